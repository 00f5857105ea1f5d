"""Divisions of labelled images by class and by group: the folds of cross-validation, and random shares."""

import dataclasses
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from vitascope.data import splits
from vitascope.data.contents import first_of_content
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
    def of(cls, targets: Targets, *keys: npt.NDArray[Any]) -> Self:
        """Bind the images that have the same value in any of some keys, (N,) each, or (0,) for none."""
        known = [np.unique(key, return_inverse=True)[1] for key in keys if len(key)]
        return cls(targets, splits.bound_sets(*known) if known else np.arange(len(targets)))

    @property
    def grouped(self) -> bool:
        """Whether a set has two or more images."""
        return len(np.unique(self.sets)) < len(self.sets)

    def take(self, indices: npt.NDArray[np.int64]) -> "Division":
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
            UserError: no images; all have the same classes; two folds are impossible.
        """
        names, counts, sets = self.targets.class_names, self.targets.counts, self.sets_by_class()
        N = len(self.targets)
        if not N:
            raise UserError("no class has two different images or groups, and cross-validation needs them")
        if not ((counts > 0) & (counts < N)).any():
            same = ", ".join(name for name, count in zip(names, counts, strict=True) if count) or "no class"
            raise UserError(
                f"all {counted(N, 'image')} have the same label, {same}; a classifier needs different ones"
            )
        known = sets[sets > (self.targets.strata is None)]
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
        """The fold of each image, (N,), 0 to `count` - 1: whole sets, at least one in every fold, and about
        equal shares of each class.

        `count` is `fold_count` by default; the caller has checked another one, which is at most the number of
        sets.

        Raises:
            UserError: as in `fold_count`.
        """
        count = count or self.fold_count()
        generator = np.random.default_rng([seed, count])
        strata = self.targets.strata
        if strata is not None and not self.grouped:
            found = np.empty(len(strata), dtype=np.int64)
            order = generator.permutation(len(strata))
            order = order[np.argsort(strata[order], kind="stable")]  # class by class
            found[order] = np.arange(len(order)) % count
            return found
        return _dealt(self.targets.members, self.sets, count, generator)


def _dealt(
    labels: npt.NDArray[np.bool_], sets: npt.NDArray[np.int64], count: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """The fold of each of N images of K classes, (N,).

    Sets are dealt one by one, those of rare classes first, large ones before small ones, in a random order.
    A set goes to a fold that gets no class completely, if there is one; of these to one that lacks most of
    its classes; of these to where it adds least to the sum of the squared shares that the folds have of each
    class and of all images. The last sets go to the folds that have none.

    Args:
        labels: the classes of each image, (N, K).
        sets: (N,), 0 to G - 1.
        count: of the folds, at most G.
        generator: of the order.
    """
    sizes = np.bincount(sets)  # (G,)
    by_class = splits.counts_by_set(labels, sets)
    counts = np.column_stack([by_class, sizes])  # (G, K + 1), the last of all images
    totals, in_several = counts.sum(axis=0), (counts > 0).sum(axis=0) > 1
    rarest = np.where(counts > 0, totals, len(labels) + 1).min(axis=1)  # (G,)
    order = np.lexsort((generator.permutation(len(sizes)), -sizes, rarest))
    dealt = np.zeros((count, len(totals)), dtype=np.int64)
    fold_of = np.empty(len(sizes), dtype=np.int64)  # (G,)
    for place, number in enumerate(order.tolist()):
        own = np.flatnonzero(counts[number])
        more, before = counts[number, own], dealt[:, own]  # (k,), (count, k)
        filled = dealt[:, -1] > 0
        needed = len(order) - place == count - filled.sum()
        completed = ((before + more == totals[own]) & in_several[own]).sum(axis=1)
        present = (before > 0).sum(axis=1)
        growth = (before * (more / totals[own] ** 2)).sum(axis=1)
        fold = np.lexsort((growth, present, completed, filled & needed))[0]
        fold_of[number] = fold
        dealt[fold, own] += more
    return fold_of[sets]


def division_of(images: splits.ImageSet) -> Division:
    """The labels of images; those of a group, and those of the same content, stay together."""
    return Division.of(images.truth, images.groups, first_of_content(images.contents))


def splits_of_fold(
    inventory: splits.Inventory,
    place: str,
    folds: int,
    fold: int | None,
    *,
    seed: int,
    rare: Literal["reject", "train"] = "reject",
) -> splits.Splits:
    """The data set of one of several folds, 0 to `folds` - 1: `test` is the fold, and a tenth of all images,
    drawn from the others, is `val`. Without a fold, `train` has all images with `ImageSet.folds`, `val` none,
    and `test` those that the data have.

    The images of `train` and `val` are divided, by the folds that a table has, or by seed. No fold divides a
    group, and only one of a table separates copies. Errors are those of all folds, also without one.

    Args:
        inventory: the data, `place` where they are.
        folds, fold: their number, and the one that is tested.
        seed: of the folds and of `val`.
        rare: whether classes of fewer images than folds are rejected, or in `train` alone.

    Raises:
        UserError: no labelled images, classes with too few images or groups, or other folds in the table.
    """
    inventory.check_trainable(place)
    given = inventory.by_name
    images = given.get("train") or given["all"]
    if "val" in given:
        images = images.followed_by(given["val"].in_classes(images.class_names, f"the val images of {place}"))
    images = dataclasses.replace(images, name="train").identified()
    if len(images.folds):
        numbers = _of_table(images, place, folds)
    else:
        numbers = _drawn(images, folds, seed, rare)
        names = np.where(numbers < 0, "", (numbers + 1).astype(np.str_))
        images = dataclasses.replace(images, folds=names)
    about = inventory.channels, inventory.root, inventory.unused_and_unlabelled(images)
    if fold is None:
        for number in range(folds):  # an error comes before the first fold is trained
            _parts_of_fold(images, numbers, number, seed)
        test = given.get("test")
        if test is not None:
            test = test.in_classes(images.class_names, f"the test images of {place}")
        return splits.Splits(images, images.subset("val", np.arange(0)), test, *about, notes=inventory.notes)
    train, val, test = _parts_of_fold(images, numbers, fold, seed)
    return splits.Splits(train, val, test, *about, ("val", "test"), inventory.notes)


def _parts_of_fold(
    images: splits.ImageSet, numbers: npt.NDArray[np.int64], fold: int, seed: int
) -> tuple[splits.ImageSet, splits.ImageSet, splits.ImageSet]:
    """`train`, `val` and `test` of one of the folds of all images, (N,). Images in no fold are in `train`,
    but for those of a tested group or picture."""
    folds, sets = int(numbers.max()) + 1, division_of(images).sets
    seen = (numbers < 0) & np.isin(sets, sets[numbers == fold])
    rest = images.subset("train", np.flatnonzero((numbers != fold) & ~seen))
    train, val = splits.stratified_split(rest, splits.VAL_SHARE * folds / (folds - 1), "val", seed, least=2)
    return train, val, images.subset("test", np.flatnonzero(numbers == fold))


def fold_names(folds: npt.NDArray[np.str_]) -> list[str]:
    """The names of the folds of images, (N,) with "" for those in none, in the order of their numbers."""
    names = set(folds.tolist()) - {""}
    return sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))


def copies_across(images: splits.ImageSet) -> int:
    """Identified images that have a copy in another fold, which only the folds of a table separate."""
    first, names = first_of_content(images.contents), images.folds
    pairs = np.unique(
        np.stack([first, np.unique(names, return_inverse=True)[1]], axis=1)[names != ""], axis=0
    )
    contents, counts = np.unique(pairs[:, 0], return_counts=True)
    return int((np.isin(first, contents[counts > 1]) & (names != "")).sum())


def _of_table(images: splits.ImageSet, place: str, folds: int) -> npt.NDArray[np.int64]:
    """The folds of a table, in the order of `fold_names`, (N,) from 0."""
    names = fold_names(images.folds)
    if without := int(np.isin(images.folds, ("", "-1")).sum()):
        raise UserError(
            f"{place}: {counted(without, 'image')} without a fold (blank or -1): give each one, or leave "
            "the column out with columns fold="
        )
    if len(names) != folds:
        raise UserError(
            f"{place}: its column of folds has {counted(len(names), 'value')}, and folds={folds}: "
            + (f"set folds={len(names)}, or " if len(names) > 1 else "")
            + "leave the column out with columns fold="
        )
    if divided := splits.divided_groups(images.groups.tolist(), images.folds.tolist(), "folds"):
        raise UserError(
            f"{place}: {divided}; correct the folds, or leave them out, so that they are drawn by group, "
            "with columns fold="
        )
    return np.array([names.index(name) for name in images.folds.tolist()], dtype=np.int64)


def _drawn(
    images: splits.ImageSet, folds: int, seed: int, rare: Literal["reject", "train"]
) -> npt.NDArray[np.int64]:
    """The folds of images by seed, (N,) from 0; -1 for those of classes with fewer images or groups."""
    division = division_of(images)
    numbers, kept = np.full(len(images), -1), np.arange(len(images))
    if (strata := division.targets.strata) is not None:
        sets = division.sets_by_class()
        few = np.flatnonzero(sets < folds)
        if rare == "reject" and len(few):
            splits.check_class_sizes(images, folds, f"{folds} folds")
            k, smaller = few[0], int(sets.min())
            raise UserError(
                f"class {images.class_names[k]!r} has images in {counted(int(sets[k]), 'group')}, fewer than "
                f"folds={folds}: {f'set folds={smaller}' if smaller > 1 else 'leave the groups out'}, or set "
                "rare=train, which keeps such classes in training alone"
            )
        kept = np.flatnonzero(~np.isin(strata, few))
    count = len(np.unique(division.sets[kept]))
    if count < folds:
        what = counted(count, "group" if len(images.groups) else "different image")
        why = f"{what} of classes that have as many as folds" if len(kept) < len(images) else what
        raise UserError(
            f"{counted(len(images), 'image')} in {why}, and folds={folds} need at least one each: "
            f"{f'set folds={count}, or ' if count > 1 else ''}add images"
        )
    numbers[kept] = division.take(kept).folds(seed, folds)
    return numbers
