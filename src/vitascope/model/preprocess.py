"""The input of a model: the preprocessing that it carries, and the check of its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from vitascope.errors import UserError


class PreprocessLike(Protocol):
    """Turns pictures into a model's input; `vitascope.data.preprocess.Preprocess` is one."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the result, in pixels."""

    def as_pictures(self, images: Any) -> Sequence[Any]:
        """One picture or many, as a sequence of pictures."""

    def pixels(self, source: Any) -> Any:
        """Resize and crop a picture: a NumPy array, uint8 (C, H, W)."""

    def framed(self, source: Any, longest: int = ...) -> tuple[Any, Any, tuple[float, float, float, float]]:
        """The same pixels; all of the picture in its own resolution, with at most `longest` pixels a side,
        uint8 (C, H, W); and the part of it that became them: left, top, right and bottom."""

    def normalize(self, pixels: Tensor) -> Tensor:
        """Turn uint8 pixels or floats in [0, 1], (B, C, H, W), into a model's input."""

    def at_size(self, image_size: tuple[int, int]) -> PreprocessLike:
        """The same preprocessing for another image size."""


def check_images(images: Tensor, in_channels: int) -> None:
    """Raise `UserError` for anything but normalized images (B, C, H, W)."""
    if not images.is_floating_point():
        raise UserError(f"images must be normalized floats, not {images.dtype}; see `Preprocess.normalize`")
    if images.ndim != 4 or images.shape[1] != in_channels:
        raise UserError(f"images must be (batch, {in_channels}, height, width), not {tuple(images.shape)}")
