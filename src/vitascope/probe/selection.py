"""Choose body, layer, pooling, classifier and setting by cross-validation, and score on the test images."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vitascope.data.targets import ClassIndices, Targets
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.probe.classifiers import (
    Classifier,
    ClassMeans,
    Features,
    LeastSquares,
    LogisticRegression,
    Neighbors,
)
from vitascope.probe.folds import FOLDS, Division
from vitascope.run.label_measures import (
    LabelScore,
    PairedDifference,
    label_score,
    mean_average_precision,
    paired_difference,
)
from vitascope.run.measures import PairedAccuracy, Score, mcnemar, predicted, score_of

CLASSIFIERS: tuple[Classifier, ...] = (Neighbors(), LogisticRegression(), LeastSquares(), ClassMeans())
SCORES_HEAD = (
    *("body", "layer", "pooling", "classifier", "setting", "cross-validated", "95% interval"),
    *("test", "95% interval", "difference to the best", "seconds"),
)
LOGGER = logging.getLogger(__name__)


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
        return ", ".join(filter(None, (self.body, self.layer, self.pooling)))


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledPart:
    """The targets of the images of one part of the data.

    Attributes:
        targets: of N images.
        names: the name of each image for messages, (N,); none for their numbers.
        groups: the group of each image, (N,), which no fold divides; (0,) for none.
    """

    targets: Targets
    names: Sequence[str] = ()
    groups: npt.NDArray[np.str_] = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.str_))

    def check(self, features: Features, place: str) -> None:
        """Reject features (N, D) with values that are not finite, naming the first image that has them."""
        if features.ndim != 2 or len(features) != len(self.targets):
            raise UserError(
                f"features of {place}: shape {features.shape} for {counted(len(self.targets), 'image')}; "
                "they need one row per image"
            )
        wrong = np.flatnonzero(~np.isfinite(features).all(axis=1))
        if len(wrong):
            first = int(wrong[0])
            name = f" ({self.names[first]})" if len(self.names) else ""
            raise UserError(
                f"features of {place}: NaN or infinite values for {len(wrong):,} of "
                f"{counted(len(features), 'image')}, first image {first}{name}; leave these images out, or "
                "compute the features in float32"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class ProbeScore:
    """A classifier on the features of one candidate, with the setting that cross-validation chose.

    Attributes:
        candidate: the features.
        classifier: with its one setting.
        validated: measured by cross-validation on the training images. Its interval counts images, so it is
            too narrow where they come in groups. It holds the accuracy on new images less often than in 95%
            (`benchmarks/probe_coverage.py`): the best of many is a little too good, fits on fewer images are
            a little worse.
        tested: measured once on the test images, after the choice.
        probabilities: of the test images, (M, K).
        seconds: of cross-validation, fit and test.
    """

    candidate: Candidate
    classifier: Classifier
    validated: Score | LabelScore
    tested: Score | LabelScore
    probabilities: npt.NDArray[np.float64]
    seconds: float

    def row(self, difference: PairedDifference | None) -> tuple[str, ...]:
        """The score as text, below `SCORES_HEAD`; no difference for the best."""
        place = self.candidate
        points = ""
        if difference is not None:
            value, *limits = (100 * each for each in (difference.value, difference.low, difference.high))
            points = "{:+.1f} ({:+.1f} to {:+.1f})".format(value, *limits)
        cells = []
        for score in (self.validated, self.tested):
            value, low, high = value_of(score)
            cells += [f"{value:.1%}", f"{low:.1%} to {high:.1%}"]
        name, (setting,) = self.classifier.name, self.classifier.settings
        return (place.body, place.layer, place.pooling, name, setting, *cells, points, f"{self.seconds:.1f}")


@dataclasses.dataclass(frozen=True, eq=False)
class ProbeSelection:
    """All scores, the best by cross-validation first; the earlier one of equals.

    Attributes:
        scores: one for each candidate and classifier.
        train, test: the images.
        folds: the fold of each training image, (N,).
    """

    scores: tuple[ProbeScore, ...]
    train: LabelledPart
    test: LabelledPart
    folds: npt.NDArray[np.int64]

    @property
    def best(self) -> ProbeScore:
        """The choice of cross-validation."""
        return self.scores[0]

    def difference(self, score: ProbeScore) -> PairedDifference:
        """The test accuracy or mAP of a score minus that of the best, with its 95% interval."""
        targets = self.test.targets
        if not isinstance(targets, ClassIndices):
            return paired_difference(targets.labels, score.probabilities, self.best.probabilities)
        best, other = (
            targets.correct(predicted(each.probabilities)) for each in (self.best, score)
        )  # (M,) each
        pairs = PairedAccuracy.of(best, other)
        low, high = pairs.interval
        return PairedDifference(0.0 - pairs.drop, 0.0 - high, 0.0 - low, mcnemar(pairs.lost, pairs.won))

    def rows(self) -> list[tuple[str, ...]]:
        """All scores as text, below `SCORES_HEAD`."""
        return [score.row(None if score is self.best else self.difference(score)) for score in self.scores]


def value_of(score: Score | LabelScore) -> tuple[float, float, float]:
    """The accuracy or mAP of a score, and the limits of its 95% interval."""
    if isinstance(score, Score):
        return score.right / score.total, *score.interval
    found = score.estimates["map"]
    return found.value, found.low, found.high


def measured(targets: Targets, probabilities: npt.NDArray[np.floating]) -> Score | LabelScore:
    """Measure probabilities (N, K)."""
    if isinstance(targets, ClassIndices):
        return score_of(targets.labels, probabilities)
    return label_score(targets.labels, probabilities)


def quality(targets: Targets, probabilities: npt.NDArray[np.floating]) -> float:
    """The accuracy, or the mAP where images have several classes, of probabilities (N, K)."""
    if isinstance(targets, ClassIndices):
        return float(targets.correct(predicted(probabilities)).mean())
    return mean_average_precision(targets.labels, probabilities)


def out_of_fold(
    classifier: Classifier, features: Features, targets: Targets, folds: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """The probabilities of each image by classifiers fitted on the other folds, (S, N, K) for S settings."""
    S, K = len(classifier.settings), len(targets.class_names)
    found = np.empty((S, len(targets), K), dtype=np.float32)
    for fold in range(int(folds.max()) + 1):
        rest, held = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        fitted = classifier.fit(features[rest], targets.take(rest))
        for number, probabilities in enumerate(fitted.probabilities(features[held])):
            found[number, held] = probabilities
    return found


def select(
    candidates: Iterable[Candidate],
    train: LabelledPart,
    test: LabelledPart,
    classifiers: Sequence[Classifier] = CLASSIFIERS,
    *,
    folds: int = FOLDS,
    seed: int = 0,
) -> ProbeSelection:
    """Score all candidates with all classifiers; only cross-validation on the training images chooses.

    Args:
        candidates: read one by one.
        train, test: the labels of the images, of the same classes.
        classifiers: each with the settings to choose from.
        folds: at most; a class of fewer images or groups lowers the number.
        seed: of the folds.

    Raises:
        UserError: features that are not finite or not one row per image; one class; a class that is too rare
            for two folds; no candidate; no test image.
    """
    if not len(test.targets):
        raise UserError("no test images; give some, or divide the data")
    numbers = Division.of(train.targets, train.groups).folds(folds, seed)
    scores = []
    for candidate in candidates:
        for part, features, where in (
            (train, candidate.train, "training"),
            (test, candidate.test, "test"),
        ):
            part.check(features, f"{candidate.place}, {where}")
        for classifier in classifiers:
            scores.append(_score(candidate, classifier, train.targets, test.targets, numbers))
            LOGGER.info("%s", ", ".join(scores[-1].row(None)))
    if not scores:
        raise UserError("no features to choose from; give a body, a layer and a pooling")
    scores.sort(key=lambda score: -value_of(score.validated)[0])  # stable
    return ProbeSelection(tuple(scores), train, test, numbers)


def _score(
    candidate: Candidate,
    classifier: Classifier,
    train: Targets,
    test: Targets,
    folds: npt.NDArray[np.int64],
) -> ProbeScore:
    """Choose the setting of a classifier, then fit it on all training images and score it."""
    began = time.perf_counter()
    held_out = out_of_fold(classifier.for_selection(), candidate.train, train, folds)  # (S, N, K)
    best = int(np.argmax([quality(train, each) for each in held_out]))
    chosen = classifier.only(best)
    (probabilities,) = chosen.fit(candidate.train, train).probabilities(candidate.test)
    seconds = time.perf_counter() - began
    return ProbeScore(
        candidate,
        chosen,
        measured(train, held_out[best]),
        measured(test, probabilities),
        probabilities,
        seconds,
    )
