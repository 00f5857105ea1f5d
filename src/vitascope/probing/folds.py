"""Divisions of labelled images by class and by group: the folds of cross-validation, and random shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.contents import first_of_content
from vitascope.data.splits import ImageSet, bound_sets, draw_share
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

    def fold_count(self) -> int:
        """The number of folds: at most `FOLDS`, and at most as many as the rarest class has images or groups.

        Where images have several classes, those of one image or group are too rare to count.

        Raises:
            UserError: all images have the same classes; two folds are impossible.
        """
        names, counts = self.targets.class_names, self.targets.counts
        sets = np.array([len(np.unique(self.sets[each])) for each in self.targets.by_class()], dtype=np.int64)
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

    def folds(self, seed: int = 0) -> npt.NDArray[np.int64]:
        """The fold of each image, (N,), 0 to `fold_count` - 1: about equal shares of each class, whole sets.

        Raises:
            UserError: as in `fold_count`.
        """
        count, found = self.fold_count(), np.zeros(len(self.targets), dtype=np.int64)
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
