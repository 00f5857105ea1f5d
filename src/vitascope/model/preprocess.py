"""The input of a model: the preprocessing that it carries, and the check of its images."""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor

from vitascope.errors import UserError


class Resizable(Protocol):
    """A preprocessing as a model knows it: `vitascope.data.preprocess.Preprocess`."""

    def at_size(self, image_size: tuple[int, int]) -> Self:
        """The same preprocessing for another image size."""


def check_images(images: Tensor, in_channels: int) -> None:
    """Raise `UserError` for anything but normalized images (B, C, H, W)."""
    if not images.is_floating_point():
        raise UserError(f"images must be normalized floats, not {images.dtype}; see `Preprocess.normalize`")
    if images.ndim != 4 or images.shape[1] != in_channels:
        raise UserError(f"images must be (batch, {in_channels}, height, width), not {tuple(images.shape)}")
