"""Augmentation of whole batches on the model's device; each image's draw is f(seed, epoch, index)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.data.randomness import uniform


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
        from kornia.geometry.transform import warp_affine

        height, width = images.shape[-2:]
        area, ratio, x, y, turn, mirror = draws.T  # (B,) each
        side = np.sqrt(1 - area * (1 - self.crop_scale))  # of the crop, as a share
        skew = np.exp((2 * ratio - 1) * math.log(4 / 3) / 2) if self.crop_scale < 1 else np.ones_like(side)
        crop_w, crop_h = np.minimum(side * skew, 1), np.minimum(side / skew, 1)
        center_x = (0.5 + (x - 0.5) * (1 - crop_w + 2 * self.shift)) * (width - 1)
        center_y = (0.5 + (y - 0.5) * (1 - crop_h + 2 * self.shift)) * (height - 1)
        angle = np.deg2rad((2 * turn - 1) * self.rotate)
        sign = np.where(mirror < self.flip, -1.0, 1.0)
        # Source point p goes to S R (p - center) + middle: first turn, then enlarge and mirror.
        a, b = sign * np.cos(angle) / crop_w, -sign * np.sin(angle) / crop_w
        c, d = np.sin(angle) / crop_h, np.cos(angle) / crop_h
        row_x = np.stack([a, b, (width - 1) / 2 - a * center_x - b * center_y], axis=1)
        row_y = np.stack([c, d, (height - 1) / 2 - c * center_x - d * center_y], axis=1)
        matrix = torch.from_numpy(np.stack([row_x, row_y], axis=1)).to(images)  # (B, 2, 3)
        return warp_affine(images, matrix, (height, width), mode="bilinear", padding_mode="reflection")

    def _jitter(self, images: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        """Brightness, contrast and saturation, each by a factor around 1."""
        from kornia.enhance import (
            adjust_brightness_accumulative,
            adjust_contrast_with_mean_subtraction,
            adjust_saturation_with_gray_subtraction,
        )

        factors = torch.from_numpy(1 + (2 * draws - 1) * self.color_jitter).to(images)  # (B, 3)
        images = adjust_brightness_accumulative(images, factors[:, 0])
        images = adjust_contrast_with_mean_subtraction(images, factors[:, 1])
        if images.shape[1] == 3:
            images = adjust_saturation_with_gray_subtraction(images, factors[:, 2])
        return images
