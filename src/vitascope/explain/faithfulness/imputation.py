"""The imputation of ROAD: remove pixels without leaving a visible shape.

"Noisy Linear Imputation" of Rong et al. 2022, "A Consistent and Efficient Evaluation Strategy for Attribution
Methods". A grey patch shows a model where something was cut out; pixels that continue their neighbours hardly
do.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import scipy.sparse as sparse
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from vitascope.errors import UserError

DIRECT, DIAGONAL = 1 / 6, 1 / 12
"""Weights of a pixel's four direct and four diagonal neighbours; their sum is 1."""


def impute(image: Tensor, removed: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Replace removed pixels of an image (C, H, W) by the weighted mean of their neighbours, plus noise.

    Neighbours may be removed too, so the means solve a linear system with one unknown per removed pixel. At
    the border, the weights of the existing neighbours are scaled to sum to 1. The system is solved directly,
    in float64 on the CPU; all channels share its factors. `removed` is bool (H, W), `noise` (C, H, W) or a
    number; known pixels are unchanged.
    """
    C, H, W = image.shape
    gone = removed.cpu().numpy().ravel()  # (HW,)
    if gone.all():
        raise UserError(f"all {H * W} pixels are removed: none is left to impute them from")
    if not gone.any():
        return image.clone()
    system, order = _system(H, W)
    unknown, known = order[gone[order]], np.flatnonzero(~gone)
    rows = system[unknown]  # (U, HW)
    pixels = image.detach().cpu().double().reshape(C, H * W).numpy().T  # (HW, C)
    # The matrix is symmetric and positive definite: no pivots, and `order` already keeps the factors sparse.
    factors = splu(
        rows[:, unknown].tocsc(),
        permc_spec="NATURAL",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    filled = np.zeros_like(pixels)
    filled[unknown] = factors.solve(-(rows[:, known] @ pixels[known]))
    means = torch.from_numpy(filled.T).reshape(C, H, W).to(image)
    return torch.where(removed.to(image.device), means + noise, image)


@functools.lru_cache(maxsize=4)
def _system(H: int, W: int) -> tuple[sparse.csr_array, npt.NDArray[np.int64]]:
    """The matrix (HW, HW) of sum_j w_ij (x_i - x_j) = 0, and an elimination order.

    Dividing by the sum of the weights gives each x_i as the weighted mean of its neighbours; undivided, the
    matrix is symmetric.
    """
    down, across = (sparse.eye_array(n, k=1) + sparse.eye_array(n, k=-1) for n in (H, W))
    weights = DIRECT * (
        sparse.kron(down, sparse.eye_array(W)) + sparse.kron(sparse.eye_array(H), across)
    ) + DIAGONAL * sparse.kron(down, across)
    matrix = sparse.diags_array(weights.sum(axis=1)) - weights
    pixels = np.arange(H * W).reshape(H, W)
    return sparse.csr_array(matrix), np.concatenate(_dissect(pixels))


def _dissect(pixels: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Nested dissection (George 1973): both halves, each ordered likewise, then the line between them.

    No pixel of one half neighbours one of the other, so elimination fills in little: a third faster at 224 x
    224 than SuperLU's own orders.
    """
    if pixels.size <= 16:
        return [pixels.ravel()]
    if len(pixels) < pixels.shape[1]:
        pixels = pixels.T
    middle = len(pixels) // 2
    return [*_dissect(pixels[:middle]), *_dissect(pixels[middle + 1 :]), pixels[middle]]
