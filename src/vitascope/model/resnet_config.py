"""`ResNetConfig`: everything that determines a `ResNet`. No torch here: the command line answers at once."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from vitascope.errors import UserError
from vitascope.model import resnet_shapes as shapes
from vitascope.model.configuration import check_fields
from vitascope.model.options import ImageOptions


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class ResNetConfig(ImageOptions):
    """The options that determine a `ResNet` classifier. Its weights fit any image size.

    Raises:
        UserError: an unknown option, with the nearest known one; numbers of which no network can be built.
    """

    option_kind: ClassVar[str] = "option of a ResNet"

    layers: tuple[int, ...] = (3, 4, 6, 3)
    """Bottleneck units in each stage."""
    width: int = 64
    """Channels after the root; a stage gives 4 times as many, and each further one twice those."""
    root: shapes.RootName = "imagenet"
    """What comes first: a 7x7 convolution and a pool, of stride 4 together; or, for images of about 32
    pixels, a 3x3 convolution of stride 1."""

    def __post_init__(self) -> None:
        """Normalize lists to tuples and reject what cannot be built."""
        self.check_images_and_classes()
        check_fields(self)
        object.__setattr__(self, "layers", tuple(self.layers))
        shapes.check_shape(self.in_channels, self.layers, self.width)
        if self.num_classes < 1:
            raise UserError(f"num_classes must be at least 1, not {self.num_classes}")
        if min(self.image_hw) < 1:
            raise UserError(f"image {self.image_hw[0]}x{self.image_hw[1]} must be positive")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the feature maps."""
        return shapes.feature_hw(self.image_hw, self.layers, self.root)

    @property
    def num_tokens(self) -> int:
        """Places of the feature maps: what a hybrid ViT would have as patches."""
        return math.prod(self.grid)

    @property
    def embed_dim(self) -> int:
        """Channels of the feature maps, D: what `ResNet.embed` gives."""
        return shapes.out_channels(self.layers, self.width)

    @property
    def gives_classes(self) -> bool:
        """Whether the head answers with classes: it always does."""
        return True

    @property
    def num_parameters(self) -> int:
        """Trainable numbers in the model, counted from the shapes (a test counts the model's own)."""
        features = shapes.num_parameters(self.in_channels, self.layers, self.width, self.root)
        return features + (self.embed_dim + 1) * self.num_classes

    @property
    def flops(self) -> int:
        """Floating-point operations of one image's forward pass; a multiply-add counts as 2.

        Convolutions and the head only, as `ViTConfig.flops` counts matrix products only.
        """
        shape = (self.in_channels, self.layers, self.width, self.root)
        return 2 * (shapes.multiply_adds(self.image_hw, *shape) + self.embed_dim * self.num_classes)

    @property
    def summary(self) -> str:
        """The network in a phrase."""
        (height, width), units = self.image_hw, ", ".join(map(str, self.layers)) or "no"
        return f"ResNet of {units} units, width {self.width}, {height}x{width} pixels"
