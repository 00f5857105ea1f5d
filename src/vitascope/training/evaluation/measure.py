"""`measure`, the only loop that compares predictions with labels, and its result, an `Evaluation`."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.data.loading import Batch, Loader
from vitascope.data.pictures import stream
from vitascope.data.reading import Faults, ImageReader
from vitascope.data.splits import ImageSet
from vitascope.data.targets import KINDS
from vitascope.errors import UserError
from vitascope.formatting import pandas_library
from vitascope.models.decoding import source_name
from vitascope.models.engines.engine import WHOLE_PICTURES, Engine
from vitascope.models.trust import PredictionSets
from vitascope.training.evaluation.reliability import Reliability
from vitascope.training.run.predictions import Predictions

if TYPE_CHECKING:
    from pandas import DataFrame

BATCH_SIZE = 128
"""On a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Evaluation(Predictions):
    """A classifier's predictions of labelled images, and their scores."""

    loss: float
    """Mean cross-entropy, nats; binary, and the mean over the classes, where any of them may apply."""
    trained_on: int = 0
    """Images that the model was trained on; they are left out, unless there were no others."""
    fitted_to: int = 0
    """Images that also set the run's temperature, and its sets or thresholds."""
    sets: PredictionSets | None = None
    """The sets of classes; None for a model that was not calibrated."""
    leaked: npt.NDArray[np.bool_] | None = None
    """Whether each image has a near-copy in the training images, (N,); None if that was not looked for."""
    averaged: "Evaluation | None" = None
    """By the mean of several views of each image, beside this one of one view; None if that was not asked
    for."""
    changes: dict[str, int] | None = None
    """Since a run's training, `missing`, `changed`, `renamed` and `new` images; None if unknown."""

    @property
    def accuracy(self) -> float:
        """Share of correct predictions: with several classes per image, of those with exactly its classes."""
        return float(self.correct.mean())

    @functools.cached_property
    def reliability(self) -> Reliability | None:
        """How far the answers can be trusted, where one class applies; else None."""
        if not self.targets.trusted:
            return None
        return Reliability.of(self.labels, self.probabilities, self.sets, self.familiarity)

    def summary(self) -> dict[str, Any]:
        """The scores as plain values, for `metrics.jsonl` and `--json`."""
        score = self.score
        return {
            "split": self.split,
            "images": score.total,
            "unreadable": len(self.unreadable),
            **score.summary(),
            "loss": self.loss,
            **({} if self.reliability is None else self.reliability.summary()),
            **({} if self.averaged is None else {"averaged": self.averaged.summary()}),
        }

    def to_dataframe(self) -> "DataFrame":
        """One row per image: `label`, `prediction`, `confidence`, `correct`; with several classes per image
        `labels`, `predictions` (texts, by "; "), `correct`, and the probability of each class by its name.

        Raises:
            UserError: no pandas.
        """
        return data_frame(self.targets.columns(self.answers, self.probabilities), index=self.indices)

    def fitted_in_words(self) -> str:
        """The images that the model's temperature, and its sets or thresholds, come from; empty for none."""
        if not self.fitted_to:
            return ""
        these = "these images" if self.fitted_to == len(self.indices) else f"{self.fitted_to:,} of them"
        return f"{these} also set the temperature, and the sets or thresholds: others have worse numbers"

    def in_words(self) -> str:
        """The accuracy or, of several classes per image, the mean average precision, with its interval."""
        return self.score.in_words(f"{self.score.total:,} {self.split} images")

    def __repr__(self) -> str:
        return f"Evaluation({self.in_words()}, loss {self.loss:.3f})"

    def _repr_html_(self) -> str:
        return html_table(self.summary())


def data_frame(columns: Mapping[str, Any] | Iterable[Mapping[str, Any]], **options: Any) -> "DataFrame":
    """A pandas data frame."""
    return pandas_library().DataFrame(columns, **options)


def html_table(values: Mapping[str, Any]) -> str:
    """Names and values as a table, for notebooks."""
    rows = (
        f"<tr><th>{escape(name)}</th><td>{escape(f'{value:.4g}' if isinstance(value, float) else str(value))}"
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


class WholePictures:
    """Batches of a split for an exported model that crops and resizes: pictures of one size each.

    Attributes:
        faults: the images that are left out, by path.
    """

    def __init__(self, engine: Engine, images: ImageSet, batch_size: int) -> None:
        self.engine, self.images, self.batch_size = engine, images, batch_size
        self.faults = Faults(len(images), images.name)

    def epoch(self) -> Iterator[Batch]:
        """The readable images; those of a batch are ordered by size."""
        images, reader = self.images, ImageReader(self.images.sources, self.engine.preprocess)
        starts = range(0, len(images), self.batch_size)
        batches = (np.arange(start, min(start + self.batch_size, len(images))) for start in starts)
        for batch in stream(self.engine, reader, batches, self.batch_size):
            for row, reason in batch.faults.items():
                self.faults.add(source_name(images.sources[batch.items[row]]), reason)
            for places, pixels in batch.stacks:
                indices = batch.items[batch.readable][places]
                targets = torch.from_numpy(images.truth.take(indices).rows)
                yield Batch(pixels, targets, indices, len(indices))


def batches_of(engine: Engine, images: ImageSet, batch_size: int | None = None) -> Loader | WholePictures:
    """The batches of a split, in its order, with an engine's pixels on its device."""
    batch_size = engine.batch_size(batch_size, BATCH_SIZE)
    if engine.own_pixels:
        return WholePictures(engine, images, min(batch_size, WHOLE_PICTURES))
    return Loader(images, engine.preprocess, batch_size, device=engine.device)


@torch.inference_mode()
def features_of_images(
    engine: Engine, batches: Loader, gather: Callable[[Any], list[Any]] = lambda part: [part]
) -> tuple[Tensor, npt.NDArray[Any]]:
    """The features (N, D) of a split's readable images, float32 on the CPU, and labels; `gather` as there."""
    computed = [(engine.features(batch.pixels)[0], batch.indices) for batch in batches.epoch()]
    parts = gather([(features.cpu(), indices) for features, indices in computed])
    rows = [batch for part in parts for batch in part if len(batch[-1])]
    places = np.concatenate([indices for _, indices in rows])
    order = np.argsort(places, kind="stable")
    features = torch.cat([features for features, _ in rows])[order]
    return features, batches.images.truth.take(places[order]).labels


@torch.inference_mode()
def measure(
    engine: Engine, batches: Loader | WholePictures, gather: Callable[[Any], list[Any]] = lambda part: [part]
) -> Evaluation:
    """Evaluate an engine on every readable image of a split.

    Several processes each compute a part of every batch; `gather` gives each the values of all.

    Raises:
        UserError: a model without classes, or with another number of them; no readable image, or too few.
    """
    engine.check_classes()
    images = batches.images
    if len(images.class_names) != engine.num_classes:  # of a model without class names
        raise UserError(
            f"the model has {engine.num_classes} classes, and the {images.noun}s have "
            f"{len(images.class_names)}: a model without class names is measured on images of as many classes"
        )
    images.truth.check_outputs(engine.meaning, images.noun)
    computed = [(engine.answers(batch.pixels), batch.indices) for batch in batches.epoch()]
    # Copied at the end: each copy waits for the accelerator, which would have no next batch meanwhile.
    copied = [([values.cpu() for values in answers.known()], indices) for answers, indices in computed]
    parts = gather((copied, batches.faults.reasons))
    rows = [batch for part, _ in parts for batch in part if len(batch[-1])]
    if not rows:
        raise UserError(f"no image of the {images.name} set could be read")
    places = np.concatenate([indices for *_, indices in rows])
    order = np.argsort(places, kind="stable")
    logits, probabilities, *familiarity = (
        torch.cat(column)[order] for column in zip(*(answers for answers, _ in rows), strict=True)
    )
    targets = images.truth.take(places[order])
    loss = KINDS[engine.meaning].cross_entropy(logits, targets)
    return Evaluation(
        split=images.name,
        indices=places[order],
        targets=targets,
        probabilities=probabilities.numpy(),
        thresholds=targets.thresholds(engine.thresholds),
        loss=loss,
        familiarity=familiarity[0].numpy() if familiarity else None,
        sets=engine.sets,
        unreadable=tuple({path: reason for _, part in parts for path, reason in part.items()}.values()),
    )
