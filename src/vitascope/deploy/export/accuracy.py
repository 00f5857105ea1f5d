"""Accuracy, agreement, size and speed of two exported models on the same labelled images."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np

from vitascope.data.decoding import source_name
from vitascope.data.loading import MAX_UNREADABLE
from vitascope.data.preprocess import Pixels
from vitascope.data.splits import ImageSet
from vitascope.deploy.predict.runtimes import ExportedEngine, files_of
from vitascope.deploy.predict.throughput import take_turns
from vitascope.errors import UserError

BATCH_SIZE = 32
TIMED_ROUNDS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One exported model."""

    precision: str
    """`fp32` or `int8`."""
    correct: int
    """Images whose most probable class is the true one."""
    size: int
    """Bytes of its files."""
    seconds: float
    """Median time of one image in a batch of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyComparison:
    """An exported model and the one made from it, on the same images."""

    images: int
    """Readable images."""
    same: int
    """Those for which both predict the same class."""
    before: Measured
    """The source."""
    after: Measured
    """The one made from it."""
    unreadable: dict[str, str]
    """Path and reason of the images left out."""

    @property
    def agreement(self) -> float:
        """`same` as a share of the images."""
        return self.same / self.images

    @property
    def drop(self) -> float:
        """The loss of accuracy; negative for a gain."""
        return (self.before.correct - self.after.correct) / self.images


def compare_accuracy(before: ExportedEngine, after: ExportedEngine, images: ImageSet) -> AccuracyComparison:
    """Measure two exported models that take the same pixels."""
    if before.class_names:
        images = images.in_classes(before.class_names, f"the {images.name} images")
    unreadable: dict[str, str] = {}
    engines, rows = (before, after), []
    example: Pixels | None = None
    for start in range(0, len(images), BATCH_SIZE):
        places = range(start, min(start + BATCH_SIZE, len(images)))
        pictures, errors = before.read([images.sources[place] for place in places])
        unreadable |= {source_name(images.sources[places[at]]): error for at, error in errors.items()}
        if pictures:
            example = pictures[0] if example is None else example
            labels = images.labels[[place for at, place in enumerate(places) if at not in errors]]
            rows.append([labels, *(engine.predict(pictures).argmax(dim=1).numpy() for engine in engines)])
    if example is None or len(unreadable) > MAX_UNREADABLE * len(images):
        raise UserError(
            f"{len(unreadable)} of {len(images)} {images.name} images cannot be read: "
            f"{'; '.join(list(unreadable.values())[:3]) or 'there is none'}"
        )
    pixels = np.ascontiguousarray(example.transpose(1, 2, 0)[None])  # (1, H, W, C)
    times = take_turns([lambda: before.run(pixels), lambda: after.run(pixels)], rounds=TIMED_ROUNDS)
    labels, *classes = np.concatenate(rows, axis=1)  # (images,) each
    first, second = (
        Measured(
            precision=engine.stored_precision,
            correct=int((found == labels).sum()),
            size=size_of(engine),
            seconds=statistics.median(seconds),
        )
        for engine, found, seconds in zip(engines, classes, times, strict=True)
    )
    same = int((classes[0] == classes[1]).sum())
    return AccuracyComparison(
        images=len(labels), same=same, before=first, after=second, unreadable=unreadable
    )


def size_of(engine: ExportedEngine) -> int:
    """Bytes of an exported model's files."""
    return sum(file.stat().st_size for file in files_of(engine.path))
