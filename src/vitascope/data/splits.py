"""Labelled images, and their division into training, validation and test, the same for every format."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self, overload

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import contents_of, first_of_content
from vitascope.data.decoding import Encoded, ImageSource
from vitascope.data.randomness import epoch_order
from vitascope.errors import UserError, nearest, printable
from vitascope.formatting import counted

VAL_SHARE = 0.1
TEST_SHARE = 0.1
UNEVEN = 3
"""Ratio of the numbers of images of two classes above which training mentions it."""


def _not_read() -> npt.NDArray[np.bytes_]:
    return np.empty(0, dtype=np.bytes_)


class LazySources(Sequence[Encoded]):
    """Places of many encoded images in a few dozen bytes each, which worker processes share."""

    @abstractmethod
    def at(self, index: int) -> Encoded:
        """One image."""

    @abstractmethod
    def take(self, indices: npt.NDArray[np.int64]) -> Self:
        """Some of the images, in the order given."""

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch: a permutation of range(len(self))."""
        return epoch_order(seed, epoch, len(self))

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Encoded | Self:
        return self.take(np.arange(len(self))[index]) if isinstance(index, slice) else self.at(index)


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Labelled images of one split; `labels` are indices into `class_names`."""

    name: str
    sources: Sequence[ImageSource]
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    contents: npt.NDArray[np.bytes_] = dataclasses.field(default_factory=_not_read, repr=False)
    """From `contents_of`, (N,), where they were read; see `identified`."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Images per class, (K,)."""
        return np.bincount(self.labels, minlength=len(self.class_names))

    @property
    def uneven(self) -> bool:
        """Whether a class has more than `UNEVEN` times the images of another one that has any."""
        counts = self.counts[self.counts > 0]
        return len(counts) > 1 and bool(counts.max() > UNEVEN * counts.min())

    def subset(self, name: str, indices: npt.NDArray[np.int64]) -> ImageSet:
        """Some of the images, in the order given."""
        all_of_them: Sequence[ImageSource] = self.sources
        if isinstance(all_of_them, LazySources):
            some: Sequence[ImageSource] = all_of_them.take(indices)
        else:
            some = [all_of_them[index] for index in indices]
        contents = self.contents[indices] if len(self.contents) else self.contents
        return ImageSet(name, some, self.labels[indices], self.class_names, contents)

    def identified(self) -> ImageSet:
        """The same images with their `contents`, which are read unless they are known."""
        known = len(self.contents) == len(self)
        return self if known else dataclasses.replace(self, contents=contents_of(self.sources))

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch: a permutation of range(len(self)), a function of seed and epoch."""
        if isinstance(self.sources, LazySources):
            return self.sources.order(seed, epoch)
        return epoch_order(seed, epoch, len(self))

    def followed_by(self, others: ImageSet) -> ImageSet:
        """These images and others of the same classes."""
        name, sources = f"{self.name} and {others.name}", [*self.sources, *others.sources]
        return ImageSet(name, sources, np.concatenate([self.labels, others.labels]), self.class_names)

    def in_classes(self, class_names: tuple[str, ...], where: str) -> ImageSet:
        """The same images, labelled by the positions of their classes in another list of names."""
        check_known_classes(self.class_names, class_names, where)
        places = np.array([class_names.index(name) for name in self.class_names], dtype=np.int64)
        return dataclasses.replace(self, labels=places[self.labels], class_names=class_names)


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: images to train on, to choose the best weights with, and to test the result on."""

    train: ImageSet
    val: ImageSet
    test: ImageSet | None  # None in folders with `train/` and `val/` alone; `val` measures the result then
    channels: int
    root: Path | None = None  # the folder of the images; None for images without one
    drawn: tuple[str, ...] = ()  # the names of the parts that were drawn from the images of `train`
    passed_over: tuple[str, ...] = ()  # descriptions of unused files in that folder

    @property
    def final(self) -> ImageSet:
        """The images to measure the finished model on."""
        return self.val if self.test is None else self.test

    @property
    def parts(self) -> dict[str, ImageSet]:
        """`train`, `val` and, where there is one, `test`."""
        given = {"train": self.train, "val": self.val, "test": self.test}
        return {name: images for name, images in given.items() if images is not None}

    def identified(self) -> Splits:
        """The same splits with the `contents` of all images."""
        return dataclasses.replace(
            self,
            train=self.train.identified(),
            val=self.val.identified(),
            test=None if self.test is None else self.test.identified(),
        )


@dataclasses.dataclass(frozen=True)
class Inventory:
    """All images of a data set now, in the splits that it has; channels and root as in `Splits`."""

    sets: tuple[ImageSet, ...]  # called `train`, `val` and `test`, or `all`; their classes may be any
    channels: int
    root: Path | None

    @property
    def by_name(self) -> dict[str, ImageSet]:
        """The sets that have images, by their names."""
        return {images.name: images for images in self.sets if len(images)}


def complete_splits(found: Inventory, place: str, *, seed: int) -> Splits:
    """The splits of a data set that has `train` and perhaps `val` and `test`, or only `all`. Missing ones are
    drawn by seed: a tenth of each class is `val`, and of `all` another tenth `test`."""
    given = found.by_name
    if "all" in given:
        everything = given["all"].identified()
        _check_sizes(everything, 3, "train, val and test")
        rest, test = stratified_split(everything, TEST_SHARE, "test", seed)
        parts = stratified_split(rest, VAL_SHARE / (1 - TEST_SHARE), "val", seed)
        return Splits(*parts, test, found.channels, found.root, ("val", "test"))
    train, val = given.get("train"), given.get("val")
    if train is None:
        raise UserError(f"{place}: no images to train on; it has {', '.join(given) or 'none at all'}")
    drawn = () if val is not None else ("val",)
    if val is None:
        train, val = stratified_split(train, VAL_SHARE, "val", seed)
    return Splits(train, val, given.get("test"), found.channels, found.root, drawn)


def stratified_split(images: ImageSet, share: float, name: str, seed: int) -> tuple[ImageSet, ImageSet]:
    """Divide images into a rest and a share of each class, at least one image, by seed. Images of the same
    content stay together: only the first of them is drawn, and the others follow it."""
    images = images.identified()
    _check_sizes(images, 2, f"{images.name} and {name}")
    first = first_of_content(images.contents)
    drawn: list[int] = []
    for label in range(len(images.class_names)):
        members = np.flatnonzero((images.labels == label) & (first == np.arange(len(images))))
        members = np.random.default_rng([seed, label]).permutation(members)
        drawn.extend(members[: max(1, round(share * len(members)))].tolist())
    taken = np.isin(first, drawn)
    return images.subset("train", np.flatnonzero(~taken)), images.subset(name, np.flatnonzero(taken))


def _check_sizes(images: ImageSet, needed: int, parts: str) -> None:
    """Reject a class with too few different images for some parts."""
    different = first_of_content(images.contents) == np.arange(len(images))
    counts = np.bincount(images.labels[different], minlength=len(images.class_names))
    for name, count, single in zip(images.class_names, images.counts.tolist(), counts.tolist(), strict=True):
        if single < needed:
            copies = f", {single} if copies count once" if single < count else ""
            raise UserError(
                f"class {name!r} has {counted(count, 'image')}{copies}; {parts} need one each, so at least "
                f"{needed}"
            )


def absent_classes(images: ImageSet) -> str:
    """The classes without images, in one line; empty if every class has some."""
    absent = [images.class_names[label] for label in np.flatnonzero(images.counts == 0)]
    if not absent:
        return ""
    have = "has" if len(absent) == 1 else "have"
    some, total = _some(absent), len(images.class_names)
    return f"{len(absent)} of {total} classes {have} no image in {images.name}: {some}"


def check_every_class(images: ImageSet, option: str) -> None:
    """Reject an option that needs images of every class."""
    if absent := absent_classes(images):
        raise UserError(f"{absent}; {option} needs images of every class: add some, or leave the option out")


class UnknownClassesError(UserError):
    """Images have classes that a model does not have; the first of them is `first`."""

    def __init__(self, message: object, first: str) -> None:
        super().__init__(message)
        self.first = first


def check_known_classes(
    found: Sequence[str], known: Sequence[str], where: str, what: str = "classes"
) -> None:
    """Reject classes that are not among the known ones, with an `UnknownClassesError`."""
    unknown = [name for name in found if name not in known]
    if unknown:
        raise UnknownClassesError(
            f"{where}: {len(unknown)} of {len(found)} {what} are not among the {len(known)} known "
            f"classes: {_some(unknown)}{nearest(unknown[0], known)}",
            unknown[0],
        )


def _some(names: Sequence[str]) -> str:
    """The first of some class names."""
    return printable(", ".join(names[:5]) + (", ..." if len(names) > 5 else ""), 500)
