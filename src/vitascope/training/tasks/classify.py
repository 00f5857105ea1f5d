"""Classification: images to classes."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.data.loading import Loader
from vitascope.data.preprocess import Preprocess
from vitascope.training.evaluate import evaluate
from vitascope.training.tasks.task import Examples, Sums


@dataclasses.dataclass(frozen=True)
class Classify:
    """Cross-entropy with label smoothing (Szegedy et al. 2016)."""

    preprocess: Preprocess
    label_smoothing: float = 0.0

    def module(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean loss, a scalar with gradients, and sums over the images: `loss`, `correct`, `count`."""
        logits = module(self.preprocess.normalize_(examples.images)).float()  # (B, K)
        loss = F.cross_entropy(logits, examples.targets, label_smoothing=self.label_smoothing)
        return loss, classified(loss, logits, examples.labels)

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Cross-entropy without smoothing, accuracy, and the share of the commonest class."""
        measured = evaluate(module, loader, precision=precision)
        return {"loss": measured.loss, "accuracy": measured.accuracy, "majority": measured.score.majority}


def classified(loss: Tensor, logits: Tensor, labels: Tensor) -> Sums:
    """Sums over images from their mean loss, logits (B, K) and labels (B,)."""
    count = torch.full((), float(len(labels)), device=loss.device)  # a copy from the CPU would have to wait
    correct = (logits.argmax(dim=1) == labels).sum()
    return {"loss": loss.detach() * count, "correct": correct, "count": count}
