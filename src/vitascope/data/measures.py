"""Measures of predictions: accuracy and its loss with their intervals, calibration, confused classes."""

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import scipy  # whose parts are imported when they are used

from vitascope.formatting import counted

BINS = 15
SAMPLES = 200
"""Bootstrap samples behind the interval of a calibration error."""
Z = 1.959964
"""The standard normal quantile of 95% intervals."""
FEW = 50
"""Images below which an accuracy is called that of few, and nothing is said about calibration."""


def wilson_interval(right: float, total: int) -> tuple[float, float]:
    """95% interval of a share that was measured on a sample (Wilson 1927); `total` is at least 1.

    Unlike the normal approximation it stays in [0, 1], also for few images and for shares near 0 and 1.
    """
    share = right / total
    centre = (share + Z**2 / (2 * total)) / (1 + Z**2 / total)
    half = Z / (1 + Z**2 / total) * math.sqrt(share * (1 - share) / total + Z**2 / (4 * total**2))
    # At both ends the formula gives 0 and 1 exactly, up to rounding.
    return (0.0 if right == 0 else centre - half), (1.0 if right == total else centre + half)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value of the exact test of McNemar (1947): whether two classifiers are equally good.

    Of the same images, `only_first` are right for the first classifier alone, `only_second` for the second
    alone. If both are equally good, either number is binomial with probability 1/2.
    """
    return min(
        1.0, 2 * float(scipy.special.bdtr(min(only_first, only_second), only_first + only_second, 0.5))
    )


def drop_interval(lost: int, won: int, total: int) -> tuple[float, float]:
    """95% interval of the loss of accuracy from one classifier to another (Bonett and Price 2012).

    Of the same `total` images, at least 1, `lost` are right for the first classifier alone, `won` for the
    second alone. One more image on either side keeps the interval from being empty where both agree.
    """
    loss, gain = (lost + 1) / (total + 2), (won + 1) / (total + 2)
    half = Z * math.sqrt((loss + gain - (loss - gain) ** 2) / (total + 2))
    return max(-1.0, loss - gain - half), min(1.0, loss - gain + half)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedMeasure(ABC):
    """A measure of a classifier and of the one made from it, on the same images.

    Attributes:
        total: images, at least 1.
    """

    name: ClassVar[str]
    """Of the measure, for people."""
    total: int

    @property
    @abstractmethod
    def drop(self) -> float:
        """The loss of the measure; negative for a gain."""

    @property
    @abstractmethod
    def interval(self) -> tuple[float, float]:
        """95% interval of the loss."""

    @abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """The measure of both with its 95% interval, as text."""

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.drop:z.2%} of the {self.name}, 95% interval {low:z.2%} to {high:z.2%}"

    def doubt(self, allowed: float, noun: str) -> str:
        """A line if `total` images, `noun` by name, cannot tell whether more than `allowed` is lost."""
        low, high = self.interval
        if not low <= allowed < high:
            return ""
        return (
            f"{counted(self.total, noun)} cannot tell whether more than {allowed:.2%} of the "
            f"{self.name} is lost (95% interval {low:.2%} to {high:.2%}); measure on more labelled images"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedAccuracy(PairedMeasure):
    """The accuracies of both.

    Attributes:
        right: images that the first classifier predicts correctly.
        lost: those of them that the second one does not.
        won: images that the second one alone predicts correctly.
    """

    name = "accuracy"
    right: int
    lost: int
    won: int

    @classmethod
    def of(cls, before: npt.NDArray[np.bool_], after: npt.NDArray[np.bool_]) -> Self:
        """Count the images for which the first and the second classifier are right, (N,) each."""
        return cls(
            total=len(before),
            right=int(before.sum()),
            lost=int((before & ~after).sum()),
            won=int((after & ~before).sum()),
        )

    @property
    def right_after(self) -> int:
        """Images that the second classifier predicts correctly."""
        return self.right - self.lost + self.won

    @property
    def drop(self) -> float:
        """The loss of accuracy; negative for a gain."""
        return (self.lost - self.won) / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the loss of accuracy."""
        return drop_interval(self.lost, self.won, self.total)

    def rows(self) -> list[tuple[str, str]]:
        """The accuracy of both with its 95% interval, as text."""
        return [
            (f"{right / self.total:.2%}", "{:.1%} to {:.1%}".format(*wilson_interval(right, self.total)))
            for right in (self.right, self.right_after)
        ]


class Score(ABC):
    """The measures of a classifier on some images.

    Attributes:
        right: correct predictions.
        total: predictions, at least 1.
    """

    right: int
    total: int
    measure: ClassVar[str]
    """What classifiers are compared by, in words."""
    guessing: ClassVar[str]
    """The simplest answer to compare with."""

    @property
    @abstractmethod
    def value_and_limits(self) -> tuple[float, float, float]:
        """The measure that classifiers are compared by, and the limits of its 95% interval."""

    @property
    @abstractmethod
    def guessed(self) -> float:
        """The measure of the simplest answer."""

    @property
    @abstractmethod
    def mean_of_classes(self) -> float:
        """A measure in which all classes count alike."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """The measures as plain values."""

    @abstractmethod
    def result(self) -> str:
        """The measure, and what it is of."""

    @abstractmethod
    def headline(self) -> str:
        """The measure and the number of images."""

    @abstractmethod
    def in_words(self, images: str) -> str:
        """The measure on some images with its interval."""

    @abstractmethod
    def compared(self) -> str:
        """The numbers to compare with, in one line."""

    @property
    def no_better(self) -> bool:
        """Whether the interval contains, or lies below, the measure of the simplest answer."""
        return self.value_and_limits[1] <= self.guessed < 1

    def warning(self, advice: str = "") -> str:
        """A line about a model that is no better than guessing, with advice; empty if it is better."""
        if not self.no_better:
            return ""
        text = f"no better than {self.guessing}, as far as {self.total:,} images show"
        return f"{text}; {advice}" if advice else text


@dataclasses.dataclass(frozen=True)
class AccuracyScore(Score):
    """The accuracy of a classifier, and the numbers to compare it with.

    Attributes:
        balanced: balanced accuracy, the mean recall of the classes that occur.
        macro_f1: mean F1, 2 TP / (2 TP + FP + FN), of the classes that occur or are predicted.
        majority: the share of the most frequent class: the accuracy of always guessing it.
        top5: the share of images whose class is among the five most probable ones; None for up to 5 classes.
    """

    measure, guessing = "accuracy", "always guessing the most frequent class"
    right: int
    total: int
    balanced: float
    macro_f1: float
    majority: float
    top5: float | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the accuracy (Wilson's)."""
        return wilson_interval(self.right, self.total)

    @property
    def value_and_limits(self) -> tuple[float, float, float]:
        """The accuracy, and the limits of its interval."""
        return self.right / self.total, *self.interval

    @property
    def guessed(self) -> float:
        """The accuracy of guessing the most frequent class."""
        return self.majority

    @property
    def mean_of_classes(self) -> float:
        """The balanced accuracy."""
        return self.balanced

    def summary(self) -> dict[str, Any]:
        """The measures as plain values."""
        low, high = self.interval
        return {
            "correct": self.right,
            "accuracy": self.right / self.total,
            "accuracy_low": low,
            "accuracy_high": high,
            **({} if self.top5 is None else {"top5_accuracy": self.top5}),
            "balanced_accuracy": self.balanced,
            "macro_f1": self.macro_f1,
            "majority": self.majority,
        }

    def result(self) -> str:
        """The accuracy and its counts."""
        return f"{self.right / self.total:.2%} right: {self.right} of {counted(self.total, 'image')}"

    def headline(self) -> str:
        """The accuracy and its counts."""
        return f"{self.right / self.total:.2%} right, {self.right} of {counted(self.total, 'image')}"

    def in_words(self, images: str) -> str:
        """The accuracy on some images with its interval."""
        low, high = self.interval
        return f"accuracy {self.right / self.total:.2%} of {images} ({low:.1%} to {high:.1%})"

    def compared(self) -> str:
        """The interval and the numbers to compare with, in one line."""
        low, high = self.interval
        only = f"only {counted(self.total, 'image')}: " if self.total < FEW else ""
        top5 = "" if self.top5 is None else f"top-5 accuracy {self.top5:.2%}; "
        return (
            f"{only}95% interval {low:.1%} to {high:.1%}; {top5}balanced accuracy {self.balanced:.2%}, "
            f"macro F1 {self.macro_f1:.2%}; always guessing the most frequent class: {self.majority:.2%}"
        )


def predicted_classes(probabilities: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """The predicted class of each image, (N,), from probabilities (N, K)."""
    return probabilities.argmax(axis=1)


def score_of(labels: npt.NDArray[np.int64], probabilities: npt.NDArray[np.floating]) -> AccuracyScore:
    """The score of probabilities (N, K) for true classes (N,), N at least 1."""
    K = probabilities.shape[1]
    guesses = predicted_classes(probabilities)
    hits = labels[labels == guesses]
    totals, guessed, right = (np.bincount(classes, minlength=K) for classes in (labels, guesses, hits))
    present, involved = totals > 0, totals + guessed > 0
    return AccuracyScore(
        right=int(right.sum()),
        total=len(labels),
        balanced=float((right[present] / totals[present]).mean()),
        macro_f1=float((2 * right[involved] / (totals + guessed)[involved]).mean()),
        majority=float(totals.max() / len(labels)),
        top5=float((ranks(labels, probabilities) < 5).mean()) if K > 5 else None,
    )


def ranks(labels: npt.NDArray[np.int64], probabilities: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """The place of each true class (N,) among the probabilities (N, K), from 0 for the most probable class.

    Of equally probable classes the first one comes first, as in `argmax`.
    """
    K = probabilities.shape[1]
    own = probabilities[np.arange(len(labels)), labels][:, None]  # (N, 1)
    later = np.arange(K) > labels[:, None]  # (N, K)
    behind = (probabilities < own) | ((probabilities == own) & later)  # none where the own one is NaN
    return K - 1 - behind.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Predictions by confidence: bin m of M holds confidences in ((m - 1) / M, m / M].

    Attributes:
        counts: predictions in each bin, int64 (M,).
        confidences: their mean confidence, float64 (M,); 0 in an empty bin.
        accuracies: their accuracy, float64 (M,); 0 in an empty bin.
    """

    counts: npt.NDArray[np.int64]
    confidences: npt.NDArray[np.float64]
    accuracies: npt.NDArray[np.float64]

    @property
    def error(self) -> float:
        """Expected calibration error: |accuracy - confidence|, a mean over the predictions."""
        gaps = np.abs(self.accuracies - self.confidences)
        return float((self.counts * gaps).sum() / self.counts.sum())


def calibration(
    confidences: npt.NDArray[np.floating], right: npt.NDArray[np.bool_], bins: int = BINS
) -> Calibration:
    """Confidence beside accuracy in `bins` bins of equal width (Guo et al. 2017, equations 2, 3 and 5).

    `confidences` (N,) in [0, 1] are of the predicted classes, `right` (N,) marks the correct ones; N >= 1.
    """
    confidences = confidences.astype(np.float64)
    edges = np.arange(1, bins) / bins
    places = np.searchsorted(edges, confidences, side="left")  # an edge belongs to the bin that it ends
    counts = np.bincount(places, minlength=bins)
    shared = np.maximum(counts, 1)
    return Calibration(
        counts=counts.astype(np.int64),
        confidences=np.bincount(places, weights=confidences, minlength=bins) / shared,
        accuracies=np.bincount(places, weights=right.astype(np.float64), minlength=bins) / shared,
    )


def calibration_interval(
    confidences: npt.NDArray[np.floating], right: npt.NDArray[np.bool_]
) -> tuple[float, float]:
    """95% interval of the expected calibration error, by its standard error over bootstrap samples.

    Their own quantiles would be too high: a mean of absolute values grows with the noise (Kumar et al. 2019).
    """
    random, N = np.random.default_rng(0), len(confidences)
    samples = random.integers(N, size=(SAMPLES, N))
    half = Z * float(np.std([calibration(confidences[rows], right[rows]).error for rows in samples]))
    error = calibration(confidences, right).error
    return max(0.0, error - half), min(1.0, error + half)


@dataclasses.dataclass(frozen=True)
class RiskCoverage:
    """The share of answers that are wrong, if only the surest are given (Geifman and El-Yaniv 2017).

    Attributes:
        coverage: the share of the images that are answered, ascending, float64 (N,).
        risk: the share of these answers that is wrong, float64 (N,).
    """

    coverage: npt.NDArray[np.float64]
    risk: npt.NDArray[np.float64]

    @property
    def area(self) -> float:
        """The mean risk over all coverages."""
        return float(self.risk.mean())

    @classmethod
    def of(cls, confidences: npt.NDArray[np.floating], right: npt.NDArray[np.bool_]) -> Self:
        """That of answers with confidences (N,); of equally sure ones, each counts as their mean."""
        numbers, places = np.unique(-confidences, return_inverse=True)
        wrong = np.bincount(places, weights=~right) / np.bincount(places, minlength=len(numbers))
        answered = np.arange(1, len(right) + 1)
        return cls(answered / len(right), np.cumsum(wrong[np.sort(places)]) / answered)


@dataclasses.dataclass(frozen=True)
class ClassPair:
    """Two of the K classes, and a number of images."""

    first: int
    second: int
    count: int


def worst_pairs(confusion: npt.NDArray[np.int64], count: int) -> list[ClassPair]:
    """At most `count` pairs of a true and a predicted class in counts (K, K): the most frequent confusion
    first, then the larger share of a class."""
    totals = confusion.sum(axis=1)
    trues, others = np.nonzero(confusion - np.diag(confusion.diagonal()))
    counts = confusion[trues, others]
    order = np.lexsort((others, trues, -counts / totals[trues], -counts))[:count]
    return [
        ClassPair(int(true), int(other), int(confusion[true, other]))
        for true, other in zip(trues[order], others[order], strict=True)
    ]


def surest(
    confidences: npt.NDArray[np.floating], among: npt.NDArray[np.bool_], count: int
) -> npt.NDArray[np.int64]:
    """Indices of the most confident predictions among some, at most `count`."""
    places = np.flatnonzero(among)
    return places[np.argsort(-confidences[places], kind="stable")][:count]
