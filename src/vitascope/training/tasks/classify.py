"""Classification, by labels alone, or also by a teacher (Touvron et al. 2021, DeiT, section 4)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.data.loading import Loader
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.model.heads import DistilledHead
from vitascope.model.vit import VisionTransformer
from vitascope.report.figures import draw_figures
from vitascope.training.distributed import print_first
from vitascope.training.evaluate import Evaluation, predict_split
from vitascope.training.options import Distillation
from vitascope.training.tasks.task import Examples, Finished, Sums
from vitascope.training.tasks.teachers import Teacher


def binary_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """Binary cross-entropy of each class, the mean over images and classes; label smoothing as in timm.

    As in DeiT III (Touvron et al. 2022, section 3), all classes of a mixed image are targets of 1, whatever
    their shares. Logits (B, K) and targets, classes (B,) or shares (B, K).
    """
    K = logits.shape[1]
    present = F.one_hot(targets, K) if targets.ndim == 1 else targets > 0
    smoothed = present.to(logits.dtype) * (1 - label_smoothing) + label_smoothing / K
    return F.binary_cross_entropy_with_logits(logits, smoothed)


@dataclasses.dataclass(frozen=True)
class Classify:
    """Cross-entropy with label smoothing (Szegedy et al. 2016), or binary cross-entropy."""

    preprocess: Preprocess
    label_smoothing: float = 0.0
    criterion: Literal["cross_entropy", "bce"] = "cross_entropy"

    def module(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean loss, a scalar with gradients, and sums over the images: `loss`, `correct`, `count`."""
        logits = module(self.preprocess.normalize_(examples.images)).float()  # (B, K)
        loss = self.label_loss(logits, examples.targets)
        return loss, classified(loss, logits, examples.labels)

    def label_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of logits (B, K) by the labels, (B,) or mixed to (B, K)."""
        criterion = binary_cross_entropy if self.criterion == "bce" else F.cross_entropy
        return criterion(logits, targets, label_smoothing=self.label_smoothing)

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Cross-entropy without smoothing, accuracy, and the share of the most frequent class."""
        found = predict_split(module, loader, precision=precision)
        return {"loss": found.loss, "accuracy": found.accuracy, "majority": found.score.majority}

    def test(self, finished: Finished) -> Evaluation:
        """Evaluate the finished model and print its accuracy."""
        tested = predict_split(finished.model, finished.loader, precision=finished.precision)
        score = tested.score
        warning = score.warning(from_scratch=finished.config.weights is None)
        print_first(
            f"{tested.split:<6} {tested.accuracy:.2%} right: {score.right} of "
            f"{counted(score.total, 'image')}, after {finished.seconds:.1f} s of training\n"
            f"       {score.compared()}" + (f"\n       {warning}" if warning else "")
        )
        return tested

    def draw(self, finished: Finished, tested: Evaluation) -> dict[str, Path]:
        """Draw the figures of a classifier."""
        images = finished.loader.images.subset(tested.split, tested.indices)
        print_first("drawing the figures")
        return draw_figures(finished.run, finished.model, images, tested.probabilities)


def classified(loss: Tensor, logits: Tensor, labels: Tensor) -> Sums:
    """Sums over images from their mean loss, logits (B, K) and labels (B,)."""
    count = torch.full((), float(len(labels)), device=loss.device)  # a copy from the CPU would have to wait
    correct = (logits.argmax(dim=1) == labels).sum()
    return {"loss": loss.detach() * count, "correct": correct, "count": count}


# Distillation: a teacher trains a second token


class BothHeads(nn.Module):
    """A student with separate outputs: images (B, C, H, W) -> logits (B, K) of both heads."""

    def __init__(self, body: VisionTransformer) -> None:
        super().__init__()
        if not isinstance(body.head, DistilledHead):
            raise UserError(
                "a student needs a distillation token with its own head: distillation_token=True, with pool "
                f'"cls" and head "linear" or "zero", not {body.config.readout.pool!r} and '
                f"{body.config.readout.head!r}"
            )
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

        The sum `agree` counts how often the distillation head and the teacher predict the same class.
        """
        by_label, by_teacher = module(self.preprocess.normalize(examples.images))  # (B, K) each
        by_label, by_teacher = by_label.float(), by_teacher.float()
        taught = self.teacher(examples.images)  # (B, K)
        from_labels = self.label_loss(by_label, examples.targets)
        weight = self.options.distill_weight
        if self.options.distill == "hard":
            from_teacher = F.cross_entropy(by_teacher, taught.argmax(dim=1))
        else:
            tau = self.options.temperature
            student, teacher = (values.div(tau).log_softmax(dim=1) for values in (by_teacher, taught))
            # The gradient of softened probabilities decreases as 1 / tau^2 (Hinton et al. 2015, section 2).
            from_teacher = tau**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        loss = (1 - weight) * from_labels + weight * from_teacher
        sums = classified(loss, (by_label + by_teacher) / 2, examples.labels)
        return loss, sums | {"agree": (by_teacher.argmax(dim=1) == taught.argmax(dim=1)).sum()}

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Cross-entropy and accuracy of both heads' mean; the teacher is not used."""
        return super().validate(MeanOfHeads(module), loader, precision)


def _channels(count: int) -> str:
    return {1: "1 channel (grey)", 3: "3 channels (colour)"}.get(count, f"{count} channels")
