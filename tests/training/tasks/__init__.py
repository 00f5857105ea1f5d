"""Tasks of masked pre-training, and images for them."""

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.data import noise
from tests.models import VARIANTS, randomize, small_config
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.options.groups import Masking
from vitascope.training.tasks.masked import Masked, MaskedAutoencoding, body_config
from vitascope.training.tasks.task import Examples

TRAINABLE = {
    name: options
    for name, options in VARIANTS.items()
    if options.get("stem", "conv") == "conv"
    and options.get("pool") not in ("map", "sequence")
    and options.get("pool_norm") != "after"
    and "patch_dropout" not in options
    and "head" not in options
}


def masked_task(
    target: str = "mean_color", corrupt: float = 0.5, decoder_dim: int = 32, **options: Any
) -> Masked:
    config = body_config(small_config(**options))
    masking = Masking(target=target, corrupt=corrupt, decoder_dim=decoder_dim, decoder_depth=1)
    kind = MaskedAutoencoding if target == "mae" else Masked
    return kind(masking=masking, config=config, preprocess=default_preprocess(config))


def small_module(task: Masked, seed: int = 0) -> nn.Module:
    return randomize(task.module(VisionTransformer(task.config)), seed).eval()


def examples(images: torch.Tensor, *, first: int = 0, seed: int = 0, epoch: int = 0) -> Examples:
    labels = torch.zeros(len(images), dtype=torch.int64)
    indices = np.arange(first, first + len(images))
    return Examples(images=images, labels=labels, targets=labels, indices=indices, seed=seed, epoch=epoch)


def pictures(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def noisy_set(count: int, size: int = 32, channels: int = 3) -> ImageSet:
    sources = [noise(size, size, channels, seed=seed) for seed in range(count)]
    return ImageSet("val", sources, ClassIndices(np.zeros(count, np.int64), ("a", "b")))
