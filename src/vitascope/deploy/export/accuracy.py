"""Two engines on the same labelled pictures: accuracy, how often they agree, size and speed."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import ImageError, source_name
from vitascope.data.loading import MAX_UNREADABLE
from vitascope.data.preprocess import Pixels
from vitascope.data.splits import ImageSet
from vitascope.deploy.predict.exported_model import ExportedEngine, files_of
from vitascope.errors import UserError

BATCH_SIZE = 32
TIMED_STEPS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One file."""

    precision: str
    """As the file tells."""
    correct: int
    """Pictures whose most probable class is the true one."""
    size: int
    """Bytes on the disk."""
    seconds: float
    """For one picture in a batch of its own: the median."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A file and the one made of it, on the same pictures."""

    images: int
    """Pictures that could be read."""
    same: int
    """Those that both give the same most probable class."""
    before: Measured
    """The file that was there."""
    after: Measured
    """The one made of it."""
    unreadable: dict[str, str]
    """Path and reason of the pictures left out."""

    @property
    def agreement(self) -> float:
        """`same` as a share of the pictures."""
        return self.same / self.images

    @property
    def drop(self) -> float:
        """By what share of the pictures the accuracy is less; below 0 where it is more."""
        return (self.before.correct - self.after.correct) / self.images


def compare(before: ExportedEngine, after: ExportedEngine, images: ImageSet) -> Comparison:
    """Measure two engines that take the same pixels.

    Raises:
        UserError: classes that the model does not know, no picture, or more than a tenth that cannot be read.
    """
    if before.class_names:
        images = images.in_classes(before.class_names, f"the {images.name} images")
    unreadable: dict[str, str] = {}
    correct, same, count = {"before": 0, "after": 0}, 0, 0
    example: Pixels | None = None
    for pictures, labels in batches(before, images, unreadable):
        example = pictures[0] if example is None else example
        own, other = (engine.predict(pictures).argmax(dim=1).numpy() for engine in (before, after))
        correct["before"] += int((own == labels).sum())
        correct["after"] += int((other == labels).sum())
        same += int((own == other).sum())
        count += len(labels)
    if example is None or len(unreadable) > MAX_UNREADABLE * len(images):
        raise UserError(
            f"{len(unreadable)} of {len(images)} {images.name} images cannot be read: "
            f"{'; '.join(list(unreadable.values())[:3]) or 'there is none'}"
        )
    seconds = medians((before, after), example)
    first, second = (
        Measured(
            precision=engine.about.precision,
            correct=correct[place],
            size=size_of(engine.path),
            seconds=median,
        )
        for engine, place, median in zip((before, after), correct, seconds, strict=True)
    )
    return Comparison(images=count, same=same, before=first, after=second, unreadable=unreadable)


def batches(
    engine: ExportedEngine, images: ImageSet, unreadable: dict[str, str]
) -> Iterator[tuple[list[Pixels], npt.NDArray[np.int64]]]:
    """Pictures as the engine takes them, with their labels; path and reason of others go to `unreadable`."""
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


def medians(engines: Sequence[ExportedEngine], picture: Pixels) -> list[float]:
    """Seconds that each engine takes for one picture, in turns, so that a busy machine slows all of them."""
    batch = np.ascontiguousarray(picture.transpose(1, 2, 0)[None])  # (1, H, W, C)
    times: list[list[float]] = [[] for _ in engines]
    for engine in engines:
        engine.run(batch)
    for _ in range(TIMED_STEPS):
        for engine, found in zip(engines, times, strict=True):
            start = time.perf_counter()
            engine.run(batch)
            found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def size_of(path: Path) -> int:
    """Bytes of an exported file and of the weights beside it."""
    return sum(file.stat().st_size for file in files_of(path))
