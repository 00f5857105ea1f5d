"""A training step neither reads a number from the device nor sends one to it: both make a GPU idle.

The tests run on a CPU, where nothing waits, and detect the operations that would wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vitascope as vs
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassIndices
from vitascope.run.run import Run
from vitascope.training.loop import Trainer
from vitascope.training.train import build_trainer, prepare

CPU = torch.device("cpu")
READ = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, torch.nonzero),
    *(torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__, torch.unique),
    *(torch.Tensor.masked_select, torch.masked_select),
}
SENT = {torch.tensor, torch.as_tensor, torch.scalar_tensor}
"""From Python's numbers: a copy out of memory that is not page-locked, which the host waits for."""


class Waits(TorchFunctionMode):
    """Records the calls that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.inside = False
        """In `one_hot`, which looks at its labels on a CPU only (aten/src/ATen/native/Onehot.cpp)."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READ | SENT:
            self.seen.append(function.__name__)
        self.inside = function is F.one_hot
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.inside = False


class Numbers(TorchDispatchMode):
    """Records the numbers that are read below Python."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default and not self.waits.inside:
            self.waits.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


def waits_of(step: Callable[[], object]) -> list[str]:
    """The operations for which a step would wait."""
    waits = Waits()
    with Numbers(waits), waits:
        step()
    return waits.seen


def trainer_of(run: Path, recipe: str, **options: Any) -> Trainer:
    """A small trainer, on images of noise in memory."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3), np.uint8)
    images = ImageSet("train", list(pixels), ClassIndices(np.arange(32) % 4, tuple("abcd")))
    splits = Splits(images, images.subset("val", np.arange(4)), None, channels=3)
    small = {"embed_dim": 24, "num_heads": 2, "depth": 2, "patch_size": 8, "batch_size": 8}
    config = vs.TrainConfig.from_recipe(recipe, data="noise", device="cpu", **small, **options)
    trainer = build_trainer(Run(run), prepare(config, splits), CPU)
    trainer.module.train()
    return trainer


def steps_of(trainer: Trainer) -> Iterator[Callable[[], object]]:
    """Every step, including the reading of its batch."""
    batches = ((batch, epoch) for epoch in range(9) for batch in trainer.train_loader.epoch(epoch))
    while True:
        yield lambda: trainer._training_step(*next(batches))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("small-data", {"precision": "bf16"}),
        ("base", {"precision": "fp32", "model_options": {"positions": "sincos_2d"}}),
        ("base", {"precision": "fp32", "model_options": {"positions": "rotary"}, "pool": "mean"}),
        ("masked", {"precision": "fp32"}),
        ("mae", {"precision": "fp32", "decoder_dim": 32}),
        ("deit", {"image_size": 16, "model": "vit_ti16", "accumulate": 2}),
        ("deit3", {"image_size": 16, "model": "vit_ti16", "crop_scale": 1.0, "shift": 0.25}),
    ],
    ids=["small-data", "sincos", "rotary", "masked", "mae", "deit", "deit3"],
)
def test_no_step_waits_for_the_device(tmp_path: Path, recipe: str, options: dict[str, Any]) -> None:
    steps = steps_of(trainer_of(tmp_path, recipe, **options))
    next(steps)()  # the first step moves data to the device
    for _ in range(5):  # mixed and not mixed, and into the next epoch
        assert waits_of(next(steps)) == []


@pytest.mark.parametrize(
    "step",
    [
        lambda: torch.ones(()).item(),
        lambda: float(torch.ones(())),
        lambda: bool(torch.ones(()) > 0),
        lambda: torch.tensor([0.5]),
        lambda: torch.clamp(torch.ones(2), max=torch.ones(())).tolist(),
        lambda: torch.nn.utils.clip_grad_norm_([with_gradient()], 1.0, error_if_nonfinite=True),
    ],
)
def test_waiting_operations_are_detected(step: Callable[[], object]) -> None:
    assert waits_of(step)
    assert not waits_of(lambda: F.one_hot(torch.arange(3), 4))


def with_gradient() -> torch.Tensor:
    tensor = torch.ones(2, requires_grad=True)
    tensor.grad = torch.ones(2)
    return tensor
