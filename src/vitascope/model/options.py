"""The options of a model, a group for each of the paper's equations and one for training. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from vitascope.errors import UserError
from vitascope.model.configuration import Configuration, check_fields, check_value

Positions = Literal[
    "none",
    "learned",
    "learned_2d",
    "sincos_1d",
    "sincos_2d",
    "sincos_2d_big_vision",
    "relative",
    "rotary",
]
Resample = Literal["timm", "huggingface", "torchvision", "jax", "dinov2"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]


def pair(value: int | Iterable[int]) -> tuple[int, int]:
    """A side as (height, width)."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, Iterable):
        sides = tuple(value)
        if len(sides) == 2 and all(isinstance(side, int) for side in sides):
            return sides[0], sides[1]
    raise UserError(f"a size is a whole number or (height, width), not {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class ImageOptions(Configuration):
    """The options of every model: its images and its classes."""

    image_size: tuple[int, int] | int = 224
    """Height and width in pixels; one number means a square."""
    in_channels: int = 3
    """Colour channels of the input, C in the paper."""
    num_classes: int = 1000
    """Outputs of the head, K."""
    class_names: tuple[str, ...] = ()
    """Name of each output, in order; empty where unknown."""

    def check_images_and_classes(self) -> None:
        """Normalize the size and the names; reject names that are not one for each class."""
        object.__setattr__(self, "image_size", pair(self.image_size))
        if isinstance(self.class_names, str):
            raise UserError(f"class_names is a list of names, not the text {self.class_names!r}")
        check_value("class_names", self.class_names, tuple[str, ...])
        object.__setattr__(self, "class_names", tuple(self.class_names))
        if self.class_names and len(self.class_names) != self.num_classes:
            raise UserError(f"{len(self.class_names)} class_names for num_classes {self.num_classes}")

    @property
    def image_hw(self) -> tuple[int, int]:
        """Image height and width, pixels."""
        return pair(self.image_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """Equation 1: from an image to tokens that know their place."""

    stem: Literal["conv", "linear", "overlap", "resnet"] = "conv"
    """What embeds patches: a convolution whose stride is its kernel; reshape and linear layer, the same
    function; a convolution whose stride is less; or a ResNet and a convolution on its feature map."""
    stride: tuple[int, int] | int | None = None
    """Pixels between overlapping patches; half a patch where it is left open."""
    patch_bias: bool = True
    """Whether the patch embedding has a bias (CLIP's has none)."""
    resnet_layers: tuple[int, ...] = (3, 4, 9)
    """Units in each stage of the ResNet stem; its stride is 4, doubled by each stage after the first."""
    resnet_width: int = 64
    """Channels after the ResNet's root."""
    resnet_dialect: Literal["jax", "timm"] = "jax"
    """Whose epsilons the ResNet has: the original's, or timm's."""
    positions: Positions = "learned"
    """How tokens know their place; see `model/positions.py`."""
    position_prefix: bool = True
    """Whether learned positions cover the class, distillation and register tokens too."""
    resample: Resample = "timm"
    """Whose rule interpolates learned positions to another grid."""
    rotary_base: float = 100.0
    """Base of the rotary frequencies."""
    rotary_rounded: bool = False
    """Whether the rotary periods are rounded to bfloat16, as in the files that DINOv3 was published in."""
    embedding_norm: bool = False
    """A LayerNorm between equation 1 and the encoder (CLIP's)."""

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_fields(self)
        object.__setattr__(self, "resnet_layers", tuple(self.resnet_layers))
        if self.stride is not None:
            object.__setattr__(self, "stride", pair(self.stride))
            if self.stem != "overlap":
                raise UserError(f'stride belongs to stem "overlap", not to {self.stem!r}')
        if self.rotary_base <= 0:
            raise UserError(f"rotary_base must be positive, not {self.rotary_base}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Equations 2 and 3: what a block of the encoder is made of."""

    norm: Literal["pre", "post"] = "pre"
    """LayerNorm before each residual branch, or after each sum as in the Transformer of 2017."""
    norm_eps: float = 1e-6
    """Epsilon of every LayerNorm."""
    attention: Literal["global", "axial", "window"] = "global"
    """Which patches a patch attends to: all; its row, then its column; or its window."""
    window: tuple[int, int] | int = 7
    """Height and width of a window, in patches."""
    head_dim: int | None = None
    """Width of an attention head; left open, `embed_dim` / `num_heads`. Set, heads can be pruned."""
    token_merging: int = 0
    """Patches that every block makes fewer, merging the most alike (Bolya et al. 2023, ToMe)."""
    qkv_bias: Literal["all", "none", "no_key"] = "all"
    """Biases of queries, keys and values; DINOv3 leaves out that of the keys."""
    mlp: Activation = "gelu"
    """Activation of the MLP: GELU, its tanh approximation (JAX's default), sigmoid(1.702 x) x, or a gate."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer over `embed_dim`."""
    layer_scale: float | None = None
    """Start of a learned scale for each channel of a residual branch (Touvron et al. 2021, CaiT)."""

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_fields(self)
        object.__setattr__(self, "window", pair(self.window))
        if min(pair(self.window)) < 1:
            raise UserError("a window is at least 1x1, not {}x{}".format(*pair(self.window)))
        if self.head_dim is not None and self.head_dim < 1:
            raise UserError(f"head_dim must be at least 1, not {self.head_dim}")
        if self.token_merging < 0:
            raise UserError(f"token_merging must be at least 0, not {self.token_merging}")
        if self.norm_eps < 0:
            raise UserError(f"norm_eps must not be negative, not {self.norm_eps}")
        if self.mlp_ratio <= 0:
            raise UserError(f"mlp_ratio {self.mlp_ratio} gives an MLP without a hidden layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadoutOptions:
    """Equation 4: the tokens beside the patches, and how an answer is read from the sequence."""

    class_token: bool | None = None
    """Whether there is a class token; left open, where pooling reads it."""
    distillation_token: bool = False
    """A second token with a head of its own, taught by a teacher (DeiT); the heads' logits are averaged."""
    num_registers: int = 0
    """Tokens that nothing reads, where the model may keep what it computes (Darcet et al. 2024)."""
    pool: Literal["cls", "mean", "cls_mean", "map"] = "cls"
    """What the head reads: the class token, the mean of the patches, both side by side, or what one learned
    query attends to."""
    pool_norm: Literal["before", "after"] = "before"
    """The last LayerNorm: of every token before pooling, or of what pooling gives (timm's `fc_norm`)."""
    head: Literal["linear", "zero", "mlp", "pre_logits", "none"] = "linear"
    """A linear layer; one that starts at zero; an MLP with a hidden tanh layer, as in pre-training; that
    hidden layer alone; or none: features."""

    def __post_init__(self) -> None:
        """Refuse what is no option or has no meaning."""
        check_fields(self)
        if self.num_registers < 0:
            raise UserError(f"num_registers must be at least 0, not {self.num_registers}")
        if self.pool in ("cls", "cls_mean") and self.class_token is False:
            raise UserError(f"pool {self.pool!r} reads a class token: class_token must not be False")
        if self.distillation_token and (self.pool != "cls" or self.head not in ("linear", "zero", "none")):
            raise UserError(
                'a distillation token goes with pool "cls" and head "linear", "zero" or "none", '
                f"not with {self.pool!r} and {self.head!r}"
            )
        if self.pool_norm == "after" and (self.distillation_token or self.pool in ("cls_mean", "map")):
            raise UserError('pool_norm "after" goes with one pooled token: pool "cls" or "mean"')

    @property
    def has_class_token(self) -> bool:
        """Whether there is a class token."""
        return self.pool in ("cls", "cls_mean") if self.class_token is None else self.class_token

    @property
    def gives_classes(self) -> bool:
        """Whether the head's outputs are classes, and not features."""
        return self.head in ("linear", "zero", "mlp")

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        return self.has_class_token + self.distillation_token + self.num_registers

    @property
    def num_pooled(self) -> int:
        """How many vectors of `embed_dim` pooling sets side by side."""
        return 2 if self.distillation_token or self.pool == "cls_mean" else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What matters only before and while a model is trained."""

    init: Literal["paper", "timm"] = "paper"
    """Initialization: that of the paper's code (vit_jax), or timm's."""
    dropout: float = 0.0
    """Dropout after the position embedding, the attention's projection and each MLP layer."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    drop_path: float = 0.0
    """Stochastic depth: the rate of the last block; it grows linearly from 0 at the first."""
    patch_dropout: float = 0.0
    """Share of the patches that each image leaves out (Li et al. 2022, FLIP): shorter sequences."""
    gradient_checkpointing: bool = False
    """Compute each block again for its gradient instead of keeping its activations."""

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_fields(self)
        for name in ("dropout", "attention_dropout", "drop_path", "patch_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is a probability in [0, 1), not {getattr(self, name)}")


DEPENDENT_OPTIONS = {
    "stride": ("stem", "overlap"),
    "resnet_layers": ("stem", "resnet"),
    "resnet_width": ("stem", "resnet"),
    "resnet_dialect": ("stem", "resnet"),
    "position_prefix": ("positions", "learned"),
    "rotary_base": ("positions", "rotary"),
    "rotary_rounded": ("positions", "rotary"),
    "window": ("attention", "window"),
}
"""Options that mean something only where another has a certain value: by name, the other and its value."""
