"""Accuracy, agreement, size and speed of two exported models on the same labelled images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import ImageError, source_name
from vitascope.data.loading import MAX_UNREADABLE
from vitascope.data.preprocess import Pixels
from vitascope.data.splits import ImageSet
from vitascope.deploy.predict.engine import Engine
from vitascope.deploy.predict.exported_model import ExportedEngine, files_of
from vitascope.deploy.predict.throughput import median_seconds
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
    correct, same, count = [0, 0], 0, 0
    example: Pixels | None = None
    for pictures, labels in batches(before, images, unreadable):
        example = pictures[0] if example is None else example
        classes = [engine.predict(pictures).argmax(dim=1).numpy() for engine in (before, after)]
        correct = [sum_ + int((found == labels).sum()) for sum_, found in zip(correct, classes, strict=True)]
        same += int((classes[0] == classes[1]).sum())
        count += len(labels)
    if example is None or len(unreadable) > MAX_UNREADABLE * len(images):
        raise UserError(
            f"{len(unreadable)} of {len(images)} {images.name} images cannot be read: "
            f"{'; '.join(list(unreadable.values())[:3]) or 'there is none'}"
        )
    pixels = np.ascontiguousarray(example.transpose(1, 2, 0)[None])  # (1, H, W, C)
    seconds = median_seconds([lambda: before.run(pixels), lambda: after.run(pixels)], TIMED_ROUNDS)
    first, second = (
        Measured(precision=engine.stored_precision, correct=right, size=size_of(engine), seconds=each_seconds)
        for engine, right, each_seconds in zip((before, after), correct, seconds, strict=True)
    )
    return AccuracyComparison(images=count, same=same, before=first, after=second, unreadable=unreadable)


def batches(
    engine: Engine, images: ImageSet, unreadable: dict[str, str]
) -> Iterator[tuple[list[Pixels], npt.NDArray[np.int64]]]:
    """Images as the engine takes them, with their labels; adds path and reason of others to `unreadable`."""
    pictures: list[Pixels] = []
    labels: list[int] = []
    for source, label in zip(images.sources, images.labels.tolist(), strict=True):
        try:
            pictures.append(engine.pixels(source))
        except ImageError as error:
            unreadable[source_name(source)] = str(error)
            continue
        labels.append(label)
        if len(pictures) == BATCH_SIZE:
            yield pictures, np.array(labels)
            pictures, labels = [], []
    if pictures:
        yield pictures, np.array(labels)


def size_of(engine: ExportedEngine) -> int:
    """Bytes of an exported model's files."""
    return sum(file.stat().st_size for file in files_of(engine.path))
