"""Changes of a batch of images whose numbers are drawn on the host and go to the device in one copy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.data.transfer import is_asynchronous, to_device

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
