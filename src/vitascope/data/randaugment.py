"""RandAugment (Cubuk et al. 2020) and 3-Augment (Touvron et al. 2022) of whole batches on the device.

RandAugment is level for level equal to PIL's.

The operations of an image and their strengths are drawn on the host from given numbers. Images are sorted by
operation, so that each kind of operation runs once per layer, however large the batch: a table of the 256
levels, a blend with another picture, or an interpolation.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.arguments import CheckedFields, Range
from vitascope.data.changes import Change, apply_changes, sample, sampling_lines

_Floats: TypeAlias = npt.NDArray[np.float64]
_Choice: TypeAlias = tuple[npt.NDArray[np.int64], _Floats]
"""Indices into OPERATIONS and arguments of `operation_arguments`, (B,) each."""

OPERATIONS = (
    *("Identity", "AutoContrast", "Equalize", "Solarize", "Posterize", "Color", "Contrast", "Brightness"),
    *("Sharpness", "Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"),
)
"""The paper's list. The order is that of the draws."""

_ORDER = (
    *("Identity", "Solarize", "Posterize", "Brightness", "AutoContrast", "Equalize"),
    *("Contrast", "Color", "Sharpness", "Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"),
)
"""The operations in the order of sorted images: nothing, tables, blends, and interpolations."""
_PLACES = np.array([_ORDER.index(name) for name in OPERATIONS])

DRAWS_PER_OPERATION = 3
"""Uniform numbers per operation: choice, strength, sign."""

_GREY = 128.0
"""The level outside the picture, as in the paper's reference code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandAugment(CheckedFields):
    """`num_ops` operations per image, each drawn from the paper's list of 14, with repetition.

    Strengths follow timm's "increasing" table (`rand-m9-mstd0.5-inc1` of DeiT), in which a larger magnitude
    is always a larger change; see `operation_arguments`.
    """

    num_ops: Annotated[int, Range(ge=1)] = 2  # operations one after the other, at least 1
    magnitude: Annotated[float, Range(ge=0, le=10)] = 9.0  # strength, from 0 to 10
    std: Annotated[float, Range(ge=0)] = 0.5
    """Standard deviation of the magnitude, which is cut to 0 to 10 (timm; 0 in the paper)."""
    probability: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Share of the operations that are carried out: 0.5 in timm and DeiT."""

    @property
    def draws(self) -> int:
        """Uniform numbers per image."""
        return self.num_ops * DRAWS_PER_OPERATION

    def __call__(self, images: Tensor, draws: _Floats) -> Tensor:
        """Floats in [0, 1], (B, C, H, W), and uniform numbers (B, `self.draws`) -> floats in [0, 1]."""
        return apply_changes(images, self.changes(draws, images.shape))

    def changes(self, draws: _Floats, shape: Sequence[int]) -> list[Change]:
        """The changes of floats in [0, 1] of a shape (B, C, H, W), by uniform numbers (B, `self.draws`)."""
        layers = [self._choose(layer) for layer in np.split(draws, self.num_ops, axis=1)]
        # Each operation takes and returns 256 levels, as in 8-bit pictures: Posterize and Equalize need them.
        to_levels = Change((), lambda images: (images * 255).round_())
        return [to_levels, *operation_changes(layers, shape), Change((), lambda levels: levels.div_(255))]

    def _choose(self, draws: _Floats) -> _Choice:
        """Uniform numbers (B, 3) -> the operations of one layer."""
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


def operation_changes(layers: Sequence[_Choice], shape: Sequence[int]) -> list[Change]:
    """The changes of levels, whole numbers from 0 to 255 as floats of a shape (B, C, H, W), by one of
    OPERATIONS per image in each layer, given by its index, with an argument of `operation_arguments`."""
    changes = []
    places = np.arange(shape[0])  # of the images among the sorted ones
    for operations, arguments in layers:
        order = np.argsort(_PLACES[operations], kind="stable")
        changes.append(_layer(places[order], operations[order], arguments[order], shape[1:]))
        places = np.argsort(order)
    return [*changes, Change((places,), lambda levels, back: levels.index_select(0, back))]


def _layer(
    places: npt.NDArray[np.int64], operations: npt.NDArray[np.int64], arguments: _Floats, shape: Sequence[int]
) -> Change:
    """One operation for each of the images at `places`, given in `_ORDER`; they stay in this order."""
    C, height, width = shape
    names = ("Solarize", "AutoContrast", "Equalize", "Contrast", "Color", "Sharpness", "Rotate")
    begins = np.searchsorted(_PLACES[operations], [_ORDER.index(name) for name in names])
    tables, contrasts, equalized, contrast, color, sharpness, moved = begins.tolist()
    table = _tables(operations[tables:contrast], arguments[tables:contrast], C)
    matrices = affine_matrices(operations[moved:], arguments[moved:], height, width)
    factors = arguments[contrast:moved].astype(np.float32).reshape(-1, 1, 1, 1)
    shares = _shares(equalized - contrasts, contrast - equalized)
    lines = sampling_lines(matrices, height, width)

    def apply(
        levels: Tensor, order: Tensor, table: Tensor, shares: Tensor, scale: Tensor, factors: Tensor,
        luma: Tensor, columns: Tensor, rows: Tensor,
    ) -> Tensor:  # fmt: skip
        levels = levels.index_select(0, order)  # new, so that the rest may overwrite it
        if tables < contrast:
            pixels = levels[tables:contrast].flatten(2)  # (n, C, H * W), a view
            index, given = pixels.long(), contrasts - tables
            if contrasts < contrast:
                _contrast_tables(table[given:], index[given:], shares, scale, equalized - contrasts)
            torch.gather(table, 2, index, out=pixels)
        if contrast < moved:
            _blend(levels[contrast:moved], factors, luma, color - contrast, sharpness - contrast)
        if moved < len(levels):
            # PIL's bilinear interpolation rounds halves up, as floor after adding 1/2 does.
            whole = levels[moved:]
            torch.add(sample(whole - _GREY, columns, rows, padding="zeros"), _GREY + 0.5, out=whole)
        if contrast < len(levels):
            levels[contrast:].clamp_(0, 255).floor_()
        return levels

    scale = np.arange(257, dtype=np.float32)
    return Change((places, table, shares, scale, factors, _luma(C), *lines), apply)


# Tables have 257 entries, one more than levels, because counts of the pixels below each level have as many.


def _tables(operations: npt.NDArray[np.int64], arguments: _Floats, channels: int) -> npt.NDArray[np.float32]:
    """The new values of all levels by Solarize, Posterize and Brightness: (n, C, 257). For AutoContrast and
    Equalize, what each level adds to the measure of `_contrast_tables`, before counting."""
    levels, amounts = np.arange(257, dtype=np.float32), arguments.astype(np.float32)[:, None]
    bits = 2.0 ** (8 - np.trunc(amounts.clip(0, 8)))
    tables = {
        "Solarize": np.where(levels < amounts, levels, 255 - levels),
        "Posterize": np.floor(levels / bits) * bits,
        "Brightness": np.floor(np.clip(amounts * levels, 0, 255)),
        "AutoContrast": np.where(levels > 0, 255, 0),
        "Equalize": np.zeros(1),
    }
    chosen = [operations[:, None] == OPERATIONS.index(name) for name in tables]
    found = np.select(chosen, list(tables.values())).astype(np.float32)[:, None]  # (n, 1, 257)
    return np.repeat(found, channels, axis=1)


def _shares(contrasts: int, equalized: int) -> npt.NDArray[np.float32]:
    """The numbers of steps of `_contrast_tables` at which the new levels 1 to 255 begin, (n, 1, 255)."""
    shares = np.tile(np.arange(1, 256, dtype=np.float32), (contrasts + equalized, 1, 1))
    shares[contrasts:] -= 0.5
    return shares


def _contrast_tables(table: Tensor, index: Tensor, shares: Tensor, scale: Tensor, equalized: int) -> None:
    """Overwrite `table` by those of AutoContrast and, from the image `equalized` on, of PIL's
    ImageOps.equalize.

    Both divide a measure of the levels into 255 steps, from the darkest level of a channel to its brightest.
    A new level is a number of steps. Equalize measures a level by the number of pixels below it, and rounds
    to the nearest step. AutoContrast measures it by itself, in 255ths, and rounds down. Steps are whole
    numbers. Where they are 0, levels stay.

    Args:
        table: of `_tables`, (n, C, 257).
        index: each channel's levels, int64 (n, C, P).
        shares: of `_shares`.
        scale: the numbers 0 to 256, float32.
    """
    counted = index[equalized:]
    if len(counted):
        table[equalized:, :, 1:].scatter_add_(2, counted, scale[1].expand(counted.shape))
    measure = table.cumsum(2)  # in float32: exact for pictures of up to 2^24 pixels
    start, end = measure.gather(2, index).aminmax(dim=2, keepdim=True)  # (n, C, 1) each
    step = torch.div(end.sub_(start), 255, rounding_mode="floor")
    begins = torch.addcmul(start, shares, step)  # (n, C, 255)
    torch.where(step > 0, torch.searchsorted(begins, measure, right=True), scale, out=table)


def _blend(levels: Tensor, factors: Tensor, luma: Tensor, color: int, sharpness: int) -> None:
    """Move levels (n, C, H, W) in place along the line from another picture through theirs.

    `factors` (n, 1, 1, 1) are the new distances, as shares of the old ones. The other picture is the mean
    luma (Contrast), from the image number `color` on each pixel's luma (Color), and from `sharpness` on the
    smoothed picture (Sharpness).
    """
    other = torch.empty_like(levels)
    if sharpness:
        grey = levels[:sharpness].flatten(2)  # (n, C, H * W)
        torch.bmm(luma.expand(len(grey), -1, -1), grey, out=other[:sharpness].flatten(2))
    if sharpness < len(levels):  # 3x3 with the centre weight 5; the border stays
        sharp = levels[sharpness:]
        other[sharpness:] = sharp
        if min(levels.shape[2:]) > 2:
            mean = sharp.unfold(2, 3, 1).mean(-1).unfold(3, 3, 1).mean(-1)  # (n, C, H - 2, W - 2)
            inside = (..., slice(1, -1), slice(1, -1))
            # Errors of rounding change no level: 13ths are never halves.
            torch.lerp(mean, sharp[inside], 4 / 13, out=other[sharpness:][inside])
    other.add_(0.5).floor_()
    if color:  # in float64: exact, and so independent of the order
        mean = other[:color].mean((1, 2, 3), keepdim=True, dtype=torch.float64)
        other[:color] = mean.add_(0.5).floor_()
    torch.addcmul(other, levels.sub_(other), factors, out=levels)


def _luma(channels: int) -> npt.NDArray[np.float32]:
    """The share of each channel in the luma (ITU-R 601, PIL's whole numbers of 65536ths, so that float32 is
    exact), in a row for each channel: (C, C). Equal shares unless the channels are RGB."""
    even = [65536 // channels + (channel < 65536 % channels) for channel in range(channels)]
    weights = np.array([19595, 38470, 7471] if channels == 3 else even) / 65536
    return np.tile(weights.astype(np.float32), (channels, 1))


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


DRAWS = 2
"""Uniform numbers per image: choice, width of the blur."""
DEVIATIONS = (0.1, 2.0)
"""The range of the blur's standard deviation, pixels, as in DeiT III's code, at every image size."""
_REACH = 6
"""Pixels on each side that a blur reads: three times the largest deviation."""
_LUMA = [0.299, 0.587, 0.114]
"""Luma of red, green and blue (ITU-R 601)."""


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
