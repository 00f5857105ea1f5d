"""What a run learns: the one interface between the loop and its tasks."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitascope.data.loading import Loader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """What a step learns from, on the model's device.

    Attributes:
        images: augmented and mixed, floats in [0, 1], (B, C, H, W): a task normalizes them itself, since a
            teacher may want other numbers than its student. It may overwrite them.
        labels: the images' own classes, int64 (B,).
        targets: what is to be said: the labels, or after mixing probabilities (B, K).
        indices: of the images in the data set, (B,).
        seed, epoch: with the indices, what anything random may depend on.
    """

    images: Tensor
    labels: Tensor
    targets: Tensor
    indices: npt.NDArray[np.int64]
    seed: int
    epoch: int


Sums = dict[str, Tensor]
"""Sums over images, among them `loss` and `count`: over the count they are means, whatever the parts."""


class Task(Protocol):
    """A thing to learn: a module around the model, a loss, a validation."""

    def module(self, model: Any) -> nn.Module:
        """What is trained: the model, or a module that holds it as `body` and what else the task needs."""

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean loss of some examples, a scalar with gradients, and detached sums over them.

        The module is only ever called, never reached into: it may be wrapped for several processes.
        """

    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Means over a split, of all processes: `loss`, which chooses the best weights, and others.

        A classifier's have `accuracy` and `majority`, that of always naming the commonest class.
        """
