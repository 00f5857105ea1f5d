"""Choose body, layer, pooling, classifier and setting by cross-validation, and score on the test images."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from vitascope.data.average_precision import PairedDifference
from vitascope.data.folds import Division
from vitascope.data.measures import Score
from vitascope.data.targets import Targets
from vitascope.errors import UserError
from vitascope.network import in_threads
from vitascope.training.linear.classifiers import (
    Classifier,
    ClassMeans,
    Features,
    Floats,
    LeastSquares,
    LinearFit,
    LogisticRegression,
    Neighbors,
)

CLASSIFIERS: tuple[Classifier, ...] = (Neighbors(), LogisticRegression(), LeastSquares(), ClassMeans())
SCORES_HEAD = (
    *("body", "layer", "pooling", "classifier", "setting"),
    *("cross-validated", "test", "to the best", "seconds"),
)
THREADS = 4
"""At most: each has copies of some features."""


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """The features of all images from one place of a body: train (N, D) and test (M, D)."""

    body: str
    layer: str
    pooling: str
    train: Features
    test: Features

    @property
    def place(self) -> str:
        """Body, layer and pooling in one text."""
        layer = self.layer and f"layer {self.layer}"
        return ", ".join(filter(None, (self.body, layer, self.pooling)))


@dataclasses.dataclass(frozen=True, eq=False)
class ProbeScore:
    """A classifier on the features of one candidate, with the setting that cross-validation chose.

    Attributes:
        candidate: the features.
        classifier: with its one setting.
        validated: measured by cross-validation on the training images. Its interval counts images, so it is
            too narrow where they come in groups. It holds the accuracy on new images less often than in 95%
            (benchmarks/results/2026-11-26-probe_coverage.md): the best of many is a little too good, fits on
            fewer images are a little worse.
        tested: measured once on the test images, after the choice.
        head: of a linear classifier, fitted on all training images: weight (K, D) and bias (K,).
        held_out: probabilities of the training images by classifiers that did not see them, float32 (N, K).
        probabilities: of the test images, (M, K).
        seconds: of cross-validation, fit and test.
    """

    candidate: Candidate
    classifier: Classifier
    validated: Score
    tested: Score
    head: tuple[Floats, Floats] | None
    held_out: npt.NDArray[np.float32]
    probabilities: npt.NDArray[np.float64]
    seconds: float

    @property
    def name(self) -> str:
        """Of the classifier with its setting: `logistic regression, C = 0.1`."""
        return ", ".join(filter(None, (self.classifier.name, *self.classifier.settings)))

    def row(self, difference: PairedDifference | None) -> tuple[str, ...]:
        """The score as text, below `SCORES_HEAD`; no difference for the best."""
        place = self.candidate
        points = ""
        if difference is not None:
            value, *limits = (100 * each for each in (difference.value, difference.low, difference.high))
            points = "{:+.1f} ({:+.1f} to {:+.1f})".format(value, *limits)
        name, (setting,) = self.classifier.name, self.classifier.settings
        validated, tested = (in_words(score) for score in (self.validated, self.tested))
        where = (place.body, place.layer, place.pooling, name, setting)
        return (*where, validated, tested, points, f"{self.seconds:.1f}")


@dataclasses.dataclass(frozen=True, eq=False)
class ProbeSelection:
    """All scores, the best by cross-validation first; the earlier one of equals.

    Attributes:
        scores: one for each candidate and classifier.
        train, test: the labels of the images, and for `train` the sets of them that no fold divides.
        folds: the fold of each training image, (N,).
    """

    scores: tuple[ProbeScore, ...]
    train: Division
    test: Targets
    folds: npt.NDArray[np.int64]

    @property
    def best(self) -> ProbeScore:
        """The choice of cross-validation."""
        return self.scores[0]

    @property
    def linear(self) -> ProbeScore:
        """The best linear classifier, which is the head of the saved model."""
        return next(score for score in self.scores if score.head is not None)

    @property
    def doubt(self) -> str:
        """Why the cross-validated values are too good, in words; empty if the test images agree with them."""
        (value, low, _), (tested, _, high) = (
            score.value_and_limits for score in (self.best.validated, self.best.tested)
        )
        if high >= low:
            return ""
        return (
            f"worse on the test images, {tested:.1%}, than in cross-validation, {value:.1%}: the body was "
            "trained on these training images, or the test images are of another kind; the selection and the "
            "forecast then are too good"
        )

    def difference(self, score: ProbeScore) -> PairedDifference:
        """The test accuracy or mAP of a score minus that of the best, with its 95% interval."""
        return self.test.difference(score.probabilities, self.best.probabilities)

    def rows(self) -> list[tuple[str, ...]]:
        """All scores as text, below `SCORES_HEAD`."""
        return [score.row(None if score is self.best else self.difference(score)) for score in self.scores]


def in_words(score: Score) -> str:
    """The accuracy or mAP of a score with its interval, in percent: `87.2% (84.1 to 89.9)`."""
    value, low, high = (100 * each for each in score.value_and_limits)
    return f"{value:.1f}% ({low:.1f} to {high:.1f})"


def out_of_fold(
    classifier: Classifier, features: Features, targets: Targets, folds: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.float32]]:
    """The probabilities of each image by classifiers fitted on the other folds, (N, K), for each setting.

    What a later setting needs is computed when it is read.
    """
    held, by_fold = [], []
    for fold in range(int(folds.max()) + 1):
        rest = np.flatnonzero(folds != fold)
        held.append(np.flatnonzero(folds == fold))
        fitted = classifier.fit(features[rest], targets.take(rest))
        by_fold.append(fitted.probabilities(features[held[-1]]))
    for parts in zip(*by_fold, strict=True):
        found = np.empty((len(targets), len(targets.class_names)), dtype=np.float32)
        for images, probabilities in zip(held, parts, strict=True):
            found[images] = probabilities
        yield found


def select(
    candidates: Iterable[Candidate],
    train: Division,
    test: Targets,
    classifiers: Sequence[Classifier] = CLASSIFIERS,
    *,
    seed: int = 0,
) -> ProbeSelection:
    """Score all candidates with all classifiers; only cross-validation on the training images chooses.

    Args:
        candidates: read one by one.
        train, test: the labels of the images, of the same classes.
        classifiers: each with the settings to choose from.
        seed: of the folds.

    Raises:
        UserError: one class; a class that is too rare for two folds; no test image.
    """
    if not len(test):
        raise UserError("no test images; give some, or divide the data")
    numbers = train.folds(seed=seed)
    pairs = ((candidate, classifier) for candidate in candidates for classifier in classifiers)

    def scored(pair: tuple[Candidate, Classifier]) -> ProbeScore:
        return _score(*pair, train.targets, test, numbers)

    # Several fits at a time use the cores better than the threads of BLAS, above all on few images.
    with threadpool_limits(1, user_api="blas"):
        scores = list(in_threads(scored, pairs, most=THREADS))
    scores.sort(key=lambda score: -score.validated.value_and_limits[0])  # stable
    return ProbeSelection(tuple(scores), train, test, numbers)


def cross_validated(
    classifier: Classifier, features: Features, targets: Targets, folds: npt.NDArray[np.int64]
) -> tuple[int, npt.NDArray[np.float32]]:
    """Choose the setting of a classifier by cross-validation: its number, and its probabilities (N, K).

    Settings are in order: those after one that is worse than the best by half a standard error are not tried.

    Args:
        classifier: with its settings.
        features, targets: of the N images, features (N, D).
        folds: the fold of each image, (N,).

    Raises:
        UserError: labels that are unknown.
    """
    if targets.partial:
        raise UserError(
            f"classifiers are fitted to complete labels, and {int((targets.rows < 0).sum()):,} of these are "
            "unknown: leave out such columns or images, or train a model, which learns from what is known"
        )
    best, value = np.empty(0, dtype=np.float32), -1.0
    chosen = 0
    for number, held_out in enumerate(out_of_fold(classifier.for_selection(), features, targets, folds)):
        found = targets.quality(held_out)
        if found > value:
            best, value, chosen = held_out, found, number
        elif found < value - 0.5 * np.sqrt(value * (1 - value) / len(targets)):
            break
    return chosen, best


def _score(
    candidate: Candidate, classifier: Classifier, train: Targets, test: Targets, folds: npt.NDArray[np.int64]
) -> ProbeScore:
    """Choose the setting of a classifier, then fit it on all training images and score it."""
    began = time.perf_counter()
    chosen, best = cross_validated(classifier, candidate.train, train, folds)
    one = classifier.only(chosen)
    fitted = one.fit(candidate.train, train)
    head = None
    if isinstance(fitted, LinearFit):
        (head,) = fitted.maps
        fitted = dataclasses.replace(fitted, maps=[head])
    (probabilities,) = fitted.probabilities(candidate.test)
    return ProbeScore(
        candidate,
        one,
        train.score(best),
        test.score(probabilities),
        head,
        best,
        probabilities,
        time.perf_counter() - began,
    )
