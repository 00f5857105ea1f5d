"""How good a model is on a split."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.data.datasets import open_for_evaluation
from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.model.evaluation_mode import evaluation_mode
from vitascope.model.hardware import resolve_device, resolve_precision
from vitascope.report.measures import Score, score_of
from vitascope.run.data import RunData
from vitascope.run.layout import MODEL
from vitascope.run.run import Run
from vitascope.training.distributed import gather
from vitascope.weights.loading import from_pretrained
from vitascope.weights.preprocess import preprocess_of

log = logging.getLogger(__name__)


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
        trained_on: images of the DATA argument that the model was trained on; they are not among the above
            unless there were no others.
        changes: of the data of a run, since it was trained: how many images are `missing`, `changed`,
            `renamed` and `new`; None where this cannot be told, or was not asked.
    """

    split: str
    class_names: tuple[str, ...]
    indices: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    loss: float
    unreadable: dict[str, str]
    trained_on: int = 0
    changes: dict[str, int] | None = None

    @property
    def predictions(self) -> npt.NDArray[np.int64]:
        """The most probable class of each image, (N,)."""
        return self.probabilities.argmax(axis=1)

    @property
    def accuracy(self) -> float:
        """Share of images whose most probable class is the true one."""
        return float((self.predictions == self.labels).mean())

    @property
    def score(self) -> Score:
        """The accuracy with its interval, the balanced accuracy and the share of the commonest class."""
        return score_of(self.labels, self.predictions)

    @property
    def confusion(self) -> npt.NDArray[np.int64]:
        """Counts (K, K): true class down, predicted class across."""
        K = len(self.class_names)
        return np.bincount(self.labels * K + self.predictions, minlength=K * K).reshape(K, K)

    def summary(self) -> dict[str, Any]:
        """Plain numbers, for `metrics.jsonl` and `--json`."""
        score = self.score
        low, high = score.interval
        return {
            "split": self.split,
            "images": len(self.labels),
            "unreadable": len(self.unreadable),
            "correct": score.right,
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "balanced_accuracy": score.balanced,
            "majority": score.majority,
            "loss": self.loss,
        }


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Loader, *, precision: torch.dtype = torch.float32) -> Evaluation:
    """Measure a model on every readable image of a split, in the split's order.

    With several processes each measures its part, and all get the whole.

    Args:
        model: normalized images (B, C, H, W) to logits (B, K).
        loader: of the split, without a seed.
        precision: dtype to compute in.

    Raises:
        UserError: no image could be read.
    """
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    indices: list[npt.NDArray[np.int64]] = []
    with evaluation_mode(model):
        for batch in loader.epoch():
            with torch.autocast(batch.pixels.device.type, precision, enabled=precision != torch.float32):
                logits.append(model(loader.preprocess.normalize(batch.pixels)).float())  # (B, K)
            labels.append(batch.labels)
            indices.append(batch.indices)
    # Copied only now: each copy waits for the accelerator, which then has no next batch to go on with.
    logits, labels = ([part.cpu() for part in parts] for parts in (logits, labels))
    parts = gather((logits, labels, indices, loader.unreadable))
    answers = [answer for part in parts for answer in part[0]]
    truths = [truth for part in parts for truth in part[1]]
    if not sum(map(len, truths)):
        raise UserError(f"no image of the {loader.images.name} set could be read")
    places = np.concatenate([place for part in parts for place in part[2]])
    order = np.argsort(places, kind="stable")
    everything, truth = torch.cat(answers)[order], torch.cat(truths)[order]
    return Evaluation(
        split=loader.images.name,
        class_names=loader.images.class_names,
        indices=places[order],
        labels=truth.numpy(),
        probabilities=everything.softmax(dim=1).numpy(),
        loss=float(F.cross_entropy(everything, truth)),
        unreadable={path: reason for part in parts for path, reason in part[3].items()},
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
    model = from_pretrained(ref)
    if not model.config.gives_classes:
        raise UserError(
            f"{ref} has no head: it gives features, not classes, so nothing can be right or wrong"
        )
    where = resolve_device(device)
    trained_on, changes = 0, None
    if data is None:
        own = data_of_run(Path(ref))
        images = own.test_images(model.config.class_names)
        changes = None if own.restored is None else own.restored.counts()
    else:
        images, trained_on = untrained(open_for_evaluation(data, model.config.class_names), data, Path(ref))
    loader = Loader(images, preprocess_of(model), batch_size, device=where)
    dtype = resolve_precision(precision, model.config, where, batch_size, training=False)
    evaluation = evaluate(model.to(where), loader, precision=dtype)
    return dataclasses.replace(evaluation, trained_on=trained_on, changes=changes)


def data_of_run(ref: Path) -> RunData:
    """The data of a run, split as in training; logs what differs.

    Raises:
        UserError: not a run folder, or its data are gone.
    """
    run = Run(ref)
    if not run.exists:
        raise UserError(f"{ref} is not a run folder, so say on what to measure: --data FOLDER")
    own = run.open_data()
    if own.note:
        log.warning("%s", own.note)
    return own


def untrained(images: ImageSet, data: str, ref: Path) -> tuple[ImageSet, int]:
    """The images that a model was not trained on, and how many it was; all, where it was trained on all.

    Only runs know what they were trained on; a warning is logged of images that are left out.

    Args:
        images: of `data`.
        data: a DATA argument, for the message.
        ref: of the model: a run folder, or the model folder in it.
    """
    run = Run(ref)
    if ref.name == MODEL and run.split_record() is None:
        run = Run(ref.parent)
    record = run.split_record()
    if record is None:
        return images, 0
    known = record.trained_on(images)
    count = int(known.sum())
    if count == len(images):
        log.warning(
            "%s: %s was trained on all %s of these images, so its accuracy on them says nothing about others",
            *(data, run.path, f"{count:,}"),
        )
    elif count:
        log.warning(
            "%s: %s was trained on %s of these %s images; they are left out: measured on the other %s",
            *(data, run.path, f"{count:,}", f"{len(images):,}", f"{len(images) - count:,}"),
        )
        images = images.subset(images.name, np.flatnonzero(~known))
    return images, count
