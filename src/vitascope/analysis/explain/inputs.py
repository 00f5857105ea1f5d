"""The images that explanations take, normalized tensors or pictures, and their forward passes.

With a hook before each pass, a server can run something else in between.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitascope.arguments import Range
from vitascope.data.stored import as_pictures
from vitascope.errors import UserError
from vitascope.models.vision_model import VisionModel, evaluation_mode
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import preprocess_of

T = TypeVar("T")

Images: TypeAlias = Tensor | Any
"""Normalized floats (B, C, H, W), or one or many pictures: paths, bytes, Pillow images, uint8 arrays."""


def seen_hw(model: VisionModel, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width, from the top left, of what a model sees of an image: what its patches tile."""
    return model.config.tiled_hw(size) if isinstance(model, VisionTransformer) else size


def as_images(model: VisionModel, images: Images) -> Tensor:
    """Normalized floats (B, C, H, W), the part that the model sees: pictures on its device, in its dtype."""
    if isinstance(images, Tensor):
        if images.ndim != 4:
            return images  # the model rejects it
        size = images.shape[2], images.shape[3]
        height, width = seen_hw(model, size)
        return images if (height, width) == size else images[:, :, :height, :width]
    preprocess = preprocess_of(model)
    pixels = [preprocess.pixels(picture) for picture in as_pictures(images)]
    check_some(pixels)
    return as_images(model, normalized(model, torch.from_numpy(np.stack(pixels))))


def check_some(images: Sized) -> None:
    """Reject no images at all."""
    if not len(images):
        raise UserError("no images: give at least one")


def normalized(model: VisionModel, pixels: Tensor) -> Tensor:
    """Pixels, uint8 (B, C, H, W), as normalized floats on the model's device, in its dtype."""
    weights = next(model.parameters())
    return preprocess_of(model).normalize(pixels).to(weights.device, weights.dtype)


def chosen_pictures(pictures: Sequence[T], count: int, seed: int = 0) -> list[T]:
    """Choose `count` of the pictures by seed, in their order; all, if there are fewer."""
    Range(ge=1).check("images", count)
    Range(ge=0).check("seed", seed)
    chosen = np.random.default_rng(seed).permutation(len(pictures))[:count]
    return [pictures[index] for index in np.sort(chosen)]


_hook: ContextVar[Callable[[], None] | None] = ContextVar("hook", default=None)


@contextmanager
def before_each_forward(hook: Callable[[], None]) -> Iterator[None]:
    """Call a function before each forward pass of methods in this thread or task; its exceptions end them."""
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


def call_hook() -> None:
    """Call the hook, if there is one; a method calls this before each of its forward passes."""
    hook = _hook.get()
    if hook is not None:
        hook()


@torch.no_grad()
def pooled_and_logits(model: VisionModel, images: Tensor) -> tuple[Tensor, Tensor]:
    """The pooled representation (B, D) and the logits (B, K) of images (B, C, H, W), in evaluation mode."""
    call_hook()
    with evaluation_mode(model):
        pooled = model.embed(images)
        return pooled, model.head(pooled)
