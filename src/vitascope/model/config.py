"""`ViTConfig`, and the named sizes of the paper. No torch here: `vitascope models` answers at once.

Sizes: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", table 1 (B, L, H); Touvron et al. 2021,
"Training data-efficient image transformers", table 1 (Ti, S).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from vitascope.errors import UserError, check_choice, nearest


def pair(value: int | Iterable[int]) -> tuple[int, int]:
    """A side as (height, width)."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, Iterable):
        sides = tuple(value)
        if len(sides) == 2 and all(isinstance(side, int) for side in sides):
            return sides[0], sides[1]
    raise UserError(f"a size is a whole number or (height, width), not {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that determines a `VisionTransformer`.

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
    embed_dim: int = 768
    """Width of a token, D in the paper."""
    depth: int = 12
    """Number of encoder blocks, L in the paper."""
    num_heads: int = 12
    """Attention heads a block, k in the paper."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer over `embed_dim`."""
    patchify: Literal["conv", "linear"] = "conv"
    """How patches are embedded: a strided convolution, or reshape and linear layer. The same function."""
    pool: Literal["cls", "mean"] = "cls"
    """What the head reads: the class token, or the mean of the patch tokens (no class token then)."""
    head: Literal["linear", "mlp", "none"] = "linear"
    """One linear layer; an MLP with one hidden tanh layer, as in pre-training; or none: features."""
    norm_eps: float = 1e-6
    """Epsilon of every LayerNorm."""
    dropout: float = 0.0
    """Dropout after the position embedding, the attention's projection and each MLP layer."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    drop_path: float = 0.0
    """Stochastic depth: the rate of the last block; it grows linearly from 0 at the first."""
    init: Literal["paper", "timm"] = "paper"
    """Initialization: that of the paper's code (vit_jax), or timm's."""
    class_names: tuple[str, ...] = ()
    """Name of each output, in order; empty where unknown."""

    def __post_init__(self) -> None:
        """Bring sizes to (height, width) and refuse what cannot be built."""
        object.__setattr__(self, "image_size", pair(self.image_size))
        object.__setattr__(self, "patch_size", pair(self.patch_size))
        if isinstance(self.class_names, str):
            raise UserError(f"class_names is a list of names, not the text {self.class_names!r}")
        object.__setattr__(self, "class_names", tuple(self.class_names))
        for name in ("in_channels", "num_classes", "embed_dim", "depth", "num_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a whole number, at least 1, not {value!r}")
        check_choice("patchify", self.patchify, ("conv", "linear"))
        check_choice("pool", self.pool, ("cls", "mean"))
        check_choice("head", self.head, ("linear", "mlp", "none"))
        check_choice("init", self.init, ("paper", "timm"))
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is a probability in [0, 1), not {getattr(self, name)}")
        if not (math.isfinite(self.mlp_ratio) and self.mlp_dim >= 1):
            raise UserError(f"mlp_ratio {self.mlp_ratio} gives an MLP without a hidden layer")
        if self.norm_eps < 0:
            raise UserError(f"norm_eps must not be negative, not {self.norm_eps}")
        if self.embed_dim % self.num_heads:
            fits = [heads for heads in range(1, self.embed_dim + 1) if self.embed_dim % heads == 0]
            best = min(fits, key=lambda heads: abs(heads - self.num_heads))
            raise UserError(
                f"num_heads {self.num_heads} does not divide embed_dim {self.embed_dim}; nearest: {best}"
            )
        check_multiple(self.image_hw, self.patch_hw)
        if self.class_names and len(self.class_names) != self.num_classes:
            raise UserError(f"{len(self.class_names)} class_names for num_classes {self.num_classes}")

    @property
    def image_hw(self) -> tuple[int, int]:
        """Image height and width, pixels."""
        return pair(self.image_size)

    @property
    def patch_hw(self) -> tuple[int, int]:
        """Patch height and width, pixels."""
        return pair(self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        (height, width), (ph, pw) = self.image_hw, self.patch_hw
        return height // ph, width // pw

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: the class token, or none."""
        return 1 if self.pool == "cls" else 0

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, T: N patches and the class token."""
        return self.grid[0] * self.grid[1] + self.num_prefix_tokens

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return int(self.embed_dim * self.mlp_ratio)

    @property
    def num_parameters(self) -> int:
        """Trainable numbers in the model, counted from the shapes (a test counts the model's own)."""
        D, hidden, K = self.embed_dim, self.mlp_dim, self.num_classes
        patch = self.in_channels * self.patch_hw[0] * self.patch_hw[1]
        embedding = patch * D + D + self.num_tokens * D + self.num_prefix_tokens * D
        block = 2 * (2 * D) + (3 * D * D + 3 * D) + (D * D + D) + (D * hidden + hidden) + (hidden * D + D)
        head = {"linear": D * K + K, "mlp": D * D + D + D * K + K, "none": 0}[self.head]
        return embedding + self.depth * block + 2 * D + head

    @property
    def flops(self) -> int:
        """Floating-point operations of one image's forward pass; a multiply-add counts as 2.

        Matrix products only, every token through every block: the count that papers halve and call "FLOPs".
        """
        D, T, (gh, gw) = self.embed_dim, self.num_tokens, self.grid
        patch = self.in_channels * self.patch_hw[0] * self.patch_hw[1]
        block = T * (4 * D * D + 2 * D * self.mlp_dim) + 2 * T * T * D
        head = {"linear": D * self.num_classes, "mlp": D * D + D * self.num_classes, "none": 0}[self.head]
        return 2 * (gh * gw * patch * D + self.depth * block + head)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ViTConfig:
        """The inverse of `to_dict`; an unknown key raises UserError and names the nearest."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise UserError(f"unknown model option {name!r}{nearest(name, known)}")
        return cls(**values)


def check_multiple(image: tuple[int, int], patch: tuple[int, int]) -> None:
    """Refuse an image size that patches do not tile."""
    if min(*image, *patch) < 1:
        raise UserError(f"image {image[0]}x{image[1]} and patch {patch[0]}x{patch[1]} must be positive")
    if image[0] % patch[0] or image[1] % patch[1]:
        fits = [max(1, round(side / step)) * step for side, step in zip(image, patch, strict=True)]
        size = str(patch[0]) if patch[0] == patch[1] else f"{patch[0]}x{patch[1]}"
        raise UserError(
            f"image {image[0]}x{image[1]} is not a multiple of patch {size}; nearest: {fits[0]}x{fits[1]}"
        )


_TI = {"embed_dim": 192, "depth": 12, "num_heads": 3}
_S = {"embed_dim": 384, "depth": 12, "num_heads": 6}
_B = {"embed_dim": 768, "depth": 12, "num_heads": 12}
_L = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
_H = {"embed_dim": 1280, "depth": 32, "num_heads": 16}

NAMED_SIZES: dict[str, dict[str, int]] = {
    "vit_ti16": {**_TI, "patch_size": 16},
    "vit_s16": {**_S, "patch_size": 16},
    "vit_s32": {**_S, "patch_size": 32},
    "vit_b8": {**_B, "patch_size": 8},
    "vit_b16": {**_B, "patch_size": 16},
    "vit_b32": {**_B, "patch_size": 32},
    "vit_l16": {**_L, "patch_size": 16},
    "vit_l32": {**_L, "patch_size": 32},
    "vit_h14": {**_H, "patch_size": 14},
}


def list_models() -> list[str]:
    """The names that `create_model` takes, by width and then by patch."""
    return list(NAMED_SIZES)


def named_config(name: str, **overrides: Any) -> ViTConfig:
    """The configuration of a named size, with any field of `ViTConfig` changed.

    Raises:
        UserError: an unknown name or field, naming the nearest.
    """
    if name not in NAMED_SIZES:
        raise UserError(
            f"unknown model {name!r}{nearest(name, NAMED_SIZES)}; `vitascope models` lists all names"
        )
    return ViTConfig.from_dict({**NAMED_SIZES[name], **overrides})
