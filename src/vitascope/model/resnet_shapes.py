"""What a `ResNet` is made of, as plain numbers. No torch here: a configuration asks before anything is built.

Sizes: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1; Steiner et al. 2022, "How to
train your ViT?" (R26, and R, the root alone).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from vitascope.errors import UserError

RESNETS: dict[str, tuple[int, ...]] = {
    "r": (),
    "r26": (2, 2, 2, 2),
    "r50": (3, 4, 6, 3),
    "r50_s16": (3, 4, 9),
}
"""Bottleneck units in each stage, by name. `r50_s16` is the R50 of R50+ViT-B/16: as many units, the last
stage's moved to the third, so that the stride is 16 and not 32 (Dosovitskiy et al. 2021, section 4.1)."""

EXPANSION = 4
"""Channels that leave a bottleneck, over those of its 3x3 convolution (He et al. 2016, section 4.1)."""

GROUPS = 32
"""Groups of a GroupNorm (Wu & He 2018), where there are so many channels."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """One bottleneck: 1x1 to `channels`, 3x3 with `stride`, 1x1 to `out_channels`."""

    in_channels: int
    channels: int
    stride: int

    @property
    def out_channels(self) -> int:
        """Channels of the sum."""
        return EXPANSION * self.channels

    @property
    def has_projection(self) -> bool:
        """Whether the shortcut needs a convolution to have the shape of the residual branch."""
        return self.in_channels != self.out_channels or self.stride != 1


@dataclasses.dataclass(frozen=True)
class Convolution:
    """One square convolution, without bias, and the GroupNorm that follows it."""

    in_channels: int
    out_channels: int
    kernel: int
    reduction: int
    """Sides of the image over those of the output."""

    @property
    def num_weights(self) -> int:
        """Numbers in the kernel, and multiply-adds for one pixel of the output."""
        return self.kernel**2 * self.in_channels * self.out_channels


def norm_groups(channels: int) -> int:
    """Groups of the GroupNorm over so many channels: 32, or each channel by itself where there are fewer.

    Raises:
        UserError: 32 does not divide the channels.
    """
    groups = min(GROUPS, channels)
    if channels % groups:
        raise UserError(
            f"{channels} channels are not {groups} equal groups; "
            f"a width of 1, 2, 4, 8, 16 or a multiple of {GROUPS} fits every layer"
        )
    return groups


def check_shape(in_channels: int, layers: Sequence[int], width: int) -> None:
    """Refuse what cannot be built.

    Raises:
        UserError: numbers below 1, or channels that the groups of a norm do not divide.
    """
    for name, value in (("in_channels", in_channels), ("width", width)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if any(units < 1 for units in layers):
        raise UserError(f"each stage needs at least 1 unit, not layers {tuple(layers)}")
    norm_groups(width)
    for stage in range(len(layers)):
        norm_groups(width * 2**stage)
        norm_groups(width * 2**stage * EXPANSION)


def stages(layers: Sequence[int], width: int = 64) -> list[list[Unit]]:
    """The units of each stage: from one stage to the next, twice the channels and half the side."""
    in_channels, result = width, []
    for stage, count in enumerate(layers):
        units = []
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1  # the root's pool has halved the first already
            units.append(Unit(in_channels, width * 2**stage, stride))
            in_channels = units[-1].out_channels
        result.append(units)
    return result


def out_channels(layers: Sequence[int], width: int = 64) -> int:
    """Channels of the feature maps: the width for no stage, then 4, 8, 16 and 32 times the width."""
    return width * 2 ** (len(layers) - 1) * EXPANSION if layers else width


def total_stride(layers: Sequence[int]) -> int:
    """Pixels from one feature to the next: 4 after the root and in the first stage, then 8, 16 and 32."""
    return 4 * 2 ** max(0, len(layers) - 1)


def feature_hw(image_hw: tuple[int, int], layers: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the feature maps: the image's over the stride, rounded up ("SAME" padding)."""
    stride = total_stride(layers)
    return -(-image_hw[0] // stride), -(-image_hw[1] // stride)


def convolutions(in_channels: int, layers: Sequence[int], width: int = 64) -> Iterator[Convolution]:
    """Every convolution, in the order of the forward pass; the shortcut's stands last in its unit."""
    check_shape(in_channels, layers, width)
    yield Convolution(in_channels, width, kernel=7, reduction=2)
    reduction = 4
    for unit in (unit for stage in stages(layers, width) for unit in stage):
        yield Convolution(unit.in_channels, unit.channels, 1, reduction)
        reduction *= unit.stride
        yield Convolution(unit.channels, unit.channels, 3, reduction)
        yield Convolution(unit.channels, unit.out_channels, 1, reduction)
        if unit.has_projection:
            yield Convolution(unit.in_channels, unit.out_channels, 1, reduction)


def num_parameters(in_channels: int, layers: Sequence[int], width: int = 64) -> int:
    """Trainable numbers of `ResNetFeatures`: kernels, and scale and shift of each norm. No head.

    Raises:
        UserError: see `check_shape`.
    """
    each = convolutions(in_channels, layers, width)
    return sum(conv.num_weights + 2 * conv.out_channels for conv in each)


def multiply_adds(image_hw: tuple[int, int], in_channels: int, layers: Sequence[int], width: int = 64) -> int:
    """Multiply-adds of one image's forward pass through `ResNetFeatures`; each counts as 1. No head.

    Matrix products only: norms, and the standardization of the weights, which no image multiplies, are left
    out.

    Raises:
        UserError: an image without pixels; see `check_shape` for the rest.
    """
    height, width_px = image_hw
    if min(image_hw) < 1:
        raise UserError(f"image {height}x{width_px} must be positive")
    return sum(
        conv.num_weights * -(-height // conv.reduction) * -(-width_px // conv.reduction)
        for conv in convolutions(in_channels, layers, width)
    )
