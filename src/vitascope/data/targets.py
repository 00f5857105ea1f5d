"""Targets: the labels of images, and all that depends on whether an image has one class or several.

There is a class for each kind of labels, chosen where they are read: their probabilities, losses, measures,
answers and texts are its methods, so that nobody else asks for the kind.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt
import scipy  # whose parts are imported when they are used
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data import average_precision, label_measures
from vitascope.data.measures import (
    ClassPair,
    PairedAccuracy,
    PairedMeasure,
    Score,
    mcnemar,
    predicted_classes,
    score_of,
    worst_pairs,
)
from vitascope.errors import UserError
from vitascope.formatting import SEPARATOR, aligned, canonical, counted
from vitascope.models.options import EVEN, Outputs

Floats = npt.NDArray[np.float64]
Probabilities = npt.NDArray[np.floating]

UNEVEN = 3
"""Ratio of the numbers of images of two classes above which training mentions it."""
SMALLEST_LOGIT = -104.0
"""The logarithm of a probability of 0, which in float32 may be 1e-45."""


@dataclasses.dataclass(frozen=True, eq=False)
class Targets(ABC):
    """The labels of N images of K classes."""

    labels: npt.NDArray[Any]
    """(N, ...): the rows of a batch are its tensor for a loss."""
    class_names: tuple[str, ...]
    """Each in its `canonical` form."""
    outputs: ClassVar[Outputs]
    """The outputs of a model of such labels, in its configuration."""
    measure: ClassVar[str]
    """What classifiers are compared by, in words."""
    value: ClassVar[str]
    """Its name in the metrics of a run."""
    exclusive: ClassVar[bool]
    """Whether each image has exactly one class."""
    trusted: ClassVar[bool]
    """Whether a classifier may know how far its answers can be trusted: sets of classes, familiarity."""

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

    @property
    @abstractmethod
    def strata(self) -> npt.NDArray[np.int64] | None:
        """The class by which each image is drawn, (N,); None where an image may have several."""

    @property
    @abstractmethod
    def balanced_weights(self) -> Floats:
        """The weight of each class that makes all count alike, (K,); every class has an image."""

    @property
    @abstractmethod
    def guessed(self) -> float:
        """The `measure` of an answer that is the same for all images."""

    @property
    def even_thresholds(self) -> tuple[float, ...]:
        """The thresholds of a model without ones of its own, (K,) or none."""
        even = self.thresholds([EVEN] * len(self.class_names))
        return () if even is None else tuple(even.tolist())

    @abstractmethod
    def by_class(self) -> list[npt.NDArray[np.int64]]:
        """For each of the K classes, the ascending indices of the images that have it."""

    @abstractmethod
    def membership(self, answers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Whether each class is among the answers, (N, K)."""

    @staticmethod
    @abstractmethod
    def names_in(text: str) -> list[str]:
        """The names of classes in a text about one image."""

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
        """The images with other names of their classes; where these stay, what is unknown remains so."""
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

    # Probabilities and losses, of any images of the kind; they know no labels

    @staticmethod
    @abstractmethod
    def probabilities(logits: Floats) -> Floats:
        """The probability of each class, (N, K), from logits (N, K)."""

    @staticmethod
    @abstractmethod
    def logits(probabilities: Probabilities, *, finite: bool = True) -> Floats:
        """Logits (N, K) with these probabilities, (N, K); if not `finite`, those of 0 and 1 are infinite."""

    @classmethod
    def sharpened(cls, probabilities: Probabilities, factor: float | Floats) -> Floats:
        """The probabilities (N, K) of logits that are multiplied by a factor, one for all or (K,)."""
        return cls.probabilities(cls.logits(probabilities, finite=False) * factor)

    @staticmethod
    @abstractmethod
    def total_loss(members: npt.NDArray[np.bool_], logits: Floats) -> float:
        """The loss of all images in nats, from the classes that each has and its logits, (N, K) each."""

    @staticmethod
    @abstractmethod
    def loss_and_slope(logits: Floats, shares: Floats) -> tuple[float, Floats]:
        """The loss of all images in nats, and its slope by logit, (N, K), from shares of 0 and 1, (N, K)."""

    @staticmethod
    @abstractmethod
    def cross_entropy(logits: Tensor, targets: "Targets") -> float:
        """The mean loss in nats of logits (N, K) of a model of this kind, for labels of any kind."""

    @abstractmethod
    def check_outputs(self, outputs: str, noun: str) -> None:
        """Reject a model whose outputs cannot be measured on these images, a `noun` in words."""

    @property
    @abstractmethod
    def decisions(self) -> int:
        """The number of losses: of images, or of known pairs of an image and a class."""

    @property
    @abstractmethod
    def outcomes(self) -> int:
        """The number of answers among which a loss decides."""

    @abstractmethod
    def classes_alone(self, least: int) -> npt.NDArray[np.int64]:
        """The classes that are decided by themselves, and that at least so many images have, and do not."""

    # Answers and measures, from probabilities (N, K)

    @staticmethod
    @abstractmethod
    def thresholds(values: Sequence[float]) -> npt.NDArray[np.float32] | None:
        """The thresholds of the classes, (K,); None where the most probable class is the answer."""

    @abstractmethod
    def tuned_thresholds(self, probabilities: Probabilities) -> tuple[float, ...]:
        """The thresholds of the highest F1, (K,); none where the most probable class is the answer."""

    @abstractmethod
    def answers(
        self, probabilities: Probabilities, thresholds: Probabilities | None = None
    ) -> npt.NDArray[Any]:
        """The answers in the form of the labels: the most probable class of each image, int64 (N,), or the
        classes from their thresholds (K,) on, by default `EVEN`, bool (N, K)."""

    @abstractmethod
    def score(
        self, probabilities: Probabilities, thresholds: Probabilities | None = None, noun: str = "image"
    ) -> Score:
        """The measures with their intervals; UserError for images, a `noun` in words, without any class."""

    def check_measurable(self, noun: str) -> None:
        """Reject images, a `noun` in words, of which none has a class to be measured by."""
        if not self.counts.any():
            raise UserError(
                f"none of the {counted(len(self), noun)} has a class to be measured by; add images that have "
                "one, or give your own split"
            )

    @abstractmethod
    def quality(self, probabilities: Probabilities) -> float:
        """The `measure` alone."""

    @abstractmethod
    def weighted_qualities(self, probabilities: Probabilities, weights: npt.NDArray[np.int32]) -> Floats:
        """The `measure` of samples of the images, (B,), in which each image is so often, weights (N, B)."""

    @abstractmethod
    def paired(self, before: Probabilities, after: Probabilities) -> PairedMeasure:
        """The `measure` of a classifier beside that of one that is made from it."""

    @abstractmethod
    def difference(self, one: Probabilities, other: Probabilities) -> average_precision.PairedDifference:
        """The `measure` of one classifier minus that of the other."""

    @abstractmethod
    def columns(self, answers: npt.NDArray[Any], probabilities: Probabilities) -> dict[str, Any]:
        """Labels, answers and whether they are right, as columns of a table of the images."""

    @abstractmethod
    def self_confidence(self, probabilities: Probabilities) -> Floats:
        """The probability of each label as it is: (N, 1) for one class per image, (N, K) for several."""

    @abstractmethod
    def class_values(self, score: Score, answers: npt.NDArray[Any]) -> dict[str, Any]:
        """The measures of each class as values of JSON."""

    @abstractmethod
    def class_lines(self, score: Score, answers: npt.NDArray[Any], names: Sequence[str]) -> Iterator[str]:
        """The measures of each class that has an image, in words, by names in one line."""

    @abstractmethod
    def confused(self, answers: npt.NDArray[Any], count: int) -> list[ClassPair]:
        """At most `count` pairs of an image's class and one predicted instead, the most frequent first."""


@dataclasses.dataclass(frozen=True, eq=False)
class ClassIndices(Targets):
    """One class per image: int64 (N,), indices into `class_names`."""

    labels: npt.NDArray[np.int64]
    outputs: ClassVar[Outputs] = "exclusive"
    measure, value = "accuracy", "accuracy"
    exclusive = trusted = True

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.labels, minlength=len(self.class_names))

    @property
    def strata(self) -> npt.NDArray[np.int64]:
        return self.labels

    @property
    def balanced_weights(self) -> Floats:
        return len(self) / (len(self.class_names) * self.counts.astype(np.float64))

    @property
    def guessed(self) -> float:
        return float(self.counts.max() / len(self))

    def by_class(self) -> list[npt.NDArray[np.int64]]:
        return np.split(np.argsort(self.labels, kind="stable"), np.cumsum(self.counts)[:-1])

    def membership(self, answers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return np.eye(len(self.class_names), dtype=np.bool_)[answers]

    @staticmethod
    def names_in(text: str) -> list[str]:
        return [text]

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

    @staticmethod
    def probabilities(logits: Floats) -> Floats:
        return torch.from_numpy(logits).softmax(dim=-1).numpy()

    @staticmethod
    def logits(probabilities: Probabilities, *, finite: bool = True) -> Floats:
        logs = torch.from_numpy(probabilities).double().log()
        return (logs.clamp(min=SMALLEST_LOGIT) if finite else logs).numpy()

    @staticmethod
    def total_loss(members: npt.NDArray[np.bool_], logits: Floats) -> float:
        return float(-torch.from_numpy(logits).log_softmax(dim=1).numpy()[members].sum())

    @staticmethod
    def loss_and_slope(logits: Floats, shares: Floats) -> tuple[float, Floats]:
        logs = scipy.special.log_softmax(logits, axis=1)
        return -(logs * shares).sum(), np.exp(logs) - shares

    @staticmethod
    def cross_entropy(logits: Tensor, targets: Targets) -> float:
        return float(F.cross_entropy(logits, torch.from_numpy(targets.rows)))

    def check_outputs(self, outputs: str, noun: str) -> None:
        pass

    @property
    def decisions(self) -> int:
        return len(self)

    @property
    def outcomes(self) -> int:
        return len(self.class_names)

    def classes_alone(self, least: int) -> npt.NDArray[np.int64]:
        return np.arange(0)

    @staticmethod
    def thresholds(values: Sequence[float]) -> npt.NDArray[np.float32] | None:
        return None

    def tuned_thresholds(self, probabilities: Probabilities) -> tuple[float, ...]:
        return ()

    def answers(
        self, probabilities: Probabilities, thresholds: Probabilities | None = None
    ) -> npt.NDArray[Any]:
        return predicted_classes(probabilities)

    def score(
        self, probabilities: Probabilities, thresholds: Probabilities | None = None, noun: str = "image"
    ) -> Score:
        return score_of(self.labels, probabilities)

    def quality(self, probabilities: Probabilities) -> float:
        return float(self.correct(predicted_classes(probabilities)).mean())

    def weighted_qualities(self, probabilities: Probabilities, weights: npt.NDArray[np.int32]) -> Floats:
        right = self.correct(predicted_classes(probabilities))
        return np.asarray(right @ weights / weights.sum(axis=0))

    def paired(self, before: Probabilities, after: Probabilities) -> PairedAccuracy:
        right, right_after = (self.correct(predicted_classes(each)) for each in (before, after))
        return PairedAccuracy.of(right, right_after)

    def difference(self, one: Probabilities, other: Probabilities) -> average_precision.PairedDifference:
        pairs = self.paired(other, one)
        low, high = pairs.interval
        return average_precision.PairedDifference(
            0.0 - pairs.drop, 0.0 - high, 0.0 - low, mcnemar(pairs.lost, pairs.won)
        )

    def columns(self, answers: npt.NDArray[Any], probabilities: Probabilities) -> dict[str, Any]:
        names = np.array(self.class_names, dtype=object)
        confidence = probabilities.max(axis=1)
        columns = {"label": names[self.labels], "prediction": names[answers], "confidence": confidence}
        return {**columns, "correct": self.correct(answers)}

    def self_confidence(self, probabilities: Probabilities) -> Floats:
        return probabilities.astype(np.float64)[self.members][:, None]

    def class_values(self, score: Score, answers: npt.NDArray[Any]) -> dict[str, Any]:
        return {"confusion": self.confusion(answers).tolist()}

    def class_lines(self, score: Score, answers: npt.NDArray[Any], names: Sequence[str]) -> Iterator[str]:
        """The accuracy of each class with its most frequent mistake."""
        width = max(map(len, names))
        for row, (name, counts) in enumerate(zip(names, self.confusion(answers), strict=True)):
            total, right = int(counts.sum()), counts[row]
            counts[row] = 0
            worst = int(counts.argmax())
            often = f", most often taken for {names[worst]} ({counts[worst]})" if counts[worst] else ""
            if total:
                yield f"{name:<{width}}  {right / total:>7.2%} of {total}{often}"

    def confused(self, answers: npt.NDArray[Any], count: int) -> list[ClassPair]:
        return worst_pairs(self.confusion(answers), count)


@dataclasses.dataclass(frozen=True, eq=False)
class ClassSets(Targets):
    """Any number of classes per image, also none: bool (N, K), True for the classes that an image has."""

    labels: npt.NDArray[np.bool_]
    outputs: ClassVar[Outputs] = "independent"
    measure, value = "mAP", "map"
    exclusive = trusted = False
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

    @property
    def strata(self) -> None:
        return None

    @property
    def balanced_weights(self) -> Floats:
        return (self.known - self.counts) / self.counts.astype(np.float64)

    @property
    def guessed(self) -> float:
        shares = self.counts / len(self)
        return float(shares[shares > 0].mean())  # the mAP of guessing is the mean share of the classes

    def by_class(self) -> list[npt.NDArray[np.int64]]:
        return [np.flatnonzero(column) for column in self.labels.T]

    def membership(self, answers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return answers

    @staticmethod
    def names_in(text: str) -> list[str]:
        return [part.strip() for part in text.split(SEPARATOR)]

    def names(self) -> list[tuple[str, ...]]:
        return [tuple(self.class_names[k] for k in row if k >= 0) for row in self.to_json()]

    @classmethod
    def of_names(cls, names: Sequence[tuple[str, ...]], class_names: tuple[str, ...]) -> Self:
        numbers = {canonical(name): number for number, name in enumerate(class_names)}
        return cls._of_rows([[numbers[canonical(name)] for name in row] for row in names], class_names)

    @classmethod
    def _of_rows(cls, rows: Sequence[Sequence[int]], class_names: tuple[str, ...]) -> Self:
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

    @staticmethod
    def probabilities(logits: Floats) -> Floats:
        return torch.from_numpy(logits).sigmoid().numpy()

    @staticmethod
    def logits(probabilities: Probabilities, *, finite: bool = True) -> Floats:
        return torch.from_numpy(probabilities).double().logit(eps=1e-12 if finite else None).numpy()

    @staticmethod
    def total_loss(members: npt.NDArray[np.bool_], logits: Floats) -> float:
        return float(np.logaddexp(0, np.where(members, -logits, logits)).sum())

    @staticmethod
    def loss_and_slope(logits: Floats, shares: Floats) -> tuple[float, Floats]:
        losses = -scipy.special.log_expit(np.where(shares > 0, logits, -logits))
        return losses.sum(), scipy.special.expit(logits) - shares

    @staticmethod
    def cross_entropy(logits: Tensor, targets: Targets) -> float:
        shares = targets.shares(torch.from_numpy(targets.rows))  # (N, K)
        known = ~shares.isnan()
        return float(F.binary_cross_entropy_with_logits(logits[known], shares[known]))

    def check_outputs(self, outputs: str, noun: str) -> None:
        if outputs != self.outputs:
            raise UserError(
                f"the model predicts one class of an image, and the {noun}s have several: measure it on "
                "images of one class each"
            )

    @property
    def decisions(self) -> int:
        return int(self.known.sum())

    @property
    def outcomes(self) -> int:
        return 2

    def classes_alone(self, least: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero(np.minimum(self.counts, self.known - self.counts) >= least)

    @staticmethod
    def thresholds(values: Sequence[float]) -> npt.NDArray[np.float32] | None:
        return np.array(values, np.float32)

    def tuned_thresholds(self, probabilities: Probabilities) -> tuple[float, ...]:
        return tuple(label_measures.best_thresholds(self.labels, self.scored(probabilities)).tolist())

    def answers(
        self, probabilities: Probabilities, thresholds: Probabilities | None = None
    ) -> npt.NDArray[Any]:
        return probabilities >= (EVEN if thresholds is None else thresholds)

    def score(
        self, probabilities: Probabilities, thresholds: Probabilities | None = None, noun: str = "image"
    ) -> label_measures.LabelScore:
        if not self.labels.any():
            raise UserError(f"none of the {noun}s has a class, so they have no mAP")
        return label_measures.label_score(self.labels, self.scored(probabilities), thresholds)

    def quality(self, probabilities: Probabilities) -> float:
        return average_precision.mean_average_precision(self.labels, self.scored(probabilities))

    def weighted_qualities(self, probabilities: Probabilities, weights: npt.NDArray[np.int32]) -> Floats:
        return average_precision.mean_of_known(
            average_precision.class_precision(self.labels, self.scored(probabilities), weights)
        )

    def paired(self, before: Probabilities, after: Probabilities) -> average_precision.PairedPrecision:
        return average_precision.PairedPrecision.of(self.labels, self.scored(before), self.scored(after))

    def difference(self, one: Probabilities, other: Probabilities) -> average_precision.PairedDifference:
        return average_precision.paired_difference(self.labels, self.scored(one), self.scored(other))

    def columns(self, answers: npt.NDArray[Any], probabilities: Probabilities) -> dict[str, Any]:
        names = np.array(self.class_names, dtype=object)
        labels, predictions = (["; ".join(names[row]) for row in rows] for rows in (self.labels, answers))
        by_class = dict(zip(self.class_names, probabilities.T, strict=True))
        return {"labels": labels, "predictions": predictions, "correct": self.correct(answers), **by_class}

    def self_confidence(self, probabilities: Probabilities) -> Floats:
        wide = probabilities.astype(np.float64)
        return np.where(self.labels, wide, 1 - wide)

    def class_values(self, score: Score, answers: npt.NDArray[Any]) -> dict[str, Any]:
        return cast("label_measures.LabelScore", score).class_values()

    def class_lines(self, score: Score, answers: npt.NDArray[Any], names: Sequence[str]) -> Iterator[str]:
        """The measures of all classes, and those of each, the worst first."""
        measured = cast("label_measures.LabelScore", score)
        yield from aligned([label_measures.ESTIMATES_HEAD, *measured.rows()])
        yield from aligned([label_measures.CLASSES_HEAD, *measured.class_rows(names)])

    def confused(self, answers: npt.NDArray[Any], count: int) -> list[ClassPair]:
        return label_measures.pairs_confused(self.labels, answers, count)


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


KINDS: dict[str, type[Targets]] = {kind.outputs: kind for kind in (ClassIndices, ClassSets)}
"""The kinds of labels by the outputs of their models."""
