"""Classification of images, also by a teacher (Touvron et al. 2021, DeiT, section 4)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.data.loading import Loader
from vitascope.data.preprocess import Preprocess
from vitascope.data.splits import ImageSet, absent_classes, check_every_class
from vitascope.data.targets import shares_of
from vitascope.errors import UserError, check_choice, printable
from vitascope.evaluation.calibrate import calibrate_model
from vitascope.evaluation.measure import Evaluation, measure
from vitascope.evaluation.novelty import Novelty
from vitascope.formatting import counted
from vitascope.model.heads import DistilledHead, predicted, scores
from vitascope.model.options import EVEN
from vitascope.model.vision_model import VisionModel, evaluation_mode
from vitascope.model.vit import VisionTransformer
from vitascope.options.groups import Balance, Distillation
from vitascope.options.recipes import TrainConfig
from vitascope.predict.engine import Answers, Engine, TorchEngine
from vitascope.run.average_precision import mean_average_precision
from vitascope.run.measures import score_of
from vitascope.run.predictions import Predictions
from vitascope.training.distributed import gather, print_first
from vitascope.training.tasks.task import Examples, Finished, Monitor, Sums
from vitascope.training.tasks.teachers import Teacher


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


def focal_loss(
    logits: Tensor,
    shares: Tensor,
    several: bool,
    weights: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Cross-entropy times (1 - p)^2, where p is the probability of what is right (Lin et al. 2017, equations
    4 and 5): (B,), for logits (B, K) and the classes' shares (B, K).

    Of several classes per image it is the mean of the binary losses of the `known` ones, times `weights` (K,)
    where a class applies.
    """
    if not several:
        logs = logits.log_softmax(dim=1)
        return -(shares * (1 - logs.exp()) ** FOCUS * logs).sum(dim=1)
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
    `focal_loss`."""
    p = logits.sigmoid()
    shifted = (p - MARGIN).clamp(min=0)
    present = (1 - p) ** PRESENT_FOCUS * F.logsigmoid(logits)
    absent = shifted**ABSENT_FOCUS * torch.log1p(-shifted)  # shifted <= 0.95
    positive = present if weights is None else weights * present
    return -mean_of_classes(shares * positive + (1 - shares) * absent, known)


class ModuleEngine(Engine):
    """A module in training, which may be sharded or return other dtypes: it is only called."""

    def __init__(
        self,
        module: nn.Module,
        preprocess: Preprocess,
        class_names: tuple[str, ...],
        device: torch.device,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self.module, self.preprocess, self.device, self.precision = module, preprocess, device, precision
        self.class_names, self.num_classes = class_names, len(class_names)
        self.description = f"a module in training, on {device}"

    def answers(self, pixels: Tensor) -> Answers:
        """As `Engine.answers`."""
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            logits = self.module(self.preprocess.normalize(pixels.to(self.device))).float()
        return Answers(logits, scores(logits, self.meaning))


def engine_of(model: VisionModel, config: TrainConfig) -> TorchEngine:
    """The engine with which `vitascope evaluate` measures a finished model, on its device.

    The precision is the run's, but for fp16, which is for training.
    """
    asked = config.execution.precision
    precision = "auto" if asked == "fp16" else asked
    return TorchEngine(model, precision=precision, device=str(next(model.parameters()).device))


@dataclasses.dataclass(frozen=True)
class Classify:
    """Cross-entropy with label smoothing (Szegedy et al. 2016), binary cross-entropy, or one of the losses
    that weaken what is easy, which are not smoothed.

    With several classes per image, labels are bool (B, K) instead of int64 (B,).
    """

    preprocess: Preprocess
    label_smoothing: float = 0.0
    criterion: Literal["cross_entropy", "bce", "focal", "asymmetric"] = "cross_entropy"
    class_weights: Tensor | None = None
    """Of one class per image: weights of the images' losses by class, (K,), with the mean 1 over the training
    images. Of several: weights of the classes that apply, against 1 for those that do not."""
    several: bool = False
    """Whether an image may have several classes."""
    unknown: bool = False
    """Whether it may be unknown if an image has a class; such labels are -1 or, mixed, NaN."""
    balance: Tensor | None = None
    """Of one class per image: what its images count for in training, (K,), by their weights or by how often
    they are drawn. The loss that selects weights counts them so too."""

    @property
    def monitor(self) -> Monitor:
        """The loss, weighted by class where the training is, or the mean average precision of several classes
        per image."""
        if self.several:
            return Monitor("map", "validation mAP", higher=True)
        return Monitor() if self.balance is None else Monitor("weighted_loss", "weighted validation loss")

    def module(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean loss, a scalar with gradients, and sums over the images: `loss`, `accuracy`, `count`."""
        logits = module(self.inputs(examples)).float()  # (B, K)
        loss = self.weighted_mean(self.label_losses(logits, examples.targets), examples.targets)
        return loss, classified(loss, logits, examples.labels)

    def inputs(self, examples: Examples) -> Tensor:
        """The module's input: normalized images, (B, C, H, W)."""
        return self.preprocess.normalize_(examples.images)

    def label_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image, (B,), for logits (B, K) and labels (B,) or probabilities (B, K)."""
        positive, known = self.class_weights if self.several else None, None
        if self.unknown:
            targets = shares_of(targets)  # (B, K)
            known, targets = ~targets.isnan(), targets.nan_to_num()
        if self.criterion == "bce":
            return binary_cross_entropy(logits, targets, self.label_smoothing, positive, known)
        if self.criterion in ("focal", "asymmetric"):
            shares = F.one_hot(targets, logits.shape[1]) if targets.ndim == 1 else targets
            shares = shares.to(logits.dtype)
            if self.criterion == "asymmetric":
                return asymmetric_loss(logits, shares, positive, known)
            return focal_loss(logits, shares, self.several, positive, known)
        return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing, reduction="none")

    def weighted_mean(self, losses: Tensor, targets: Tensor) -> Tensor:
        """The mean of losses (B,), each times sum_k t_k w_k for its targets t before smoothing; of several
        classes per image, whose losses are weighted already, the mean alone.

        It is divided by the number of images, not by the sum of their weights: a part of a batch, in
        accumulation or in another process, needs to know nothing about the other parts.
        """
        if self.class_weights is None or self.several:
            return losses.mean()
        weights = self.class_weights
        return (losses * (weights[targets] if targets.ndim == 1 else targets @ weights)).mean()

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Cross-entropy without smoothing, without and with weights, and what `Task.validate` lists."""
        names = loader.images.class_names
        engine = ModuleEngine(module, self.preprocess, names, loader.device, precision)
        if self.several:
            engine.meaning, engine.thresholds = "independent", (EVEN,) * len(names)
        with evaluation_mode(module):
            measured = measure(engine, loader, gather)
        if self.several:
            if not measured.labels.any():
                images = counted(len(measured.labels), f"readable {measured.split} image")
                raise UserError(
                    f"none of the {images} has a class, so they have no mAP: repair the others, or give your "
                    "own split"
                )
            mean = mean_average_precision(measured.labels, measured.scored)
            return {"loss": measured.loss, "accuracy": measured.accuracy, "map": mean}
        score = score_of(measured.labels, measured.probabilities)
        weighted = {} if self.balance is None else {"weighted_loss": weighted_loss(measured, self.balance)}
        return {
            "loss": measured.loss,
            **weighted,
            "accuracy": measured.accuracy,
            "balanced_accuracy": score.balanced,
            "majority": score.majority,
        }

    def calibrate(self, finished: Finished) -> list[Novelty]:
        """Set the temperature, and of several classes per image the thresholds of the highest F1; else what
        the model knows about its answers."""
        model, config = finished.model, finished.config
        calibration = calibrate_model(
            model,
            lambda: engine_of(model, config),
            finished.val_loader,
            finished.train_loader,
            gather,
        )
        print_first("answers " + "\n        ".join(calibration.lines()))
        return list(calibration.novelties)

    def test(self, finished: Finished) -> Evaluation:
        """Evaluate the finished model and print the result."""
        tested = measure(engine_of(finished.model, finished.config), finished.loader, gather)
        if tested.fitted:
            tested = dataclasses.replace(tested, fitted_to=len(tested.indices))
        score = tested.score
        lines = [
            f"{tested.split:<6} {score.result()}, after {finished.seconds:.1f} s of training",
            score.compared(),
            tested.fitted_in_words() if tested.several else "",  # of which the line above shows some
            score.warning(finished.run.better_start),
            absent_classes(finished.loader.images),
            *(f"left out: {printable(reason)}" for reason in tested.unreadable),
        ]
        print_first("\n       ".join(filter(None, lines)))
        return tested

    def draw(self, finished: Finished, tested: Evaluation) -> dict[str, Path]:
        """Draw the figures of a classifier."""
        from vitascope.report.figures import draw_figures  # matplotlib delays the start of training

        images = finished.loader.images.subset(tested.split, tested.indices)
        print_first("drawing the figures")
        return draw_figures(finished.run, finished.model, images, tested)


def losses_of(predictions: Predictions) -> npt.NDArray[np.float64]:
    """The cross-entropy of each image of one class, nats, (N,)."""
    labels, probabilities = predictions.labels, predictions.probabilities.astype(np.float64)
    own = probabilities[np.arange(len(labels)), labels]  # (N,)
    return -np.log(np.maximum(own, np.finfo(np.float32).tiny))


def weighted_loss(predictions: Predictions, weights: Tensor) -> float:
    """The mean cross-entropy of images of one class, by the weights (K,) of their classes."""
    return float(np.average(losses_of(predictions), weights=weights.cpu().numpy()[predictions.labels]))


def class_weights_of(balance: Balance, images: ImageSet) -> Tensor | None:
    """The weights (K,) of the training images' classes; None without any.

    Raises:
        UserError: a class that the images do not have; with `balanced`, one without images.
    """
    if balance.balances_loss:
        return balanced_weights(images)
    named = balance.weights_by_class()
    for name in named:
        check_choice("class", name, images.class_names)
    if not named:
        return None
    return torch.tensor([named.get(name, 1.0) for name in images.class_names])


def balanced_weights(images: ImageSet, option: str = "class_weights=balanced") -> Tensor:
    """The weight of each of K classes with n_c of N images, (K,): N / (K n_c), scikit-learn's "balanced".

    With several classes per image it is (N - n_c) / n_c: the images without the class over those with it.
    Errors name the option.

    Raises:
        UserError: a class without images.
    """
    check_every_class(images, option)
    counts, N = torch.from_numpy(images.truth.counts).double(), len(images)
    known = torch.from_numpy(images.truth.known)
    return (N / (len(counts) * counts) if images.truth.exclusive else (known - counts) / counts).float()


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether exactly an image's class or classes are predicted, (B,), from logits (B, K); of those that are
    known, where labels are -1."""
    if labels.ndim == 1:
        return predicted(logits) == labels
    agrees = (logits > 0) == (labels > 0)
    return (agrees | (labels < 0) if labels.dtype == torch.int8 else agrees).all(dim=1)


def classified(loss: Tensor, logits: Tensor, labels: Tensor) -> Sums:
    """Sums over images from their mean loss, logits (B, K) and labels (B,) or, of several classes, (B, K)."""
    count = torch.full((), float(len(labels)), device=loss.device)  # a copy from the CPU would have to wait
    correct = right(logits, labels).sum()
    return {"loss": loss.detach() * count, "accuracy": correct, "count": count}


# Distillation: a teacher trains a second token


class BothHeads(nn.Module):
    """A student with separate outputs: images (B, C, H, W) -> logits (B, K) of both heads."""

    def __init__(self, body: VisionTransformer) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the class head and of the distillation head."""
        assert isinstance(self.body.head, DistilledHead)
        return self.body.head.both(self.body.embed(images))


class MeanOfHeads(nn.Module):
    """The mean of both heads' logits, (B, K); it only calls the module, which may be sharded."""

    def __init__(self, both: nn.Module) -> None:
        super().__init__()
        self.both = both

    def forward(self, images: Tensor) -> Tensor:
        """The mean of both heads' logits."""
        by_label, by_teacher = self.both(images)
        return (by_label + by_teacher) / 2


@dataclasses.dataclass(frozen=True)
class Distill(Classify):
    """Labels train the class token, a teacher the distillation token, with the same augmented images.

    The teacher's decision is never smoothed (section 4, "Hard-label distillation").
    """

    options: Distillation = dataclasses.field(kw_only=True)
    teacher: Teacher = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        theirs, ours = self.teacher.preprocess.channels, self.preprocess.channels
        if theirs != ours:
            raise UserError(
                f"teacher {self.teacher.name} takes images of {_channels(theirs)}, the student of "
                f"{_channels(ours)}: both must take the same"
            )

    def module(self, model: nn.Module) -> nn.Module:
        """The model with separate outputs; UserError if it does not have two heads."""
        assert isinstance(model, VisionTransformer)
        return BothHeads(model)

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """(1 - w) label_loss(class head) + w L: L is that of equation 3 if hard, of equation 2 if soft.

        Class weights apply to both terms, as balanced sampling would; of several classes per image, to the
        first one.
        The sum `agree` counts how often the distillation head and the teacher predict the same class.
        """
        by_label, by_teacher = module(self.preprocess.normalize(examples.images))  # (B, K) each
        by_label, by_teacher = by_label.float(), by_teacher.float()
        taught = self.teacher(examples.images)  # (B, K)
        from_labels = self.label_losses(by_label, examples.targets)  # (B,)
        weight = self.options.distill_weight
        decided = taught > 0 if self.several else predicted(taught)  # (B, K) or (B,)
        if self.options.distill == "soft":
            from_teacher = self.soft_losses(by_teacher, taught)
        elif self.several:
            from_teacher = binary_cross_entropy(by_teacher, decided, label_smoothing=0.0)
        else:
            from_teacher = F.cross_entropy(by_teacher, decided, reduction="none")  # (B,)
        loss = self.weighted_mean((1 - weight) * from_labels + weight * from_teacher, examples.targets)
        sums = classified(loss, (by_label + by_teacher) / 2, examples.labels)
        return loss, sums | {"agree": right(by_teacher, decided).sum()}

    def soft_losses(self, student: Tensor, teacher: Tensor) -> Tensor:
        """KL(teacher || student) of each image at the temperature, (B,), from logits (B, K); with several
        classes per image, of each class's two outcomes, and the mean over the classes."""
        tau = self.options.temperature
        # The gradient of softened probabilities decreases as 1 / tau^2 (Hinton et al. 2015, section 2).
        if not self.several:
            ours, theirs = (values.div(tau).log_softmax(dim=1) for values in (student, teacher))  # (B, K)
            return tau**2 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)
        # The class applies, or does not.
        ours, theirs = (F.logsigmoid(torch.stack([x, -x], dim=2) / tau) for x in (student, teacher))
        return tau**2 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=2).mean(dim=1)

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Cross-entropy and accuracy of both heads' mean; the teacher is not used."""
        return super().validate(MeanOfHeads(module), loader, precision)


def _channels(count: int) -> str:
    return {1: "1 channel (grey)", 3: "3 channels (colour)"}.get(count, f"{count} channels")
