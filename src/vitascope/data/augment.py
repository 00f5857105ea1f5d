"""Augmentation of whole batches on the model's device; each image's draw is f(seed, epoch, index)."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.data.changes import Change, apply_changes, sample, sampling_lines
from vitascope.data.randaugment import DRAWS, RandAugment, luma_weights, three_augment_change
from vitascope.data.randomness import uniform

_Floats = npt.NDArray[np.float64]

_FIXED_DRAWS = 15
"""Random numbers per image before RandAugment's: 4 crop, 1 rotation, 1 flip, 3 colours, 6 erasing. After them
come 3-Augment's."""
_FACTOR = 0x21F0AAAD
"""A constant of T. Ettinger's 32-bit hash, below 2^31, so that no int64 product overflows."""
NEW_EPOCHS, SHIFTS = 5, (1 / 16, 1 / 8)
"""The epochs in which images are new to a model; the largest shifts that grow, in these and after them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of images, and their limits. The defaults change nothing."""

    flip: float = 0.0  # probability of a mirror image
    crop_scale: float = 1.0  # smallest share of the area of a random crop, which is enlarged to the full size
    # Largest shift, as a share of the side, in whole pixels without a crop or rotation; None: `SHIFTS`.
    shift: float | None = 0.0
    rotate: float = 0.0  # largest rotation, degrees
    color_jitter: float = 0.0  # largest change of brightness, contrast and saturation, as a share
    three_augment: bool = False  # greyscale, solarization or blur, before the colours change
    randaugment: RandAugment | None = None  # operations drawn from a list, after the above
    erase: float = 0.0  # probability that a rectangle becomes noise, after all else

    def without_crop(self) -> Self:
        """The same for images that are already cropped by `crop_draws`; all other draws stay the same."""
        return dataclasses.replace(self, crop_scale=1.0)

    def __call__(self, pixels: Tensor, indices: npt.NDArray[np.int64], *, seed: int, epoch: int) -> Tensor:
        """uint8 (B, C, H, W) and the images' indices in the data set -> floats in [0, 1], (B, C, H, W)."""
        shape, operations = pixels.shape, self.randaugment.draws if self.randaugment else 0
        drawn = uniform(seed, epoch, indices, _FIXED_DRAWS + operations + DRAWS)  # in [0, 1)
        draws, for_operations, for_three = np.split(drawn, [_FIXED_DRAWS, _FIXED_DRAWS + operations], axis=1)
        warps = self.crop_scale < 1 or self.rotate
        shift = SHIFTS[epoch >= NEW_EPOCHS] if self.shift is None else self.shift
        changes = []
        if not warps and (shift or self.flip):  # needs no interpolation
            changes.append(self._move(draws[:, 2:6], shape, shift))
        changes.append(Change((), lambda pixels: pixels / 255))
        if warps:
            changes.append(self._warp(draws[:, :6], shape, shift))
        if self.three_augment:
            changes.append(three_augment_change(for_three, shape[1]))
        if self.color_jitter:
            changes.append(self._jitter(draws[:, 6:9], shape[1]))
        if self.randaugment:
            changes += self.randaugment.changes(for_operations, shape)
        if self.erase:
            changes += _erase(draws[:, 9:], self.erase, shape)
        return apply_changes(pixels, changes)

    def _move(self, draws: _Floats, shape: Sequence[int], shift: float) -> Change:
        """Shift each image by up to a share of its sides, in whole pixels, filled up by reflection (a random
        crop of the padded image), and flip it. `draws` (B, 4) are x, y, rotation and flip."""
        _, C, height, width = shape
        mirrored = draws[:, 3] < self.flip
        if not shift:
            return Change((np.flatnonzero(mirrored),), _flip)
        columns, rows = _reflected(draws[:, 0], width, shift), _reflected(draws[:, 1], height, shift)
        columns[mirrored] = columns[mirrored, ::-1]

        def apply(pixels: Tensor, starts: Tensor, columns: Tensor) -> Tensor:
            places = (starts + columns).flatten(2).expand(-1, C, -1)  # (B, C, H * W)
            return pixels.flatten(2).gather(2, places).view_as(pixels)

        return Change(((rows * width)[:, None, :, None], columns[:, None, None]), apply)

    def _warp(self, draws: _Floats, shape: Sequence[int], shift: float) -> Change:
        """Crop, shift, rotate and flip by one affine map, so that each image is interpolated once."""
        height, width = shape[-2:]
        area, ratio, x, y, turn, mirror = draws.T  # (B,) each
        side = np.sqrt(1 - area * (1 - self.crop_scale))  # of the crop, as a share
        reach = np.minimum(math.log(4 / 3) / 2, -np.log(side))  # of log(width / height) / 2, inside the image
        skew = np.exp((2 * ratio - 1) * reach)
        crop_w, crop_h = side * skew, side / skew
        angle = np.deg2rad((2 * turn - 1) * self.rotate)
        sign = np.where(mirror < self.flip, -1.0, 1.0)
        # Where each output point is read, in coordinates that run from -1 to 1 along each side.
        row_x = [sign * crop_w * np.cos(angle), -crop_h * np.sin(angle) * height / width]
        row_y = [sign * crop_w * np.sin(angle) * width / height, crop_h * np.cos(angle)]
        row_x.append((2 * x - 1) * (1 - crop_w + 2 * shift))
        row_y.append((2 * y - 1) * (1 - crop_h + 2 * shift))
        lines = sampling_lines(np.stack([row_x, row_y]).transpose(2, 0, 1), height, width)
        return Change(lines, functools.partial(sample, padding="reflection"))

    def _jitter(self, draws: _Floats, channels: int) -> Change:
        """Change brightness, contrast (about the image's mean luma) and saturation (about each pixel's), each
        by a factor around 1, by one matrix per image."""
        luma = luma_weights(channels)  # (C,)
        factors = 1 + (2 * draws - 1) * self.color_jitter  # (B, 3)
        brightness, contrast, saturation = factors.T[..., None, None]  # (B, 1, 1) each
        mix = luma + saturation * (np.eye(channels) - luma)  # (B, C, C)
        scaled = (brightness * contrast * mix).astype(np.float32)
        of_mean = (brightness * (1 - contrast) * luma).astype(np.float32)  # (B, 1, C)

        def apply(images: Tensor, scaled: Tensor, of_mean: Tensor) -> Tensor:
            offset = of_mean @ images.mean(dim=(2, 3)).unsqueeze(2)  # (B, 1, 1)
            return torch.baddbmm(offset, scaled, images.flatten(2)).clamp_(0, 1).view_as(images)

        return Change((scaled, of_mean), apply)


def _flip(pixels: Tensor, rows: Tensor) -> Tensor:
    """Mirror the images with these numbers, (b,)."""
    return pixels.index_copy(0, rows, pixels.index_select(0, rows).flip(-1))


def _reflected(draws: _Floats, side: int, reach: float) -> npt.NDArray[np.int64]:
    """The places along a side at which images are read that are shifted by up to a share `reach` of it: (B,
    side) for draws (B,). Places outside are reflected."""
    most = round(reach * side)
    shift = np.floor(draws * (2 * most + 1)).astype(np.int64) - most  # (B,)
    place = np.abs(shift[:, None] + np.arange(side)) % max(1, 2 * side - 2)  # reflection has this period
    found: npt.NDArray[np.int64] = np.minimum(place, 2 * side - 2 - place)
    return found


def _erase(draws: _Floats, probability: float, shape: Sequence[int]) -> list[Change]:
    """Random erasing (Zhong et al. 2020) with DeiT's numbers: 2 to 33% of the area, aspect 0.3 to 3.3."""
    # `draws` (B, 6) are chance, area, aspect, y, x and the noise's key. The noise is uniform in [0, 1]: valid
    # values of a picture, and after normalization about as wide as DeiT's standard normal noise.
    chosen = np.flatnonzero(draws[:, 0] < probability)  # (b,)
    if not len(chosen):
        return []
    height, width = shape[-2:]
    top, left, bottom, right = _rectangles(draws[chosen, 1:5], height, width)  # (b, 1, 1, 1) each
    y, x = np.arange(height)[:, None], np.arange(width)
    keys = (draws[chosen, 5:] * 2**32).astype(np.uint32).view(np.int32)  # (b, 1)

    def apply(images: Tensor, rows: Tensor, keys: Tensor, inside_y: Tensor, inside_x: Tensor) -> Tensor:
        noise = _noise(keys, images.shape[1:])
        # In place: before it come changes that make new images.
        return images.index_copy_(
            0, rows, torch.where(inside_y & inside_x, noise, images.index_select(0, rows))
        )

    return [Change((chosen, keys, (y >= top) & (y < bottom), (x >= left) & (x < right)), apply)]


def _rectangles(draws: _Floats, height: int, width: int) -> npt.NDArray[np.int64]:
    """Top, left, bottom and right of rectangles: (4, B, 1, 1, 1). Zhong et al. draw again if a rectangle does
    not fit into the picture; here the aspect is drawn from those that fit."""
    area, aspect, y, x = draws.T  # (B,) each
    area = 0.02 + area * (1 / 3 - 0.02)  # as a share
    narrowest, widest = np.log(area * height / width), np.log(height / width / area)  # of height / width
    low, high = np.clip(math.log(0.3), narrowest, widest), np.clip(-math.log(0.3), narrowest, widest)
    root = np.exp((low + aspect * (high - low)) / 2)
    side = np.sqrt(area * height * width)
    rows = np.clip(np.rint(side * root), 1, height)
    columns = np.clip(np.rint(side / root), 1, width)
    top, left = np.floor(y * (height - rows + 1)), np.floor(x * (width - columns + 1))
    return np.stack([top, left, top + rows, left + columns]).astype(np.int64)[..., None, None, None]


def _noise(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Uniform numbers in [0, 1], (B, *shape), as a hash of a key for each image, int32 (B, 1), and of the
    position, so that an image's noise does not depend on the rest of the batch."""
    # Both are well mixed already, so that one multiplication, modulo 2^32, is enough.
    bits = (_positions(math.prod(shape), keys.device) ^ keys).mul_(_FACTOR)
    return torch.rsub(bits, 0.5, alpha=2.0**-32).view(-1, *shape)


@functools.lru_cache(maxsize=8)
def _positions(count: int, device: torch.device) -> Tensor:
    """A 32-bit hash of the positions 0 to count - 1, int32 (count,)."""
    bits = torch.arange(count, device=device)
    for shift, factor in ((16, _FACTOR), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return (bits ^ (bits >> 15)).int()
