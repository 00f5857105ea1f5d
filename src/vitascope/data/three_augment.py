"""3-Augment (Touvron et al. 2022, "DeiT III", section 3) of whole batches on the device.

The colour jitter and the flip that belong to it are options of `Augmentation`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.changes import Change, apply_changes

DRAWS = 2
"""Uniform numbers per image: choice, width of the blur."""
DEVIATIONS = (0.1, 2.0)
"""The range of the blur's standard deviation, pixels, as in DeiT III's code, at every image size."""
_REACH = 6
"""Pixels on each side that a blur reads: three times the largest deviation."""
_LUMA = [0.299, 0.587, 0.114]
"""Luma of red, green and blue (ITU-R 601)."""

_Floats = npt.NDArray[np.float64]


def three_augment(images: Tensor, draws: _Floats) -> Tensor:
    """Convert each image to grey, solarize it, or blur it, with equal probabilities.

    Floats in [0, 1], (B, C, H, W), and uniform numbers (B, DRAWS) -> floats in [0, 1], (B, C, H, W).
    """
    return apply_changes(images, [three_augment_change(draws, images.shape[1])])


def three_augment_change(draws: _Floats, channels: int) -> Change:
    """The change of images with C channels, by uniform numbers (B, DRAWS)."""
    which, width = draws.T
    chosen = [np.flatnonzero(np.floor(3 * which) == number) for number in range(3)]  # (b,) each
    low, high = DEVIATIONS
    deviation = low + width[chosen[2]] * (high - low)  # (b,)
    taps = np.exp(-0.5 * (np.arange(-_REACH, _REACH + 1) / deviation[:, None]) ** 2)  # (b, 13)
    taps /= taps.sum(axis=1, keepdims=True)

    def apply(
        images: Tensor, grey: Tensor, solarized: Tensor, blurred: Tensor, luma: Tensor, taps: Tensor
    ) -> Tensor:
        changed = images
        for rows, operation, number in (
            (grey, _greyscale, luma),
            (solarized, _solarize, luma),
            (blurred, _blur, taps),
        ):
            if len(rows):  # each image depends on its own draws only, so that it is the same in any batch
                changed = changed.index_copy(0, rows, operation(images.index_select(0, rows), number))
        return changed

    columns = taps.repeat(channels, axis=0).astype(np.float32)[:, None, :, None]  # (b * C, 1, 13, 1)
    luma = luma_weights(channels).astype(np.float32)[:, None, None]
    return Change((*chosen, luma, columns), apply)


def luma_weights(channels: int) -> _Floats:
    """The share of each channel in the luma, (C,); equal ones unless the channels are RGB."""
    return np.array(_LUMA if channels == 3 else [1 / channels] * channels)


def _greyscale(images: Tensor, luma: Tensor) -> Tensor:
    return (images * luma).sum(dim=1, keepdim=True).expand_as(images)


def _solarize(images: Tensor, _: Tensor) -> Tensor:
    """Invert values above one half: levels from 128 on."""
    return torch.minimum(images, 1 - images)


def _blur(images: Tensor, taps: Tensor) -> Tensor:
    """Gaussian blur, along columns and then along rows, by taps (B * C, 1, 13, 1) for each channel; the
    picture's border is repeated outside of it."""
    channels = images.flatten(0, 1).unsqueeze(0)  # (1, B * C, H, W)
    padded = F.pad(channels, (_REACH,) * 4, mode="replicate")
    for kernel in (taps, taps.mT):
        padded = F.conv2d(padded, kernel, groups=len(taps))
    return padded.view_as(images).clamp_(0, 1)
