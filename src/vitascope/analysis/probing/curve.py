"""The learning curve of a classifier, and a forecast for more labels.

The error (1 - accuracy, or 1 - mAP) of n training images is fitted by a + b n^-c, a power law with a limit
(Hestness et al. 2017). The forecast is Bayesian: its interval has the noise of the images that measured the
curve and of those drawn for training, and the uncertainty of the three numbers and of the law itself.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import ndtr, softmax
from threadpoolctl import threadpool_limits

from vitascope.data.folds import Division
from vitascope.intervals import CONFIDENCE
from vitascope.network import in_threads
from vitascope.training.linear.classifiers import Classifier, Features, Floats
from vitascope.training.linear.selection import THREADS

SIZES = 6
RANGE = 32
"""Ratio of the largest size to the smallest one, unless that has too few images per class."""
PER_CLASS = 3
"""Images per class, on average, that the smallest size needs."""
SHORTEST = 4
"""Ratio of the largest size to the smallest one that a forecast needs."""
DRAWS = 2
"""Random training sets of each size and fold; one of the largest size, which takes all images."""
RESAMPLES = 400
EXPONENTS = np.linspace(0.1, 1.5, 15)
LIMITS = np.linspace(0.0, 1.0, 21)
"""Shares of the error of the largest size that no number of images removes."""
MISFITS = np.array([0.01, 0.02, 0.04, 0.08, 0.16])
"""Deviations of the logarithm of an error from the law: training sets differ, and the law is not exact."""
DRIFT = 0.2
"""Deviation of the logarithm of an error, for each e-fold of images beyond the largest size. It was chosen
for the coverage of the intervals on the digits (benchmarks/results/2026-11-26-probe_coverage.md)."""
UPPER = (1 + CONFIDENCE) / 2
TIMES = {2: "twice as many labels", 4: "four times as many labels"}


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The accuracy or mAP with `factor` times as many training images, and its 95% interval."""

    factor: int
    value: float
    low: float
    high: float

    def in_words(self, now: float) -> str:
        """The forecast, beside the cross-validated value of the present images."""
        digits = 0 if self.value < 0.95 else 1
        value, low, high = (f"{100 * each:.{digits}f}" for each in (self.value, self.low, self.high))
        gain = " would bring" if self.low > now else ": no gain can be shown,"
        return f"{TIMES[self.factor]}{gain} {value}% ({low} to {high}); cross-validated now: {now:.{digits}%}"


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
        return [each.in_words(self.now) for each in self.forecasts]

    @property
    def now(self) -> float:
        """The cross-validated value of all images, which the forecasts continue."""
        return float(self.values[-1])


def learning_curve(
    classifier: Classifier,
    features: Features,
    division: Division,
    folds: npt.NDArray[np.int64],
    *,
    seed: int = 0,
) -> LearningCurve:
    """Measure the curve of a classifier with one setting on features (N, D) of training images.

    Each fold is left out in turn. Training sets of each size are drawn from the others, and the images of the
    fold measure them; so all N images measure each size. Groups are drawn as a whole. Classes are not drawn
    evenly, because that makes small sets better than those that come at random, and the curve too flat.
    """
    K = int((division.targets.counts > 0).sum())
    most = len(folds) * (1 - 1 / (int(folds.max()) + 1))
    smallest = max(most / RANGE, PER_CLASS * K)
    shares = np.geomspace(min(smallest / most, 1), 1, SIZES).tolist() if smallest < most else [1.0]
    weights = _resampled(division.sets, np.random.default_rng([seed, len(folds)]))

    def measured(share: float) -> tuple[float, Floats]:
        return _errors(classifier.for_selection(), features, division, folds, share, weights, seed)

    with threadpool_limits(1, user_api="blas"):
        found_by_size = list(in_threads(measured, reversed(shares), most=THREADS))[::-1]
    sizes, errors = [size for size, _ in found_by_size], [drawn for _, drawn in found_by_size]
    samples = np.array(errors)  # (S, 1 + B)
    found = samples[:, 0]
    covariance = np.atleast_2d(np.cov(samples[:, 1:]))
    reason = _doubt(sizes, found, covariance)
    forecasts = () if reason else forecast(np.array(sizes), found, covariance, len(folds))
    return LearningCurve(
        len(folds),
        np.array(sizes, dtype=np.int64),
        1 - found,
        np.sqrt(covariance.diagonal()),
        forecasts,
        reason,
    )


def forecast(sizes: Floats, errors: Floats, covariance: Floats, images: int) -> tuple[Forecast, ...]:
    """Continue the errors (S,) of training sets of some sizes (S,) to multiples of a number of images.

    The law is log error = L + log(r + (1 - r) (n / n_S)^-c), plus normal noise: r is the share of the error
    that remains; 1 is a curve at its end. The priors of L, c, r and of the logarithm of the misfit are flat.
    Given r, c and the misfit, L is normal, so the forecast is a mixture of normal distributions, over a grid.

    Args:
        covariance: of the errors, (S, S), by the images that measured them.
        images: the number that is multiplied.
    """
    factors, floor = np.array(list(TIMES)), 0.5 / images  # an error of 0 still has the noise of some images
    logs = np.log(np.maximum(errors, floor))
    relative = covariance / np.outer(np.exp(logs), np.exp(logs)) + np.diag((floor / np.exp(logs)) ** 2)
    r, c = (each.reshape(-1, 1) for each in np.meshgrid(LIMITS, EXPONENTS))  # (P, 1) each
    shapes, beyond = (
        np.log(r + (1 - r) * (counts / sizes[-1]) ** -c) for counts in (sizes, factors * images)
    )  # (P, S), (P, F)
    rest = logs - shapes  # (P, S)
    evidence, means, deviations = [], [], []
    for misfit in MISFITS:
        noise = relative + misfit**2 * np.eye(len(sizes))
        inverse = np.linalg.inv(noise)
        precision = inverse.sum()
        level = rest @ inverse.sum(axis=0) / precision  # L, (P,)
        apart = rest - level[:, None]
        squares = np.einsum("ps,st,pt->p", apart, inverse, apart)
        evidence.append(-(squares + np.linalg.slogdet(noise)[1] + np.log(precision)) / 2)
        means.append(level[:, None] + beyond)
        drifts = DRIFT * np.log(factors * images / sizes[-1])  # (F,)
        variances = 1 / precision + misfit**2 + np.square(drifts)
        deviations.append(np.broadcast_to(np.sqrt(variances), beyond.shape))
    weights = softmax(np.concatenate(evidence))  # (Q,)
    columns = zip(factors.tolist(), np.concatenate(means).T, np.concatenate(deviations).T, strict=True)
    return tuple(_forecast(number, weights, mean, deviation) for number, mean, deviation in columns)


def _forecast(factor: int, weights: Floats, means: Floats, deviations: Floats) -> Forecast:
    """The median and the 95% interval of 1 - error, where log error is a mixture of normals, (Q,) each."""

    def below(log: float, share: float) -> float:
        return float(weights @ ndtr((log - means) / deviations)) - share

    ends = (means - 6 * deviations).min(), (means + 6 * deviations).max()
    quantiles = [brentq(below, *ends, args=(share,)) for share in (0.5, UPPER, 1 - UPPER)]
    value, low, high = (1 - np.minimum(np.exp(quantiles), 1)).tolist()
    return Forecast(factor, value, low, high)


def _doubt(sizes: list[float], errors: Floats, covariance: Floats) -> str:
    """Why a curve allows no forecast; empty if it does."""
    if sizes[-1] < SHORTEST * sizes[0]:
        needed = SHORTEST * PER_CLASS
        return f"too few images; a curve needs {needed} training images per class outside of each fold"
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
                generator = np.random.default_rng([seed, draw, fold, round(1000 * share)])
                some = some[division.take(some).sample(share, generator)]
            fitted = classifier.fit(features[some], targets.take(some))
            (held_out[held],) = fitted.probabilities(features[held])
            sizes.append(len(some))
        errors.append(1 - targets.weighted_qualities(held_out, weights))
    return float(np.mean(sizes)), np.mean(errors, axis=0)


def _resampled(sets: npt.NDArray[np.int64], generator: np.random.Generator) -> npt.NDArray[np.int32]:
    """How often each image is in the images, once, and in B bootstrap samples of their sets: (N, 1 + B)."""
    G = int(sets.max()) + 1
    drawn = generator.multinomial(G, np.full(G, 1 / G), size=RESAMPLES).T  # (G, B)
    return np.concatenate([np.ones((len(sets), 1)), drawn[sets]], axis=1).astype(np.int32)
