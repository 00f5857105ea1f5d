"""`ResNetConfig`: everything that determines a `ResNet`. No torch here: the command line answers at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vitascope.errors import UserError, nearest
from vitascope.model import resnet_shapes as shapes
from vitascope.model.checks import check_fields
from vitascope.model.options import pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Everything that determines a `ResNet`, the classifier.

    Raises:
        UserError: numbers of which no network can be built.
    """

    image_size: tuple[int, int] | int = 224
    """Height and width in pixels; one number means a square. The weights fit any."""
    in_channels: int = 3
    """Colours of the input."""
    num_classes: int = 1000
    """Outputs of the head, K."""
    class_names: tuple[str, ...] = ()
    """Name of each output, in order; empty where unknown."""
    layers: tuple[int, ...] = (3, 4, 6, 3)
    """Bottleneck units in each stage."""
    width: int = 64
    """Channels after the root; a stage gives 4 times as many, and each further one twice those."""
    root: shapes.RootName = "imagenet"
    """What comes first: a 7x7 convolution and a pool, of stride 4 together; or, for images of about 32
    pixels, a 3x3 convolution of stride 1."""

    def __post_init__(self) -> None:
        """Bring the size to (height, width) and refuse what cannot be built."""
        object.__setattr__(self, "image_size", pair(self.image_size))
        if isinstance(self.class_names, str):
            raise UserError(f"class_names is a list of names, not the text {self.class_names!r}")
        check_fields(self)
        object.__setattr__(self, "class_names", tuple(self.class_names))
        object.__setattr__(self, "layers", tuple(self.layers))
        shapes.check_shape(self.in_channels, self.layers, self.width)
        if self.num_classes < 1:
            raise UserError(f"num_classes must be at least 1, not {self.num_classes}")
        if min(self.image_hw) < 1:
            raise UserError(f"image {self.image_hw[0]}x{self.image_hw[1]} must be positive")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise UserError(f"{len(self.class_names)} class_names for num_classes {self.num_classes}")

    @property
    def image_hw(self) -> tuple[int, int]:
        """Image height and width, pixels."""
        return pair(self.image_size)

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

    def replace(self, **options: Any) -> ResNetConfig:
        """A copy with options changed.

        Raises:
            UserError: an unknown name, naming the nearest; what cannot be built.
        """
        for name in options:
            if name not in RESNET_OPTIONS:
                raise UserError(f"unknown option of a ResNet {name!r}{nearest(name, RESNET_OPTIONS)}")
        return dataclasses.replace(self, **options)

    def option(self, name: str) -> Any:
        """The value of an option by its name."""
        return getattr(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by option, for JSON."""
        values = {name: self.option(name) for name in RESNET_OPTIONS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ResNetConfig:
        """The inverse of `to_dict`; an unknown key raises UserError and names the nearest."""
        return cls().replace(**values)


RESNET_OPTIONS = tuple(field.name for field in dataclasses.fields(ResNetConfig))
"""Every option's name."""
