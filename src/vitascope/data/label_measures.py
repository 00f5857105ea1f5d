"""Measures of classifiers whose images have several classes: average precision, F1, exact matches.

Labels are bool (N, K), probabilities floats (N, K). B samples of the images have weights, int32 (N, B): how
often each image is drawn. A column of ones measures the images themselves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy  # whose parts are imported when they are used

from vitascope.data.average_precision import (
    Bools,
    Floats,
    ResampledPrecision,
    Weights,
    average_precision,
    bootstrap_samples,
    class_precision,
    mean_of_known,
    share_limits,
)
from vitascope.data.measures import ClassPair, Score
from vitascope.formatting import counted
from vitascope.models.options import EVEN

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


def f1(hits: Floats, positives: Floats, predicted: Floats) -> Floats:
    """F1 = 2 TP / (2 TP + FP + FN); NaN where nothing is positive or predicted."""
    with np.errstate(invalid="ignore"):
        found: Floats = 2 * hits / (positives + predicted)
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
        after = max(0.0, scores[ends[best] + 1]) if ends[best] + 1 < len(scores) else 0.0
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
class LabelScore(Score):
    """The measures of N predictions of K classes of which any may apply.

    Attributes:
        total: N.
        right: images with exactly their classes above the thresholds.
        estimates: by name. `map`: the mean over the classes of their average precision (macro mAP);
            `micro_map`: the average precision of all pairs of an image and a class together; `macro_f1` and
            `micro_f1`: at a probability of 0.5; `macro_f1_tuned` and `micro_f1_tuned`: at the thresholds;
            `exact`: the share of `right`. Macro means are over the classes that occur, or for F1 are
            predicted.
        positives: images of each class, int64 (K,).
        known: images of which it is known whether they have it, int64 (K,).
        ap: average precision of each class, (K,); NaN for one without images.
        ap_interval: its 95% intervals, (K, 2).
        f1, f1_tuned: of each class, (K,), at 0.5 and at the thresholds; NaN for one that neither occurs nor
            is predicted.
        thresholds: (K,).
    """

    measure, guessing = "mAP", "the same answer for every image"
    total: int
    right: int
    estimates: dict[str, Estimate]
    positives: npt.NDArray[np.int64]
    known: npt.NDArray[np.int64]
    ap: Floats
    ap_interval: Floats
    f1: Floats
    f1_tuned: Floats
    thresholds: npt.NDArray[np.floating]

    @property
    def value_and_limits(self) -> tuple[float, float, float]:
        """The mean average precision, and the limits of its interval."""
        found = self.estimates["map"]
        return found.value, found.low, found.high

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

    def headline(self) -> str:
        """The mean average precision and the number of images."""
        return f"mAP {self.estimates['map'].value:.2%} of {counted(self.total, 'image')}"

    def in_words(self, images: str) -> str:
        """The mean average precision of some images."""
        found = self.estimates["map"]
        return f"mAP {found.value:.2%} of {images} ({found.low:.1%} to {found.high:.1%})"

    def compared(self) -> str:
        """The measures at the thresholds beside those of a constant answer, in one line."""
        words = {"macro_f1_tuned": "macro F1", "micro_f1_tuned": "micro F1", "exact": "all classes right"}
        found = self.estimates
        parts = [
            f"{text} {found[name].value:.2%} (constant {found[name].constant:.1%})"
            for name, text in words.items()
        ]
        at = "0.5" if (self.thresholds == EVEN).all() else "the thresholds"
        return f"a constant answer: mAP {found['map'].constant:.2%}; at {at}: {', '.join(parts)}"

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

        The average precision of a constant answer is the share of the known images that have the class.
        """
        return [
            (
                names[k],
                f"{self.positives[k]:,}",
                f"{self.ap[k]:.1%}",
                "{:.0%} to {:.0%}".format(*self.ap_interval[k]),
                f"{self.positives[k] / self.known[k]:.1%}",
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
    def guessed(self) -> float:
        """The mAP of a constant answer."""
        return self.estimates["map"].constant

    @property
    def mean_of_classes(self) -> float:
        """The macro F1 at the thresholds."""
        return self.estimates["macro_f1_tuned"].value


def label_score(
    labels: Bools,
    probabilities: npt.NDArray[np.floating],
    thresholds: npt.NDArray[np.floating] | None = None,
    *,
    intervals: bool = True,
) -> LabelScore:
    """Measure probabilities (N, K) for labels (N, K), N at least 1.

    Intervals are of 95%, from the standard error of the log odds over bootstrap samples of the images (Efron
    1979), the same samples for the same number of images; see `share_limits` and `ResampledPrecision`.

    Args:
        labels, probabilities: (N, K); see `Targets.scored` for labels that are unknown.
        thresholds: (K,); None for 0.5.
        intervals: False leaves out the bootstrap; lower and upper limits are NaN.
    """
    N, K = labels.shape
    at = np.full(K, EVEN, dtype=np.float32) if thresholds is None else thresholds
    once = np.ones((N, 1), dtype=np.int32)
    whole = _measures(labels, probabilities, at, once)
    positives, known = labels.sum(axis=0, dtype=np.int64), (probabilities >= 0).sum(axis=0)
    prevalence = positives / np.maximum(known, 1)
    constant = _measures(labels, np.where(probabilities < 0, -1, prevalence), at, once)
    constant |= _constant_f1(labels, positives, known)
    limits, ap_limits = dict.fromkeys(ESTIMATES, (np.nan, np.nan)), np.full((2, K), np.nan)
    if intervals:
        samples = _measures(labels, probabilities, at, bootstrap_samples(N))
        precision = ResampledPrecision(N, positives, whole["ap"][0], samples["ap"])
        for name in ESTIMATES:
            low, high = share_limits(whole[name][0], samples[name], N)
            limits[name] = float(low), float(high)
        limits["map"], ap_limits = precision.mean_limits, precision.limits
    estimates = {
        name: Estimate(float(whole[name][0]), *limits[name], float(constant[name][0])) for name in ESTIMATES
    }
    return LabelScore(
        total=N,
        right=int(((probabilities >= at) == labels).all(axis=1).sum()),
        estimates=estimates,
        positives=positives,
        known=known,
        ap=whole["ap"][0],
        ap_interval=ap_limits.T,
        f1=whole["f1"][0],
        f1_tuned=whole["f1_tuned"][0],
        thresholds=at,
    )


def mistake_confidences(labels: Bools, answers: Bools, probabilities: npt.NDArray[np.floating]) -> Floats:
    """The highest confidence in a mistake of each image, (N,), from (N, K) each: the probability of a class
    that is predicted wrongly, 1 minus that of a class that is missed; 0 without mistakes."""
    confidences = np.where(labels, 1 - probabilities, probabilities)
    found: Floats = np.where(labels != answers, confidences, 0.0).max(axis=1)
    return found


def _measures(
    labels: Bools,
    probabilities: npt.NDArray[np.floating],
    thresholds: npt.NDArray[np.floating],
    weights: Weights,
) -> dict[str, Floats]:
    """The measures by name for each sample, weights (N, B): (B,), and `ap`, `f1` and `f1_tuned` (B, K)."""
    found = {"ap": class_precision(labels, probabilities, weights)}
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


def _constant_f1(
    labels: Bools, positives: npt.NDArray[np.int64], known: npt.NDArray[np.int64]
) -> dict[str, Floats]:
    """The best that one answer for all images can reach: macro and micro F1, exact matches, (1,) each."""
    N, hits = len(labels), positives.astype(np.float64)
    always = f1(hits, hits, known.astype(np.float64))
    # Micro F1 is best for the most frequent classes, some number of them.
    order = np.argsort(-hits / np.maximum(known, 1), kind="stable")
    micro = f1(np.cumsum(hits[order]), hits.sum(), np.cumsum(known[order]).astype(np.float64))
    macro = mean_of_known(np.where(positives > 0, always, np.nan))[None]
    packed = np.packbits(labels, axis=1)
    _, repeats = np.unique(packed, axis=0, return_counts=True)
    return {
        **{f"macro_f1{ending}": macro for ending in ("", "_tuned")},
        **{f"micro_f1{ending}": np.array([np.nanmax(micro, initial=0.0)]) for ending in ("", "_tuned")},
        "exact": np.array([repeats.max() / N]),
    }


def pairs_together(labels: Bools, count: int) -> list[ClassPair]:
    """At most `count` pairs of classes that images (N, K) have together, the most frequent first."""
    own = scipy.sparse.csr_array(labels, dtype=np.int64)
    return _most_frequent(scipy.sparse.triu(own.T @ own, k=1), count)  # each pair once


def pairs_confused(labels: Bools, answers: Bools, count: int) -> list[ClassPair]:
    """At most `count` pairs of a class that images have without its prediction, and a class that is predicted
    for them without being theirs, (N, K) each; the most frequent first."""
    missed, wrong = (
        scipy.sparse.csr_array(where, dtype=np.int64) for where in (labels & ~answers, ~labels & answers)
    )
    return _most_frequent(missed.T @ wrong, count)


def _most_frequent(counts: scipy.sparse.sparray, count: int) -> list[ClassPair]:
    """The largest of the counts (K, K)."""
    found = counts.tocoo()
    order = np.lexsort((found.col, found.row, -found.data))[:count]
    return [ClassPair(int(found.row[k]), int(found.col[k]), int(found.data[k])) for k in order]
