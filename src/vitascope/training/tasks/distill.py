"""The task of distillation: a teacher teaches a second token (Touvron et al. 2021, DeiT, section 4)."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.data.loading import Loader
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.heads import DistilledHead
from vitascope.model.modes import evaluation_mode
from vitascope.model.vit import VisionTransformer
from vitascope.training.distributed import sum_over_processes
from vitascope.training.options import Distillation
from vitascope.training.tasks.classify import Classify, classified
from vitascope.training.tasks.task import Examples, Sums
from vitascope.training.tasks.teachers import Teacher


class BothHeads(nn.Module):
    """A student whose heads answer apart: images (B, C, H, W) -> logits (B, K) by label, and by teacher.

    Raises:
        UserError: a model without a distillation token and the two heads of one.
    """

    def __init__(self, body: VisionTransformer) -> None:
        super().__init__()
        if not isinstance(body.head, DistilledHead):
            raise UserError(
                "a student needs a distillation token with a head of its own: distillation_token=True, with "
                f'pool "cls" and head "linear" or "zero", not with {body.config.readout.pool!r} and '
                f"{body.config.readout.head!r}"
            )
        self.body = body

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the class token says, and what the distillation token does."""
        assert isinstance(self.body.head, DistilledHead)
        return self.body.head.both(self.body.embed(images))


class MeanOfHeads(nn.Module):
    """What `BothHeads` says in the mean: images (B, C, H, W) -> logits (B, K).

    The same as its body says, and by a call alone: the weights may be spread over several processes.
    """

    def __init__(self, both: nn.Module) -> None:
        super().__init__()
        self.both = both

    def forward(self, images: Tensor) -> Tensor:
        """The mean of both heads' logits."""
        by_label, by_teacher = self.both(images)
        return (by_label + by_teacher) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill:
    """Labels teach the class token, a teacher the distillation token, of the same augmented images.

    Raises:
        UserError: a teacher of images with other channels than the student's.
    """

    options: Distillation
    """How much of the teacher, and what of it."""
    preprocess: Preprocess
    """The student's."""
    teacher: Teacher
    """Its outputs are in the data's order of classes."""
    label_smoothing: float = 0.0
    """Of the labels; a teacher's decision is never smoothed (section 4, "Hard-label distillation")."""

    def __post_init__(self) -> None:
        """Refuse a teacher that sees other images."""
        theirs, ours = self.teacher.preprocess.channels, self.preprocess.channels
        if theirs != ours:
            raise UserError(
                f"teacher {self.teacher.name} sees images of {_channels(theirs)}, the student of "
                f"{_channels(ours)}: both must see the same"
            )

    def module(self, model: VisionTransformer) -> nn.Module:
        """The model with its heads apart; UserError where it has not two."""
        return BothHeads(model)

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean loss, a scalar with gradients, and sums over the images.

        (1 - w) CE(class head, targets) + w L, where w is `distill_weight` and L, of the distillation head,
        CE with the teacher's decision (equation 3) or the divergence from its softened probabilities
        (equation 2). The sums are `loss`, `correct` (of both heads' mean), `count`, and `agree`: how often
        the distillation head says what the teacher says.
        """
        by_label, by_teacher = module(self.preprocess.normalize(examples.images))  # (B, K) each
        by_label, by_teacher = by_label.float(), by_teacher.float()
        taught = self.teacher(examples.images)  # (B, K)
        from_labels = F.cross_entropy(by_label, examples.targets, label_smoothing=self.label_smoothing)
        weight = self.options.distill_weight
        loss = (1 - weight) * from_labels + weight * self._from_teacher(by_teacher, taught)
        sums = classified(loss, (by_label + by_teacher) / 2, examples.labels)
        return loss, sums | {"agree": (by_teacher.argmax(dim=1) == taught.argmax(dim=1)).sum()}

    def _from_teacher(self, logits: Tensor, taught: Tensor) -> Tensor:
        """The distillation head's loss: its logits (B, K) beside the teacher's."""
        if self.options.distill == "hard":
            return F.cross_entropy(logits, taught.argmax(dim=1))
        tau = self.options.temperature
        student, teacher = (values.div(tau).log_softmax(dim=1) for values in (logits, taught))
        # The gradient of softened probabilities falls as 1 / tau^2 (Hinton et al. 2015, section 2).
        return tau**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Cross-entropy and accuracy of both heads' mean, over all processes; no teacher is asked."""
        return Classify(self.preprocess).validate(MeanOfHeads(module), loader, precision)


@torch.inference_mode()
def both_heads(model: VisionTransformer, loader: Loader, precision: torch.dtype) -> dict[str, float]:
    """Accuracy of each head on a split and of their mean: `class_head`, `distillation_head`, `both_heads`.

    Under torchrun every process has to call it.

    Raises:
        UserError: a model without the two heads, or no image could be read.
    """
    module = BothHeads(model)
    correct, count = torch.zeros(3, dtype=torch.int64, device=loader.device), 0
    with evaluation_mode(module):
        for batch in loader.epoch():
            with torch.autocast(batch.pixels.device.type, precision, enabled=precision != torch.float32):
                by_label, by_teacher = module(loader.preprocess.normalize(batch.pixels))  # (B, K) each
            logits = torch.stack([by_label, by_teacher, (by_label + by_teacher) / 2])  # (3, B, K)
            correct += (logits.argmax(dim=2) == batch.labels).sum(dim=1)
            count += len(batch.labels)
    sums = {"class_head": correct[0], "distillation_head": correct[1], "both_heads": correct[2]}
    totals = sum_over_processes(sums | {"count": torch.tensor(count)})
    if not totals["count"]:
        raise UserError(f"no image of the {loader.images.name} set could be read")
    return {name: float(totals[name] / totals["count"]) for name in sums}


def _channels(count: int) -> str:
    return {1: "1 channel (grey)", 3: "3 channels (colour)"}.get(count, f"{count} channels")
