"""A training step waits for nothing on the device: a step that does makes a GPU idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitascope as vs
from tests.pretended_gpu import GPU, PretendedGPU, WaitError, pretended_gpu
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassIndices
from vitascope.models.engines.transfer import to_device
from vitascope.training.building import build_trainer, prepare
from vitascope.training.loop import Trainer
from vitascope.training.run.run import Run

ROTARY = {"model_options": {"positions": "rotary"}, "pool": "mean", "clip_grad": 1.0}
AUGMENTED = {"crop_scale": 0.5, "rotate": 10.0, "color_jitter": 0.3, "randaugment": 2, "erase": 0.5}


@pytest.fixture
def gpu() -> Iterator[PretendedGPU]:
    with pretended_gpu() as gpu:
        yield gpu


def trainer_of(run: Path, recipe: str, **options: Any) -> Trainer:
    """A small trainer on the pretended GPU, with images of noise in its memory."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3), np.uint8)
    images = ImageSet("train", list(pixels), ClassIndices(np.arange(32) % 4, tuple("abcd")))
    splits = Splits(images, images.subset("val", np.arange(4)), None, channels=3)
    small = {"embed_dim": 24, "num_heads": 2, "depth": 2, "patch_size": 8, "batch_size": 16}
    values = {"accumulate": 1, "precision": "fp32", **small, **options}
    config = vs.TrainConfig.from_recipe(recipe, data="noise", device="cpu", **values)
    trainer = build_trainer(Run(run), prepare(config, splits), GPU)
    trainer.module.train()
    return trainer


def steps_of(trainer: Trainer) -> Iterator[Callable[[], object]]:
    batches = ((batch, epoch) for epoch in range(9) for batch in trainer.train_loader.epoch(epoch))
    while True:
        yield lambda: trainer._training_step(*next(batches))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("small-data", {"clip_grad": 1.0}),
        ("base", {"ema": 0.9, "class_weights": "balanced", **ROTARY, **AUGMENTED}),
        ("base", {"model_options": {"positions": "sincos_2d"}, "shift": 0.25, "flip": 0.5}),
        ("masked", {}),
        ("mae", {"decoder_dim": 32}),
        ("deit", {"image_size": 16, "model": "vit_ti16", "accumulate": 2}),
        ("deit3", {"image_size": 16, "model": "vit_ti16", "crop_scale": 1.0, "shift": 0.25}),
    ],
    ids=["small-data", "rotary", "sincos", "masked", "mae", "deit", "deit3"],
)
def test_no_step_waits_for_the_device(tmp_path, gpu, recipe: str, options: dict[str, Any]) -> None:
    steps = steps_of(trainer_of(tmp_path, recipe, **options))
    next(steps)()  # the first step moves constants to the device
    with gpu.watched():
        for _ in range(3):  # mixed and not mixed, and into the next epoch
            next(steps)()
    assert not [entry for entry in gpu.log if entry.startswith("process waits")]


def on_gpu(*shape: int) -> Tensor:
    return torch.zeros(shape, device=GPU)


WAITING = {
    "item": lambda: on_gpu().item(),
    "indices on the CPU": lambda: on_gpu(2)[torch.arange(2)],
    "from pageable memory": lambda: torch.ones(2).to(GPU, non_blocking=True),
    "below Python": lambda: torch.nn.utils.clip_grad_norm_([with_gradient()], 1.0, error_if_nonfinite=True),
}


@pytest.mark.parametrize("kind", WAITING)
def test_what_waits_is_detected(gpu: PretendedGPU, kind: str) -> None:
    with gpu.watched(), pytest.raises(WaitError):
        WAITING[kind]()


def test_what_does_not_wait_is_no_error(gpu: PretendedGPU) -> None:
    with gpu.watched():
        to_device(np.ones(2), GPU)
        F.one_hot(torch.zeros(3, dtype=torch.int64, device=GPU), 4)
        on_gpu(2)[on_gpu(2) > 0] = 0.0
        on_gpu(2).to("cpu", non_blocking=True)
        torch.nn.utils.clip_grad_norm_([with_gradient()], 1.0)


def with_gradient() -> Tensor:
    tensor = torch.ones(2, requires_grad=True, device=GPU)
    tensor.grad = on_gpu(2)
    return tensor
