"""Principal components whose signs do not depend on the machine."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.errors import UserError

_ROUNDING = 1e-6
"""Smallest relative spread that counts: below it, values differ only by float32 rounding."""


def principal_components(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The directions in which rows of (M, D) vary most, strongest first; each one's largest entry is
    positive.

    Returns components, float64 (k, D), orthonormal, and each one's share of the variance, float64 (k,), on
    the CPU. k is less than `count` where rows vary in fewer directions, 0 where they are all equal.
    """
    if not values.isfinite().all():
        raise UserError(
            "principal components need finite numbers: look for NaN or infinity in the images and the "
            "weights, or run the model in float32"
        )
    values = values.detach().cpu().double()
    centred = values - values.mean(dim=0)  # (M, D)
    M, D = centred.shape
    # The smaller of the two products: M is thousands for patches, D is for filters of 32x32 pixels.
    if M < D:
        variances, left = torch.linalg.eigh(centred @ centred.T)  # (M,), (M, M), rising
        directions = (left.T @ centred).flip(0)
    else:
        variances, right = torch.linalg.eigh(centred.T @ centred)  # (D,), (D, D), rising
        directions = right.T.flip(0)
    variances = variances.flip(0)
    kept = (variances > _ROUNDING**2 * values.square().sum()).nonzero()[:count, 0]
    components = torch.nn.functional.normalize(directions[kept], dim=1)  # (k, D)
    largest = components.abs().argmax(dim=1, keepdim=True)
    return components * components.gather(1, largest).sign(), variances[kept] / variances.sum()
