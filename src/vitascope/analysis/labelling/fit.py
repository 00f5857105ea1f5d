"""A classifier of the labelled pictures and what it tells: its accuracy, sure answers, doubtful labels.

The first labels are those of chosen pictures: typical ones, then those that a classifier is unsure of. It is
right about these more often, or less, than about others. So only pictures that are offered at random judge,
by answers of classifiers that did not see them, and they have no effect on what is chosen.
"""

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
"""One C, since cross-validation on 20 labels often picks one that says a single class; it is near the best
for 20 to 4,000 labels (benchmarks/results/2026-11-29-label-accept.md)."""
FOLDS, MANY = 10, 1000
"""With few labels, a classifier of four fifths of them is worse. From `MANY` on, half the folds do."""
LEAST = 0.9
"""Answers are accepted if the lower limit of their share of right ones is at least this."""


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Pictures without a label that may get the classifier's answer without a look at each.

    Attributes:
        label: the answer.
        rows: of the pictures, int64 (m,), the least sure first.
        value, low, high: the share of right answers among those as sure, of all classes together, and its
            95% interval. By Laplace's rule the value of r of n is (r + 1) / (n + 2), so never 1.
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
        probabilities: of all pictures by the classifier of all labels, float32 (N, K); None if no labels
            differ, and then all others are empty too.
        margins: how sure the classifier of those that do not judge is of each picture, (N,), for the order.
        held_out: of the labelled pictures by classifiers that did not see them or their copies, float32
            (n, K); None if no two classes have two pictures.
        folds: the fold of each labelled picture, int64 (n,).
        score: by the pictures that judge; None where there is a reason.
        reason: why there is no score, or which classes it leaves out; else empty.
        confused: a class and the one that is said instead of it most often, out of fold, and how often; None
            without a mistake.
        acceptances: by class; none for several classes per picture.
        suspects: the labels that contradict the classifier, the least probable one first; `image` is a row
            of the N pictures.
    """

    probabilities: Probabilities | None = None
    margins: Floats | None = None
    held_out: Probabilities | None = None
    folds: Integers | None = None
    score: Score | None = None
    reason: str = ""
    confused: tuple[str, str, int] | None = None
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
        same = f"{counted(len(targets), 'label')} of one class: label pictures of another class"
        return LabelFit(reason=same if len(targets) else "no picture is labelled yet")
    order = _reproducible(features[rows], targets)
    known, labels = rows[order], targets.take(order)
    judging = np.ones(len(rows), np.bool_) if judges is None else judges[order]
    division = Division.of(labels, np.arange(0) if groups is None else groups[known])
    alone = division.sets_by_class() == 1
    measured, others = ~labels.members[:, alone].any(axis=1), np.flatnonzero(~judging)
    with threadpool_limits(1):  # sums of several threads may differ, and others use the other cores
        probabilities = choosing = _fitted(features, known, labels)
        if _differ(labels.take(others)):
            choosing = _fitted(features, known[others], labels.take(others))
        margins = _margins(labels, choosing)
        if not _differ(labels.take(np.flatnonzero(measured))):
            reason = "too few labels: an accuracy needs two pictures of two classes each"
            return LabelFit(probabilities, margins, reason=reason)
        count = FOLDS if len(rows) < MANY else FOLDS // 2
        folds = division.folds(seed, min(count, int(division.sets.max()) + 1))
        (held_out,) = out_of_fold(CLASSIFIER, features[known], labels, folds)
    score, reason = _score(labels, held_out, judging & measured, alone)
    truth, answers, given = labels.take(np.flatnonzero(measured)), held_out[measured], np.argsort(order)
    pairs, names = truth.confused(truth.answers(answers), 1), truth.class_names
    confused = [(names[pair.first], names[pair.second], pair.count) for pair in pairs]
    free = np.ones(len(features), np.bool_) if taken is None else ~taken
    free[rows] = False
    return LabelFit(
        probabilities,
        margins,
        held_out[given],
        folds[given],
        score,
        reason,
        confused[0] if confused else None,
        tuple(_acceptances(labels.take(np.flatnonzero(judging)), held_out[judging], probabilities, free)),
        tuple(
            dataclasses.replace(suspect, image=int(known[measured][suspect.image]))
            for suspect in suspects(truth, answers)
        ),
    )


def _score(labels: Targets, held_out: Probabilities, judging: Mask, alone: Mask) -> tuple[Score | None, str]:
    """The score of the judges, (n,), and why there is none or which classes, (K,), it leaves out."""
    truth = labels.take(np.flatnonzero(judging))
    if not truth.counts.any():
        return None, "no accuracy yet: label the next pictures that come at random"
    names = ", ".join(labels.class_names[k] for k in np.flatnonzero(alone))
    reason = f"not measured, since only one picture has the label: {names}" if names else ""
    return truth.score(held_out[judging]), reason


def _fitted(features: Features, rows: Integers, targets: Targets) -> Probabilities:
    """The probabilities (N, K) of all pictures by the classifier of some."""
    (exact,) = CLASSIFIER.fit(features[rows], targets).probabilities(features)
    return exact.astype(np.float32)


def _margins(targets: Targets, probabilities: Probabilities) -> Floats:
    """How much more probable the answer is than the next best one, (N,)."""
    if targets.exclusive:
        largest = np.sort(probabilities.astype(np.float64), axis=1)[:, -2:]
        return largest[:, 1] - largest[:, 0]
    return np.abs(2 * probabilities.astype(np.float64) - 1).min(axis=1)


def _acceptances(
    truth: Targets, held_out: Probabilities, probabilities: Probabilities, free: Mask
) -> Iterator[Acceptance]:
    """Those of the free pictures, (N,), by the out-of-fold answers to the judges, (n, K)."""
    if not truth.exclusive:
        return
    evidence = _surest(held_out.max(axis=1), truth.correct(truth.answers(held_out)))
    if evidence is None:
        return
    least, *shares = evidence
    confidences, answers = probabilities.max(axis=1), truth.answers(probabilities)
    order = np.argsort(confidences, kind="stable")
    order = order[(free & (confidences >= least))[order]]
    for k, label in enumerate(truth.class_names):
        if (answers[order] == k).any():
            yield Acceptance(label, order[answers[order] == k], *shares)


def _surest(confidences: Probabilities, right: Mask) -> tuple[float, float, float, float] | None:
    """The least confidence of the n answers to accept, their share of right ones, and its interval.

    Sets of the surest answers are tested, from the smallest that can pass to the first whose lower limit is
    below `LEAST`: in a fixed sequence, each test has the whole level (Angelopoulos et al. 2021, Learn then
    Test). Of those that pass, the one of the highest limit is taken, since what a larger one adds is less
    often right, above all of some classes.
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
    best = passed - 1 - int(np.argmax(low[:passed][::-1]))  # the largest of equals
    n, r = int(sizes[best]), int(counts[best])
    return float(falling[n - 1]), (r + 1) / (n + 2), float(low[best]), float(high[best])


def share_interval(right: Integers, total: Integers) -> tuple[Floats, Floats]:
    """95% intervals of shares of right answers, (n,) each, exact (Clopper and Pearson 1934)."""
    tail = (1 - CONFIDENCE) / 2
    low, high = betaincinv(right, total - right + 1, tail), betaincinv(right + 1, total - right, 1 - tail)
    return np.where(right > 0, low, 0.0), np.where(right < total, high, 1.0)


def _differ(targets: Targets) -> bool:
    """Whether some pictures have a class and others do not."""
    return bool(((targets.counts > 0) & (targets.counts < len(targets))).any())


def _reproducible(features: Features, targets: Targets) -> Integers:
    """An order of the labelled pictures, (n,), that depends on features and labels alone."""
    content = np.hstack([features.view(np.uint8), targets.members.view(np.uint8)])
    return np.argsort(content.view(f"S{content.shape[1]}").ravel(), kind="stable")
