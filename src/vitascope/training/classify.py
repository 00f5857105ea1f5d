"""The task of classification: a model and a batch to a loss and what to count."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Classify:
    """Cross-entropy with label smoothing (Szegedy et al. 2016)."""

    label_smoothing: float = 0.0

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss, a scalar with gradients, and sums over the batch: `loss`, `correct`, `count`.

        Args:
            model: images to logits (B, K).
            images: normalized floats (B, C, H, W).
            labels: int64 (B,).
        """
        logits = model(images).float()  # (B, K)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        count = torch.tensor(float(len(labels)), device=loss.device)
        correct = (logits.argmax(dim=1) == labels).sum()
        return loss, {"loss": loss.detach() * count, "correct": correct, "count": count}
