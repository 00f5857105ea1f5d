"""Evaluation of a classifier on a split."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.arguments import checked
from vitascope.data.datasets import open_for_evaluation
from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet, UnknownClassesError
from vitascope.errors import UserError
from vitascope.formatting import pandas_library
from vitascope.model.classifier import Classifier, evaluation_mode
from vitascope.model.hardware import resolve_device, resolve_precision, reuse_freed_memory
from vitascope.run.predictions import Predictions
from vitascope.run.run import Run
from vitascope.training.distributed import gather
from vitascope.weights.loading import from_pretrained
from vitascope.weights.preprocess import preprocess_of

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation(Predictions):
    """A classifier's predictions on a split, and their scores."""

    loss: float
    """Mean cross-entropy, nats."""
    trained_on: int = 0
    """Images that the model was trained on; they are left out, unless there were no others."""
    changes: dict[str, int] | None = None
    """Since a run's training, `missing`, `changed`, `renamed` and `new` images; None if unknown."""

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return float(self.correct.mean())

    def summary(self) -> dict[str, Any]:
        """The scores as plain values, for `metrics.jsonl` and `--json`."""
        score = self.score
        low, high = score.interval
        return {
            "split": self.split,
            "images": score.total,
            "unreadable": len(self.unreadable),
            "correct": score.right,
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            **({} if score.top5 is None else {"top5_accuracy": score.top5}),
            "balanced_accuracy": score.balanced,
            "macro_f1": score.macro_f1,
            "majority": score.majority,
            "loss": self.loss,
        }

    def to_dataframe(self) -> DataFrame:
        """One row per image: `label`, `prediction`, `confidence`, `correct`; UserError without pandas."""
        names = np.array(self.class_names, dtype=object)
        columns = {
            "label": names[self.labels],
            "prediction": names[self.classes],
            "confidence": self.confidences,
            "correct": self.correct,
        }
        return data_frame(columns, index=self.indices)

    def in_words(self) -> str:
        """The accuracy with its interval, in a few words."""
        low, high = self.score.interval
        images = f"{self.score.total:,} {self.split} images"
        return f"accuracy {self.accuracy:.2%} of {images} ({low:.1%} to {high:.1%})"

    def __repr__(self) -> str:
        return f"Evaluation({self.in_words()}, loss {self.loss:.3f})"

    def _repr_html_(self) -> str:
        return html_table(self.summary())


def data_frame(columns: Mapping[str, Any] | Iterable[Mapping[str, Any]], **options: Any) -> DataFrame:
    """A pandas data frame."""
    return pandas_library().DataFrame(columns, **options)


def html_table(values: Mapping[str, Any]) -> str:
    """Names and values as a table, for notebooks."""
    rows = (
        f"<tr><th>{escape(name)}</th><td>{escape(f'{value:.4g}' if isinstance(value, float) else str(value))}"
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


@torch.inference_mode()
def predict_split(model: nn.Module, loader: Loader, *, precision: torch.dtype = torch.float32) -> Evaluation:
    """Evaluate a model on every readable image of a split; each of several processes gets the whole."""
    computed: list[tuple[Tensor, Tensor, npt.NDArray[np.int64]]] = []
    with evaluation_mode(model):
        for batch in loader.epoch():
            with torch.autocast(batch.pixels.device.type, precision, enabled=precision != torch.float32):
                logits = model(loader.preprocess.normalize(batch.pixels)).float()  # (B, K)
            computed.append((logits, batch.targets, batch.indices))
    # Copied at the end: each copy waits for the accelerator, which would have no next batch meanwhile.
    copied = [(logits.cpu(), labels.cpu(), indices) for logits, labels, indices in computed]
    parts = gather((copied, loader.unreadable))
    batches = [batch for part, _ in parts for batch in part]
    if not any(len(labels) for _, labels, _ in batches):
        raise UserError(f"no image of the {loader.images.name} set could be read")
    places = np.concatenate([indices for _, _, indices in batches])
    order = np.argsort(places, kind="stable")
    outputs = torch.cat([logits for logits, _, _ in batches])[order]  # (N, K)
    truths = torch.cat([labels for _, labels, _ in batches])[order]  # (N,)
    return Evaluation(
        split=loader.images.name,
        indices=places[order],
        targets=loader.images.truth.take(places[order]),
        probabilities=outputs.softmax(dim=1).numpy(),
        loss=float(F.cross_entropy(outputs, truths)),
        unreadable=tuple({path: reason for _, part in parts for path, reason in part.items()}.values()),
    )


@checked
def evaluate(
    model: str | os.PathLike[str] | Classifier,
    data: str | os.PathLike[str] | None = None,
    *,
    rename: Mapping[str, str] | None = None,
    batch_size: int = 128,
    precision: str = "auto",
    device: str = "auto",
) -> Evaluation:
    """Evaluate a classifier, as `vitascope evaluate` does.

    Images that a run was trained on are left out, with a warning.

    Args:
        model: a MODEL (run folder, model folder or file, hub id), or a model.
        data: a DATA argument with the classes of the model; None for the test images of a run.
        rename: the model's names of classes that have other names in `data`: `{"birds": "bird"}`. Class
            folders of a run's own data are recognized by their contents.
        batch_size: images per batch.
        precision: `auto`, `fp32` or `bf16`.
        device: `auto`, or a torch device.

    Raises:
        UserError: no such model or data, no head, unknown classes, or no data for a model that is no run.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, not {batch_size}")
    reuse_freed_memory()
    ref = None if isinstance(model, nn.Module) else Path(model)
    loaded = model if isinstance(model, nn.Module) else from_pretrained(model)
    if not loaded.config.gives_classes:
        raise UserError(f"{ref or 'the model'} has no head: it returns features, which cannot be evaluated")
    names = loaded.config.class_names
    trained_on, changes = 0, None
    if rename and data is None:
        raise UserError("rename is about the classes of other data: set data")
    if data is not None:
        images = _labelled_images(os.fspath(data), names, rename)
        if ref is not None:
            images, trained_on = without_training_images(images, os.fspath(data), ref)
    elif ref is None or not Run(ref).exists:
        raise UserError(f"{ref or 'the model'} is not a run folder with test images of its own: set data")
    else:
        opened = Run(ref).open_data()
        if opened.note:
            log.warning("%s", opened.note)
        images = opened.test_images(names)
        changes = None if opened.restored is None else opened.restored.counts()
    where = resolve_device(device)
    home = next(loaded.parameters()).device
    loader = Loader(images, preprocess_of(loaded), batch_size, device=where)
    dtype = resolve_precision(precision, loaded.config, where, batch_size, training=False)
    try:
        evaluation = predict_split(loaded.to(where), loader, precision=dtype)
    finally:
        loaded.to(home)
    return dataclasses.replace(evaluation, trained_on=trained_on, changes=changes)


def _labelled_images(data: str, class_names: tuple[str, ...], rename: Mapping[str, str] | None) -> ImageSet:
    try:
        return open_for_evaluation(data, class_names, rename)
    except UnknownClassesError as error:
        raise UserError(
            f"{error}; if {error.first} is one of them under another name, add --rename {error.first}=CLASS"
        ) from error


def without_training_images(images: ImageSet, data: str, ref: Path) -> tuple[ImageSet, int]:
    """Leave out the images that a run was trained on, unless they are all; also returns their number."""
    run = Run.of_model(ref)
    record = None if run is None else run.split_record()
    if run is None or record is None:
        return images, 0
    known = record.trained_on(images)
    count, total = int(known.sum()), len(images)
    trained = f"{data}: {run.path} was trained on"
    if count == total:
        log.warning(
            "%s all %s of these images: the accuracy does not hold for other images", trained, f"{count:,}"
        )
    elif count:
        counts = (f"{number:,}" for number in (count, total, total - count))
        log.warning("%s %s of these %s images, which are left out; %s remain", trained, *counts)
        images = images.subset(images.name, np.flatnonzero(~known))
    return images, count
