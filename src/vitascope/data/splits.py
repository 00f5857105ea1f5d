"""Labelled images, and how they are divided into training, validation and test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.data.decoding import ImageSource
from vitascope.data.randomness import epoch_order
from vitascope.errors import UserError, nearest

VAL_SHARE = 0.1
TEST_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Labelled images of one split.

    `sources` are what `preprocess.read_image` takes; `labels` are int64 indices into `class_names`.
    """

    name: str
    sources: Sequence[ImageSource]
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, name: str, indices: npt.NDArray[np.int64]) -> ImageSet:
        """Some of the images, in the order given."""
        sources = [self.sources[index] for index in indices]
        return ImageSet(name, sources, self.labels[indices], self.class_names)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch: a permutation of range(len(self)), a function of seed and epoch."""
        return epoch_order(seed, epoch, len(self))

    def in_classes(self, class_names: tuple[str, ...], where: str) -> ImageSet:
        """The same images, labelled by the positions of their classes in another list of names.

        Raises:
            UserError: a class that the list lacks; `where` is what the message calls this set.
        """
        check_known_classes(self.class_names, class_names, where)
        places = np.array([class_names.index(name) for name in self.class_names], dtype=np.int64)
        return dataclasses.replace(self, labels=places[self.labels], class_names=class_names)


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: what is trained on, what chooses the best weights, and what only the end may see."""

    train: ImageSet
    val: ImageSet
    test: ImageSet | None
    """None where a folder has `train/` and `val/` but no `test/`: then `val` is the last word."""
    channels: int
    root: Path | None = None
    """The folder that the images lie in; None where they lie in none."""
    passed_over: tuple[str, ...] = ()
    """What lies in that folder and is not used, in words."""

    @property
    def final(self) -> ImageSet:
        """What the finished model is measured on."""
        return self.val if self.test is None else self.test


def split_tree(images: ImageSet, seed: int) -> tuple[ImageSet, ImageSet, ImageSet]:
    """Divide images into train, val and test by seed: a tenth of each class is val, another tenth test.

    Raises:
        UserError: a class with fewer than three images.
    """
    _check_sizes(images, 3, "train, val and test")
    rest, test = stratified_split(images, TEST_SHARE, "test", seed)
    train, val = stratified_split(rest, VAL_SHARE / (1 - TEST_SHARE), "val", seed)
    return train, val, test


def stratified_split(images: ImageSet, share: float, name: str, seed: int) -> tuple[ImageSet, ImageSet]:
    """Take a share of each class away by seed: what is left, and the part, at least one image a class.

    Raises:
        UserError: a class with fewer than two images, which cannot be on both sides.
    """
    _check_sizes(images, 2, f"{images.name} and {name}")
    part: list[int] = []
    for label in range(len(images.class_names)):
        members = np.flatnonzero(images.labels == label)
        members = np.random.default_rng([seed, label]).permutation(members)
        part.extend(members[: max(1, round(share * len(members)))].tolist())
    taken = np.sort(np.array(part, dtype=np.int64))
    left = np.setdiff1d(np.arange(len(images)), taken)
    return images.subset("train", left), images.subset(name, taken)


def _check_sizes(images: ImageSet, needed: int, parts: str) -> None:
    """Refuse a class that is too small for each part of a split to get an image of it."""
    counts = np.bincount(images.labels, minlength=len(images.class_names))
    for class_name, count in zip(images.class_names, counts.tolist(), strict=True):
        if count < needed:
            images_of_it = "1 image" if count == 1 else f"{count} images"
            raise UserError(
                f"class {class_name!r} has {images_of_it}; {parts} need one each, so at least {needed}"
            )


def check_known_classes(
    found: Sequence[str], known: Sequence[str], where: str, what: str = "classes"
) -> None:
    """Refuse classes that are not among the known ones.

    Raises:
        UserError: names up to five of them, and the known name that is nearest to the first.
    """
    unknown = [name for name in found if name not in known]
    if unknown:
        listed = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise UserError(
            f"{where}: {len(unknown)} of {len(found)} {what} are not among the {len(known)} known "
            f"classes: {listed}{nearest(unknown[0], known)}"
        )
