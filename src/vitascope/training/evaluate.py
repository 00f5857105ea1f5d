"""How good a model is on a split."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from vitascope.data.datasets import ImageSet, open_data, open_for_evaluation
from vitascope.data.loading import Loader
from vitascope.errors import UserError
from vitascope.model.hardware import resolve_device, resolve_precision
from vitascope.training.run import CONFIG, open_run
from vitascope.weights.store import load_pretrained


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A model measured on a split.

    Attributes:
        split: the split's name.
        class_names: of the K classes.
        indices: which of the split's images could be read, (N,).
        labels: their true classes, int64 (N,).
        probabilities: the model's, float32 (N, K).
        loss: mean cross-entropy, nats.
        unreadable: path and reason of the images left out.
    """

    split: str
    class_names: tuple[str, ...]
    indices: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    loss: float
    unreadable: dict[str, str]

    @property
    def predictions(self) -> npt.NDArray[np.int64]:
        """The most probable class of each image, (N,)."""
        return self.probabilities.argmax(axis=1)

    @property
    def accuracy(self) -> float:
        """Share of images whose most probable class is the true one."""
        return float((self.predictions == self.labels).mean())

    @property
    def confusion(self) -> npt.NDArray[np.int64]:
        """Counts (K, K): true class down, predicted class across."""
        K = len(self.class_names)
        return np.bincount(self.labels * K + self.predictions, minlength=K * K).reshape(K, K)

    def summary(self) -> dict[str, Any]:
        """Plain numbers, for `metrics.jsonl` and `--json`."""
        correct = int((self.predictions == self.labels).sum())
        return {
            "split": self.split,
            "images": len(self.labels),
            "unreadable": len(self.unreadable),
            "correct": correct,
            "accuracy": self.accuracy,
            "loss": self.loss,
        }


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Loader, *, precision: torch.dtype = torch.float32) -> Evaluation:
    """Measure a model on every readable image of a split, in the split's order.

    Raises:
        UserError: no image could be read.
    """
    was_training = model.training
    model.eval()
    logits, labels, indices = [], [], []
    for batch in loader.epoch():
        with torch.autocast(batch.pixels.device.type, precision, enabled=precision != torch.float32):
            logits.append(model(loader.preprocess.normalize(batch.pixels)).float().cpu())  # (B, K)
        labels.append(batch.labels.cpu())
        indices.append(batch.indices)
    model.train(was_training)
    if not logits:
        raise UserError(f"no image of the {loader.images.name} set could be read")
    everything, truth = torch.cat(logits), torch.cat(labels)
    return Evaluation(
        split=loader.images.name,
        class_names=loader.images.class_names,
        indices=np.concatenate(indices),
        labels=truth.numpy(),
        probabilities=everything.softmax(dim=1).numpy(),
        loss=float(F.cross_entropy(everything, truth)),
        unreadable=dict(loader.unreadable),
    )


def evaluate_pretrained(
    ref: str | os.PathLike[str],
    data: str | None = None,
    *,
    batch_size: int = 128,
    precision: str = "auto",
    device: str = "auto",
) -> Evaluation:
    """Measure the model of a MODEL argument; what `vitascope evaluate` calls.

    Args:
        ref: a run folder or a model folder.
        data: a DATA argument; None takes the images that a run folder's own model was not trained on.
        batch_size: images at a time.
        precision: `auto`, `fp32` or `bf16`.
        device: `auto`, or a torch device.

    Raises:
        UserError: no model or data there, classes that the model does not know, no way to tell the data, or
            a batch of nothing.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, not {batch_size}")
    loaded = load_pretrained(ref)
    model = loaded.model
    if not model.config.readout.gives_classes:
        raise UserError(
            f"{ref} has no head: it gives features, not classes, so nothing can be right or wrong"
        )
    where = resolve_device(device)
    images = _own_images(Path(ref)) if data is None else open_for_evaluation(data, model.config.class_names)
    loader = Loader(images, loaded.preprocess, batch_size, device=where)
    dtype = resolve_precision(precision, model.config, where, batch_size, training=False)
    return evaluate(model.to(where), loader, precision=dtype)


def _own_images(ref: Path) -> ImageSet:
    """The test split of the data that a run was trained on."""
    if not (ref / CONFIG).is_file():
        raise UserError(f"{ref} is not a run folder, so say on what to measure: --data FOLDER")
    _, config = open_run(ref)
    return open_data(config.data, seed=config.seed).final
