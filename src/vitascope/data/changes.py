"""Changes of a batch of images whose numbers are drawn on the host and go to the device in one copy."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.models.engines.transfer import is_asynchronous, to_device

Array: TypeAlias = npt.NDArray[Any]

_ALIGNMENT = 16
"""Bytes: an array begins at a multiple in the common buffer, so that every dtype can be read there."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a batch: host arrays, and a function of the images and of these arrays' tensors.

    The function may overwrite the tensors, and images that an earlier change has made; the first change of a
    batch makes new images.
    """

    arrays: tuple[Array, ...]
    apply: Callable[..., Tensor]


def apply_changes(images: Tensor, changes: Sequence[Change]) -> Tensor:
    """Images (B, ...) after all changes, in turn; the arrays are copied to the device together."""
    arrays = [array for change in changes for array in change.arrays]
    tensors = iter(together(arrays, images.device))
    for change in changes:
        images = change.apply(images, *itertools.islice(tensors, len(change.arrays)))
    return images


def together(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on a device; a GPU gets one copy of a common buffer, of which they are views."""
    if not is_asynchronous(device):
        return [to_device(array, device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = list(itertools.accumulate(sizes, initial=0))
    buffer = np.empty(starts[-1], np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = to_device(buffer, device)
    return [
        moved[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


_Floats = npt.NDArray[np.float64]


def sampling_lines(
    matrices: _Floats, height: int, width: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The parts of the points (x, y) that affine maps read: of columns (B, 2, 1, W), of rows (B, 2, H, 1).

    The maps (B, 2, 3) lead from output to input. x and y run from -1 to 1 along each side.
    """
    x, y = ((2 * np.arange(side) + 1) / side - 1 for side in (width, height))  # the pixels' centres
    by_x, by_y, shift = np.moveaxis(matrices[..., None, None], 2, 0)  # (B, 2, 1, 1) each
    return (by_x * x + shift).astype(np.float32), (by_y * y[:, None]).astype(np.float32)


def sample(images: Tensor, columns: Tensor, rows: Tensor, *, padding: str) -> Tensor:
    """Images (B, C, H, W), read bilinearly at the points of `sampling_lines`; `padding` as in grid_sample."""
    grid = (columns + rows).permute(0, 2, 3, 1)  # (B, H, W, 2)
    return F.grid_sample(images, grid, padding_mode=padding, align_corners=False)
