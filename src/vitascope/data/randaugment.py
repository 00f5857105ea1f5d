"""RandAugment (Cubuk et al. 2020) of whole batches on the device, level for level equal to PIL's.

The operations of an image and their strengths are drawn on the host from given numbers; images are sorted by
operation, so that each operation runs once per layer, however large the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.transfer import to_device
from vitascope.errors import UserError

_Floats: TypeAlias = npt.NDArray[np.float64]

DRAWS_PER_OPERATION = 3
"""Uniform numbers per operation: choice, strength, sign."""

_GREY = 128.0
"""The level outside the picture, as in the paper's reference code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandAugment:
    """`num_ops` operations per image, each drawn from the paper's list of 14, with repetition.

    Strengths follow timm's "increasing" table (`rand-m9-mstd0.5-inc1` of DeiT), in which a larger magnitude
    is always a larger change; see `operation_arguments`.
    """

    num_ops: int = 2  # operations one after the other, at least 1
    magnitude: float = 9.0  # strength, from 0 to 10
    std: float = 0.5  # standard deviation of the magnitude, which is cut to 0 to 10 (timm; 0 in the paper)
    probability: float = 1.0  # share of the operations that are carried out, above 0: 0.5 in timm and DeiT

    def __post_init__(self) -> None:
        if self.num_ops < 1:
            raise UserError(f"RandAugment needs 1 operation or more per image, not {self.num_ops}")
        if not 0 <= self.magnitude <= 10:
            raise UserError(f"RandAugment's magnitude is from 0 to 10, not {self.magnitude:g}")
        if not 0 <= self.std < float("inf"):
            raise UserError(
                f"RandAugment's standard deviation must be a number of 0 or more, not {self.std:g}"
            )
        if not 0 < self.probability <= 1:
            raise UserError(f"RandAugment's probability is above 0 and at most 1, not {self.probability:g}")

    @property
    def draws(self) -> int:
        """Uniform numbers per image."""
        return self.num_ops * DRAWS_PER_OPERATION

    def __call__(self, images: Tensor, draws: _Floats) -> Tensor:
        """Floats in [0, 1], (B, C, H, W), and uniform numbers (B, `self.draws`) -> floats in [0, 1]."""
        # Each operation takes and returns 256 levels, as in 8-bit pictures: Posterize and Equalize need them.
        levels = (images * 255).round()  # (B, C, H, W)
        for layer in np.split(draws, self.num_ops, axis=1):
            levels = apply_operations(levels, *self._choose(layer))
        return levels / 255

    def _choose(self, draws: _Floats) -> tuple[npt.NDArray[np.int64], _Floats]:
        """Uniform numbers (B, 3) -> indices into OPERATIONS and their arguments, (B,) each."""
        which, strength, sign = draws.T
        # Below the probability, `which` is uniform again, and chooses the operation.
        chosen = (which / self.probability * len(OPERATIONS)).astype(np.int64)
        operations = np.where(which < self.probability, chosen, OPERATIONS.index("Identity"))
        normal = torch.special.ndtri(torch.from_numpy(strength.clip(2.0**-53))).numpy()  # finite at 0, too
        magnitude = np.clip(self.magnitude + self.std * normal, 0, 10)
        return operations, operation_arguments(operations, magnitude, np.where(sign < 0.5, -1.0, 1.0))


def operation_arguments(operations: npt.NDArray[np.int64], magnitude: _Floats, sign: _Floats) -> _Floats:
    """Each operation's argument from a magnitude in [0, 10] and a sign of 1 or -1, (B,) all: timm's table,
    but Posterize keeps one bit at magnitude 10, because without any the picture is black."""
    share = magnitude / 10
    factor = np.maximum(0.1, 1 + 0.9 * share * sign)  # 1 changes nothing
    table = {
        "Solarize": 256 - np.floor(share * 256),  # levels from here on are inverted
        "Posterize": np.maximum(1, 4 - np.floor(share * 4)),  # bits that are kept
        **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), factor),
        "Rotate": 30 * share * sign,  # degrees, counterclockwise
        **dict.fromkeys(("ShearX", "ShearY"), 0.3 * share * sign),  # tangent of the angle
        **dict.fromkeys(("TranslateX", "TranslateY"), 0.45 * share * sign),  # share of the side
    }
    arguments = np.zeros(len(operations))
    for name, values in table.items():
        arguments = np.where(operations == OPERATIONS.index(name), values, arguments)
    return arguments


def apply_operations(levels: Tensor, operations: npt.NDArray[np.int64], arguments: _Floats) -> Tensor:
    """Apply to each image's levels, whole numbers from 0 to 255 as floats (B, C, H, W), one of OPERATIONS,
    given by its index, (B,), with an argument of `operation_arguments`, (B,)."""
    order = np.argsort(operations, kind="stable")
    operations, arguments = operations[order], arguments[order]
    there, back = to_device(np.stack([order, np.argsort(order)]), levels.device)  # (B,) each
    ordered = levels.index_select(0, there)
    on_device = to_device(arguments.astype(np.float32), levels.device)
    changed = []
    ends = np.searchsorted(operations, np.arange(len(_VALUE_OPERATIONS)), side="right").tolist()
    for start, end, function in zip([0, *ends], ends, _VALUE_OPERATIONS.values(), strict=False):
        if start < end:
            changed.append(function(ordered[start:end], on_device[start:end]))
    if ends[-1] < len(order):  # the rest moves pixels: one interpolation for all of them
        height, width = levels.shape[-2:]
        theta = affine_matrices(operations[ends[-1] :], arguments[ends[-1] :], height, width)
        changed.append(_warp(ordered[ends[-1] :], to_device(theta.astype(np.float32), levels.device)))
    return torch.cat(changed).index_select(0, back)


# The operations take levels (B, C, H, W) and an argument for each image (B,).


def _auto_contrast(levels: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to the range from 0 to 255."""
    low, high = levels.amin((2, 3), keepdim=True), levels.amax((2, 3), keepdim=True)  # (B, C, 1, 1)
    stretched = ((levels - low) * 255 / (high - low).clamp(min=1)).floor()
    return torch.where(high > low, stretched, levels)


def _equalize(levels: Tensor, _: Tensor) -> Tensor:
    """Make each channel's levels about equally frequent, as PIL's ImageOps.equalize: a level's new value is
    the number of pixels below it, in steps; a step is a 255th of those below the brightest level."""
    pixels = levels.flatten(0, 1).flatten(1).long()  # (B * C, H * W)
    counts = pixels.new_zeros(len(pixels), 256).scatter_add_(1, pixels, torch.ones_like(pixels))
    brightest = pixels.amax(dim=1, keepdim=True)  # (B * C, 1)
    step = (pixels.shape[1] - counts.gather(1, brightest)) // 255
    below = counts.cumsum(dim=1) - counts  # (B * C, 256)
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=levels.device))
    return table.gather(1, pixels).view_as(levels).to(levels.dtype)


def _posterize(levels: Tensor, bits: Tensor) -> Tensor:
    step = torch.bitwise_left_shift(1, 8 - bits.int()).view(-1, 1, 1, 1)
    return (levels / step).floor() * step


def _contrast(levels: Tensor, factor: Tensor) -> Tensor:
    """Move levels away from the mean grey of the picture, or towards it."""
    luma = _luma(levels)
    pixels = luma[0].numel()
    total = luma.long().sum(dim=(1, 2, 3))  # in integers: independent of the order
    mean = (2 * total + pixels) // (2 * pixels)  # rounded
    return _blend(mean.to(levels.dtype).view(-1, 1, 1, 1), levels, factor)


def _sharpness(levels: Tensor, factor: Tensor) -> Tensor:
    """Move levels away from a smoothed picture, or towards it: 3x3, centre weight 5, the border stays."""
    rows = levels[..., :-2, :] + levels[..., 1:-1, :] + levels[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]  # (B, C, H - 2, W - 2)
    inside = levels[..., 1:-1, 1:-1]
    smooth = levels.clone()
    smooth[..., 1:-1, 1:-1] = ((total + 4 * inside) / 13).round()
    return _blend(smooth, levels, factor)


def _luma(levels: Tensor) -> Tensor:
    """Each pixel's luma (ITU-R 601, PIL's whole numbers): (B, 1, H, W)."""
    if levels.shape[1] != 3:
        return levels.mean(dim=1, keepdim=True).round()
    red, green, blue = levels.unbind(1)
    weighted = 19595 * red + 38470 * green + 7471 * blue + 32768  # below 2^24, so exact in float32
    return (weighted / 65536).floor().unsqueeze(1)


def _blend(start: Tensor, levels: Tensor, factor: Tensor) -> Tensor:
    """A point on the line from `start` through the picture; PIL rounds down."""
    return (start + factor.view(-1, 1, 1, 1) * (levels - start)).clamp(0, 255).floor()


def affine_matrices(
    operations: npt.NDArray[np.int64], arguments: _Floats, height: int, width: int
) -> _Floats:
    """Affine maps, (B, 2, 3), from output to input, in coordinates from -1 to 1 along each side. Rotation is
    about the centre, shear about the upper left corner (as in PIL, timm and torchvision)."""

    def amount(name: str) -> _Floats:
        return np.where(operations == OPERATIONS.index(name), arguments, 0.0)  # (B,)

    angle = np.deg2rad(amount("Rotate"))
    shear_x, shear_y = amount("ShearX") * height / width, amount("ShearY") * width / height
    row_x = [np.cos(angle), shear_x - np.sin(angle) * height / width, shear_x + 2 * amount("TranslateX")]
    row_y = [shear_y + np.sin(angle) * width / height, np.cos(angle), shear_y + 2 * amount("TranslateY")]
    return np.stack([row_x, row_y]).transpose(2, 0, 1)


def _warp(levels: Tensor, theta: Tensor) -> Tensor:
    """Each image read at the points of its matrix, (B, 2, 3), with grey outside."""
    height, width = levels.shape[-2:]
    # Not F.affine_grid: its matrix product may round differently for one image than for a batch.
    x = (2 * torch.arange(width, device=levels.device) + 1) / width - 1  # (W,), the pixels' centres
    y = ((2 * torch.arange(height, device=levels.device) + 1) / height - 1).unsqueeze(1)  # (H, 1)
    by_x, by_y, shift = theta[..., None, None].unbind(2)  # (B, 2, 1, 1) each
    grid = (by_x * x + by_y * y + shift).permute(0, 2, 3, 1)  # (B, H, W, 2)
    return (F.grid_sample(levels - _GREY, grid, align_corners=False) + _GREY).round()


_VALUE_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Identity": lambda levels, _: levels,
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Solarize": lambda levels, at: torch.where(levels < at.view(-1, 1, 1, 1), levels, 255 - levels),
    "Posterize": _posterize,
    "Color": lambda levels, factor: _blend(_luma(levels), levels, factor),  # nothing in grey pictures
    "Contrast": _contrast,
    "Brightness": lambda levels, factor: _blend(torch.zeros_like(levels), levels, factor),
    "Sharpness": _sharpness,
}

OPERATIONS = (*_VALUE_OPERATIONS, "Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
"""The paper's list: operations on values first, then those that move pixels."""
