"""Augmentation of whole batches on the model's device; each image's draw is f(seed, epoch, index)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.randaugment import RandAugment
from vitascope.data.randomness import uniform
from vitascope.data.three_augment import DRAWS, luma_weights, three_augment
from vitascope.data.transfer import to_device

_FIXED_DRAWS = 15
"""Random numbers per image before RandAugment's: 4 crop, 1 rotation, 1 flip, 3 colours, 6 erasing. After them
come 3-Augment's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of images, and their limits. The defaults change nothing."""

    flip: float = 0.0  # probability of a mirror image
    crop_scale: float = 1.0  # smallest share of the area of a random crop, which is enlarged to the full size
    shift: float = 0.0  # largest shift, as a share of the side; in whole pixels, without a crop or rotation
    rotate: float = 0.0  # largest rotation, degrees
    color_jitter: float = 0.0  # largest change of brightness, contrast and saturation, as a share
    three_augment: bool = False  # greyscale, solarization or blur, before the colours change
    randaugment: RandAugment | None = None  # operations drawn from a list, after the above
    erase: float = 0.0  # probability that a rectangle becomes noise, after all else

    def without_crop(self) -> Augmentation:
        """The same for images that are already cropped by `crop_draws`; all other draws stay the same."""
        return dataclasses.replace(self, crop_scale=1.0)

    def __call__(self, pixels: Tensor, indices: npt.NDArray[np.int64], *, seed: int, epoch: int) -> Tensor:
        """uint8 (B, C, H, W) and the images' indices in the data set -> floats in [0, 1], (B, C, H, W)."""
        fixed, operations = _FIXED_DRAWS, self.randaugment.draws if self.randaugment else 0
        drawn = uniform(seed, epoch, indices, fixed + operations + DRAWS)  # in [0, 1)
        draws, for_operations, for_three = np.split(drawn, [fixed, fixed + operations], axis=1)
        warps = self.crop_scale < 1 or self.rotate
        if self.shift and not warps:
            pixels = _shift(pixels, draws[:, 2:4], self.shift)
        if self.flip and not warps:  # needs no interpolation
            rows = to_device(np.flatnonzero(draws[:, 5] < self.flip), pixels.device)
            pixels = pixels.index_copy(0, rows, pixels.index_select(0, rows).flip(-1))
        images = pixels / 255
        if warps:
            images = self._warp(images, draws[:, :6])
        if self.three_augment:
            images = three_augment(images, for_three)
        if self.color_jitter:
            images = self._jitter(images, draws[:, 6:9])
        if self.randaugment:
            images = self.randaugment(images, for_operations)
        if self.erase:
            images = _erase(images, draws[:, 9:], self.erase)
        return images

    def _warp(self, images: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        """Crop, shift, rotate and flip by one affine map, so that each image is interpolated once."""
        height, width = images.shape[-2:]
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
        row_x.append((2 * x - 1) * (1 - crop_w + 2 * self.shift))
        row_y.append((2 * y - 1) * (1 - crop_h + 2 * self.shift))
        matrices = np.stack([row_x, row_y]).transpose(2, 0, 1)
        theta = to_device(matrices.astype(np.float32), images.device)  # (B, 2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)  # (B, H, W, 2)
        return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)

    def _jitter(self, images: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        """Change brightness, contrast (about the image's mean luma) and saturation (about each pixel's), each
        by a factor around 1, by one 3x3 matrix per image."""
        C = images.shape[1]
        device = images.device
        luma = luma_weights(C, device)  # (C,)
        factors = 1 + (2 * draws - 1) * self.color_jitter  # (B, 3)
        brightness, contrast, saturation = to_device(factors.astype(np.float32), device).T
        grey = luma.expand(C, C)
        mix = torch.lerp(grey, torch.eye(C, device=device), saturation.view(-1, 1, 1))  # (B, C, C)
        mean = images.mean(dim=(2, 3)) @ luma  # (B,)
        offset = (brightness * (1 - contrast) * mean).view(-1, 1, 1)
        scaled = (brightness * contrast).view(-1, 1, 1) * mix
        return (scaled @ images.flatten(2) + offset).clamp(0, 1).view_as(images)


def crop_draws(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The draws of an `Augmentation` for crops: area, ratio, x and y, uniform in [0, 1), (B, 4)."""
    return uniform(seed, epoch, indices, 4)


def _shift(pixels: Tensor, draws: npt.NDArray[np.float64], reach: float) -> Tensor:
    """Shift each image by up to a share `reach` of its sides, in whole pixels, and fill up by reflection: a
    random crop of the padded image. `draws` (B, 2) are x and y."""
    B, C, height, width = pixels.shape
    places = []  # the column, and the row, from which each pixel is read
    for draw, side in zip(draws.T, (width, height), strict=True):
        most = round(reach * side)
        shift = np.floor(draw * (2 * most + 1)).astype(np.int64) - most  # (B,)
        place = np.abs(shift[:, None] + np.arange(side)) % max(1, 2 * side - 2)  # reflection has this period
        places.append(np.minimum(place, 2 * side - 2 - place))  # (B, side)
    columns, rows = (to_device(place, pixels.device) for place in places)
    rows = rows.view(B, 1, height, 1).expand(-1, C, -1, width)
    return pixels.gather(2, rows).gather(3, columns.view(B, 1, 1, width).expand(-1, C, height, -1))


def _erase(images: Tensor, draws: npt.NDArray[np.float64], probability: float) -> Tensor:
    """Random erasing (Zhong et al. 2020) with DeiT's numbers: 2 to 33% of the area, aspect 0.3 to 3.3."""
    # `draws` (B, 6) are chance, area, aspect, y, x and the noise's key. The noise is uniform in [0, 1]: valid
    # values of a picture, and after normalization about as wide as DeiT's standard normal noise.
    chosen = np.flatnonzero(draws[:, 0] < probability)  # (b,)
    if not len(chosen):
        return images
    device, (height, width) = images.device, images.shape[-2:]
    edges = _rectangles(draws[chosen, 1:5], height, width)
    top, left, bottom, right = to_device(edges, device)  # (b, 1, 1, 1) each
    y = torch.arange(height, device=device).unsqueeze(1)  # (H, 1)
    x = torch.arange(width, device=device)  # (W,)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)  # (b, 1, H, W)
    noise = _noise(to_device((draws[chosen, 5] * 2**32).astype(np.int64), device), images.shape[1:])
    rows = to_device(chosen, device)
    return images.index_copy(0, rows, torch.where(inside, noise, images.index_select(0, rows)))


def _rectangles(draws: npt.NDArray[np.float64], height: int, width: int) -> npt.NDArray[np.int64]:
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


def _noise(keys: Tensor, shape: torch.Size) -> Tensor:
    """Uniform numbers in [0, 1], (B, *shape), as a hash of each key in [0, 2^32) and the position, so that an
    image's noise does not depend on the rest of the batch."""
    positions = _mix(torch.arange(shape.numel(), device=keys.device))
    bits = _mix(positions ^ keys.unsqueeze(1))  # (B, C * H * W)
    return (bits >> 8).float().div(2**24 - 1).view(-1, *shape)


def _mix(bits: Tensor) -> Tensor:
    """32 bits to 32 well-mixed ones: xorshift and multiply (constants: T. Ettinger). Both factors are below
    2^31, so no int64 product overflows."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 15)
