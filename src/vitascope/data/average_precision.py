"""Average precision of classes of which an image may have several: its bootstrap intervals, and the
difference of two classifiers on the same images.

Labels are bool (N, K), probabilities floats (N, K). B samples of the images have weights, int32 (N, B): how
often each image is drawn. A column of ones measures the images themselves.
"""

import dataclasses
from typing import Self

import numpy as np
import numpy.typing as npt
import scipy  # whose parts are imported when they are used

from vitascope.data.measures import PairedMeasure, Z, drop_interval, wilson_interval
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.intervals import CONFIDENCE

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Weights = npt.NDArray[np.int32]

RESAMPLES = 500
"""Bootstrap samples behind an interval: enough for a standard error."""
CHUNK = 10**7
"""Resampled scores in memory at once."""


def average_precision(labels: Bools, scores: npt.NDArray[np.floating], weights: Weights) -> Floats:
    """AP = sum_n (R_n - R_{n-1}) P_n over descending thresholds, without interpolation, (B,).

    R_n and P_n are recall and precision above the n-th distinct score (Zhu 2004; as in scikit-learn). NaN
    without a positive label.

    Args:
        labels: (N,).
        scores: (N,).
        weights: (N, B), or (N / K, B) if each is that of K labels in a row.
    """
    if not labels.any():
        return np.full(weights.shape[1], np.nan)
    order, positive, ends = _recall_steps(labels, scores)
    images = order[: ends[-1] + 1] // (len(labels) // len(weights))
    begins = np.concatenate([[0], ends[:-1] + 1])
    places = np.searchsorted(positive, begins)
    found, columns = [], max(1, CHUNK // len(images))
    for start in range(0, weights.shape[1], columns):
        part = weights[:, start : start + columns]
        above = np.cumsum(np.add.reduceat(part[images], begins, axis=0), axis=0)  # (n, B)
        gained = np.add.reduceat(part[images[positive]], places, axis=0)  # true positives of a score, (n, B)
        hits = np.cumsum(gained, axis=0)
        with np.errstate(invalid="ignore"):
            found.append((gained * (hits / np.maximum(above, 1))).sum(axis=0) / hits[-1])
    return np.concatenate(found)


def _recall_steps(
    labels: Bools, scores: npt.NDArray[np.floating]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The order of descending scores (N,), the places of positive labels in it, and the last places (n,) of
    the scores at which recall grows, which are all that average precision counts."""
    order = np.argsort(-scores, kind="stable")
    positive = np.flatnonzero(labels[order])
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # the last of each score
    return order, positive, np.unique(ends[np.searchsorted(ends, positive)])


def precision_recall(labels: Bools, scores: npt.NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Recall and precision above each score at which recall grows, (n,) each, from the highest score on.

    Average precision is the area under the steps that hold each precision back to the recall before.
    `labels` and `scores` are (N,), with a positive label.
    """
    order, _, ends = _recall_steps(labels, scores)
    hits = np.cumsum(labels[order])[ends]
    return hits / hits[-1], hits / (ends + 1)


def mean_of_known(values: Floats) -> Floats:
    """The mean over the last axis, without NaN; NaN if there is nothing else."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        found: Floats = np.where(known, values, 0).sum(axis=-1) / known.sum(axis=-1)
    return found


def class_precision(labels: Bools, probabilities: npt.NDArray[np.floating], weights: Weights) -> Floats:
    """The average precision of each class, (B, K), for labels (N, K) in samples with weights (N, B)."""
    pairs = zip(labels.T, probabilities.T, strict=True)
    return np.stack([average_precision(*pair, weights) for pair in pairs], axis=1)


def mean_average_precision(labels: Bools, probabilities: npt.NDArray[np.floating]) -> float:
    """The mean over the classes that occur of their average precision; NaN if none does."""
    found = class_precision(labels, probabilities, np.ones((len(labels), 1), dtype=np.int32))
    return float(mean_of_known(found[0]))


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """The mAP of one classifier minus that of another on the same images, with its 95% interval."""

    value: float
    low: float
    high: float
    p: float
    """Two-sided p-value: the probability of such a difference, or a larger one, if both are equally good."""


@dataclasses.dataclass(frozen=True, eq=False)
class ResampledPrecision:
    """The average precision of K classes on some images and on B bootstrap samples of them (Efron 1979).

    Attributes:
        total: images.
        positives: those of each class, int64 (K,).
        values: of the images, (K,); NaN for a class without any.
        drawn: of the samples, (B, K); NaN for a class without images in a sample.
    """

    total: int
    positives: npt.NDArray[np.int64]
    values: Floats
    drawn: Floats

    @classmethod
    def of(cls, labels: Bools, probabilities: npt.NDArray[np.floating], weights: Weights) -> Self:
        """Measure probabilities (N, K) for labels (N, K), and samples of the images with weights (N, B)."""
        once = np.ones((len(labels), 1), dtype=np.int32)
        values, drawn = (class_precision(labels, probabilities, each) for each in (once, weights))
        return cls(len(labels), labels.sum(axis=0, dtype=np.int64), values[0], drawn)

    @property
    def mean(self) -> float:
        """The mean average precision of the classes that occur."""
        return float(mean_of_known(self.values))

    @property
    def freedom(self) -> npt.NDArray[np.int64]:
        """The degrees of freedom of each class' variance, (K,): n - 1 for n images, at least 1."""
        return np.maximum(self.positives - 1, 1)

    @property
    def samples(self) -> Floats:
        """`drawn` with the variance of independent samples, (B, K).

        n values that are drawn from n have (n - 1) / n of it, and average precision is a mean over the n
        images of a class.
        """
        mean = mean_of_known(self.drawn.T)
        return mean + (self.drawn - mean) * np.sqrt((self.freedom + 1) / self.freedom)

    @property
    def limits(self) -> Floats:
        """The 95% interval of each class, (2, K)."""
        return share_limits(self.values, self.samples, self.total, counts=self.positives)

    @property
    def mean_limits(self) -> tuple[float, float]:
        """The 95% interval of the mean.

        Its degrees of freedom are those of a sum of variances (Satterthwaite 1946).
        """
        samples = self.samples
        variances = np.square(deviation(samples))  # (K,)
        known = variances > 0
        own, freedom = variances[known], self.freedom[known]
        together = own.sum() ** 2 / (own**2 / freedom).sum() if known.any() else 1.0
        quantile = float(scipy.special.stdtrit(together, (1 + CONFIDENCE) / 2))  # Student's t
        mean, means = mean_of_known(self.values), mean_of_known(samples)
        found = share_limits(mean, means, self.total, quantile)
        return float(found[0]), float(found[1])

    def minus(self, other: "ResampledPrecision") -> PairedDifference:
        """Subtract the mean of another classifier, measured on the same images and samples of them.

        The difference is taken as normal.
        """
        value = self.mean - other.mean
        error = float(deviation(mean_of_known(self.samples - other.samples)))
        p = 1.0 if value == 0 else 0.0 if error == 0 else float(2 * scipy.special.ndtr(-abs(value) / error))
        return PairedDifference(value, value - Z * error, value + Z * error, p)


def paired_difference(
    labels: Bools, first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]
) -> PairedDifference:
    """Compare probabilities (N, K) of two classifiers for labels (N, K), at least one of them positive."""
    weights = bootstrap_samples(len(labels))
    one, other = (ResampledPrecision.of(labels, each, weights) for each in (first, second))
    return one.minus(other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedPrecision(PairedMeasure):
    """The mean average precisions of both.

    Attributes:
        before, after: each with the limits of its 95% interval.
        limits: of the 95% interval of the loss.
    """

    name = "mAP"
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    limits: tuple[float, float]

    @classmethod
    def of(
        cls,
        labels: Bools,
        before: npt.NDArray[np.floating],
        after: npt.NDArray[np.floating],
    ) -> Self:
        """Compare probabilities (N, K) of the first and the second classifier for labels (N, K).

        The interval of the loss is from bootstrap samples of the images, the same for both classifiers. It is
        never shorter than that of the accuracy of two classifiers that agree on all images, because images
        with equal results do not tell that there are no others.

        Raises:
            UserError: no image has a class.
        """
        N = len(labels)
        if not labels.any():
            raise UserError(
                f"no one of {counted(N, 'image')} has a class, so no mean average precision can be compared"
            )
        weights = bootstrap_samples(N)
        both = [ResampledPrecision.of(labels, each, weights) for each in (before, after)]
        values = [(each.mean, *each.mean_limits) for each in both]
        found, least = both[0].minus(both[1]), drop_interval(0, 0, N)[1]
        limits = (
            max(-1.0, min(found.low, found.value - least)),
            min(1.0, max(found.high, found.value + least)),
        )
        return cls(total=N, before=values[0], after=values[1], limits=limits)

    @property
    def drop(self) -> float:
        """The loss of mean average precision; negative for a gain."""
        return self.before[0] - self.after[0]

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the loss."""
        return self.limits

    def rows(self) -> list[tuple[str, str]]:
        """The mean average precision of both with its 95% interval, as text."""
        return [
            (f"{value:.2%}", f"{low:.1%} to {high:.1%}") for value, low, high in (self.before, self.after)
        ]


def bootstrap_samples(N: int) -> Weights:
    """How often each of N images is in each bootstrap sample, (N, RESAMPLES); the same for the same N."""
    drawn = np.random.default_rng(N).multinomial(N, np.full(N, 1 / N), size=RESAMPLES)
    return np.ascontiguousarray(drawn.T, dtype=np.int32)


def deviation(samples: Floats) -> Floats:
    """The standard deviation of samples (B, ...), without NaN."""
    squares = np.square(samples - mean_of_known(samples.T).T)
    return np.sqrt(mean_of_known(squares.T).T)


def share_limits(
    value: Floats,
    samples: Floats,
    total: int,
    quantile: float = Z,
    counts: npt.NDArray[np.int64] | int | None = None,
) -> Floats:
    """95% intervals of shares, (2, ...), from bootstrap samples of the images.

    The limits are `quantile` standard errors of the log odds away, and include the value. Samples say nothing
    about values nearer to 0 or 1 than a quarter of an image; their limits are Wilson's.

    Args:
        value: the shares, (...), NaN where undefined.
        samples: (B, ...).
        total: images.
        counts: the images whose share it is, (...), for Wilson's interval; None for all.
    """
    least = 1 / (4 * total)
    # Log odds stay in (0, 1), and their distribution is nearly symmetric, unlike that of the shares.
    drawn = scipy.special.logit(np.clip(samples, least, 1 - least))
    # Samples exceed the value as much as the value the truth: average precision grows with repetitions.
    centre = 2 * scipy.special.logit(np.clip(value, least, 1 - least)) - mean_of_known(drawn.T).T
    half = quantile * deviation(drawn)
    low, high = scipy.special.expit(np.stack([centre - half, centre + half]))
    found = np.stack([np.minimum(low, value), np.maximum(high, value)])
    known = np.maximum(total if counts is None else counts, 1)
    wilson = np.stack(
        np.vectorize(wilson_interval, otypes=[float, float])(np.clip(value, 0, 1) * known, known)
    )
    inside = (least < value) & (value < 1 - least)
    return np.where(np.isnan(value), np.nan, np.where(inside, found, wilson))
