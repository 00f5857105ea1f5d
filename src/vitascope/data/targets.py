"""Targets: the labels of images, as the data have them, a loss takes them and a run's files keep them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.formatting import canonical

UNEVEN = 3
"""Ratio of the numbers of images of two classes above which training mentions it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Targets(ABC):
    """The labels of N images of K classes."""

    labels: npt.NDArray[Any]
    """(N, ...): the rows of a batch are its tensor for a loss."""
    class_names: tuple[str, ...]
    """Each in its `canonical` form."""
    exclusive: ClassVar[bool]
    """Whether each image has exactly one class."""

    def __post_init__(self) -> None:
        """Bring the names of the classes into one form, in which those of a model and of data are equal."""
        object.__setattr__(self, "class_names", tuple(map(canonical, self.class_names)))

    def __len__(self) -> int:
        return len(self.labels)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Targets)
            and type(self) is type(other)
            and self.class_names == other.class_names
            and np.array_equal(self.labels, other.labels)
        )

    @property
    def members(self) -> npt.NDArray[np.bool_]:
        """Whether each image has each class, (N, K)."""
        members = np.zeros((len(self), len(self.class_names)), dtype=np.bool_)
        for k, images in enumerate(self.by_class()):
            members[images, k] = True
        return members

    def take(self, indices: npt.NDArray[np.int64]) -> Self:
        """The targets of some of the images, in the order given."""
        return dataclasses.replace(self, labels=self.labels[indices])

    def joined(self, others: Self) -> Self:
        """These targets and others of the same classes."""
        assert self.class_names == others.class_names
        return dataclasses.replace(self, labels=np.concatenate([self.labels, others.labels]))

    def differ(self, some: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether the labels of each pair of images, indices (n,) and (n,), differ: (n,)."""
        different = self.labels[some] != self.labels[others]
        found: npt.NDArray[np.bool_] = np.any(different, axis=tuple(range(1, different.ndim)))
        return found

    @property
    def rows(self) -> npt.NDArray[Any]:
        """The labels as a batch has them, (N, ...)."""
        return self.labels

    @property
    def known(self) -> npt.NDArray[np.int64]:
        """The images of which it is known whether they have each class, (K,)."""
        return np.full(len(self.class_names), len(self))

    @property
    def partial(self) -> bool:
        """Whether it is unknown of some images if they have some class."""
        return bool((self.known < len(self)).any())

    def scored(self, probabilities: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The probabilities (N, K) to measure: -1 where the label is unknown. There the label is that the
        class does not apply, so that these cells come last, are never predicted and count nowhere."""
        return probabilities

    @property
    def uneven(self) -> bool:
        """Whether a class has more than `UNEVEN` times the images of another one that has any."""
        counts = self.counts[self.counts > 0]
        return len(counts) > 1 and bool(counts.max() > UNEVEN * counts.min())

    @property
    @abstractmethod
    def counts(self) -> npt.NDArray[np.int64]:
        """Images per class, (K,)."""

    @abstractmethod
    def by_class(self) -> list[npt.NDArray[np.int64]]:
        """For each of the K classes, the ascending indices of the images that have it."""

    @abstractmethod
    def names(self) -> list[tuple[str, ...]]:
        """The names of each image's classes."""

    @classmethod
    @abstractmethod
    def of_names(cls, names: Sequence[tuple[str, ...]], class_names: tuple[str, ...]) -> Self:
        """The targets with these names of each image's classes, all of them in `class_names`."""

    def merged(self) -> Self:
        """The same labels, with one class for all of one name, such as a name in two Unicode forms."""
        names = tuple(dict.fromkeys(self.class_names))
        if len(names) == len(self.class_names):
            return self
        return self.of_names([tuple(dict.fromkeys(row)) for row in self.names()], names)

    def in_classes(self, class_names: tuple[str, ...]) -> Self:
        """The same labels in another list of classes, which has the names of all that the images have."""
        return self.relabelled(self.names(), class_names)

    def relabelled(self, names: Sequence[tuple[str, ...]], class_names: tuple[str, ...]) -> Self:
        """The same images with these names of their classes; what is unknown of images whose names stay the
        same remains unknown."""
        return self.of_names(names, class_names)

    @abstractmethod
    def shares(self, rows: Tensor) -> Tensor:
        """The rows of a batch as float32 shares of the classes, (B, K), which can be mixed."""

    @abstractmethod
    def correct(self, answers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Whether each image's answer, a row of the form of its label, is right: (N,)."""

    def confusion(self, classes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Counts (K, K) of predicted classes, (N,): rows are true classes, columns are predicted ones; a
        UserError for several classes per image, which are not confused one for one."""
        raise UserError("images of several classes have no confusion matrix")

    @abstractmethod
    def to_json(self) -> list[Any]:
        """Each image's label as a value of JSON."""


@dataclasses.dataclass(frozen=True, eq=False)
class ClassIndices(Targets):
    """One class per image: int64 (N,), indices into `class_names`."""

    labels: npt.NDArray[np.int64]
    exclusive = True

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.labels, minlength=len(self.class_names))

    def by_class(self) -> list[npt.NDArray[np.int64]]:
        return np.split(np.argsort(self.labels, kind="stable"), np.cumsum(self.counts)[:-1])

    def names(self) -> list[tuple[str, ...]]:
        alone = [(name,) for name in self.class_names]
        return [alone[label] for label in self.labels.tolist()]

    @classmethod
    def of_names(cls, names: Sequence[tuple[str, ...]], class_names: tuple[str, ...]) -> Self:
        numbers = {canonical(name): number for number, name in enumerate(class_names)}
        return cls(np.array([numbers[canonical(name)] for (name,) in names], dtype=np.int64), class_names)

    def correct(self, answers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return answers == self.labels

    def confusion(self, classes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        K = len(self.class_names)
        return np.bincount(self.labels * K + classes, minlength=K * K).reshape(K, K)

    def shares(self, rows: Tensor) -> Tensor:
        shares = torch.zeros(len(rows), len(self.class_names), device=rows.device)
        return shares.scatter_(1, rows.unsqueeze(1), 1.0)  # as one_hot, in fewer operations

    def to_json(self) -> list[Any]:
        return self.labels.tolist()


@dataclasses.dataclass(frozen=True, eq=False)
class ClassSets(Targets):
    """Any number of classes per image, also none: bool (N, K), True for the classes that an image has."""

    labels: npt.NDArray[np.bool_]
    exclusive = False
    unknown: npt.NDArray[np.bool_] | None = None
    """Where it is not known whether an image has a class, bool (N, K): losses and measures leave these cells
    out. None if all are known."""

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and np.array_equal(self.rows, cast("ClassSets", other).rows)

    @property
    def rows(self) -> npt.NDArray[Any]:
        """The labels, bool; or int8 with -1 where they are unknown."""
        return (
            self.labels if self.unknown is None else np.where(self.unknown, -1, self.labels).astype(np.int8)
        )

    @property
    def known(self) -> npt.NDArray[np.int64]:
        return super().known - (0 if self.unknown is None else self.unknown.sum(axis=0))

    def scored(self, probabilities: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return probabilities if self.unknown is None else np.where(self.unknown, -1, probabilities)

    def take(self, indices: npt.NDArray[np.int64]) -> Self:
        return self._with(self.labels[indices], self.rows[indices] < 0)

    def joined(self, others: Self) -> Self:
        rows = np.concatenate([self.rows, others.rows])
        return self._with(super().joined(others).labels, rows < 0)

    def differ(self, some: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        one, other = self.rows[some], self.rows[others]
        return ((one != other) & (one >= 0) & (other >= 0)).any(axis=1)

    def merged(self) -> Self:
        return self.in_classes(tuple(dict.fromkeys(self.class_names)))

    def relabelled(self, names: Sequence[tuple[str, ...]], class_names: tuple[str, ...]) -> Self:
        targets = self.of_names(names, class_names)
        if self.unknown is None:
            return targets
        unknown = np.zeros_like(targets.labels)
        for name, column in zip(self.class_names, self.unknown.T, strict=True):
            if name in targets.class_names:
                unknown[:, targets.class_names.index(name)] |= column
        same = np.array([now == before for now, before in zip(names, self.names(), strict=True)])
        return targets._with(targets.labels, unknown & ~targets.labels & same[:, None])

    def _with(self, labels: npt.NDArray[np.bool_], unknown: npt.NDArray[np.bool_]) -> Self:
        return dataclasses.replace(self, labels=labels, unknown=unknown if unknown.any() else None)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return self.labels.sum(axis=0, dtype=np.int64)

    def by_class(self) -> list[npt.NDArray[np.int64]]:
        return [np.flatnonzero(column) for column in self.labels.T]

    def names(self) -> list[tuple[str, ...]]:
        return [tuple(self.class_names[k] for k in row if k >= 0) for row in self.to_json()]

    @classmethod
    def of_names(cls, names: Sequence[tuple[str, ...]], class_names: tuple[str, ...]) -> Self:
        numbers = {canonical(name): number for number, name in enumerate(class_names)}
        return cls._of_rows([[numbers[canonical(name)] for name in row] for row in names], class_names)

    @classmethod
    def _of_rows(cls, rows: Sequence[Sequence[int]], class_names: tuple[str, ...]) -> Self:
        """The targets with these indices of each image's classes."""
        labels = np.zeros((len(rows), len(class_names)), dtype=np.bool_)
        labels[np.repeat(np.arange(len(rows)), [len(row) for row in rows]), list(chain(*rows))] = True
        return cls(labels, class_names)

    def correct(self, answers: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Whether all classes of each image, and no others, are predicted: (N,)."""
        return (answers == self.labels).all(axis=1)

    def shares(self, rows: Tensor) -> Tensor:
        """As float32, NaN where a label is unknown: so is a mixture of it."""
        return shares_of(rows)

    def to_json(self) -> list[Any]:
        """Of each image the numbers of its classes and, counted from -1 on, of those that are unknown."""
        images, classes = np.nonzero(self.rows)
        numbers = np.where(self.rows[images, classes] < 0, -1 - classes, classes)
        rows = np.split(numbers, np.searchsorted(images, np.arange(1, len(self))))
        return [row.tolist() for row in rows[: len(self)]]


def shares_of(rows: Tensor) -> Tensor:
    """The rows of `ClassSets`, bool or int8 (B, K), as float32 with NaN for -1; floats as they are."""
    return rows.float().masked_fill(rows < 0, torch.nan) if rows.dtype == torch.int8 else rows.float()


def minus_one_is_none(numbers: Iterable[float]) -> bool:
    """Whether the label -1 stands for none among these whole numbers: always, but beside 1 alone."""
    return {*numbers} != {-1, 1}


def targets_from_json(values: Sequence[Any], class_names: tuple[str, ...]) -> Targets | None:
    """The reverse of `Targets.to_json`, with a ValueError for what is not a label of these classes; None for
    images without labels, which have no class names."""
    if not class_names:
        return None
    K, several = len(class_names), any(isinstance(value, list) for value in values)
    rows = values if several else [[value] for value in values]
    least = -K if several else 0
    for row in rows:
        if not isinstance(row, list) or any(type(k) is not int or not least <= k < K for k in row):
            raise ValueError(f"an image without a label of its {K} classes")
    if several:
        present, absent = ([[k for k in row if (k < 0) == sign] for row in rows] for sign in (False, True))
        targets = ClassSets._of_rows(present, class_names)
        unknown = ClassSets._of_rows([[-1 - k for k in row] for row in absent], class_names).labels
        return targets._with(targets.labels, unknown)
    return ClassIndices(np.array(values, dtype=np.int64), class_names)
