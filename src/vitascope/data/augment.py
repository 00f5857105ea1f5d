"""Augmentation of whole batches on the model's device; each image's draw is f(seed, epoch, index)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.randomness import uniform

_LUMA = [0.299, 0.587, 0.114]
"""How bright red, green and blue look (ITU-R 601)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What is varied at random, and how far. The defaults vary nothing."""

    flip: float = 0.0
    """Probability of a mirror image."""
    crop_scale: float = 1.0
    """Smallest share of the area that a random crop keeps; it is enlarged to the full size."""
    shift: float = 0.0
    """Largest shift, as a share of the side."""
    rotate: float = 0.0
    """Largest rotation, degrees."""
    color_jitter: float = 0.0
    """Largest change of brightness, contrast and saturation, as a share."""

    def __call__(self, pixels: Tensor, indices: npt.NDArray[np.int64], *, seed: int, epoch: int) -> Tensor:
        """uint8 (B, C, H, W) and the images' indices in the data set -> floats in [0, 1], (B, C, H, W)."""
        images = pixels.float() / 255
        draws = uniform(seed, epoch, indices, 9)  # (B, 9) in [0, 1)
        if self.flip or self.crop_scale < 1 or self.shift or self.rotate:
            images = self._warp(images, draws[:, :6])
        if self.color_jitter:
            images = self._jitter(images, draws[:, 6:])
        return images

    def _warp(self, images: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        """Crop, shift, rotation and flip are one affine map, so each image is interpolated once."""
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
        theta = torch.from_numpy(np.stack([row_x, row_y]).transpose(2, 0, 1)).to(images)  # (B, 2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)  # (B, H, W, 2)
        return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)

    def _jitter(self, images: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        """Brightness, contrast and saturation, each by a factor around 1, as one 3x3 matrix an image.

        Brightness scales, contrast moves away from the image's mean luma, saturation from each pixel's.
        """
        C = images.shape[1]
        luma = torch.tensor(_LUMA if C == 3 else [1 / C] * C).to(images)  # (C,)
        brightness, contrast, saturation = (
            torch.from_numpy(1 + (2 * draws - 1) * self.color_jitter).to(images).T
        )
        grey = luma.expand(C, C)
        mix = torch.lerp(grey, torch.eye(C).to(images), saturation.view(-1, 1, 1))  # (B, C, C)
        mean = images.mean(dim=(2, 3)) @ luma  # (B,)
        offset = (brightness * (1 - contrast) * mean).view(-1, 1, 1)
        scaled = (brightness * contrast).view(-1, 1, 1) * mix
        return (scaled @ images.flatten(2) + offset).clamp(0, 1).view_as(images)
