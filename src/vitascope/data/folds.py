"""Divisions of labelled images by class and by group: the folds of cross-validation, and random shares."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import first_of_content
from vitascope.data.splits import (
    VAL_SHARE,
    ImageSet,
    Inventory,
    Splits,
    bound_sets,
    check_class_sizes,
    draw_share,
    stratified_split,
)
from vitascope.data.targets import Targets
from vitascope.errors import UserError
from vitascope.formatting import counted

FOLDS = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """Labelled images with the sets of them that stay together.

    Attributes:
        targets: the labels of N images.
        sets: the set of each image, int64 (N,), 0 to G - 1; every image is its own where there are no groups.
    """

    targets: Targets
    sets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, targets: Targets, *keys: npt.NDArray[Any]) -> Division:
        """Bind the images that have the same value in any of some keys, (N,) each, or (0,) for none."""
        known = [np.unique(key, return_inverse=True)[1] for key in keys if len(key)]
        return cls(targets, bound_sets(*known) if known else np.arange(len(targets)))

    @property
    def grouped(self) -> bool:
        """Whether a set has two or more images."""
        return len(np.unique(self.sets)) < len(self.sets)

    def take(self, indices: npt.NDArray[np.int64]) -> Division:
        """The division of some of the images."""
        return Division(
            self.targets.take(indices), np.unique(self.sets[indices], return_inverse=True)[1].reshape(-1)
        )

    def sample(self, share: float, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
        """Draw a share of the sets at random, at least one: bool (N,)."""
        G = len(np.unique(self.sets))
        taken = np.zeros(G, dtype=np.bool_)
        taken[generator.permutation(G)[: max(1, round(share * G))]] = True
        return taken[self.sets]

    def sets_by_class(self) -> npt.NDArray[np.int64]:
        """The number of sets that each class has images in, (K,)."""
        return np.array([len(np.unique(self.sets[rows])) for rows in self.targets.by_class()], dtype=np.int64)

    def fold_count(self) -> int:
        """The number of folds: at most `FOLDS`, and at most as many as the rarest class has images or groups.

        Where images have several classes, those of one image or group are too rare to count.

        Raises:
            UserError: all images have the same classes; two folds are impossible.
        """
        names, counts, sets = self.targets.class_names, self.targets.counts, self.sets_by_class()
        exclusive, N = self.targets.exclusive, len(self.targets)
        if not ((counts > 0) & (counts < N)).any():
            same = ", ".join(name for name, count in zip(names, counts, strict=True) if count) or "no class"
            raise UserError(
                f"all {counted(N, 'image')} have the same label, {same}; a classifier needs different ones"
            )
        known = sets[(sets > 0) if exclusive else (sets > 1)]
        fewest = int(known.min(initial=FOLDS)) if len(known) else 0
        if fewest < 2:
            k = int(np.where(sets > 0, sets, len(self.sets) + 1).argmin())
            where = ", all in one group" if counts[k] > 1 else ""
            raise UserError(
                f"class {names[k]!r} has {counted(int(counts[k]), 'image')}{where}; cross-validation needs "
                f"images in 2 {'groups' if self.grouped else 'folds'}: add images, or leave the class out"
            )
        return fewest

    def folds(self, seed: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """The fold of each image, (N,), 0 to `count` - 1: about equal shares of each class, whole sets.

        `count` is `fold_count` by default; the caller has checked another one.

        Raises:
            UserError: as in `fold_count`.
        """
        count, found = count or self.fold_count(), np.zeros(len(self.targets), dtype=np.int64)
        generator = np.random.default_rng([seed, count])
        if self.targets.exclusive and not self.grouped:
            order = generator.permutation(len(self.targets))
            order = order[np.argsort(self.targets.labels[order], kind="stable")]  # class by class
            found[order] = np.arange(len(order)) % count
            return found
        rest = np.arange(len(self.targets))
        for fold in range(count - 1):
            part, share = self.take(rest), 1 / (count - fold)
            taken = draw_share(part.targets.members, part.sets, share, generator, every_class=True)
            found[rest[taken]] = fold
            rest = rest[~taken]
        found[rest] = count - 1
        return found


def division_of(images: ImageSet) -> Division:
    """The labels of images; those of a group, and those of the same content, stay together."""
    return Division.of(images.truth, images.groups, first_of_content(images.contents))


def splits_of_fold(
    inventory: Inventory,
    place: str,
    folds: int,
    fold: int | None,
    *,
    seed: int,
    rare: Literal["reject", "train"] = "reject",
) -> Splits:
    """The data set of one of several folds, 0 to `folds` - 1: `test` is the fold, and a tenth of all images,
    drawn from the others, is `val`. Without a fold, `train` has all images with `ImageSet.folds`, 1 to
    `folds`, `val` none, and `test` those that the data have.

    The images of `train` and `val` are divided, by the folds that a table has, or by seed. No fold divides a
    group or separates copies.

    Args:
        inventory: the data, `place` where they are.
        folds, fold: their number, and the one that is tested.
        seed: of the folds and of `val`.
        rare: whether classes of fewer images than folds are rejected, or in every `train` and in no fold.

    Raises:
        UserError: no labelled images, classes with too few images or groups, or other folds in the table.
    """
    given = inventory.by_name
    images = given.get("train", given.get("all"))
    if images is None:
        raise UserError(f"{place}: no images to train on; it has {', '.join(given) or 'none at all'}")
    if "val" in given:
        images = images.followed_by(given["val"].in_classes(images.class_names, f"the val images of {place}"))
    images = dataclasses.replace(images, name="train").identified()
    numbers = np.array(
        _of_table(images, place, folds) if len(images.folds) else _drawn(images, folds, seed, rare)
    )
    images = dataclasses.replace(images, folds=np.where(numbers < 0, "", (numbers + 1).astype(np.str_)))
    about = inventory.channels, inventory.root, inventory.unused_and_unlabelled(images)
    if fold is None:
        test = given.get("test")
        if test is not None:
            test = test.in_classes(images.class_names, f"the test images of {place}")
        return Splits(images, images.subset("val", np.arange(0)), test, *about, notes=inventory.notes)
    rest = images.subset("train", np.flatnonzero(numbers != fold))
    train, val = stratified_split(rest, VAL_SHARE * folds / (folds - 1), "val", seed, least=2)
    test = images.subset("test", np.flatnonzero(numbers == fold))
    return Splits(train, val, test, *about, ("val", "test"), inventory.notes)


def _of_table(images: ImageSet, place: str, folds: int) -> npt.NDArray[np.int64]:
    """The folds of a table, in the order of their names, (N,) from 0."""
    names, numbers = np.unique(images.folds, return_inverse=True)
    if blank := int((images.folds == "").sum()):
        raise UserError(f"{place}: {counted(blank, 'image')} without a fold; give each one, or none")
    if len(names) != folds:
        raise UserError(
            f"{place}: its column of folds has {counted(len(names), 'value')}, and folds={folds}: set "
            f"folds={len(names)}, or leave the column out with columns fold="
        )
    return numbers


def _drawn(
    images: ImageSet, folds: int, seed: int, rare: Literal["reject", "train"]
) -> npt.NDArray[np.int64]:
    """The folds of images by seed, (N,) from 0; -1 for those of classes with fewer images or groups."""
    division = division_of(images)
    numbers, kept = np.full(len(images), -1), np.arange(len(images))
    if division.targets.exclusive:
        few = np.flatnonzero(division.sets_by_class() < folds)
        if rare == "reject" and len(few):
            check_class_sizes(images, folds, f"{folds} folds")
            raise UserError(
                f"class {images.class_names[few[0]]!r} has images in fewer groups than folds={folds}: set a "
                "smaller number, or rare=train, which keeps such classes in training alone"
            )
        kept = np.flatnonzero(~np.isin(division.targets.labels, few))
    if not len(kept) or len(np.unique(division.sets[kept])) < folds:
        raise UserError(f"{counted(len(images), 'image')} cannot be divided into folds={folds}")
    numbers[kept] = division.take(kept).folds(seed, folds)
    return numbers
