"""The options of a model, in a group per equation of the paper and one for training. No torch."""

import dataclasses
import enum
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from vitascope.arguments import CheckedFields, Range, check_fields
from vitascope.errors import UserError
from vitascope.models.configuration import Configuration

SinCos = Literal["sincos_1d", "sincos_2d", "sincos_2d_big_vision"]
Relative = Literal["relative", "relative_by_block"]
Rotary = Literal["rotary", "rotary_axial", "rotary_mixed"]
Positions = Literal["none", "learned", "learned_2d", SinCos, Relative, Rotary]
Resample = Literal["timm", "huggingface", "torchvision", "jax", "dinov2"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]
ClassOutputs = Literal["exclusive", "independent"]
"""Classes of which one applies, or any may."""
Outputs = Literal[ClassOutputs, "embedding"]
CLASSES: tuple[ClassOutputs, ...] = get_args(ClassOutputs)

EVEN = 0.5
"""The threshold of a class without one of its own."""
PROBABILITY = Range(ge=0, lt=1)
MAX_MEMBERS = 20
"""Of an ensemble."""
MAX_TOKENIZER_LAYERS = 8
"""More would leave one token of an image of five hundred pixels."""


@dataclasses.dataclass(frozen=True)
class AppliesWith:
    """An option that applies only if another one has a certain value, or one of several."""

    option: str
    value: str
    others: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether the option applies with this value of the other."""
        return value == self.value or value in self.others


class Role(enum.Enum):
    """What an option does for an architecture; one without a role does what its named size says."""

    SHAPE = "the shape of the body's weights"
    NAME = "fixed by a named size, also by its default"
    FREE = "no part of an architecture: of the task, of training, or of a library's numerics"


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

    image_size: Annotated[tuple[int, int] | int, Range(ge=1), Role.FREE] = 224
    """Height and width in pixels; one number means a square."""
    in_channels: Annotated[int, Range(ge=1), Role.SHAPE] = 3
    """Colour channels of the input, C in the paper."""
    num_classes: Annotated[int, Range(ge=1), Role.FREE] = 1000
    """Outputs of the head, K."""
    class_names: Annotated[tuple[str, ...], Role.FREE] = ()
    """Name of each output, in order; empty where unknown."""
    outputs: Annotated[Outputs, Role.FREE] = "exclusive"
    """The outputs: classes of which one applies, classes of which any may apply, or an embedding, such as
    CLIP's."""
    thresholds: Annotated[tuple[float, ...], Range(ge=0, le=1), Role.FREE] = ()
    """Probability from which on each class is taken to apply, where any may; empty for `EVEN`."""
    members: Annotated[int, Range(ge=1, le=MAX_MEMBERS), Role.FREE] = 1
    """Models of this configuration whose probabilities are averaged: of an `Ensemble`, more than one."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "image_size", pair(self.image_size))
        if self.class_names and len(self.class_names) != self.num_classes:
            raise UserError(f"{len(self.class_names)} class_names for num_classes {self.num_classes}")
        if self.thresholds and len(self.thresholds) != self._decided_alone:
            raise UserError(
                f"{len(self.thresholds)} thresholds for {self.num_classes} {self.outputs} outputs: there is "
                "one for each class, where any may apply"
            )

    @property
    def _decided_alone(self) -> int:
        """The number of classes that each apply or not: all K where any may, none where one does."""
        return self.num_classes if self.outputs == "independent" else 0

    @property
    def decision_thresholds(self) -> tuple[float, ...]:
        """Probability from which on each of the K classes applies, where any may; empty where one does."""
        return self.thresholds or (EVEN,) * self._decided_alone

    @property
    def image_hw(self) -> tuple[int, int]:
        """Image height and width, pixels."""
        return pair(self.image_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """Equation 1: patches and positions."""

    stem: Annotated[Literal["conv", "overlap", "resnet", "tokenizer"], Role.NAME] = "conv"
    """The patch embedding: a convolution whose stride is its kernel, the paper's linear projection; one of
    smaller stride; a ResNet and a convolution of its feature map; or a few small convolutions with pooling,
    the tokenizer of CCT (Hassani et al. 2021)."""
    stride: Annotated[tuple[int, int] | int | None, Range(ge=1), AppliesWith("stem", "overlap")] = None
    """Pixels between overlapping patches; by default half a patch."""
    patch_bias: bool = True
    """Whether the convolutions of the patch embedding have a bias (CLIP's and CCT's have none)."""
    resnet_layers: Annotated[tuple[int, ...], AppliesWith("stem", "resnet")] = (3, 4, 9)
    """Units in each stage of the ResNet stem; its stride is 4, doubled by each stage after the first."""
    resnet_width: Annotated[int, AppliesWith("stem", "resnet")] = 64
    """Channels after the ResNet's root."""
    resnet_dialect: Annotated[Literal["jax", "timm"], AppliesWith("stem", "resnet")] = "jax"
    """The epsilons of the ResNet: the original's, or timm's."""
    positions: Annotated[Positions, Role.NAME] = "learned"
    """The position embedding; see `model/positions.py`."""
    position_prefix: Annotated[bool, AppliesWith("positions", "learned"), Role.FREE] = True
    """Whether learned positions cover the class, distillation and register tokens too."""
    absolute: Literal["none", "patches", "all"] = "none"
    """Learned positions beside relative or rotary ones: none, those of patches, or of all tokens (EVA-02)."""
    resample: Annotated[Resample, Role.FREE] = "timm"
    """The library whose rule interpolates learned positions to another grid."""
    embedding_norm: bool = False
    """A norm between equation 1 and the encoder (CLIP's)."""
    patch_norm: Annotated[bool, AppliesWith("stem", "conv", ("overlap",))] = False
    """A norm of the patches before positions are added to them (AIMv2's)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stride is not None:
            object.__setattr__(self, "stride", pair(self.stride))
            if self.stem != "overlap":
                raise UserError(f'stride belongs to stem "overlap", not to {self.stem!r}')
        if self.absolute != "none" and not (self.relative or self.rotary):
            raise UserError(
                f"absolute {self.absolute!r} adds learned positions to relative or rotary ones, not to "
                f"positions {self.positions!r}"
            )

    @property
    def relative(self) -> bool:
        """Whether a learned number is added to each score of attention."""
        return self.positions in get_args(Relative)

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.positions in get_args(Rotary)

    @property
    def learned(self) -> Literal["none", "patches", "all"]:
        """The tokens that learned positions are added to."""
        if self.positions != "learned":
            return self.absolute
        return "all" if self.position_prefix else "patches"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryOptions:
    """The rotary positions of equation 1."""

    rotary_base: Annotated[
        float, Range(gt=0), AppliesWith("positions", "rotary", ("rotary_axial", "rotary_mixed"))
    ] = 100.0
    """Base of the rotary frequencies; of `rotary_mixed`, those that training starts from."""
    rotary_rounded: Annotated[bool, AppliesWith("positions", "rotary")] = False
    """Whether rotary periods are rounded to bfloat16, as in DINOv3's published files."""
    rotary_grid: Annotated[
        tuple[int, int] | int | None, Range(ge=1), AppliesWith("positions", "rotary_axial")
    ] = None
    """Rows and columns that every grid is stretched to, so that angles stay as in pre-training (EVA-02)."""
    rotary_offset: Annotated[float, AppliesWith("positions", "rotary_axial")] = 0.0
    """Number of the first row and the first column (Perception Encoder's is 1)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rotary_grid is not None:
            object.__setattr__(self, "rotary_grid", pair(self.rotary_grid))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """The stem "tokenizer" of equation 1 (Hassani et al. 2021, section 3.3)."""

    tokenizer_widths: Annotated[tuple[int, ...], Range(ge=1), AppliesWith("stem", "tokenizer")] = (32, 64)
    """Channels after each layer but the last, which has `embed_dim`. The first layers halve the image, until
    a place is a patch; the others keep its size."""
    tokenizer_pooling: Annotated[tuple[int, ...], Range(ge=0), AppliesWith("stem", "tokenizer")] = ()
    """The layers that may halve the image, numbered from 0; empty for all. As many of them do as the patch
    size needs, the first ones."""
    tokenizer_activation: Annotated[Literal["relu", "gelu"], AppliesWith("stem", "tokenizer")] = "relu"
    """After each convolution and its pooling: the paper's ReLU, or GELU."""

    def __post_init__(self) -> None:
        check_fields(self)
        layers, pooling = self.num_layers, list(self.tokenizer_pooling)
        if layers > MAX_TOKENIZER_LAYERS or pooling != [layer for layer in range(layers) if layer in pooling]:
            raise UserError(
                f"a tokenizer has at most {MAX_TOKENIZER_LAYERS} layers, a width for each but the last in "
                f"tokenizer_widths, not {layers}; tokenizer_pooling is an ascending choice of these, "
                f"not {pooling}"
            )

    @property
    def num_layers(self) -> int:
        """Number of convolutions."""
        return len(self.tokenizer_widths) + 1

    @property
    def pooling(self) -> tuple[int, ...]:
        """The layers that may halve the image."""
        return self.tokenizer_pooling or tuple(range(self.num_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Equations 2 and 3: the blocks of the encoder."""

    norm: Literal["pre", "post", "branch"] = "pre"
    """The norm before each residual branch, after each sum as in the Transformer of 2017, or of each
    branch's result, before the sum (Liu et al. 2022, Swin V2)."""
    attention: Literal["global", "axial", "window"] = "global"
    """The patches that a patch attends to: all; its row, then its column; or its window."""
    window: Annotated[tuple[int, int] | int, Range(ge=1), AppliesWith("attention", "window")] = 7
    """Height and width of a window, in patches."""
    head_dim: Annotated[int | None, Range(ge=1), Role.SHAPE] = None
    """Width of an attention head, for pruned heads; by default `embed_dim` / `num_heads`."""
    token_merging: Annotated[int, Range(ge=0)] = 0
    """Pairs of the most similar patches that every block merges (Bolya et al. 2023, ToMe)."""
    qkv_bias: Literal["all", "none", "no_key"] = "all"
    """Biases of queries, keys and values; DINOv3 has none for the keys."""
    linear_bias: bool = True
    """Biases of the other linear layers of the blocks; AIMv2 has none."""
    mlp: Activation = "gelu"
    """The MLP: GELU, its tanh approximation (JAX's default), x sigmoid(1.702 x), or SwiGLU."""
    mlp_ratio: Annotated[float, Role.SHAPE] = 4.0
    """Width of the MLP's hidden layer over `embed_dim`."""
    layer_scale: float | None = None
    """Initial value of a learned scale per channel of a residual branch (Touvron et al. 2021, CaiT)."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "window", pair(self.window))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOptions(CheckedFields):
    """The norms of equations 1 to 4."""

    norm_type: Literal["layer", "rms"] = "layer"
    """Every norm: LayerNorm, or RMSNorm, which has no mean and no bias (Zhang and Sennrich 2019)."""
    inner_norm: Literal["none", "mlp", "all"] = "none"
    """A further norm inside the branches, before their last layer: in none, in the MLP, or in attention
    too (EVA-02's)."""
    norm_eps: Annotated[float, Range(ge=0), Role.FREE] = 1e-6
    """Epsilon of every norm."""
    qk_norm: bool = False
    """Norms of each head's queries and keys (Dehghani et al. 2023, ViT-22B)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadoutOptions:
    """Equation 4: the tokens beside the patches, pooling and head."""

    class_token: bool | None = None
    """Whether there is a class token; by default, if pooling reads it."""
    distillation_token: Annotated[bool, Role.NAME] = False
    """A second token with its own head for a teacher's labels (DeiT); the heads' logits are averaged."""
    num_registers: Annotated[int, Range(ge=0), Role.NAME] = 0
    """Extra tokens that the head does not read (Darcet et al. 2024)."""
    pool: Literal["cls", "mean", "cls_mean", "map", "sequence"] = "cls"
    """The head's input: the class token, the mean of the patches, both concatenated, the patches that one
    learned query attends to, or their sum under the softmax of one learned score (Hassani et al. 2021)."""
    pool_heads: Annotated[int | None, Range(ge=1), AppliesWith("pool", "map")] = None
    """Heads of the pooling query; by default of the width of the blocks' heads."""
    pool_mlp_ratio: Annotated[float | None, Range(gt=0), AppliesWith("pool", "map")] = None
    """Width of the hidden layer of the pooling's MLP over `embed_dim`; by default that of the blocks."""
    pool_prefix: Annotated[bool, AppliesWith("pool", "map")] = False
    """Whether the query attends to all tokens, not to the patches alone (Perception Encoder's)."""
    pool_norm: Literal["before", "after", "none"] = "before"
    """The last norm: of every token before pooling, of the pooled vector (timm's `fc_norm`), or none."""
    head: Annotated[Literal["linear", "mlp", "pre_logits", "cosine", "none"], Role.FREE] = "linear"
    """A linear layer; the pre-training MLP with a hidden tanh layer; that hidden layer alone; the cosine with
    one vector per class, which `zero_shot` makes of texts; or none, for features."""
    projection: Annotated[int | None, Range(ge=1), AppliesWith("head", "cosine"), Role.FREE] = None
    """Width of the linear projection before the cosine; by default there is none."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pool in ("cls", "cls_mean") and self.class_token is False:
            raise UserError(f"pool {self.pool!r} reads a class token: class_token must not be False")
        if self.distillation_token and (self.pool != "cls" or self.head not in ("linear", "none")):
            raise UserError(
                'a distillation token goes with pool "cls" and head "linear" or "none", '
                f"not with {self.pool!r} and {self.head!r}"
            )
        if self.pool_norm == "after" and (self.distillation_token or self.pool in ("cls_mean", "map")):
            raise UserError('pool_norm "after" goes with one pooled token: pool "cls", "mean" or "sequence"')

    @property
    def has_class_token(self) -> bool:
        """Whether there is a class token."""
        return self.pool in ("cls", "cls_mean") if self.class_token is None else self.class_token

    @property
    def num_pooled(self) -> int:
        """The number of vectors of `embed_dim` that pooling concatenates."""
        return 2 if self.distillation_token or self.pool == "cls_mean" else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regularization(CheckedFields):
    """Initialization and regularization, which matter only in training."""

    init: Annotated[Literal["paper", "mimetic", "timm"], Role.FREE] = "paper"
    """The initialization of the paper's code (vit_jax); the same with attention as trained models have it
    (Trockman and Kolter 2023); or that of timm."""
    head_init: Annotated[Literal["init", "zero"], Role.FREE] = "init"
    """The output layer starts as `init` has it, or at zero, so that first gradients do not reach the body."""
    dropout: Annotated[float, PROBABILITY, Role.FREE] = 0.0
    """Dropout after the position embedding, the attention's projection and each MLP layer."""
    attention_dropout: Annotated[float, PROBABILITY, Role.FREE] = 0.0
    """Dropout on the attention weights."""
    drop_path: Annotated[float, PROBABILITY, Role.FREE] = 0.0
    """Stochastic depth: the rate of the last block; it grows linearly from 0 at the first."""
    patch_dropout: Annotated[float, PROBABILITY, Role.FREE] = 0.0
    """Share of each image's patches that is left out (Li et al. 2022, FLIP)."""


OPTION_SETS = {"modern": {"positions": "rotary", "num_registers": 4, "layer_scale": 0.1}}
"""Model options under one name, for `--model-options modern`."""
