"""`ViTConfig`: the options that determine a `VisionTransformer`, and its cost. No torch, for a fast start.

The cost is counted from the shapes, because `torch.utils.flop_counter` needs torch and a built model, and the
table of models must not wait for either. A test compares the two counts.
"""

import dataclasses
import itertools
import math
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from vitascope.arguments import Range, has_type
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.models import options
from vitascope.models.resnet_config import ResNetConfig


class LinearLayer(NamedTuple):
    """A matrix product of a forward pass: (rows, inputs) x (inputs, outputs), plus a bias."""

    rows: int
    inputs: int
    outputs: int
    biases: int


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class ViTConfig(options.ImageOptions):
    """The options that determine a `VisionTransformer`.

    The options of the groups are keywords too: `ViTConfig(depth=6, pool="mean", positions="rotary")`.

    Raises:
        UserError: an unknown option, with the nearest known one; options that contradict each other, with the
            values and the nearest that fit.
    """

    option_kind: ClassVar[str] = "model option"

    patch_size: Annotated[tuple[int, int] | int, Range(ge=1), options.Role.SHAPE] = 16
    """Height and width of a patch, P in the paper."""
    remainder: Annotated[Literal["rejected", "cut"], options.Role.FREE] = "rejected"
    """Images with pixels at the right or the bottom that fill no patch are rejected, or these pixels are cut:
    the rule of checkpoints such as SigLIP's at 384 pixels in patches of 14."""
    embed_dim: Annotated[int, Range(ge=1), options.Role.SHAPE] = 768
    """Width of a token, D in the paper."""
    depth: Annotated[int, Range(ge=1), options.Role.SHAPE] = 12
    """Number of encoder blocks, L in the paper."""
    num_heads: Annotated[int, Range(ge=1), options.Role.SHAPE] = 12
    """Attention heads per block, k in the paper."""
    embedding: options.EmbeddingOptions = dataclasses.field(default_factory=options.EmbeddingOptions)
    """Equation 1."""
    rotary: options.RotaryOptions = dataclasses.field(default_factory=options.RotaryOptions)
    """The rotary positions of equation 1."""
    tokenizer: options.TokenizerOptions = dataclasses.field(default_factory=options.TokenizerOptions)
    """The stem "tokenizer" of equation 1."""
    block: options.BlockOptions = dataclasses.field(default_factory=options.BlockOptions)
    """Equations 2 and 3."""
    norms: options.NormOptions = dataclasses.field(default_factory=options.NormOptions)
    """The norms of equations 1 to 4."""
    readout: options.ReadoutOptions = dataclasses.field(default_factory=options.ReadoutOptions)
    """Equation 4."""
    regularization: options.Regularization = dataclasses.field(default_factory=options.Regularization)
    """Initialization and regularization."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "patch_size", options.pair(self.patch_size))
        self._check_widths()
        self._check_token_merging()
        self._check_stem()
        self.grid_of(self.image_hw)

    def _check_widths(self) -> None:
        """Reject widths that do not divide as heads, positions and pooling need, and grids that break up."""
        for name, hidden in {"mlp_ratio": self.mlp_dim, "pool_mlp_ratio": self.pool_mlp_dim}.items():
            if hidden < 1:
                raise UserError(f"{name} {self.option(name)} gives an MLP without a hidden layer")
        if self.block.head_dim is None and self.embed_dim % self.num_heads:
            fits = [heads for heads in range(1, self.embed_dim + 1) if self.embed_dim % heads == 0]
            best = min(fits, key=lambda heads: abs(heads - self.num_heads))
            raise UserError(
                f"num_heads {self.num_heads} does not divide embed_dim {self.embed_dim}; nearest: {best}"
            )
        embedding, training, positions = self.embedding, self.regularization, self.embedding.positions
        if embedding.rotary and self.head_dim % 4:
            raise UserError(f"rotary positions need a head width that 4 divides, not {self.head_dim}")
        waves = positions.startswith("sincos") or (embedding.learned != "none" and training.init == "mimetic")
        if waves and self.embed_dim % 4:
            raise UserError(f"sine-cosine positions need an embed_dim that 4 divides, not {self.embed_dim}")
        if training.patch_dropout and (self.block.attention != "global" or embedding.relative):
            raise UserError("patch_dropout breaks up the grid that axial, window and relative attention need")
        heads = {"pool_heads": self.readout.pool_heads}
        if self.readout.pool == "map" and self.readout.pool_heads is None:
            heads = {'of pool "map", whose heads have the same width, head_dim': self.head_dim}
        for name, divisor in heads.items():
            if divisor is not None and self.embed_dim % divisor:
                raise UserError(f"{name} {divisor} does not divide embed_dim {self.embed_dim}")

    def _check_token_merging(self) -> None:
        """Reject blocks that need the place of a token, which a merged one has not, or a way back to it."""
        embedding = self.embedding
        against = {
            f"attention {self.block.attention!r}": self.block.attention != "global",
            f"positions {embedding.positions!r}": embedding.relative or embedding.rotary,
            f"norm {self.block.norm!r}": self.block.norm != "pre",
        }
        unsuited = " and ".join(name for name, applies in against.items() if applies)
        if self.block.token_merging and unsuited:
            raise UserError(
                f"token_merging does not go with {unsuited}: it needs global attention, positions that are "
                "added to the tokens, and pre-norm blocks"
            )

    def _check_stem(self) -> None:
        """Reject patches that the stem cannot make."""
        embedding, (ph, pw), (sh, sw) = self.embedding, self.patch_hw, self.patch_stride
        if self.remainder == "cut" and embedding.stem not in ("conv", "overlap"):
            raise UserError(
                f'remainder "cut" is the rule of a convolution, not of the stem {embedding.stem!r}'
            )
        if embedding.stem == "overlap" and (sh > ph or sw > pw):
            raise UserError(f"stride {sh}x{sw} leaves gaps between patches of {ph}x{pw}")
        if embedding.stem == "resnet":
            step = self.stem_resnet.stride
            if ph % step or pw % step:
                raise UserError(
                    f"patch {ph}x{pw} is not a multiple of the stride of a ResNet with "
                    f"{len(embedding.resnet_layers)} stages, {step}"
                )
        sides = [2**halved for halved in range(1, len(self.tokenizer.pooling) + 1)]
        if embedding.stem == "tokenizer" and (ph != pw or ph not in sides):
            raise UserError(
                f"a tokenizer of {len(self.tokenizer.pooling)} layers has patches of "
                f"{' or '.join(map(str, sides))} pixels, not {ph}x{pw}: set patch_size to one of these, or "
                "add tokenizer_widths, one for each layer but the last"
            )

    def grid_of(self, image: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches in an image of (height, width); `UserError` if they do not tile it."""
        patch, step = self.patch_hw, self.patch_stride
        check_tiling(self.tiled_hw(image), patch, step)
        grid = ((image[0] - patch[0]) // step[0] + 1, (image[1] - patch[1]) // step[1] + 1)
        window = options.pair(self.block.window)
        if self.block.attention == "window" and (grid[0] % window[0] or grid[1] % window[1]):
            raise UserError(
                f"a grid of {grid[0]}x{grid[1]} patches is not a multiple of the window "
                f"{window[0]}x{window[1]}"
            )
        return grid

    def at_size(self, image_size: tuple[int, int] | int) -> Self:
        """The same for another image size, which patches must tile; only a checkpoint's own may be cut."""
        if options.pair(image_size) == self.image_hw:
            return self
        return self.replace(image_size=image_size, remainder="rejected")

    def tiled_hw(self, image: tuple[int, int]) -> tuple[int, int]:
        """Height and width, from the top left, of what the patches tile in an image of (height, width)."""
        (ph, pw), (sh, sw) = self.patch_hw, self.patch_stride
        if self.remainder == "rejected" or image[0] < ph or image[1] < pw:
            return image
        return (image[0] - ph) // sh * sh + ph, (image[1] - pw) // sw * sw + pw

    @property
    def patch_hw(self) -> tuple[int, int]:
        """Patch height and width, pixels."""
        return options.pair(self.patch_size)

    @property
    def patch_stride(self) -> tuple[int, int]:
        """Pixels from one patch to the next, down and across."""
        if self.embedding.stem != "overlap":
            return self.patch_hw
        if self.embedding.stride is None:
            return max(1, self.patch_hw[0] // 2), max(1, self.patch_hw[1] // 2)
        return options.pair(self.embedding.stride)

    @property
    def tokenizer_channels(self) -> tuple[int, ...]:
        """Channels of the image and after every layer of the stem "tokenizer"."""
        return (self.in_channels, *self.tokenizer.tokenizer_widths, self.embed_dim)

    @property
    def tokenizer_pools(self) -> tuple[bool, ...]:
        """Whether each layer of the stem "tokenizer" halves the image."""
        pooling = self.tokenizer.pooling[: self.patch_hw[0].bit_length() - 1]
        return tuple(layer in pooling for layer in range(self.tokenizer.num_layers))

    @property
    def stem_resnet(self) -> ResNetConfig:
        """The ResNet of the stem "resnet"; its head is not built."""
        layers, width = self.embedding.resnet_layers, self.embedding.resnet_width
        return ResNetConfig(
            image_size=self.image_size, in_channels=self.in_channels, layers=layers, width=width
        )

    def windows_of(self, grid: tuple[int, int]) -> list[tuple[int, int]]:
        """Height and width of the windows that patches of a grid attend within, one pass after another."""
        if self.block.attention == "axial":
            return [(1, grid[1]), (grid[0], 1)]  # a row is a window of height 1, a column one of width 1
        return [options.pair(self.block.window) if self.block.attention == "window" else grid]

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.grid_of(self.image_hw)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        readout = self.readout
        return readout.has_class_token + readout.distillation_token + readout.num_registers

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, T: the prefix tokens and N patches."""
        return self.grid[0] * self.grid[1] + self.num_prefix_tokens

    @property
    def num_pooled_tokens(self) -> int:
        """The number of tokens that pooling by attention or by scores sums up."""
        return self.num_tokens - (0 if self.readout.pool_prefix else self.num_prefix_tokens)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.block.head_dim or self.embed_dim // self.num_heads

    @property
    def attention_dim(self) -> int:
        """Width of all heads together: `embed_dim`, unless heads are pruned."""
        return self.num_heads * self.head_dim

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return round(self.embed_dim * self.block.mlp_ratio)

    @property
    def pool_mlp_dim(self) -> int:
        """Width of the hidden layer of attention pooling's MLP."""
        ratio = self.readout.pool_mlp_ratio
        return self.mlp_dim if ratio is None else round(self.embed_dim * ratio)

    @property
    def final_norm(self) -> Literal["before", "after", "none"]:
        """Where the last LayerNorm is, relative to the pooling; a post-norm block ends in one of its own."""
        return "none" if self.block.norm == "post" else self.readout.pool_norm

    @property
    def gives_classes(self) -> bool:
        """Whether the head's outputs are classes, not features."""
        return self.readout.head in ("linear", "mlp", "cosine") and self.outputs != "embedding"

    @property
    def feature_dim(self) -> int:
        """Width of `embed`'s output."""
        return self.members * self.readout.num_pooled * self.embed_dim

    @property
    def summary(self) -> str:
        """The model in a phrase."""
        (height, width), (ph, pw) = self.image_hw, self.patch_hw
        patch = str(ph) if ph == pw else f"{ph}x{pw}"
        several = f"{self.members} models of " if self.members > 1 else ""
        blocks = f"{several}{counted(self.depth, 'block')} of width {self.embed_dim}"
        return f"{blocks}, {height}x{width} pixels in patches of {patch}"

    # The cost

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        D, embedding, (gh, gw), prefix = self.embed_dim, self.embedding, self.grid, self.num_prefix_tokens
        linear = sum(layer.inputs * layer.outputs + layer.biases for layer in self._linear_layers())
        norms = 2 * self.depth + (self.final_norm != "none")
        norms += embedding.embedding_norm + embedding.patch_norm + (self.readout.pool == "map")
        heads = {"none": 0, "mlp": self.mlp_dim, "all": self.mlp_dim + self.attention_dim}
        of_norm = 1 if self.norms.norm_type == "rms" else 2  # its weight, and LayerNorm's bias
        inner = of_norm * self.depth * (heads[self.norms.inner_norm] + 2 * self.head_dim * self.norms.qk_norm)
        scales = 0 if self.block.layer_scale is None else 2 * self.depth
        vectors = prefix + of_norm * norms + scales + (self.readout.pool == "map")  # the query
        bias = self.num_heads * ((2 * gh - 1) * (2 * gw - 1) + (3 if prefix else 0))
        positions = {
            "learned_2d": D * (gh + gw),
            "relative": bias,
            "relative_by_block": self.depth * bias,
            "rotary_mixed": self.depth * self.attention_dim,  # two frequencies for each pair of channels
        }
        learned = {"none": 0, "patches": gh * gw, "all": gh * gw + prefix}[embedding.learned]
        resnet = self.stem_resnet.feature_parameters if embedding.stem == "resnet" else 0
        cosine = 2 if self.readout.head == "cosine" else 0  # its scale and bias
        vectors = D * (vectors + learned)
        total = linear + vectors + inner + positions.get(embedding.positions, 0) + resnet + cosine
        return self.members * total

    @property
    def flops(self) -> int:
        """Floating-point operations of one image's matrix products, which papers halve and call "FLOPs"."""
        total = sum(layer.rows * layer.inputs * layer.outputs for layer in self._linear_layers())
        for T, kept in self.tokens_by_block():
            pairs = self.attended_pairs() if not self.block.token_merging else T * T
            total += 2 * self.attention_dim * pairs
            if kept < T:  # similarities between the two sets, and the sums of merged tokens
                first = (T - self.num_prefix_tokens) // 2
                total += first * (T - self.num_prefix_tokens - first) * self.head_dim
                total += kept * (T - kept) * self.embed_dim
        # one query attends to the patches; or they are summed by their score
        products = {"map": 2, "sequence": 1}.get(self.readout.pool, 0)
        total += products * self.num_pooled_tokens * self.embed_dim
        if self.embedding.stem == "resnet":
            total += self.stem_resnet.feature_multiply_adds
        return 2 * total * self.members

    def tokens_by_block(self) -> list[tuple[int, int]]:
        """The number of tokens in the attention and in the MLP of each block: fewer with token merging."""
        P, T = self.num_prefix_tokens, self.num_tokens
        counts = []
        for _ in range(self.depth):
            counts.append((T, T - min(self.block.token_merging, (T - P) // 2)))
            T = counts[-1][1]
        return counts

    def attended_pairs(self) -> int:
        """(query, key) pairs that a head compares in one block: T^2, or fewer with local attention."""
        (gh, gw), P = self.grid, self.num_prefix_tokens
        prefix_rows = P * self.num_tokens  # prefix tokens attend to everything, in each pass
        return sum(prefix_rows + gh * gw * (P + math.prod(window)) for window in self.windows_of((gh, gw)))

    def _linear_layers(self) -> list[LinearLayer]:
        """Every linear layer and the patch embedding; a ResNet stem is not among them."""
        D, K, inner, (gh, gw) = self.embed_dim, self.num_classes, self.attention_dim, self.grid
        layers = self._patch_embedding()
        qkv_biases = {"all": 3 * inner, "no_key": 2 * inner, "none": 0}[self.block.qkv_bias]
        for T, kept in self.tokens_by_block():
            layers += [LinearLayer(T, D, 3 * inner, qkv_biases)]
            layers += [LinearLayer(T, inner, D, D * self.block.linear_bias)]
            layers += self._mlp(kept, self.mlp_dim)
        if self.readout.pool == "map":
            layers += [LinearLayer(1, D, D, D), LinearLayer(self.num_pooled_tokens, D, 2 * D, 2 * D)]
            layers += [LinearLayer(1, D, D, D), *self._mlp(1, self.pool_mlp_dim)]
        if self.readout.pool == "sequence":
            layers.append(LinearLayer(gh * gw, D, 1, 1))
        pooled, head = D * self.readout.num_pooled, self.readout.head
        shapes = {"linear": [(pooled, K)], "mlp": [(pooled, D), (D, K)], "pre_logits": [(pooled, D)]}
        if self.readout.distillation_token:
            shapes["linear"] = [(D, K), (D, K)]
        last = [LinearLayer(1, inputs, outputs, outputs) for inputs, outputs in shapes.get(head, ())]
        if head == "cosine":
            width = self.readout.projection
            last = [LinearLayer(1, pooled, width, width)] if width else []
            last.append(LinearLayer(1, width or pooled, K, 0))
        return layers + last

    def _patch_embedding(self) -> list[LinearLayer]:
        """The convolutions of the stem as matrix products, without a ResNet."""
        embedding, (gh, gw), (ph, pw), channels = self.embedding, self.grid, self.patch_hw, self.in_channels
        if embedding.stem == "tokenizer":
            pools, layers = self.tokenizer_pools, itertools.pairwise(self.tokenizer_channels)
            return [  # a pooling leaves a quarter of the places
                LinearLayer(
                    gh * gw * 4 ** sum(pools[index:]), 9 * inputs, outputs, outputs * embedding.patch_bias
                )
                for index, (inputs, outputs) in enumerate(layers)
            ]
        if embedding.stem == "resnet":
            resnet = self.stem_resnet
            ph, pw, channels = ph // resnet.stride, pw // resnet.stride, resnet.embed_dim
        D = self.embed_dim
        return [LinearLayer(gh * gw, channels * ph * pw, D, D * embedding.patch_bias)]

    def _mlp(self, rows: int, hidden: int) -> list[LinearLayer]:
        D, biases = self.embed_dim, self.block.linear_bias
        wide = 2 * hidden if self.block.mlp == "swiglu" else hidden
        return [LinearLayer(rows, D, wide, wide * biases), LinearLayer(rows, hidden, D, D * biases)]


OPTIONS = ViTConfig.groups()
"""The group of every option by its name; None for those of `ViTConfig` itself."""


def check_layer(config: ViTConfig, layer: int) -> int:
    """The number of a layer from 0, given one that may count from the last."""
    depth = config.depth
    if not has_type(layer, int) or not -depth <= layer < depth:
        raise UserError(f"no layer {layer}: the model has {depth}, 0 to {depth - 1} (or -{depth} to -1)")
    return layer % depth


def check_head(config: ViTConfig, head: int | None) -> None:
    """Reject a head that does not exist."""
    if head is not None and not (has_type(head, int) and 0 <= head < config.num_heads):
        raise UserError(f"no head {head}: each layer has {config.num_heads}, 0 to {config.num_heads - 1}")


def check_tiling(image: tuple[int, int], patch: tuple[int, int], step: tuple[int, int]) -> None:
    """Raise `UserError` for an image that patches, a step apart, do not tile."""
    rests = [(side - whole) % move for side, whole, move in zip(image, patch, step, strict=True)]
    if any(rests) or image[0] < patch[0] or image[1] < patch[1]:
        fits = [
            whole + max(0, round((side - whole) / move)) * move
            for side, whole, move in zip(image, patch, step, strict=True)
        ]
        size = str(patch[0]) if patch[0] == patch[1] else f"{patch[0]}x{patch[1]}"
        tiles = f"a multiple of patch {size}"
        if step != patch:
            tiles = f"tiled by patches of {size} every {step[0]}x{step[1]} pixels"
        raise UserError(f"image {image[0]}x{image[1]} is not {tiles}; nearest: {fits[0]}x{fits[1]}")
