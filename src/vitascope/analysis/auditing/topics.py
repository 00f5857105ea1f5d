"""Pictures of another kind than the rest, by the distance of their features."""

import numpy as np
from scipy.special import expit

from vitascope.data.finding import Finding
from vitascope.training.evaluation.calibration import shrunk_covariance
from vitascope.training.linear.classifiers import Features, Floats

FEWEST = 20
"""Images from which on the usual ones are known."""
KEPT = 0.9
"""The share of the images that mean and covariance are from: up to a tenth may be of another kind."""
STEPS, FOLDS = 3, 5
LISTED = 3.0
"""The deviation from which on an image is listed."""
USUAL = 0.8413
"""The quantile that is one standard deviation above the median."""


def off_topic_scores(features: Features) -> Floats:
    """How unlike the other images each is: 0 to 1, (N,); an image is listed from 0.5 on.

    The score is a logistic function of the logarithm of its distance, standardized by median and upper
    spread. All are 0 for less than `FEWEST` images and for equal features. `features` (N, D) are finite.
    """
    distances = _distances(features)
    if not distances.any():
        return distances
    logs = np.log(np.maximum(distances, 1e-9 * distances.max()))
    median, usual = np.quantile(logs, (0.5, USUAL))
    return np.asarray(expit((logs - median) / max(usual - median, 1e-3) - LISTED))


def off_topic(scores: Floats) -> list[Finding]:
    """The images that are unlike the others, by `off_topic_scores`, (N,)."""
    return [
        Finding("off-topic", float(scores[image]), "its features are far from those of the others", image)
        for image in np.flatnonzero(scores >= 0.5).tolist()
    ]


def _distances(features: Features) -> Floats:
    """The Mahalanobis distance of each image from the mean, (N,), estimated from other images.

    As in the minimum covariance determinant (Rousseeuw and Van Driessen 1999), mean and covariance are those
    of the nearest images, in turn: otherwise twenty ships among cats are usual, because they are a direction
    of high variance. Out-of-fold distances do not make those images nearer that the estimate is from.
    """
    N = len(features)
    if N < FEWEST:
        return np.zeros(N)
    X = features.astype(np.float64)
    deviations = np.abs(X - np.median(X, axis=0))
    spread = np.median(deviations, axis=0)
    distances = np.square(deviations / np.where(spread > 0, spread, np.inf)).sum(axis=1)
    folds = np.arange(N) % FOLDS
    for _ in range(STEPS):
        kept = distances <= np.quantile(distances, KEPT)
        distances = np.empty(N)
        for fold in range(FOLDS):
            some, held = X[kept & (folds != fold)], folds == fold
            mean = some.mean(axis=0)
            covariance = shrunk_covariance(some - mean)
            scale = np.trace(covariance) / len(covariance)
            covariance += (1e-6 * scale or 1.0) * np.eye(len(covariance))  # may be singular, or 0
            held_out = X[held] - mean
            distances[held] = (held_out * np.linalg.solve(covariance, held_out.T).T).sum(axis=1)
    return np.sqrt(np.maximum(distances, 0))
