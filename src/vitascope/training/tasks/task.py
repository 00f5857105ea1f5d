"""The interface between the training loop and its tasks."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitascope.data.loading import Loader
from vitascope.models.vision_model import VisionModel
from vitascope.training.evaluation.novelty import Novelty
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """The training images of a step. Random draws may depend on the seed, epoch and indices only."""

    images: Tensor
    """Augmented and mixed, floats in [0, 1], (B, C, H, W); a task normalizes them, and may overwrite them."""
    labels: Tensor
    """The images' own labels, as in `Batch`: int64 (B,) for one class per image."""
    targets: Tensor
    """The labels, or probabilities (B, K) after mixing."""
    indices: npt.NDArray[np.int64]
    """Of the images, as in `Batch`, (B,)."""
    seed: int
    epoch: int


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run after its last step."""

    run: Run
    config: TrainConfig
    model: VisionModel
    """The finished model, on its device; every process has all of it."""
    module: nn.Module
    """The trained module with the last weights; a process may have only a part."""
    loader: Loader
    """Of the images to test on."""
    val_loader: Loader
    """Of the validation images."""
    train_loader: Callable[[], Loader]
    """Of training images, not augmented: of so many that their features are known."""
    precision: torch.dtype
    seconds: float
    """Time in the training loop."""


class PatchPictures(NamedTuple):
    """Predictions of corrupted patches for n images."""

    rows: dict[str, npt.NDArray[np.uint8]]
    """The images (n, C, H, W) by the name of their row: whole, as `given`, predicted, right."""
    hidden: npt.NDArray[np.bool_]
    """The patches (n, gh, gw) that are hidden by [mask]."""
    replaced: npt.NDArray[np.bool_]
    """Those replaced by another patch."""
    kept: npt.NDArray[np.bool_]
    """Those that are unchanged, but predicted as well."""


@dataclasses.dataclass(frozen=True)
class PatchEvaluation:
    """Means over a split for masked patches: `loss`, and `accuracy` if patches are classified."""

    split: str
    images: int
    metrics: dict[str, float]
    pictures: PatchPictures

    def summary(self) -> dict[str, Any]:
        """Plain values for `metrics.jsonl`."""
        return {"split": self.split, "images": self.images, **self.metrics}

    def in_words(self) -> str:
        """The metrics, in a few words."""
        metrics = ", ".join(f"{name} {value:.3f}" for name, value in self.metrics.items())
        return f"{metrics} on {self.images:,} {self.split} images"


Sums = dict[str, Tensor]
"""Sums over images, among them `loss` and `count`, the number of images."""


@dataclasses.dataclass(frozen=True)
class Monitor:
    """The value of a validation that selects the best weights."""

    name: str = "loss"
    words: str = "validation loss"
    higher: bool = False
    """Whether higher values are better."""

    def better(self, value: float, than: float) -> bool:
        """Whether a value is better than another one; NaN never is."""
        return value > than if self.higher else value < than

    @property
    def worst(self) -> float:
        """The value that every number is better than."""
        return -math.inf if self.higher else math.inf

    def best_in_words(self, value: float) -> str:
        """The best value: "the lowest validation loss, 0.123"."""
        return f"the {'highest' if self.higher else 'lowest'} {self.words}, {self.shown(value)}"

    def shown(self, value: float) -> str:
        """A value as text: shares in percent."""
        return f"{value:.1%}" if self.higher else f"{value:.3f}"


class Task(Protocol):
    """A training task: the trained module, its loss, its validation, the test of the finished model."""

    @property
    def monitor(self) -> Monitor:
        """What selects the best weights."""

    def module(self, model: Any) -> nn.Module:
        """The trained module: the model, or a module that has it as `body`."""

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean loss of the examples, a scalar with gradients, and detached sums over them.

        The module may be wrapped for several processes: it may be called, but has no other attributes.
        """

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Means over a split, over all processes: `loss` and others, among them that of the `monitor`.

        Classification adds `accuracy`, `balanced_accuracy`, and `majority`: the accuracy of always predicting
        the most frequent class; with several classes per image, `accuracy`, the share of images with exactly
        their classes, and `map`, the mean average precision.
        """

    def calibrate(self, finished: Finished) -> list[Novelty]:
        """Set what of the finished model follows from the validation images, and return how often it notices
        what it was not taught; all processes call it."""

    def test(self, finished: Finished) -> Any:
        """Evaluate the finished model and print the result; all processes call it."""
