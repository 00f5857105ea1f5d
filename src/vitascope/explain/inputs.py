"""The images that explanations take: normalized tensors, or pictures that the model's preprocessing reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitascope.arguments import Range
from vitascope.errors import UserError
from vitascope.model.vision_model import VisionModel
from vitascope.weights.preprocess import preprocess_of

T = TypeVar("T")

Images: TypeAlias = Tensor | Any
"""Normalized floats (B, C, H, W), or one or many pictures: paths, bytes, Pillow images, uint8 arrays."""


def as_images(model: VisionModel, images: Images) -> Tensor:
    """Normalized floats (B, C, H, W): a tensor unchanged; pictures on the model's device, in its dtype."""
    if isinstance(images, Tensor):
        return images
    preprocess = preprocess_of(model)
    pixels = [preprocess.pixels(picture) for picture in preprocess.as_pictures(images)]
    if not pixels:
        raise UserError("no pictures: give at least one")
    return normalized(model, torch.from_numpy(np.stack(pixels)))


def normalized(model: VisionModel, pixels: Tensor) -> Tensor:
    """Pixels, uint8 (B, C, H, W), as normalized floats on the model's device, in its dtype."""
    weights = next(model.parameters())
    return preprocess_of(model).normalize(pixels).to(weights.device, weights.dtype)


def sample(pictures: Sequence[T], count: int, seed: int = 0) -> list[T]:
    """Choose `count` of the pictures by seed, in their order; all, if there are fewer."""
    Range(ge=1).check("images", count)
    Range(ge=0).check("seed", seed)
    chosen = np.random.default_rng(seed).permutation(len(pictures))[:count]
    return [pictures[index] for index in np.sort(chosen)]
