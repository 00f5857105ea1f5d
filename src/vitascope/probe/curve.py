"""The learning curve of a classifier, and a forecast for more labels.

The error (1 - accuracy, or 1 - mAP) of n training images is fitted by a + b n^-c, a power law with a lower limit
(Hestness et al. 2017). The forecast is Bayesian: its interval holds the noise of the images that measured the
curve, of the images drawn for training, of the three numbers, and of the law itself.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from vitascope.data.targets import ClassIndices
from vitascope.formatting import counted
from vitascope.intervals import CONFIDENCE
from vitascope.probe.classifiers import Classifier, Features, Floats
from vitascope.probe.folds import Division
from vitascope.run.label_measures import average_precision, mean_of_known
from vitascope.run.measures import predicted

HALVINGS = 5
"""The smallest size is the largest one, halved so many times."""
PER_CLASS = 2
"""Images per class, on average, that the smallest size needs."""
FEWEST_SIZES = 4
DRAWS = 2
"""Random training sets of each size and fold; one of the largest size, which takes all images."""
RESAMPLES = 400
EXPONENTS = np.linspace(0.1, 1.5, 15)
MISFITS = np.array([0.01, 0.02, 0.04, 0.08, 0.16])
"""Deviations of a point from the law, relative to its error: training sets differ, and the law is not exact."""
SAMPLES = 200
"""Of the posterior for each exponent and misfit."""
TIMES = {2: "twice as many labels", 4: "four times as many labels"}


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The accuracy or mAP with `factor` times as many training images, and its 95% interval."""

    factor: int
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 0 if self.value < 0.95 else 1
        value, low, high = (f"{100 * each:.{digits}f}" for each in (self.value, self.low, self.high))
        return f"{TIMES[self.factor]} would bring {value}% ({low} to {high})"


@dataclasses.dataclass(frozen=True, eq=False)
class LearningCurve:
    """The accuracy, or the mAP, by the number of training images.

    Attributes:
        images: N, the number of all training images.
        sizes: numbers of training images, ascending, (S,); the largest leaves one fold out.
        values: the accuracy or mAP on the images left out, (S,).
        deviations: standard errors of the values, (S,).
        forecasts: for the factors of `TIMES`; none where there is a reason.
        reason: why there is no forecast; empty where there is one.
    """

    images: int
    sizes: npt.NDArray[np.int64]
    values: Floats
    deviations: Floats
    forecasts: tuple[Forecast, ...]
    reason: str = ""

    def lines(self) -> list[str]:
        """The forecasts in words, or the reason why there are none."""
        if self.reason:
            return [f"no forecast for more labels: {self.reason}"]
        return [str(each) for each in self.forecasts]


def learning_curve(
    classifier: Classifier,
    features: Features,
    division: Division,
    folds: npt.NDArray[np.int64],
    *,
    seed: int = 0,
) -> LearningCurve:
    """Measure the curve of a classifier with one setting on features (N, D) of training images.

    Each fold is left out in turn. Training sets of each size are drawn from the others, by class and by group,
    and the images of the fold measure them; so all N images measure each size.
    """
    K = int((division.targets.counts > 0).sum())
    most = len(folds) - len(folds) // (int(folds.max()) + 1)
    shares = [2.0**-n for n in range(HALVINGS, -1, -1) if most * 2.0**-n >= PER_CLASS * K or n == 0]
    weights = _resampled(division.sets, np.random.default_rng([seed, len(folds)]))
    sizes, errors = [], []
    for share in shares:
        size, drawn = _errors(classifier.for_selection(), features, division, folds, share, weights, seed)
        sizes.append(size)
        errors.append(drawn)
    samples = np.array(errors)  # (S, 1 + B)
    found = samples[:, 0]
    covariance = np.atleast_2d(np.cov(samples[:, 1:]))
    reason, forecasts = _doubt(sizes, found, covariance), ()
    if not reason:
        forecasts = forecast(np.array(sizes), found, covariance, len(folds), seed=seed)
    return LearningCurve(
        len(folds),
        np.array(sizes, dtype=np.int64),
        1 - found,
        np.sqrt(covariance.diagonal()),
        forecasts,
        reason,
    )


def forecast(
    sizes: npt.NDArray[np.int64], errors: Floats, covariance: Floats, images: int, *, seed: int = 0
) -> tuple[Forecast, ...]:
    """Continue the errors (S,) of training sets of some sizes (S,) to multiples of a number of images.

    The law is a + b (n / n_S)^-c with flat priors for a >= 0, b >= 0, c and the misfit. Given the latter two,
    a and b have a normal posterior, which is sampled; samples outside of the limits are left out.

    Args:
        covariance: of the errors, (S, S), by the images that measured them.
        images: the number that is multiplied.
    """
    generator = np.random.default_rng([seed, images])
    factors = np.array(list(TIMES))
    values, logs = [], []
    for c in EXPONENTS:
        law = np.stack([np.ones(len(sizes)), (sizes / sizes[-1]) ** -c], axis=1)  # (S, 2)
        beyond = np.stack([np.ones(len(factors)), (factors * images / sizes[-1]) ** -c], axis=1)  # (F, 2)
        for misfit in MISFITS:
            # An error of 0 still has the noise of less than one image.
            noise = covariance + np.diag(np.square(misfit * errors) + (0.5 / images) ** 2)
            factor = cho_factor(noise)
            precision = law.T @ cho_solve(factor, law)  # (2, 2)
            mean = np.linalg.solve(precision, law.T @ cho_solve(factor, errors))
            rest = errors - law @ mean
            log_evidence = -np.log(factor[0].diagonal()).sum() - rest @ cho_solve(factor, rest) / 2
            log_evidence -= np.linalg.slogdet(precision)[1] / 2
            drawn = generator.multivariate_normal(mean, np.linalg.inv(precision), size=SAMPLES)  # (T, 2)
            drawn = drawn[(drawn >= 0).all(axis=1)]
            ahead = drawn @ beyond.T
            values.append(ahead * (1 + misfit * generator.standard_normal(ahead.shape)))
            logs.append(np.full(len(drawn), log_evidence))
    samples, log_weights = np.concatenate(values), np.concatenate(logs)
    weights = np.exp(log_weights - log_weights.max())
    shares = np.array([0.5, (1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2])
    found = []
    for number, column in zip(factors.tolist(), samples.T, strict=True):
        order = np.argsort(column)
        places = np.searchsorted(np.cumsum(weights[order]), shares * weights.sum())
        value, low, high = np.clip(1 - column[order][places], 0, 1).tolist()
        found.append(Forecast(number, value, low, high))
    return tuple(found)


def _doubt(sizes: list[float], errors: Floats, covariance: Floats) -> str:
    """Why a curve allows no forecast; empty if it does."""
    if len(sizes) < FEWEST_SIZES:
        return (
            f"{counted(len(sizes), 'size')} of training sets with {PER_CLASS} images per class; "
            f"a curve needs {FEWEST_SIZES}"
        )
    gain = errors[0] - errors[-1]
    deviation = np.sqrt(covariance[0, 0] + covariance[-1, -1] - 2 * covariance[0, -1])
    if not gain > 2 * deviation:
        return (
            f"{sizes[-1]:,.0f} images are not better than {sizes[0]:,.0f} beyond chance "
            f"({1 - errors[-1]:.1%} and {1 - errors[0]:.1%})"
        )
    return ""


def _errors(
    classifier: Classifier,
    features: Features,
    division: Division,
    folds: npt.NDArray[np.int64],
    share: float,
    weights: npt.NDArray[np.int32],
    seed: int,
) -> tuple[float, Floats]:
    """The mean size of training sets of a share of the other folds, and their mean error on the images and on
    each of B samples of them, (1 + B,)."""
    targets, draws = division.targets, DRAWS if share < 1 else 1
    sizes, errors = [], []
    for draw in range(draws):
        held_out = np.empty((len(folds), len(targets.class_names)), dtype=np.float32)
        for fold in range(int(folds.max()) + 1):
            held, some = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
            if share < 1:
                generator = np.random.default_rng([seed, draw, fold, round(1 / share)])
                some = some[division.take(some).draw(share, generator)]
            fitted = classifier.fit(features[some], targets.take(some))
            (held_out[held],) = fitted.probabilities(features[held])
            sizes.append(len(some))
        errors.append(1 - _qualities(division, held_out, weights))
    return float(np.mean(sizes)), np.mean(errors, axis=0)


def _qualities(
    division: Division, probabilities: npt.NDArray[np.float32], weights: npt.NDArray[np.int32]
) -> Floats:
    """The accuracy or mAP of probabilities (N, K), weights (N, 1 + B): (1 + B,)."""
    targets = division.targets
    if isinstance(targets, ClassIndices):
        right = targets.correct(predicted(probabilities))
        return right @ weights / weights.sum(axis=0)
    pairs = zip(targets.labels.T, probabilities.T, strict=True)
    return mean_of_known(np.stack([average_precision(*pair, weights) for pair in pairs], axis=1))


def _resampled(sets: npt.NDArray[np.int64], generator: np.random.Generator) -> npt.NDArray[np.int32]:
    """How often each image is among the images, once, and in B bootstrap samples of their sets: (N, 1 + B)."""
    G = int(sets.max()) + 1
    drawn = generator.multinomial(G, np.full(G, 1 / G), size=RESAMPLES).T  # (G, B)
    return np.concatenate([np.ones((len(sets), 1)), drawn[sets]], axis=1).astype(np.int32)
