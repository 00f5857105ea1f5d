"""Measures of classifiers whose images have several classes: average precision, F1, exact matches.

Labels are bool (N, K), probabilities floats (N, K). B samples of the images have weights, int32 (N, B): how
often each image is drawn. A column of ones measures the images themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit, ndtr

from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.model.options import EVEN
from vitascope.run.measures import PairedMeasure, drop_interval, wilson_interval

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Weights = npt.NDArray[np.int32]

ESTIMATES = {
    "map": "mAP",
    "micro_map": "micro mAP",
    "macro_f1": "macro F1 at 0.5",
    "micro_f1": "micro F1 at 0.5",
    "macro_f1_tuned": "macro F1 at the thresholds",
    "micro_f1_tuned": "micro F1 at the thresholds",
    "exact": "exact matches",
}
"""The measures of all classes by name, in words."""
ESTIMATES_HEAD = ("measure", "value", "95% interval", "a constant answer")
CLASSES_HEAD = (
    *("class", "images", "AP", "95% interval", "constant AP"),
    *("F1 at 0.5", "F1 at the threshold", "threshold"),
)
Z = 1.959964
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


def f1(hits: Floats, positives: Floats, predicted: Floats) -> Floats:
    """F1 = 2 TP / (2 TP + FP + FN); NaN where nothing is positive or predicted."""
    with np.errstate(invalid="ignore"):
        found: Floats = 2 * hits / (positives + predicted)
    return found


def mean_of_known(values: Floats) -> Floats:
    """The mean over the last axis, without NaN; NaN if there is nothing else."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        found: Floats = np.where(known, values, 0).sum(axis=-1) / known.sum(axis=-1)
    return found


def best_thresholds(labels: Bools, probabilities: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """The threshold of each class with the highest F1 on some images, (K,), between two of their
    probabilities: 0.5 if it is among the best, and for a class that no image has."""
    found = np.full(labels.shape[1], EVEN, dtype=np.float32)
    for k, (own, scores) in enumerate(zip(labels.T, probabilities.T.astype(np.float64), strict=True)):
        if not own.any():
            continue
        order = np.argsort(-scores, kind="stable")
        scores, ends = scores[order], np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
        measured = f1(np.cumsum(own[order])[ends].astype(np.float64), own.sum(), ends + 1.0)
        at_even = np.searchsorted(-scores[ends], -EVEN, side="right") - 1  # the last score of 0.5 or more
        best = int(measured.argmax())
        if at_even >= 0 and measured[at_even] == measured[best]:
            continue
        after = scores[ends[best] + 1] if ends[best] + 1 < len(scores) else 0.0
        found[k] = (scores[ends[best]] + after) / 2
    return found


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A measure with its 95% interval, and its value for a constant answer."""

    value: float
    low: float
    high: float
    constant: float
    """Of the best answer that is the same for all images."""


@dataclasses.dataclass(frozen=True, eq=False)
class LabelScore:
    """The measures of N predictions of K classes of which any may apply.

    Attributes:
        total: N, at least 1.
        right: images with exactly their classes above the thresholds.
        estimates: by name. `map`: the mean over the classes of their average precision (macro mAP);
            `micro_map`: the average precision of all pairs of an image and a class together; `macro_f1` and
            `micro_f1`: at a probability of 0.5; `macro_f1_tuned` and `micro_f1_tuned`: at the thresholds;
            `exact`: the share of `right`. Macro means are over the classes that occur, or for F1 are
            predicted.
        positives: images of each class, int64 (K,).
        ap: average precision of each class, (K,); NaN for one without images.
        ap_interval: its 95% intervals, (K, 2).
        f1, f1_tuned: of each class, (K,), at 0.5 and at the thresholds; NaN for one that neither occurs nor
            is predicted.
        thresholds: (K,).
    """

    total: int
    right: int
    estimates: dict[str, Estimate]
    positives: npt.NDArray[np.int64]
    ap: Floats
    ap_interval: Floats
    f1: Floats
    f1_tuned: Floats
    thresholds: npt.NDArray[np.floating]

    def summary(self) -> dict[str, Any]:
        """The measures as plain values."""
        values = {"correct": self.right, "accuracy": self.right / self.total}
        for name, estimate in self.estimates.items():
            values |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            values[f"{name}_constant"] = estimate.constant
        return values

    def result(self) -> str:
        """The mean average precision and its interval."""
        found, images = self.estimates["map"], counted(self.total, "image")
        return f"mAP {found.value:.2%} of {images}, 95% interval {found.low:.1%} to {found.high:.1%}"

    def in_words(self, images: str) -> str:
        """The mean average precision of some images."""
        found = self.estimates["map"]
        return f"mAP {found.value:.2%} of {images} ({found.low:.1%} to {found.high:.1%})"

    def compared(self) -> str:
        """The measures beside those of a constant answer, in one line."""
        words = {"macro_f1": "macro F1", "micro_f1": "micro F1", "exact": "all classes right"}
        found = self.estimates
        parts = [
            f"{text} {found[name].value:.2%} (constant {found[name].constant:.1%})"
            for name, text in words.items()
        ]
        return f"a constant answer: mAP {found['map'].constant:.2%}; " + ", ".join(parts)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """The measures of all classes as text, below `ESTIMATES_HEAD`."""
        return [
            (words, f"{each.value:.2%}", f"{each.low:.1%} to {each.high:.1%}", f"{each.constant:.1%}")
            for words, each in ((words, self.estimates[name]) for name, words in ESTIMATES.items())
        ]

    @property
    def ascending(self) -> npt.NDArray[np.int64]:
        """The classes that occur, those of the lowest average precision first."""
        present = np.flatnonzero(self.positives)
        return present[np.argsort(self.ap[present], kind="stable")]

    def class_rows(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """The classes of `ascending` as text, below `CLASSES_HEAD`.

        The average precision of a constant answer is the share of the images that have the class.
        """
        return [
            (
                names[k],
                f"{self.positives[k]:,}",
                f"{self.ap[k]:.1%}",
                "{:.0%} to {:.0%}".format(*self.ap_interval[k]),
                f"{self.positives[k] / self.total:.1%}",
                f"{self.f1[k]:.1%}",
                f"{self.f1_tuned[k]:.1%}",
                f"{self.thresholds[k]:.2f}",
            )
            for k in self.ascending
        ]

    def class_values(self) -> dict[str, list[float | None]]:
        """The measures of each of the K classes as plain values, in their order; None where undefined."""

        def plain(values: npt.NDArray[np.floating]) -> list[float | None]:
            return [None if np.isnan(value) else float(value) for value in values]

        low, high = self.ap_interval.T
        return {
            "positives": self.positives.tolist(),
            **{"ap": plain(self.ap), "ap_low": plain(low), "ap_high": plain(high)},
            **{"f1": plain(self.f1), "f1_tuned": plain(self.f1_tuned), "thresholds": plain(self.thresholds)},
        }

    @property
    def no_better(self) -> bool:
        """Whether the interval of the mAP contains, or lies below, that of a constant answer."""
        return self.estimates["map"].low <= self.estimates["map"].constant < 1

    def warning(self, advice: str = "") -> str:
        """A line about a model that is no better than a constant answer; empty if it is better."""
        if not self.no_better:
            return ""
        text = f"no better than the same answer for every image, as far as {self.total:,} images show"
        return f"{text}; {advice}" if advice else text


def mean_average_precision(labels: Bools, probabilities: npt.NDArray[np.floating]) -> float:
    """The mean over the classes that occur of their average precision; NaN if none does."""
    return float(_map(labels, probabilities, np.ones((len(labels), 1), dtype=np.int32))[0])


def label_score(
    labels: Bools,
    probabilities: npt.NDArray[np.floating],
    thresholds: npt.NDArray[np.floating] | None = None,
    *,
    intervals: bool = True,
) -> LabelScore:
    """Measure probabilities (N, K) for labels (N, K), N at least 1.

    Intervals are of 95%, from the standard error of the log odds over bootstrap samples of the images (Efron
    1979), the same samples for the same number of images; Wilson's for values of 0 and 1, which have none.

    Args:
        labels, probabilities: (N, K).
        thresholds: (K,); None for 0.5.
        intervals: False leaves out the bootstrap; lower and upper limits are NaN.
    """
    N, K = labels.shape
    at = np.full(K, EVEN, dtype=np.float32) if thresholds is None else thresholds
    once = np.ones((N, 1), dtype=np.int32)
    whole = _measures(labels, probabilities, at, once)
    prevalence = labels.mean(axis=0)
    constant = _measures(labels, np.broadcast_to(prevalence, labels.shape), at, once)
    constant |= _constant_f1(labels, prevalence)
    samples: dict[str, Floats] = {}
    if intervals:
        samples = _measures(labels, probabilities, at, _samples(N))
    positives = labels.sum(axis=0, dtype=np.int64)
    limits = {
        name: _limits(value[0], samples.get(name), positives if name == "ap" else N)
        for name, value in whole.items()
        if name in ESTIMATES or name == "ap"
    }
    estimates = {}
    for name in ESTIMATES:
        low, high = map(float, limits[name])
        estimates[name] = Estimate(float(whole[name][0]), low, high, float(constant[name][0]))
    return LabelScore(
        total=N,
        right=int(((probabilities >= at) == labels).all(axis=1).sum()),
        estimates=estimates,
        positives=positives,
        ap=whole["ap"][0],
        ap_interval=limits["ap"].T,
        f1=whole["f1"][0],
        f1_tuned=whole["f1_tuned"][0],
        thresholds=at,
    )


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """The mAP of one classifier minus that of another on the same images, with its 95% interval."""

    value: float
    low: float
    high: float
    p: float
    """Two-sided p-value: the probability of such a difference, or a larger one, if both are equally good."""


def paired_difference(
    labels: Bools, first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]
) -> PairedDifference:
    """Compare the probabilities (N, K) of two classifiers for labels (N, K), at least one of them positive.

    Both are measured on the same bootstrap samples of the images; the difference is taken as normal with
    their standard error (Efron 1979).
    """
    N = len(labels)
    once, drawn = np.ones((N, 1), dtype=np.int32), _samples(N)
    found = [_map(labels, first, weights) - _map(labels, second, weights) for weights in (once, drawn)]
    deviations = found[1] - mean_of_known(found[1])
    value, error = float(found[0][0]), float(np.sqrt(mean_of_known(np.square(deviations))))
    p = 1.0 if value == 0 else 0.0 if error == 0 else float(2 * ndtr(-abs(value) / error))
    return PairedDifference(value, value - Z * error, value + Z * error, p)


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
    ) -> PairedPrecision:
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
        once, weights = np.ones((N, 1), dtype=np.int32), _samples(N)
        values, samples = (
            [_map(labels, each, drawn) for each in (before, after)] for drawn in (once, weights)
        )
        both = []
        for value, sample in zip(values, samples, strict=True):
            low, high = map(float, _limits(value[0], sample, N))
            both.append((float(value[0]), low, high))
        drop, drawn = both[0][0] - both[1][0], samples[0] - samples[1]  # (B,)
        least = drop_interval(0, 0, N)[1]
        half = max(least, Z * float(np.nanstd(drawn)))
        centre = 2 * drop - float(np.nanmean(drawn))  # as in `_limits`
        limits = max(-1.0, centre - half), min(1.0, centre + half)
        return cls(total=N, before=both[0], after=both[1], limits=limits)

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


def _samples(N: int) -> Weights:
    """How often each of N images is in each bootstrap sample, (N, RESAMPLES); the same for the same N."""
    drawn = np.random.default_rng(N).multinomial(N, np.full(N, 1 / N), size=RESAMPLES)
    return np.ascontiguousarray(drawn.T, dtype=np.int32)


def mistake_confidences(labels: Bools, answers: Bools, probabilities: npt.NDArray[np.floating]) -> Floats:
    """The highest confidence in a mistake of each image, (N,), from (N, K) each: the probability of a class
    that is predicted wrongly, 1 minus that of a class that is missed; 0 without mistakes."""
    confidences = np.where(labels, 1 - probabilities, probabilities)
    found: Floats = np.where(labels != answers, confidences, 0.0).max(axis=1)
    return found


def _map(labels: Bools, probabilities: npt.NDArray[np.floating], weights: Weights) -> Floats:
    """The mean over the classes of their average precision, (B,), of samples with weights (N, B)."""
    pairs = zip(labels.T, probabilities.T, strict=True)
    return mean_of_known(np.stack([average_precision(*pair, weights) for pair in pairs], axis=1))


def _limits(value: Floats, samples: Floats | None, counts: npt.NDArray[np.int64] | int) -> Floats:
    """95% intervals, (2, ...), of shares (...) measured on `counts` images, from bootstrap samples (B, ...);
    NaN without samples."""
    if samples is None:
        return np.full((2, *np.shape(value)), np.nan)
    least = 1 / (4 * np.maximum(counts, 1))
    # Log odds stay in (0, 1), and their distribution is nearly symmetric, unlike that of the shares.
    drawn = logit(np.clip(samples, least, 1 - least))
    mean = mean_of_known(drawn.T).T
    deviation = np.sqrt(mean_of_known(np.square(drawn - mean).T).T)
    # Samples exceed the value as much as the value the truth: average precision grows with repetitions.
    centre = 2 * logit(np.clip(value, least, 1 - least)) - mean
    found = expit(np.stack([centre - Z * deviation, centre + Z * deviation]))
    wilson = np.vectorize(wilson_interval)
    for end in (0, 1):
        at = value == end
        if at.any():
            ends = np.stack(wilson(end * np.maximum(counts, 1), np.maximum(counts, 1)))
            found = np.where(at, ends, found)
    return np.where(np.isnan(value), np.nan, found)


def _measures(
    labels: Bools,
    probabilities: npt.NDArray[np.floating],
    thresholds: npt.NDArray[np.floating],
    weights: Weights,
) -> dict[str, Floats]:
    """The measures by name for each sample, weights (N, B): (B,), and `ap`, `f1` and `f1_tuned` (B, K)."""
    pairs = zip(labels.T, probabilities.T, strict=True)
    found = {"ap": np.stack([average_precision(*pair, weights) for pair in pairs], axis=1)}
    found["map"] = mean_of_known(found["ap"])
    found["micro_map"] = average_precision(labels.ravel(), probabilities.ravel(), weights)
    drawn = weights.T.astype(np.float64)
    positives = drawn @ labels  # (B, K)
    for ending, answers in (("", probabilities >= EVEN), ("_tuned", probabilities >= thresholds)):
        hits, predicted = drawn @ (answers & labels), drawn @ answers
        found[f"f1{ending}"] = f1(hits, positives, predicted)
        found[f"macro_f1{ending}"] = mean_of_known(found[f"f1{ending}"])
        found[f"micro_f1{ending}"] = f1(*(each.sum(axis=1) for each in (hits, positives, predicted)))
    exact = ((probabilities >= thresholds) == labels).all(axis=1)
    found["exact"] = drawn @ exact / drawn.sum(axis=1)
    return found


def _constant_f1(labels: Bools, prevalence: Floats) -> dict[str, Floats]:
    """The best that one answer for all images can reach: macro and micro F1, exact matches, (1,) each."""
    N = len(labels)
    always = f1(prevalence * N, prevalence * N, np.full(len(prevalence), float(N)))
    # Micro F1 is best for the most frequent classes, some number of them.
    counts = np.sort(prevalence)[::-1] * N
    micro = f1(np.cumsum(counts), counts.sum(), N * np.arange(1.0, len(counts) + 1))
    macro = mean_of_known(np.where(prevalence > 0, always, np.nan))[None]
    packed = np.packbits(labels, axis=1)
    _, repeats = np.unique(packed, axis=0, return_counts=True)
    return {
        **{f"macro_f1{ending}": macro for ending in ("", "_tuned")},
        **{f"micro_f1{ending}": np.array([np.nanmax(micro, initial=0.0)]) for ending in ("", "_tuned")},
        "exact": np.array([repeats.max() / N]),
    }
