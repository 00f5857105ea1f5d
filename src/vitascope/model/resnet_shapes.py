"""What a `ResNet` is made of, as plain numbers. No torch here: a configuration asks before anything is built.

Sizes: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1; Steiner et al. 2022, "How to
train your ViT?" (R26, and R, the root alone).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

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

MAX_STAGES = 8
"""More would leave one feature of an image of a thousand pixels."""

RootName = Literal["imagenet", "cifar"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root:
    """What comes before the stages: one convolution, and perhaps a 3x3 max pool of stride 2."""

    kernel: int
    stride: int
    pools: bool

    @property
    def reduction(self) -> int:
        """Sides of the image over those of what the first stage gets."""
        return self.stride * (2 if self.pools else 1)


ROOTS: dict[RootName, Root] = {
    "imagenet": Root(kernel=7, stride=2, pools=True),
    "cifar": Root(kernel=3, stride=1, pools=False),
}
"""He et al. 2016, table 1 and section 4.2: of a 32x32 image the first would leave 8x8 before any unit."""


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
        UserError: numbers below 1, too many stages, or channels that the groups of a norm do not divide.
    """
    for name, value in (("in_channels", in_channels), ("width", width)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if len(layers) > MAX_STAGES:
        raise UserError(f"a ResNet has at most {MAX_STAGES} stages, not {len(layers)}")
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
            stride = (
                2 if stage > 0 and index == 0 else 1
            )  # the first stage keeps the size that the root gives it
            units.append(Unit(in_channels, width * 2**stage, stride))
            in_channels = units[-1].out_channels
        result.append(units)
    return result


def out_channels(layers: Sequence[int], width: int = 64) -> int:
    """Channels of the feature maps: the width for no stage, then 4, 8, 16 and 32 times the width."""
    return width * 2 ** (len(layers) - 1) * EXPANSION if layers else width


def total_stride(layers: Sequence[int], root: RootName = "imagenet") -> int:
    """Pixels from one feature to the next: the root's and the first stage's, doubled by each further stage.

    4, 8, 16 and 32 for one to four stages after the root of ImageNet; 1, 2 and 4 after CIFAR's.
    """
    return ROOTS[root].reduction * 2 ** max(0, len(layers) - 1)


def feature_hw(
    image_hw: tuple[int, int], layers: Sequence[int], root: RootName = "imagenet"
) -> tuple[int, int]:
    """Rows and columns of the feature maps: the image's over the stride, rounded up ("SAME" padding)."""
    stride = total_stride(layers, root)
    return -(-image_hw[0] // stride), -(-image_hw[1] // stride)


def convolutions(
    in_channels: int, layers: Sequence[int], width: int = 64, root: RootName = "imagenet"
) -> Iterator[Convolution]:
    """Every convolution, in the order of the forward pass; the shortcut's stands last in its unit."""
    check_shape(in_channels, layers, width)
    yield Convolution(in_channels, width, ROOTS[root].kernel, ROOTS[root].stride)
    reduction = ROOTS[root].reduction
    for unit in (unit for stage in stages(layers, width) for unit in stage):
        yield Convolution(unit.in_channels, unit.channels, 1, reduction)
        reduction *= unit.stride
        yield Convolution(unit.channels, unit.channels, 3, reduction)
        yield Convolution(unit.channels, unit.out_channels, 1, reduction)
        if unit.has_projection:
            yield Convolution(unit.in_channels, unit.out_channels, 1, reduction)


def num_parameters(
    in_channels: int, layers: Sequence[int], width: int = 64, root: RootName = "imagenet"
) -> int:
    """Trainable numbers of `ResNetFeatures`: kernels, and scale and shift of each norm. No head.

    Raises:
        UserError: see `check_shape`.
    """
    each = convolutions(in_channels, layers, width, root)
    return sum(conv.num_weights + 2 * conv.out_channels for conv in each)


def multiply_adds(
    image_hw: tuple[int, int],
    in_channels: int,
    layers: Sequence[int],
    width: int = 64,
    root: RootName = "imagenet",
) -> int:
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
        for conv in convolutions(in_channels, layers, width, root)
    )
