"""`ViTConfig`: everything that determines a model, grouped as the paper's equations are.

No torch here: the command line answers at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vitascope.errors import UserError, nearest
from vitascope.model import cost, resnet_shapes
from vitascope.model.checks import check_fields
from vitascope.model.options import BlockOptions, EmbeddingOptions, ReadoutOptions, TrainingOptions, pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that determines a `VisionTransformer`.

    Options lie in groups, an object for each part of the model. Where options are given by name, in
    `replace`, `from_dict`, `create_model` and a model folder's `config.json`, the groups are left out:
    `config.replace(pool="mean", positions="rotary")`.

    Raises:
        UserError: where the numbers contradict each other, with the numbers and the nearest that fit.
    """

    image_size: tuple[int, int] | int = 224
    """Height and width in pixels; one number means a square."""
    patch_size: tuple[int, int] | int = 16
    """Height and width of a patch, P in the paper."""
    in_channels: int = 3
    """Colours of the input, C in the paper."""
    num_classes: int = 1000
    """Outputs of the head, K."""
    class_names: tuple[str, ...] = ()
    """Name of each output, in order; empty where unknown."""
    embed_dim: int = 768
    """Width of a token, D in the paper."""
    depth: int = 12
    """Number of encoder blocks, L in the paper."""
    num_heads: int = 12
    """Attention heads a block, k in the paper."""
    embedding: EmbeddingOptions = dataclasses.field(default_factory=EmbeddingOptions)
    """Equation 1."""
    block: BlockOptions = dataclasses.field(default_factory=BlockOptions)
    """Equations 2 and 3."""
    readout: ReadoutOptions = dataclasses.field(default_factory=ReadoutOptions)
    """Equation 4."""
    training: TrainingOptions = dataclasses.field(default_factory=TrainingOptions)
    """What matters only in training."""

    def __post_init__(self) -> None:
        """Bring sizes to (height, width) and refuse what cannot be built."""
        object.__setattr__(self, "image_size", pair(self.image_size))
        object.__setattr__(self, "patch_size", pair(self.patch_size))
        if isinstance(self.class_names, str):
            raise UserError(f"class_names is a list of names, not the text {self.class_names!r}")
        for name in ("in_channels", "num_classes", "embed_dim", "depth", "num_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a whole number, at least 1, not {value!r}")
        check_fields(self)
        object.__setattr__(self, "class_names", tuple(self.class_names))
        if self.mlp_dim < 1:
            raise UserError(f"mlp_ratio {self.block.mlp_ratio} gives an MLP without a hidden layer")
        if self.block.head_dim is None and self.embed_dim % self.num_heads:
            fits = [heads for heads in range(1, self.embed_dim + 1) if self.embed_dim % heads == 0]
            best = min(fits, key=lambda heads: abs(heads - self.num_heads))
            raise UserError(
                f"num_heads {self.num_heads} does not divide embed_dim {self.embed_dim}; nearest: {best}"
            )
        if self.class_names and len(self.class_names) != self.num_classes:
            raise UserError(f"{len(self.class_names)} class_names for num_classes {self.num_classes}")
        self._check_combinations()
        self.grid_of(self.image_hw)

    def _check_combinations(self) -> None:
        """Refuse options that do not go together."""
        positions, embedding = self.embedding.positions, self.embedding
        if positions == "rotary" and self.head_dim % 4:
            raise UserError(f"rotary positions need a head width that 4 divides, not {self.head_dim}")
        if positions.startswith("sincos") and self.embed_dim % 4:
            raise UserError(f"sine-cosine positions need an embed_dim that 4 divides, not {self.embed_dim}")
        if self.training.patch_dropout and (self.block.attention != "global" or positions == "relative"):
            raise UserError("patch_dropout breaks up the grid that axial, window and relative attention need")
        if self.readout.pool == "map" and self.embed_dim % self.head_dim:
            raise UserError(
                f'pool "map" has heads of the same width, and head_dim {self.head_dim} does not divide '
                f"embed_dim {self.embed_dim}"
            )
        if self.block.token_merging:
            self._check_merging()
        (ph, pw), (sh, sw) = self.patch_hw, self.patch_stride
        if embedding.stem == "overlap" and not (1 <= sh <= ph and 1 <= sw <= pw):
            raise UserError(f"stride {sh}x{sw} leaves gaps between patches of {ph}x{pw}")
        if embedding.stem == "resnet":
            resnet_shapes.check_shape(self.in_channels, embedding.resnet_layers, embedding.resnet_width)
            step = resnet_shapes.total_stride(embedding.resnet_layers)
            if ph % step or pw % step:
                raise UserError(
                    f"patch {ph}x{pw} is not a multiple of the stride of a ResNet with "
                    f"{len(embedding.resnet_layers)} stages, {step}"
                )

    def _check_merging(self) -> None:
        """Refuse token merging where a merged token would have no place, or blocks no way back."""
        against = {
            f"attention {self.block.attention!r}": self.block.attention != "global",
            f"positions {self.embedding.positions!r}": self.embedding.positions in ("relative", "rotary"),
            'norm "post"': self.block.norm == "post",
            "gradient_checkpointing": self.training.gradient_checkpointing,
        }
        if any(against.values()):
            found = " and ".join(name for name, stands in against.items() if stands)
            raise UserError(
                f"token_merging does not go with {found}: it needs global attention, positions that are "
                "added to the tokens, pre-norm blocks and no gradient_checkpointing"
            )

    def grid_of(self, image: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches in an image of (height, width).

        Raises:
            UserError: a size that patches do not tile, or a grid that windows do not; names the nearest.
        """
        patch, step = self.patch_hw, self.patch_stride
        check_tiling(image, patch, step)
        grid = ((image[0] - patch[0]) // step[0] + 1, (image[1] - patch[1]) // step[1] + 1)
        window = self.window
        if self.block.attention == "window" and (grid[0] % window[0] or grid[1] % window[1]):
            raise UserError(
                f"a grid of {grid[0]}x{grid[1]} patches is not a multiple of the window "
                f"{window[0]}x{window[1]}"
            )
        return grid

    @property
    def image_hw(self) -> tuple[int, int]:
        """Image height and width, pixels."""
        return pair(self.image_size)

    @property
    def patch_hw(self) -> tuple[int, int]:
        """Patch height and width, pixels."""
        return pair(self.patch_size)

    @property
    def patch_stride(self) -> tuple[int, int]:
        """Pixels from one patch to the next, down and across."""
        if self.embedding.stem != "overlap":
            return self.patch_hw
        if self.embedding.stride is None:
            return max(1, self.patch_hw[0] // 2), max(1, self.patch_hw[1] // 2)
        return pair(self.embedding.stride)

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of an attention window, patches."""
        return pair(self.block.window)

    def windows_of(self, grid: tuple[int, int]) -> list[tuple[int, int]]:
        """Height and width of the windows that patches of a grid attend within, one pass after another."""
        if self.block.attention == "axial":
            return [(1, grid[1]), (grid[0], 1)]  # a row is a window of height 1, a column one of width 1
        return [self.window if self.block.attention == "window" else grid]

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.grid_of(self.image_hw)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        return self.readout.num_prefix_tokens

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, T: the prefix tokens and N patches."""
        return self.grid[0] * self.grid[1] + self.num_prefix_tokens

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.block.head_dim or self.embed_dim // self.num_heads

    @property
    def attention_dim(self) -> int:
        """Width of all heads side by side: `embed_dim`, unless heads are pruned."""
        return self.num_heads * self.head_dim

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return round(self.embed_dim * self.block.mlp_ratio)

    @property
    def num_parameters(self) -> int:
        """Trainable numbers in the model, counted from the shapes (a test counts the model's own)."""
        return cost.num_parameters(self)

    @property
    def flops(self) -> int:
        """Floating-point operations of one image's forward pass; a multiply-add counts as 2.

        Matrix products only, every token through every block: the count that papers halve and call "FLOPs".
        """
        return 2 * cost.multiply_adds(self)

    @property
    def gives_classes(self) -> bool:
        """Whether the head answers with classes, and not with features."""
        return self.readout.gives_classes

    @property
    def summary(self) -> str:
        """The model in a phrase."""
        (height, width), (ph, pw) = self.image_hw, self.patch_hw
        patch = str(ph) if ph == pw else f"{ph}x{pw}"
        return f"{self.depth} blocks of width {self.embed_dim}, {height}x{width} pixels in patches of {patch}"

    def replace(self, **options: Any) -> ViTConfig:
        """A copy with options changed, each by its own name, whatever its group.

        Raises:
            UserError: an unknown name, naming the nearest; what cannot be built.
        """
        top: dict[str, Any] = {}
        grouped: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in OPTIONS:
                raise UserError(f"unknown model option {name!r}{nearest(name, OPTIONS)}")
            group = OPTIONS[name]
            (top if group is None else grouped.setdefault(group, {}))[name] = value
        groups = {
            group: dataclasses.replace(getattr(self, group), **values) for group, values in grouped.items()
        }
        return dataclasses.replace(self, **top, **groups)

    def option(self, name: str) -> Any:
        """The value of an option by its own name, whatever its group."""
        group = OPTIONS[name]
        return getattr(self if group is None else getattr(self, group), name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by option, without groups, for JSON."""
        values = {name: self.option(name) for name in OPTIONS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ViTConfig:
        """The inverse of `to_dict`; an unknown key raises UserError and names the nearest."""
        return cls().replace(**values)


_GROUPS = {
    "embedding": EmbeddingOptions,
    "block": BlockOptions,
    "readout": ReadoutOptions,
    "training": TrainingOptions,
}
OPTIONS: dict[str, str | None] = {
    **{field.name: None for field in dataclasses.fields(ViTConfig) if field.name not in _GROUPS},
    **{field.name: group for group, options in _GROUPS.items() for field in dataclasses.fields(options)},
}
"""Every option's name, and the group that it lies in; None for `ViTConfig` itself."""


def check_tiling(image: tuple[int, int], patch: tuple[int, int], step: tuple[int, int]) -> None:
    """Refuse an image size that patches, a step apart, do not tile."""
    if min(*image, *patch) < 1:
        raise UserError(f"image {image[0]}x{image[1]} and patch {patch[0]}x{patch[1]} must be positive")
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
