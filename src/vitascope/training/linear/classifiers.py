"""Classifiers of frozen features: nearest neighbours, logistic regression, least squares, class means.

A classifier has one or several settings of one hyper-parameter, in order. `fit` shares the work of all
settings: one search of neighbours, one eigen-decomposition, warm starts. Features are floats (N, D); where
images have one class each (`ClassIndices`), probabilities are those of exclusive classes, where they have any
number of them (`ClassSets`), those of each class alone. A class without training images gets probability 0.
"""

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from scipy.special import softmax

from vitascope.data.targets import Targets

Features = npt.NDArray[np.floating]
Floats = npt.NDArray[np.float64]

BLOCK = 2**25
"""Numbers in memory at once: similarities of images, features in float64."""
STRENGTHS = tuple(10.0**power for power in range(-5, 2))
RIDGES = tuple(2.0**power for power in range(-10, 20, 2))
BIAS_FEATURE = 100.0
"""The constant feature of least squares: so large that the ridge hardly shrinks the bias."""
EXACT, ROUGH = 1e-6, 1e-2
"""Tolerances of regressions: the first has probabilities within 1e-4, the second within a few hundredths."""
ITERATIONS = 1000
LOGGER = logging.getLogger(__name__)


class Fitted(ABC):
    """A classifier with its settings, fitted on some images."""

    @abstractmethod
    def probabilities(self, features: Features) -> Iterator[Floats]:
        """The probabilities (M, K) of images with features (M, D), for each setting; those of a linear
        classifier can be read once."""


class Classifier(ABC):
    """A kind of classifier with the settings to choose from."""

    name: ClassVar[str]
    """In tables."""
    varied: ClassVar[str] = ""
    """The field with the values of the settings; empty for a classifier of one setting."""
    setting: ClassVar[str] = ""
    """A setting in words, a template for its value."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Each setting in words."""
        return tuple(map(self.setting.format, getattr(self, self.varied))) if self.varied else ("",)

    def only(self, number: int) -> Self:
        """The same classifier with one of its settings."""
        one = {self.varied: (getattr(self, self.varied)[number],)} if self.varied else {}
        return dataclasses.replace(cast("Any", self), **one)

    def for_selection(self) -> Self:
        """The same classifier, perhaps less exact and faster, for choosing between settings."""
        return self

    @abstractmethod
    def fit(self, features: Features, targets: Targets) -> Fitted:
        """Fit all settings on features (N, D) of images with these targets."""


@dataclasses.dataclass(frozen=True)
class Neighbors(Classifier):
    """The weighted nearest neighbours of DINO (Caron et al. 2021, appendix F.1).

    The k images of the highest cosine similarity vote for their classes with weight exp(similarity / T).

    Attributes:
        neighbors: each k; all images vote where there are fewer.
        temperature: T.
    """

    neighbors: tuple[int, ...] = (1, 5, 10, 20)
    temperature: float = 0.07

    name, varied, setting = "nearest neighbours", "neighbors", "k = {}"

    def fit(self, features: Features, targets: Targets) -> Fitted:
        """Keep the features at unit length."""
        return _Voters(self, _unit(features), membership(targets))


@dataclasses.dataclass(frozen=True, eq=False)
class _Voters(Fitted):
    """Images of known classes: `directions` (N, D) of unit length, `shares` (N, K) of 0 and 1."""

    options: Neighbors
    directions: Features
    shares: Floats

    def probabilities(self, features: Features) -> Iterator[Floats]:
        near, similar = self._search(features)
        for k in self.options.neighbors:
            weights = softmax(similar[:, :k] / self.options.temperature, axis=1)  # (M, k)
            found = np.zeros((len(features), self.shares.shape[1]))
            for column in range(weights.shape[1]):  # (M, k, K) would be large
                found += weights[:, column, None] * self.shares[near[:, column]]
            yield found

    def _search(self, features: Features) -> tuple[npt.NDArray[np.int64], Floats]:
        """The most similar images, (M, k) for the largest k, and their similarities in descending order."""
        known = torch.from_numpy(self.directions)
        k = min(max(self.options.neighbors), len(known))
        found = []
        for part in _blocks(features, len(known)):
            similarities = torch.from_numpy(_unit(part).astype(self.directions.dtype)) @ known.T  # (m, N)
            found.append(similarities.topk(k, dim=1))
        near = torch.cat([each.indices for each in found]).numpy()
        return near, torch.cat([each.values for each in found]).double().numpy()


@dataclasses.dataclass(frozen=True, eq=False)
class LinearFit(Fitted):
    """Linear classifiers of raw features, one per setting.

    Attributes:
        maps: weight (K, D) and bias (K,), float64, of each setting: the head of a model. The bias of a class
            without images is -inf, that of a class that all images have beside others inf. They may be found
            one by one, when they are read, which is possible once.
        kind: of the labels, whose probabilities these are.
    """

    maps: Iterable[tuple[Floats, Floats]]
    kind: type[Targets]

    def probabilities(self, features: Features) -> Iterator[Floats]:
        """The probabilities (M, K) for each setting."""
        for weight, bias in self.maps:
            parts = _blocks(features, features.shape[1])
            logits = np.concatenate([part.astype(np.float64) @ weight.T for part in parts]) + bias  # (M, K)
            yield self.kind.probabilities(logits)


@dataclasses.dataclass(frozen=True)
class LogisticRegression(Classifier):
    """Logistic regression with an L2 penalty, on features standardized by the training images.

    It minimizes |W|^2 / 2 + C (sum of the images' losses); biases have no penalty. Exclusive classes have one
    softmax, else each class has a regression of its own, all fitted at once. Standardized features make one
    range of strengths fit all bodies, whatever the scale of their features.

    Attributes:
        strengths: each C, ascending, so that each fit starts at the one before.
        tolerance: the largest component of the gradient at the solution, in coordinates whose Hessian is near
            the identity. Above `EXACT`, products of matrices are in single precision.
    """

    strengths: tuple[float, ...] = STRENGTHS
    tolerance: float = EXACT

    name, varied, setting = "logistic regression", "strengths", "C = {:g}"

    def for_selection(self) -> Self:
        """The same with the tolerance `ROUGH`: several times faster."""
        return dataclasses.replace(self, tolerance=max(ROUGH, self.tolerance))

    def fit(self, features: Features, targets: Targets) -> LinearFit:
        """Follow the path of the strengths as far as the maps are read."""
        shares, kind = membership(targets), type(targets)
        axes, scores = rotated(features)
        if self.tolerance > EXACT:
            scores = scores.astype(np.float32)
        path = _Path(axes.powers, scores, shares[:, _varied(shares)], kind)
        solutions = (path.solve(strength, self.tolerance) for strength in self.strengths)
        maps = (axes.on_raw(weight, bias) for weight, bias in solutions)
        return LinearFit((_with_constant(*each, shares, kind) for each in maps), kind)


@dataclasses.dataclass(frozen=True)
class LeastSquares(Classifier):
    """Ridge regression to -1 and +1, the few-shot protocol of the ViT paper (Dosovitskiy et al. 2021, 4.1).

    The features are standardized by the training images and joined by a constant `BIAS_FEATURE`, as in
    big_vision. The probabilities are the softmax (or logistic function) of the regression's values, as the
    head of a model gives them: their order has a meaning, their sizes are too even.

    Attributes:
        ridges: each factor of |W|^2 beside the sum of squared errors, above 0.
    """

    ridges: tuple[float, ...] = RIDGES

    name, varied, setting = "least squares", "ridges", "ridge = {:.3g}"

    def fit(self, features: Features, targets: Targets) -> LinearFit:
        """Solve for all ridges with one eigen-decomposition."""
        shares, kind = membership(targets), type(targets)
        axes, scores = rotated(features)
        values = 2 * shares[:, _varied(shares)] - 1  # (N, k)
        moments, N = scores.T @ values, len(values)  # (r, k)
        maps = []
        for ridge in self.ridges:
            # The features have mean 0, so the constant one is orthogonal to all others.
            bias = values.mean(axis=0) * N * BIAS_FEATURE**2 / (N * BIAS_FEATURE**2 + ridge)
            weight = (moments / (axes.powers[:, None] + ridge)).T
            maps.append(_with_constant(*axes.on_raw(weight, bias), shares, kind))
        return LinearFit(maps, kind)


@dataclasses.dataclass(frozen=True)
class ClassMeans(Classifier):
    """The nearest class mean, by the Euclidean distance d in units of the deviation within the classes.

    Probabilities are the softmax of -d^2 / 2, those of normal distributions around the means with the same
    diagonal covariance. Where images have several classes, each class compares the mean of the images that
    have it with the mean of the others.
    """

    name = "class means"

    def fit(self, features: Features, targets: Targets) -> LinearFit:
        """Find the means, and the linear function that compares the distances from them."""
        shares, kind = membership(targets), type(targets)
        varied = _varied(shares)
        own = shares[:, varied]  # (N, k)
        N, k = own.shape
        centre = features.mean(axis=0, dtype=np.float64)
        centred = features - centre  # (N, D)
        means = own.T @ centred / own.sum(axis=0)[:, None]  # (k, D)
        if targets.strata is not None:
            deviation = _nonzero(np.sqrt(np.square(centred - own @ means).sum(axis=0) / max(N - k, 1)))
            means /= deviation
            weight, bias = means, -np.square(means).sum(axis=1) / 2
        else:
            others = (1 - own).T @ centred / (1 - own).sum(axis=0)[:, None]
            # Around a class's two means: the total variance less the variance between them, (k, D).
            between = (own.mean(axis=0) * (1 - own.mean(axis=0)))[:, None] * np.square(means - others)
            total = np.square(centred).sum(axis=0)
            deviation = _nonzero(np.sqrt(np.maximum(total - N * between, 0) / max(N - 2, 1)))
            weight = (means - others) / deviation
            bias = (np.square(others / deviation) - np.square(means / deviation)).sum(axis=1) / 2
        weight = weight / deviation
        return LinearFit((_with_constant(weight, bias - weight @ centre, shares, kind),), kind)


def membership(targets: Targets) -> Floats:
    """1 for the classes that each image has, else 0: (N, K)."""
    return targets.members.astype(np.float64)


def _varied(shares: Floats) -> npt.NDArray[np.bool_]:
    """The classes, (K,), that some images have and others do not."""
    return np.logical_and(shares.any(axis=0), ~shares.all(axis=0))


def _with_constant(
    weight: Floats, bias: Floats, shares: Floats, kind: type[Targets]
) -> tuple[Floats, Floats]:
    """Weight (K, D) and bias (K,) of all classes from those of the varied ones."""
    varied, (certain,) = _varied(shares), kind.logits(np.ones(1), finite=False)
    weights = np.zeros((len(varied), weight.shape[1]))
    biases = np.where(shares.all(axis=0), certain, -np.inf)
    weights[varied], biases[varied] = weight, bias
    return weights, biases


def _blocks(features: Features, width: int) -> Iterator[Features]:
    """The rows in parts of which each needs at most `BLOCK` numbers, `width` per row."""
    rows = max(1, BLOCK // width)
    return (features[start : start + rows] for start in range(0, len(features), rows))


def _unit(features: Features) -> Features:
    """Rows of length 1; a row of zeros stays one, with similarity 0 to all others."""
    return features / _nonzero(np.linalg.norm(features, axis=1, keepdims=True))


def _nonzero(scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Scales to divide by: 1 instead of 0."""
    return np.where(scales == 0, scales.dtype.type(1), scales)


@dataclasses.dataclass(frozen=True, eq=False)
class Axes:
    """The eigenvectors of X^T X that have a positive eigenvalue, for standardized features X (N, D).

    Penalties |W|^2 are the same in these coordinates, and a solution has no part outside of them.

    Attributes:
        mean, scale: of the raw features, (D,) each; constant features have an infinite scale.
        vectors: (D, r).
        powers: the eigenvalues, (r,).
    """

    mean: Floats
    scale: Floats
    vectors: Floats
    powers: Floats

    def on_raw(self, weight: Floats, bias: Floats) -> tuple[Floats, Floats]:
        """Weight (k, D) and bias (k,) on the raw features, from weight (k, r) along the axes."""
        raw = weight @ self.vectors.T / self.scale
        return raw, bias - raw @ self.mean


def rotated(features: Features) -> tuple[Axes, Features]:
    """The axes of features (N, D), and the standardized features along them, float64 (N, r)."""
    X = features.astype(np.float64)
    mean = X.mean(axis=0)
    X -= mean
    deviation = np.sqrt(np.square(X).mean(axis=0))
    # The deviation of a constant feature may be a rounding error of its mean.
    scale = np.where(deviation > 1e-7 * np.abs(mean), _nonzero(deviation), np.inf)
    X /= scale
    wide = X.shape[1] > len(X)
    powers, vectors = np.linalg.eigh(X @ X.T if wide else X.T @ X)
    kept = powers > powers.max(initial=0.0) * max(X.shape) * np.finfo(np.float64).eps
    powers, vectors = powers[kept], vectors[:, kept]
    if wide:
        vectors = X.T @ (vectors / np.sqrt(powers))
    return Axes(mean, scale, vectors, powers), X @ vectors


class _Path:
    """Regressions of ascending strengths, each started at the solution of the one before.

    L-BFGS (Liu and Nocedal 1989) needs tens instead of thousands of steps in coordinates in which the Hessian
    is near the identity: along the eigenvectors of the features, divided by the roots of the curvature there.
    """

    def __init__(self, powers: Floats, scores: Features, shares: Floats, kind: type[Targets]) -> None:
        self.powers, self.scores, self.shares, self.kind = powers, scores, shares, kind
        self.weight = np.zeros((len(powers), shares.shape[1]))  # (r, K)
        self.bias = kind.logits(shares.mean(axis=0), finite=False)

    def solve(self, strength: float, tolerance: float) -> tuple[Floats, Floats]:
        """The weight (K, r) and bias (K,) for one C."""
        N, K = self.shares.shape
        if not K:  # all images have the same classes
            return self.weight.T, self.bias
        # Two weights of a softmax share the penalty that the one weight of a logistic regression bears.
        C = strength / 2 if self.kind.exclusive and K == 2 else strength
        Z, r = self.scores, len(self.powers)
        logits = Z @ self.weight.astype(Z.dtype) + self.bias
        p = self.kind.probabilities(logits)
        curvature = C * (p * (1 - p)).mean(axis=0)  # (K,)
        scale = np.vstack([1 + np.outer(self.powers, curvature), N * curvature]) ** -0.5  # (r + 1, K)

        def loss(flat: Floats) -> tuple[float, Floats]:
            both = flat.reshape(r + 1, K) * scale
            weight, bias = both[:-1], both[-1]
            logits = Z @ weight.astype(Z.dtype) + bias  # (N, K)
            losses, residuals = self.kind.loss_and_slope(logits, self.shares)
            slope = np.vstack([C * (Z.T @ residuals.astype(Z.dtype)) + weight, C * residuals.sum(axis=0)])
            return float(C * losses + np.square(weight).sum() / 2), (slope * scale).ravel()

        start = (np.vstack([self.weight, self.bias]) / scale).ravel()
        options = {"gtol": tolerance, "ftol": 0.0, "maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS}
        found = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
        if found.nit >= ITERATIONS:
            LOGGER.warning("logistic regression with C = %g stopped after %d steps", strength, found.nit)
        both = found.x.reshape(r + 1, K) * scale
        self.weight, self.bias = both[:-1], both[-1]
        return self.weight.T, self.bias
