"""A classifier of the labelled pictures and what it tells: its accuracy, doubtful labels, sure answers.

The pictures that a person labels first are chosen: typical ones, then those that the classifier is unsure
of. Their share of right answers is not that of other pictures. So only pictures that were offered at random
judge, by answers of classifiers that did not see them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv
from threadpoolctl import threadpool_limits

from vitascope.analysis.probing.label_errors import Suspect, suspects
from vitascope.data.folds import Division
from vitascope.data.measures import Score
from vitascope.data.targets import Targets
from vitascope.formatting import counted
from vitascope.intervals import CONFIDENCE
from vitascope.training.linear.classifiers import LogisticRegression
from vitascope.training.linear.selection import out_of_fold

Features = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

CLASSIFIER = LogisticRegression((0.1,), 1e-3)
"""One C: cross-validation on 20 labels often picks one that says a single class, and 0.1 is near the best
for 20 to 4,000 labels (benchmarks/results/2026-11-29-label-accept.md)."""
FOLDS = 10
"""More than a probe has: with few labels, a classifier of four fifths of them is worse than that of all."""
MANY = 1000
"""Labels from which on half as many folds do, for the time."""
LEAST = 0.9
"""Answers are accepted if the lower limit of their share of right ones is at least this."""


@dataclasses.dataclass(frozen=True)
class ConfusedClasses:
    """The class `label` of pictures for which the classifier most often said another one."""

    label: str
    said: str
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Pictures without a label that may get the classifier's answer without a look at each.

    Attributes:
        label: the answer.
        rows: of the pictures, int64 (m,), the least sure first.
        value, low, high: the share of right answers among those as sure, of all classes together, and its
            95% interval.
    """

    label: str
    rows: Integers
    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, eq=False)
class LabelFit:
    """A classifier of n labelled pictures out of N, and what it tells.

    Attributes:
        probabilities: of all pictures by the classifier of all labels, float32 (N, K); None if no
            labels differ.
        held_out: of the labelled pictures by classifiers that did not see them or their copies, float32
            (n, K); None if no class has enough pictures.
        folds: the fold of each labelled picture, int64 (n,).
        score: by the pictures that judge; None where there is a reason.
        reason: why there is no score, or which classes it leaves out; else empty.
        confused: the classes that are confused most often out of fold; None without a mistake.
        acceptances: by class; none for several classes per picture.
        suspects: the labels that contradict the classifier, the least probable one first; `image` is a row
            of the N pictures.
    """

    probabilities: Probabilities | None = None
    held_out: Probabilities | None = None
    folds: Integers | None = None
    score: Score | None = None
    reason: str = ""
    confused: ConfusedClasses | None = None
    acceptances: tuple[Acceptance, ...] = ()
    suspects: tuple[Suspect, ...] = ()


def fit_labels(
    features: Features,
    rows: Integers,
    targets: Targets,
    *,
    judges: Mask | None = None,
    taken: Mask | None = None,
    groups: Integers | None = None,
    seed: int = 0,
) -> LabelFit:
    """Fit a classifier to labelled pictures and judge it. The order of the pictures has no effect.

    Args:
        features: of all pictures, (N, D).
        rows: the pictures that a person has labelled, (n,).
        targets: their labels. A class without pictures gets probability 0.
        judges: which of the n pictures were offered at random; None for all.
        taken: which of the N pictures are not accepted, beside the labelled ones; None for no others.
        groups: the group of near-copies of each picture, (N,): no fold divides one.
        seed: of the folds.
    """
    if not _differ(targets):
        return LabelFit(reason=_lack(targets))
    order = _reproducible(features[rows], targets)
    known, labels = rows[order], targets.take(order)
    with threadpool_limits(1):  # sums of several threads may differ, and others work on the other cores
        (exact,) = CLASSIFIER.fit(features[known], labels).probabilities(features)
    probabilities = exact.astype(np.float32)
    division = Division.of(labels, np.arange(0) if groups is None else groups[known])
    sets = division.sets_by_class()
    measured = np.flatnonzero(~labels.members[:, sets == 1].any(axis=1))
    if not _differ(labels.take(measured)):
        return LabelFit(
            probabilities, reason="too few labels: accuracy needs two pictures of two classes each"
        )
    count = FOLDS if len(labels) < MANY else FOLDS // 2
    folds = division.folds(seed, min(count, int(division.sets.max()) + 1))
    with threadpool_limits(1):
        (held_out,) = out_of_fold(CLASSIFIER, features[known], labels, folds)
    truth, answers = labels.take(measured), held_out[measured]
    judging = measured if judges is None else measured[judges[order][measured]]
    judged = labels.take(judging)
    reason, score = _unmeasured(labels, sets), None
    if judged.counts.any():
        score = judged.score(held_out[judging])
    else:
        reason = "no accuracy yet: none of the labelled pictures was offered at random"
    free = np.ones(len(features), np.bool_) if taken is None else ~taken
    free[rows] = False
    given = np.argsort(order)
    return LabelFit(
        probabilities,
        held_out[given],
        folds[given],
        score,
        reason,
        _confused(truth, answers),
        tuple(_acceptances(judged, held_out[judging], probabilities, np.flatnonzero(free))),
        tuple(
            dataclasses.replace(suspect, image=int(known[measured[suspect.image]]))
            for suspect in suspects(truth, answers)
        ),
    )


def _acceptances(
    truth: Targets, held_out: Probabilities, probabilities: Probabilities, free: Integers
) -> Iterator[Acceptance]:
    """Of the pictures without a label, indices (m,) into probabilities (N, K), those with sure answers."""
    if not truth.exclusive:
        return
    evidence = _surest(held_out.max(axis=1), truth.correct(truth.answers(held_out)))
    if evidence is None:
        return
    least, *shares = evidence
    confidences, answers = probabilities[free].max(axis=1), truth.answers(probabilities[free])
    order = np.argsort(confidences, kind="stable")
    order = order[confidences[order] >= least]
    for k, label in enumerate(truth.class_names):
        if (answers[order] == k).any():
            yield Acceptance(label, free[order[answers[order] == k]], *shares)


def _surest(confidences: Probabilities, right: Mask) -> tuple[float, float, float, float] | None:
    """The least confidence of n answers that are accepted, the share of right ones, and its interval.

    Sets of the surest answers are tested from the smallest that can pass, each larger than the one before, up
    to the first whose lower limit is below `LEAST`. With a fixed sequence, each test has the whole level, and
    a wrong set passes as rarely as one test alone would let it (Angelopoulos et al. 2021, Learn then Test).
    """
    order = np.argsort(-confidences, kind="stable")
    falling = confidences[order]
    sizes = 1 + np.flatnonzero(np.append(falling[1:] < falling[:-1], True))  # answers as sure are not divided
    sizes = sizes[share_interval(sizes, sizes)[0] >= LEAST]
    counts = np.cumsum(right[order], dtype=np.int64)[sizes - 1]
    low, high = share_interval(counts, sizes)
    passed = int(np.argmin(np.append(low >= LEAST, False)))
    if not passed:
        return None
    last = passed - 1
    return (
        float(falling[sizes[last] - 1]),
        float(counts[last] / sizes[last]),
        float(low[last]),
        float(high[last]),
    )


def share_interval(right: Integers, total: Integers) -> tuple[Floats, Floats]:
    """95% intervals of shares of right answers, (n,) each, exact (Clopper and Pearson 1934)."""
    tail = (1 - CONFIDENCE) / 2
    with np.errstate(invalid="ignore"):
        low, high = betaincinv(right, total - right + 1, tail), betaincinv(right + 1, total - right, 1 - tail)
    return np.where(right > 0, low, 0.0), np.where(right < total, high, 1.0)


def _confused(truth: Targets, held_out: Probabilities) -> ConfusedClasses | None:
    """The most frequent mistake of answers (n, K)."""
    pairs = truth.confused(truth.answers(held_out), 1)
    names = truth.class_names
    return ConfusedClasses(names[pairs[0].first], names[pairs[0].second], pairs[0].count) if pairs else None


def _differ(targets: Targets) -> bool:
    """Whether some pictures have a class and others do not."""
    return bool(((targets.counts > 0) & (targets.counts < len(targets))).any())


def _lack(targets: Targets) -> str:
    """The reason why labels that do not differ have no classifier."""
    if not len(targets):
        return "no picture is labelled yet"
    return f"all {counted(len(targets), 'label')} are the same: label pictures of another class"


def _unmeasured(labels: Targets, sets: Integers) -> str:
    """The classes of one picture, or one group of copies, in words; sets (K,) by class."""
    names = [name for name, count in zip(labels.class_names, sets, strict=True) if count == 1]
    return f"not measured, since no second picture has the label: {', '.join(names)}" if names else ""


def _reproducible(features: Features, targets: Targets) -> Integers:
    """An order of the labelled pictures, (n,), that depends on features and labels alone."""
    content = np.hstack([features.view(np.uint8), targets.members.view(np.uint8)])
    return np.argsort(content.view(f"S{content.shape[1]}").ravel(), kind="stable")
