"""3-Augment (Touvron et al. 2022, "DeiT III", section 3) of whole batches on the device.

The colour jitter and the flip that belong to it are options of `Augmentation`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.transfer import to_device

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
    which, width = draws.T
    for number, operation in enumerate((_greyscale, _solarize, _blur)):
        chosen = np.flatnonzero(np.floor(3 * which) == number)  # (b,)
        if len(chosen):  # each image depends on its own draws only, so that it is the same in any batch
            rows = to_device(chosen, images.device)
            changed = operation(images.index_select(0, rows), width[chosen])
            images = images.index_copy(0, rows, changed)
    return images


def luma_weights(channels: int, device: torch.device) -> Tensor:
    """The share of each channel in the luma, (C,); equal ones unless the channels are RGB."""
    return to_device(np.array(_LUMA if channels == 3 else [1 / channels] * channels, np.float32), device)


def _greyscale(images: Tensor, _: _Floats) -> Tensor:
    weights = luma_weights(images.shape[1], images.device).view(-1, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True).expand_as(images)


def _solarize(images: Tensor, _: _Floats) -> Tensor:
    """Invert values above one half: levels from 128 on."""
    return torch.minimum(images, 1 - images)


def _blur(images: Tensor, width: _Floats) -> Tensor:
    """Gaussian blur, along columns and then along rows; the picture's border is repeated outside of it."""
    low, high = DEVIATIONS
    deviation = low + width * (high - low)  # (B,)
    offsets = np.arange(-_REACH, _REACH + 1)
    taps = np.exp(-0.5 * (offsets / deviation[:, None]) ** 2)  # (B, 13)
    taps /= taps.sum(axis=1, keepdims=True)
    columns = to_device(taps.T.astype(np.float32), images.device)[..., None, None, None]  # (13, B, 1, 1, 1)
    for _ in range(2):
        padded = F.pad(images.mT, (_REACH, _REACH, 0, 0), mode="replicate")  # (B, C, W, H + 12)
        shifted = padded.unfold(-1, images.shape[-2], 1).unbind(-2)  # 13 of (B, C, W, H)
        images = torch.zeros_like(shifted[0])
        for tap, neighbours in zip(columns, shifted, strict=True):
            images.addcmul_(tap, neighbours)
    return images.clamp(0, 1)
