"""Losses of classifiers, and what training does otherwise where an image may have several classes."""

import dataclasses
from abc import ABC, abstractmethod
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.targets import ClassIndices, ClassSets, Targets
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.intervals import Interval
from vitascope.models.heads import predicted
from vitascope.training.options.groups import Optimization
from vitascope.training.run.predictions import Predictions
from vitascope.training.tasks.task import Monitor


@dataclasses.dataclass(frozen=True)
class Criterion:
    """The loss of labels, with its options."""

    name: Literal["cross_entropy", "bce", "focal", "asymmetric"] = "cross_entropy"
    label_smoothing: float = 0.0

    @classmethod
    def of(cls, options: Optimization) -> Self:
        """The criterion of a run."""
        return cls(options.loss or "cross_entropy", options.label_smoothing)


def mean_of_classes(losses: Tensor, known: Tensor | None) -> Tensor:
    """The mean of the losses (B, K) of each image's classes, (B,), of those that are known, bool (B, K); None
    stands for all. An image without any, as a mixture may be, has the loss 0."""
    if known is None:
        return losses.mean(dim=1)
    return losses.where(known, 0).sum(dim=1) / known.sum(dim=1).clamp(min=1)


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float,
    positive_weights: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy of each class, the mean over the `known` ones, (B,); label smoothing as in timm.

    As in DeiT III (Touvron et al. 2022, section 3), all classes of a mixed image are targets of 1, whatever
    their shares. Logits (B, K) and targets, classes (B,) or shares (B, K). The loss of a class that applies
    is multiplied by its weight in `positive_weights`, (K,).
    """
    K = logits.shape[1]
    present = F.one_hot(targets, K) if targets.ndim == 1 else targets > 0
    smoothed = present.to(logits.dtype) * (1 - label_smoothing) + label_smoothing / K
    losses = F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none")
    if positive_weights is not None:  # pos_weight would also multiply the smoothing of absent classes
        losses = losses * positive_weights.where(present, 1)
    return mean_of_classes(losses, known)


FOCUS, POSITIVE_SHARE = 2.0, 0.25
"""The exponent and, where any class may apply, the weight of those that do (Lin et al. 2017, section 4.1)."""
ABSENT_FOCUS, PRESENT_FOCUS, MARGIN = 4.0, 1.0, 0.05
"""Exponents of the classes that do not and that do apply, and what is taken from the probability of the
former (the defaults of Ridnik et al. 2021)."""


def focal_loss(logits: Tensor, shares: Tensor) -> Tensor:
    """Cross-entropy times (1 - p)^2, where p is the probability of what is right (Lin et al. 2017, equations
    4 and 5): (B,), for logits (B, K) and the classes' shares (B, K)."""
    logs = logits.log_softmax(dim=1)
    return -(shares * (1 - logs.exp()) ** FOCUS * logs).sum(dim=1)


def binary_focal_loss(
    logits: Tensor, shares: Tensor, weights: Tensor | None = None, known: Tensor | None = None
) -> Tensor:
    """The focal loss of each class, times `weights` (K,) where it applies; the mean of `known` ones, (B,)."""
    present = (1 - logits.sigmoid()) ** FOCUS * F.logsigmoid(logits)
    absent = logits.sigmoid() ** FOCUS * F.logsigmoid(-logits)
    positive = POSITIVE_SHARE if weights is None else POSITIVE_SHARE * weights
    weighted = positive * shares * present + (1 - POSITIVE_SHARE) * (1 - shares) * absent
    return -mean_of_classes(weighted, known)


def asymmetric_loss(
    logits: Tensor, shares: Tensor, weights: Tensor | None = None, known: Tensor | None = None
) -> Tensor:
    """The focal loss with an exponent for each case, and with probabilities of absent classes that are lower
    by a margin (Ridnik et al. 2021, equations 6 and 7): the mean over the classes, (B,). Arguments as of
    `binary_focal_loss`."""
    p = logits.sigmoid()
    shifted = (p - MARGIN).clamp(min=0)
    present = (1 - p) ** PRESENT_FOCUS * F.logsigmoid(logits)
    absent = shifted**ABSENT_FOCUS * torch.log1p(-shifted)  # shifted <= 0.95
    positive = present if weights is None else weights * present
    return -mean_of_classes(shares * positive + (1 - shares) * absent, known)


class Losses(ABC):
    """The losses of one kind of labels."""

    targets: type[Targets]
    """The kind."""
    images: str
    """What its images have, in words."""
    criteria: tuple[str, ...]
    """The first is the default."""

    @abstractmethod
    def losses(
        self,
        criterion: Criterion,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        known: Tensor | None,
    ) -> Tensor:
        """The loss of each image, (B,), for logits (B, K) and labels or shares of the classes, (B, ...).

        The classes have weights (K,); of `known` (B, K) are the labels.
        """

    @abstractmethod
    def weighted_mean(self, losses: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """The mean of losses (B,), each by the weight (K,) of its image's classes.

        It is divided by the number of images, not by the sum of their weights: a part of a batch, in
        accumulation or in another process, needs to know nothing about the other parts.
        """

    @abstractmethod
    def decided(self, logits: Tensor) -> Tensor:
        """The answers for logits (B, K) in the form of the labels, (B, ...)."""

    @abstractmethod
    def of_decisions(self, logits: Tensor, decisions: Tensor) -> Tensor:
        """The loss of logits (B, K) against the decisions of a teacher, (B,)."""

    @abstractmethod
    def divergence(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """KL(teacher || student) of each image at a temperature, (B,), from logits (B, K).

        The gradient of softened probabilities decreases as 1 / temperature^2 (Hinton et al. 2015, section 2).
        """

    @abstractmethod
    def monitor(self, balance: Tensor | None) -> Monitor:
        """The validation value that selects weights, with classes that count by weights (K,)."""

    @abstractmethod
    def validated(self, predictions: Predictions, balance: Tensor | None) -> dict[str, float]:
        """What a validation measures beside the loss and the accuracy."""

    @abstractmethod
    def worse(self, last: Predictions, best: Predictions, balance: Tensor | None) -> bool:
        """Whether the last weights are worse than the best ones by more than chance, on the same images."""


class SingleLabel(Losses):
    """One class per image: labels (B,), or shares of the classes (B, K)."""

    targets, images = ClassIndices, "one class each"
    criteria = ("cross_entropy", "bce", "focal")

    def losses(
        self,
        criterion: Criterion,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        known: Tensor | None,
    ) -> Tensor:
        """As `Losses.losses`; weights count in `weighted_mean`."""
        if criterion.name == "bce":
            return binary_cross_entropy(logits, targets, criterion.label_smoothing)
        if criterion.name == "focal":
            shares = F.one_hot(targets, logits.shape[1]) if targets.ndim == 1 else targets
            return focal_loss(logits, shares.to(logits.dtype))
        smoothing = criterion.label_smoothing
        return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")

    def weighted_mean(self, losses: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """The mean of losses (B,), each times sum_k t_k w_k for its targets t before smoothing."""
        if weights is None:
            return losses.mean()
        return (losses * (weights[targets] if targets.ndim == 1 else targets @ weights)).mean()

    def decided(self, logits: Tensor) -> Tensor:
        """The most probable class, (B,)."""
        return predicted(logits)

    def of_decisions(self, logits: Tensor, decisions: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(logits, decisions, reduction="none")

    def divergence(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Of the classes."""
        ours, theirs = (values.div(temperature).log_softmax(dim=1) for values in (student, teacher))
        return temperature**2 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)

    def monitor(self, balance: Tensor | None) -> Monitor:
        """The loss, weighted by class where the training is."""
        return Monitor() if balance is None else Monitor("weighted_loss", "weighted validation loss")

    def validated(self, predictions: Predictions, balance: Tensor | None) -> dict[str, float]:
        """The weighted loss, the balanced accuracy, and the share of the most frequent class."""
        score = predictions.score
        weighted = {} if balance is None else {"weighted_loss": weighted_loss(predictions, balance)}
        return {**weighted, "balanced_accuracy": score.mean_of_classes, "majority": score.guessed}

    def worse(self, last: Predictions, best: Predictions, balance: Tensor | None) -> bool:
        """Whether the loss is higher in a paired t-test with a level of 95%, and no more answers are right: a
        loss alone may grow while a model becomes more accurate and too sure of itself."""
        counts = np.ones(len(last.labels)) if balance is None else balance.cpu().numpy()[last.labels]
        gap = Interval.of(counts * (losses_of(last) - losses_of(best)))
        return gap.verdict == "better" and bool(counts @ last.correct <= counts @ best.correct)


class MultiLabel(Losses):
    """Any number of classes per image: labels bool (B, K), int8 with -1 where unknown, or mixed, floats."""

    targets, images = ClassSets, "several classes"
    criteria = ("bce", "focal", "asymmetric")

    def losses(
        self,
        criterion: Criterion,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        known: Tensor | None,
    ) -> Tensor:
        """As `Losses.losses`; weights are of the classes that apply, against 1 for those that do not."""
        if criterion.name == "bce":
            return binary_cross_entropy(logits, targets, criterion.label_smoothing, weights, known)
        loss = asymmetric_loss if criterion.name == "asymmetric" else binary_focal_loss
        return loss(logits, targets.to(logits.dtype), weights, known)

    def weighted_mean(self, losses: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """The mean of losses, which are weighted already."""
        return losses.mean()

    def decided(self, logits: Tensor) -> Tensor:
        """The classes that are more probable than not, bool (B, K)."""
        return logits > 0

    def of_decisions(self, logits: Tensor, decisions: Tensor) -> Tensor:
        """Binary cross-entropy."""
        return binary_cross_entropy(logits, decisions, label_smoothing=0.0)

    def divergence(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Of each class's two outcomes, and the mean over the classes."""
        ours, theirs = (F.logsigmoid(torch.stack([x, -x], dim=2) / temperature) for x in (student, teacher))
        divergences = F.kl_div(ours, theirs, reduction="none", log_target=True)
        return temperature**2 * divergences.sum(dim=2).mean(dim=1)

    def monitor(self, balance: Tensor | None) -> Monitor:
        """The mean average precision."""
        return Monitor("map", "validation mAP", higher=True)

    def validated(self, predictions: Predictions, balance: Tensor | None) -> dict[str, float]:
        """The mean average precision; UserError where no image has a class."""
        if not predictions.labels.any():
            images = counted(len(predictions.labels), f"readable {predictions.split} image")
            raise UserError(
                f"none of the {images} has a class, so they have no mAP: repair the others, or give your "
                "own split"
            )
        return {"map": predictions.targets.quality(predictions.probabilities)}

    def worse(self, last: Predictions, best: Predictions, balance: Tensor | None) -> bool:
        """Whether the 95% interval of the difference of the mAPs is below 0."""
        return last.targets.difference(last.probabilities, best.probabilities).high < 0


LOSSES: dict[type[Targets], Losses] = {kind.targets: kind for kind in (SingleLabel(), MultiLabel())}
"""By the kind of labels."""


def losses_of(predictions: Predictions) -> npt.NDArray[np.float64]:
    """The cross-entropy of each image of one class, nats, (N,)."""
    labels, probabilities = predictions.labels, predictions.probabilities.astype(np.float64)
    own = probabilities[np.arange(len(labels)), labels]  # (N,)
    return -np.log(np.maximum(own, np.finfo(np.float32).tiny))


def weighted_loss(predictions: Predictions, weights: Tensor) -> float:
    """The mean cross-entropy of images of one class, by the weights (K,) of their classes."""
    return float(np.average(losses_of(predictions), weights=weights.cpu().numpy()[predictions.labels]))
