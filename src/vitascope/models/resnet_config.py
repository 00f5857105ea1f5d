"""`ResNetConfig`: the options that determine a `ResNet`, its shapes and its cost. No torch, for a fast start.

Sizes: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1; Steiner et al. 2022, "How to
train your ViT?" (R26, and R, the root alone).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NamedTuple

from vitascope.arguments import Range
from vitascope.errors import UserError
from vitascope.models.options import ImageOptions, Role

EXPANSION = 4
"""Output channels of a bottleneck over those of its 3x3 convolution (He et al. 2016, section 4.1)."""

GROUPS = 32
"""Groups of a GroupNorm (Wu & He 2018) of 32 channels or more."""

MAX_STAGES = 8
"""More would leave one feature of an image of a thousand pixels."""

RootName = Literal["imagenet", "cifar"]


class Root(NamedTuple):
    """The layers before the stages: one convolution, and maybe a 3x3 max pool of stride 2."""

    kernel: int
    stride: int
    pools: bool

    @property
    def reduction(self) -> int:
        """Sides of the image over those of the first stage's input."""
        return self.stride * (2 if self.pools else 1)


ROOTS: dict[RootName, Root] = {
    "imagenet": Root(kernel=7, stride=2, pools=True),
    "cifar": Root(kernel=3, stride=1, pools=False),
}
"""He et al. 2016, table 1 and section 4.2: the first would reduce a 32x32 image to 8x8 before any unit."""


class Unit(NamedTuple):
    """A bottleneck: 1x1 to `channels`, 3x3 with `stride`, 1x1 to `out_channels`."""

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


class Convolution(NamedTuple):
    """A square convolution without bias; a GroupNorm follows it."""

    in_channels: int
    out_channels: int
    kernel: int
    reduction: int
    """Sides of the image over those of the output."""

    @property
    def num_weights(self) -> int:
        """Numbers in the kernel: the multiply-adds of one output pixel."""
        return self.kernel**2 * self.in_channels * self.out_channels


def norm_groups(channels: int) -> int:
    """Groups of the GroupNorm of this many channels: 32, or one per channel if there are fewer."""
    groups = min(GROUPS, channels)
    if channels % groups:
        raise UserError(
            f"{channels} channels are not {groups} equal groups; "
            f"a width of 1, 2, 4, 8, 16 or a multiple of {GROUPS} fits every layer"
        )
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class ResNetConfig(ImageOptions):
    """The options that determine a `ResNet` classifier. Its weights fit any image size.

    Raises:
        UserError: an unknown option, with the nearest known one; numbers of which no network can be built.
    """

    option_kind: ClassVar[str] = "option of a ResNet"
    gives_classes: ClassVar[bool] = True

    layers: Annotated[tuple[int, ...], Range(ge=1), Role.SHAPE] = (3, 4, 6, 3)
    """Bottleneck units in each stage."""
    width: Annotated[int, Range(ge=1), Role.SHAPE] = 64
    """Channels after the root; the first stage has 4 times as many, each further stage twice the last."""
    root: Annotated[RootName, Role.SHAPE] = "imagenet"
    """The first layers: a 7x7 convolution and a pool, of stride 4 together; or, for images of about 32
    pixels, a 3x3 convolution of stride 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.layers) > MAX_STAGES:
            raise UserError(f"a ResNet has at most {MAX_STAGES} stages, not {len(self.layers)}")
        norm_groups(self.width)
        for stage in range(len(self.layers)):  # not each of the units, which may be claimed to be billions
            norm_groups(self.width * 2**stage)
            norm_groups(self.width * 2**stage * EXPANSION)

    def stages(self) -> list[list[Unit]]:
        """The units of each stage: from one stage to the next, twice the channels and half the side."""
        in_channels, result = self.width, []
        for stage, count in enumerate(self.layers):
            units = []
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                units.append(Unit(in_channels, self.width * 2**stage, stride))
                in_channels = units[-1].out_channels
            result.append(units)
        return result

    def convolutions(self) -> Iterator[Convolution]:
        """Every convolution, in the order of the forward pass; a unit's shortcut is its last."""
        root = ROOTS[self.root]
        yield Convolution(self.in_channels, self.width, root.kernel, root.stride)
        reduction = root.reduction
        for unit in (unit for stage in self.stages() for unit in stage):
            yield Convolution(unit.in_channels, unit.channels, 1, reduction)
            reduction *= unit.stride
            yield Convolution(unit.channels, unit.channels, 3, reduction)
            yield Convolution(unit.channels, unit.out_channels, 1, reduction)
            if unit.has_projection:
                yield Convolution(unit.in_channels, unit.out_channels, 1, reduction)

    @property
    def stride(self) -> int:
        """Pixels from one feature to the next: the root's, doubled by each stage after the first."""
        return ROOTS[self.root].reduction * 2 ** max(0, len(self.layers) - 1)

    @property
    def embed_dim(self) -> int:
        """Channels of the feature maps, D: the width of `ResNet.embed`."""
        return self.width * 2 ** (len(self.layers) - 1) * EXPANSION if self.layers else self.width

    @property
    def feature_dim(self) -> int:
        """Width of `embed`'s output."""
        return self.members * self.embed_dim

    def grid_of(self, image: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of an image's feature maps: its sides over the stride, rounded up."""
        return -(-image[0] // self.stride), -(-image[1] // self.stride)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the feature maps."""
        return self.grid_of(self.image_hw)

    @property
    def num_tokens(self) -> int:
        """Places of the feature maps: a hybrid ViT's patches."""
        return math.prod(self.grid)

    @property
    def feature_parameters(self) -> int:
        """Trainable parameters without the head: kernels, and scale and shift of each norm."""
        return sum(
            convolution.num_weights + 2 * convolution.out_channels for convolution in self.convolutions()
        )

    @property
    def feature_multiply_adds(self) -> int:
        """Multiply-adds of one image's convolutions; norms and the weights' standardization are left out."""
        height, width = self.image_hw
        return sum(
            convolution.num_weights * -(-height // convolution.reduction) * -(-width // convolution.reduction)
            for convolution in self.convolutions()
        )

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return self.members * (self.feature_parameters + (self.embed_dim + 1) * self.num_classes)

    @property
    def flops(self) -> int:
        """Floating-point operations of one image's convolutions and head; a multiply-add counts as 2."""
        return 2 * self.members * (self.feature_multiply_adds + self.embed_dim * self.num_classes)

    @property
    def summary(self) -> str:
        """The network in a phrase."""
        (height, width), units = self.image_hw, ", ".join(map(str, self.layers)) or "no"
        several = f"{self.members} models: " if self.members > 1 else ""
        return f"{several}ResNet of {units} units, width {self.width}, {height}x{width} pixels"
