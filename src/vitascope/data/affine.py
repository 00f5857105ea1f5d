"""Affine maps of pictures: one interpolation per image, at sums of a column's and a row's part."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

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
