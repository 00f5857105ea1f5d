"""Classification: images to classes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.data.loading import Loader
from vitascope.data.preprocess import Preprocess
from vitascope.formatting import counted
from vitascope.report.figures import draw_figures
from vitascope.training.distributed import print_first
from vitascope.training.evaluate import Evaluation, predict_split
from vitascope.training.tasks.task import Examples, Finished, Sums


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
