"""Pictures to look at: the model's part bright or under its heatmap, and what the crop leaves out dimmed."""

import dataclasses
import math
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from PIL import Image

Uint8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.floating[Any]]
Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""

_DIMMED, _FRAME = 0.3, 150
"""Brightness of what the model does not see, which is also grey; the grey of the line around what it sees."""

_STRENGTH = 0.6
"""Share of the colours of the largest heat in the picture under it."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture, and the part of it that the model sees."""

    pixels: Uint8Array
    """(H, W) or (H, W, 3)."""
    box: Box
    """Its part that is the model's input."""

    @classmethod
    def whole(cls, pixels: Uint8Array) -> Self:
        """A picture, (H, W) or (H, W, 3), that the model sees all of."""
        return cls(pixels, (0, 0, pixels.shape[1], pixels.shape[0]))

    @classmethod
    def of_channels(cls, pixels: Uint8Array, box: Box) -> Self:
        """A picture (C, H, W)."""
        return cls(to_picture(pixels), box)

    @property
    def height(self) -> int:
        """In pixels."""
        return self.pixels.shape[0]

    @property
    def width(self) -> int:
        """In pixels."""
        return self.pixels.shape[1]

    def enlarged(self, side: int = 256) -> "Picture":
        """The same, enlarged by a whole factor to at least `side` pixels, as room for a heatmap."""
        times = max(1, math.ceil(side / min(self.height, self.width)))
        if times == 1:
            return self
        pixels = self.pixels.repeat(times, axis=0).repeat(times, axis=1)
        left, top, right, bottom = (times * side for side in self.box)
        return Picture(pixels, (left, top, right, bottom))

    def resized(self, height: int, width: int) -> "Picture":
        """The same in another number of pixels."""
        if (height, width) == (self.height, self.width):
            return self
        pixels = np.asarray(Image.fromarray(self.pixels).resize((width, height), Image.Resampling.LANCZOS))
        x, y = width / self.width, height / self.height
        left, top, right, bottom = self.box
        return Picture(pixels, (left * x, top * y, right * x, bottom * y))

    def shrunk(self, side: int) -> "Picture":
        """The same with at most `side` pixels on its longer side."""
        scale = min(1.0, side / max(self.height, self.width))
        return self.resized(max(1, round(self.height * scale)), max(1, round(self.width * scale)))

    def seen(self) -> tuple[slice, slice]:
        """Rows and columns of the model's part, at least one of each."""
        left, top, right, bottom = self.box
        rows, columns = (
            slice(first := min(round(start), size - 1), max(round(end), first + 1))
            for start, end, size in ((top, bottom, self.height), (left, right, self.width))
        )
        return rows, columns


def to_picture(pixels: Uint8Array) -> Uint8Array:
    """(C, H, W) as matplotlib draws it: (H, W) for one channel, (H, W, 3) for three."""
    return pixels[0] if pixels.shape[0] == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))


def dimmed(picture: Picture) -> Uint8Array:
    """The picture with what the model does not see dimmed: (H, W) or (H, W, 3)."""
    seen = picture.seen()
    if picture.pixels[seen].shape == picture.pixels.shape:
        return picture.pixels
    drawn = _surroundings(picture.pixels, seen)
    drawn[seen] = picture.pixels[seen]
    return drawn


def overlay(picture: Picture, heatmap: FloatArray) -> Uint8Array:
    """A picture with its seen part under a heatmap (gh, gw) and the rest dimmed: uint8 (H, W, 3)."""
    seen = picture.seen()
    drawn = _surroundings(_rgb(picture.pixels), seen)
    rgb = _rgb(picture.pixels)[seen]  # (h, w, 3)
    size = (rgb.shape[1], rgb.shape[0])
    heat = np.asarray(Image.fromarray(heatmap.astype(np.float32)).resize(size, Image.Resampling.BILINEAR))
    low, high = float(heatmap.min()), float(heatmap.max())
    heat = np.clip((heat - low) / max(high - low, 1e-12), 0, 1)[..., None]  # (h, w, 1)
    colour = colormaps["inferno"](heat[..., 0])[..., :3] * 255
    mixed = rgb * (1 - _STRENGTH * heat) * (0.35 + 0.65 * heat) + colour * _STRENGTH * heat
    drawn[seen] = np.rint(np.clip(mixed, 0, 255))
    return drawn


def beside_itself(picture: Picture, heatmap: FloatArray) -> Uint8Array:
    """A picture, enlarged to at least 96 pixels, beside itself under its heatmap, as one RGB array."""
    large = picture.enlarged(96)
    gap = np.full((large.height, max(2, large.width // 24), 3), 255, dtype=np.uint8)
    return np.concatenate([_rgb(dimmed(large)), gap, overlay(large, heatmap)], axis=1)


def _surroundings(pixels: Uint8Array, seen: tuple[slice, slice]) -> Uint8Array:
    """A copy in dark grey, of the same shape, with a line around the seen part."""
    grey = pixels if pixels.ndim == 2 else np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    drawn = np.broadcast_to(np.rint(grey * _DIMMED), pixels.shape).astype(np.uint8)
    line = math.ceil(max(pixels.shape[:2]) / 300)
    drawn[tuple(slice(max(0, side.start - line), side.stop + line) for side in seen)] = _FRAME
    return drawn


def _rgb(pixels: Uint8Array) -> Uint8Array:
    """(H, W) or (H, W, 3) as (H, W, 3)."""
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=-1)
