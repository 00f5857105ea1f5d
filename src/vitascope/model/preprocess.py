"""The preprocessing that a model carries, as far as `model` knows it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class PreprocessLike(Protocol):
    """Turns pictures into a model's input; `vitascope.data.preprocess.Preprocess` is one."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the result, in pixels."""

    def pixels(self, source: Any) -> Any:
        """Resize and crop a picture: a NumPy array, uint8 (C, H, W)."""

    def normalize(self, pixels: Tensor) -> Tensor:
        """Turn uint8 pixels or floats in [0, 1], (B, C, H, W), into a model's input."""

    def at_size(self, image_size: tuple[int, int]) -> PreprocessLike:
        """The same preprocessing for another image size."""
