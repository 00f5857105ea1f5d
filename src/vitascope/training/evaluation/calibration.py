"""Calibration: the temperature that makes probabilities true (Guo et al. 2017), and how true they are.

The temperature divides the logits. It is found on images that the classifier was not trained on, and becomes
part of its head, so that every runtime and every export computes calibrated probabilities.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.data.targets import Targets
from vitascope.formatting import counted
from vitascope.models.ensemble import Ensemble
from vitascope.models.heads import scale_logits
from vitascope.models.trust import Familiarity, ranked
from vitascope.models.vision_model import VisionModel

Floats = npt.NDArray[np.float64]

SHARPEST = 100.0
"""The largest factor of the logits."""
STEPS = 40
"""Of the bisection, each of which halves the interval of the factor's logarithm."""
GAIN = 3.32
"""Nats by which one parameter has to be better, in all, to be better than by chance: half the 99% quantile of
chi-squared with one degree of freedom (Wilks 1938)."""
SPREAD = 0.5
"""Standard deviation of the logarithm of a temperature before any image is seen. With `GAIN`, the expected
log loss of other images then rises by less than 0.005 nats, whatever the number of images, and falls where
answers are too sure or too unsure (benchmarks/results/2026-11-28-few-images.md)."""
FEWEST = 100
"""Validation images from which on they have a temperature: they also chose the weights."""
MOST_BYTES = 1_500_000
"""Of the directions and means behind familiarity; all numbers together stay below 2 MB."""
LEVELS = 1000
"""Distances that are kept."""
LEAST_VARIANCE = 1e-3
"""Of a direction, as a share of the mean one: below it, rounding as of bfloat16 would be a difference."""
EACH = 50
"""Images with a class, and without it, from which on it may have its own temperature."""


UNKNOWN = -1e9
"""The logit where a label is unknown: at any factor it has no loss and no slope."""


def sharpness(targets: Targets, logits: Floats, unknown: float = 2) -> float:
    """The factor of the logits (N, K) of a classifier without a confidence of its own, from images that it
    did not see; it changes no order of classes.

    Its inverse is the temperature of Guo et al. (2017, section 4.2), for labels that are wrong as often as
    so many more images of an `unknown` class would make them, two in Platt (1999, section 2.2, for two
    classes): where all answers are right, it stays finite.
    """
    wide, members = _of_known(targets, logits), targets.members
    share = unknown / (unknown + targets.known.mean())
    wanted = (1 - share) * wide[members].sum() + share * wide[wide > UNKNOWN].sum() / targets.outcomes
    return _sharpness(targets, wide, wanted)


def _of_known(targets: Targets, logits: Floats) -> Floats:
    """The logits (N, K), with `UNKNOWN` where the label is unknown."""
    return np.where(targets.rows < 0, UNKNOWN, logits) if targets.partial else logits


def mean_loss(targets: Targets, logits: Floats) -> float:
    """The loss of logits (N, K) per image, nats; the mean over the known classes where any may apply."""
    return targets.total_loss(targets.members, _of_known(targets, logits)) / targets.decisions


def _sharpness(targets: Targets, logits: Floats, wanted: float, spread: float = math.inf) -> float:
    """By bisection: the loss is convex in the factor, and its slope is that of the sum of the logits that the
    classes are expected to have, against those that they have. To it comes that of a normal prior of the
    factor's logarithm, with a standard deviation."""
    low, high = -np.log(SHARPEST), np.log(SHARPEST)
    for _ in range(STEPS):
        middle = (low + high) / 2
        factor = np.exp(middle)
        slope = factor * ((targets.probabilities(factor * logits) * logits).sum() - wanted)
        if slope + middle / spread**2 > 0:
            high = middle
        else:
            low = middle
    return float(np.exp(low))


@dataclasses.dataclass(frozen=True, eq=False)
class Temperature:
    """What validation images say about the temperature of a classifier.

    Attributes:
        values: that of each class, (K,); all are equal where one class applies. 1 leaves the logits alone.
        images: that it was found on.
        reason: why it is 1; empty if it is not.
        out_of_fold: whether several classifiers answered, each about images that it had no part of.
    """

    values: Floats
    images: int
    reason: str = ""
    out_of_fold: bool = False

    @classmethod
    def of(cls, targets: Targets, logits: npt.NDArray[np.floating], *, out_of_fold: bool = False) -> Self:
        """The most probable temperature of logits (N, K), which is 1 where the images cannot tell.

        They can if it is better by more than chance, and if they are out of fold, or not few. Where any class
        may apply, a class with enough images has its own.
        """
        wide, N = _of_known(targets, logits.astype(np.float64)), len(targets)
        if N < FEWEST and not out_of_fold:
            reason = f"fitting one needs {FEWEST} validation images, or out-of-fold answers, as folds have"
            return cls(np.ones(wide.shape[1]), N, reason)
        members = targets.members
        factor, reason = _factor(targets, members, wide)
        values = np.full(wide.shape[1], 1 / factor)
        for k in targets.classes_alone(EACH):
            values[k] /= _factor(targets, members[:, k], factor * wide[:, k])[0]
        return cls(values, N, reason if (values == 1).all() else "", out_of_fold)

    def apply(self, model: VisionModel) -> None:
        """Divide the logits of a model, in its head."""
        factors = torch.from_numpy(1 / self.values).float()
        if isinstance(model, Ensemble):
            model.sharpness.mul_(factors)
        elif not self.reason:
            scale_logits(model.head, factors)

    def __str__(self) -> str:
        images = counted(self.images, "out-of-fold answer" if self.out_of_fold else "validation image")
        if self.reason:
            return f"temperature 1: {self.reason} ({images})"
        low, high = self.values.min(), self.values.max()
        shown = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f} by class"
        return f"temperature {shown}, from {images}"


def _factor(targets: Targets, members: npt.NDArray[np.bool_], logits: Floats) -> tuple[float, str]:
    """The most probable factor of the logits of all classes, or of one, and the reason why it is 1."""
    factor = _sharpness(targets, logits, logits[members].sum(), SPREAD)
    gain = targets.total_loss(members, logits) - targets.total_loss(members, factor * logits)
    gain -= np.log(factor) ** 2 / (2 * SPREAD**2)
    if gain > GAIN:
        return factor, ""
    return 1.0, f"another one is better by {max(0.0, gain):.1f} nats, which may be chance"


# Familiarity


def class_gaussians(features: Tensor, labels: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    """Gaussian classes with one covariance: `center`, `projection` and `means` as of `Familiarity`.

    Of at least two images with features (N, D) and one class each, (N,). The covariance is Ledoit and Wolf's
    (2004), so that few images suffice.
    """
    wide = features.double().numpy()
    center = wide.mean(axis=0)
    _, places = np.unique(labels, return_inverse=True)
    sums = np.zeros((places.max() + 1, wide.shape[1]))
    np.add.at(sums, places, wide - center)
    means = sums / np.bincount(places)[:, None]  # (K, D), of the classes that have images
    variances, directions = np.linalg.eigh(shrunk_covariance(wide - center - means[places]))  # ascending
    rank = max(1, min(len(variances), MOST_BYTES // (4 * sum(means.shape))))
    kept = np.maximum(variances[:rank], max(LEAST_VARIANCE * variances.mean(), np.finfo(np.float32).tiny))
    projection = directions[:, :rank] / np.sqrt(kept)  # (D, r)
    values = {"center": center, "projection": projection, "means": means @ projection}
    return {name: torch.from_numpy(numbers).float() for name, numbers in values.items()}


def shrunk_covariance(deviations: Floats) -> Floats:
    """The covariance (D, D) of deviations from a mean (N, D), drawn to a multiple of the identity as
    far as it helps in the mean (Ledoit and Wolf 2004, section 3.3)."""
    N, D = deviations.shape
    sample = deviations.T @ deviations / N
    scale = np.trace(sample) / D  # m
    distance = ((sample - scale * np.eye(D)) ** 2).sum()  # D d^2
    noise = (((deviations**2).sum(axis=1) ** 2).sum() / N - (sample**2).sum()) / N  # D b^2
    share = min(1.0, noise / distance) if distance else 0.0
    return np.asarray((1 - share) * sample + share * scale * np.eye(D))


def familiarity_of(gaussians: Mapping[str, Tensor], distances: Tensor) -> Familiarity:
    """The familiarity at the distances (n,) of at least two images to which the classes were not fitted."""
    levels, images = ranked(distances, LEVELS).flip(0), torch.tensor(float(len(distances)))
    return Familiarity(**gaussians, levels=levels, images=images)
