"""The basis of torchvision's and facebook's families: `.pth` files with nothing but tensors.

No tensor shows the image size or the number of heads. Both are read by one rule, and a model that the rule
would read differently is not written.
"""

import dataclasses
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.timm_body import GIVE_CONFIG, default_heads, guessed_heads, heads
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import Family, Source, State, respelled

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Names in facebook's files that differ from timm's; at most one pattern matches.
_TIMMS_NAMES = {
    r"^(register|storage)_tokens$": "reg_token",
    r"^(blocks\.\d+\.)gamma_([12])$": r"\1ls\2.gamma",
    r"^(blocks\.\d+\.mlp\.)w12?\.(\w+)$": r"\1fc1.\2",
    r"^(blocks\.\d+\.mlp\.)w3\.(\w+)$": r"\1fc2.\2",
}


class PthFamily(Family):
    """A family whose file is `model.pth`: the state, in the names of its repository."""

    wrapper: ClassVar[str] = ""  # the key of the state in the file, which otherwise is the state

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        torch.save(_alone({self.wrapper: state} if self.wrapper else state), folder / "model.pth")
        return [folder / "model.pth"]

    def guessed(self, source: Source, config: ViTConfig) -> str:
        """The heads, unless the file or the training script has a name of this family."""
        return "" if self.is_named(source) else guessed_heads(source, config)

    def is_named(self, source: Source) -> bool:
        """Whether the name of the file, or of a training script's model, begins with this family's."""
        names = (str(source.training.get("arch", "")), source.file, Path(source.name).name)
        return any(re.match(rf"{self.name}(?![a-z])", name) for name in names)


def imagenet(config: ViTConfig, **options: Any) -> Preprocess:
    """ImageNet's mean and std, or 0.5 for other than 3 channels; a crop after the shorter side's resize."""
    half = (0.5,) * config.in_channels
    known = config.in_channels == 3
    statistics = {"mean": IMAGENET_MEAN if known else half, "std": IMAGENET_STD if known else half}
    return Preprocess(
        **{"image_size": config.image_hw, "channels": config.in_channels, **statistics, **options}
    )


def shorter_side(image_size: tuple[int, int], share: float) -> tuple[int, int]:
    """`resize_to` for a crop of `image_size` that keeps a share of the shorter side."""
    side = round(max(image_size) / share)
    return side, side


def dino_evaluation(config: ViTConfig, **options: Any) -> Preprocess:
    """DINO's `make_classification_eval_transform`: a crop of 224 (or the patches that fit) of 256."""
    ph, pw = config.patch_hw
    size = max(ph, 224 // ph * ph), max(pw, 224 // pw * pw)
    return imagenet(config, image_size=size, resize_to=shorter_side(size, 224 / 256), **options)


def has_timms_body(source: Source) -> bool:
    """Whether the tensors are a ViT's by timm's and facebook's names, without timm's settings."""
    wanted = ("patch_embed.proj.weight", "cls_token", "norm.weight")
    return not source.config and all(map(source.has, wanted)) and source.has_any("blocks.0.")


def with_timms_names(source: Source) -> Source:
    """The same tensors under timm's names, for reading shapes."""
    tensors = {respelled(name, _TIMMS_NAMES.items()): tensor for name, tensor in source.tensors.items()}
    return dataclasses.replace(source, tensors=tensors)


def square_size(source: Source, key: str, prefix: int, patch: tuple[int, int]) -> tuple[int, int]:
    """The image size of a position embedding (1, prefix + N, D) whose grid is a square."""
    length = source.shape(key, 3)[1]
    side = math.isqrt(max(0, length - prefix))
    if side == 0 or side * side != length - prefix:
        raise CheckpointError(
            f"{source.name}: {length} positions in {key}, {prefix} of them not of patches, are not a square "
            f"grid; {GIVE_CONFIG}"
        )
    return side * patch[0], side * patch[1]


def grid_options(source: Source, options: Mapping[str, Any], prefix: int) -> dict[str, Any]:
    """The options that a square grid of positions, of which the prefix has some, and the width show."""
    return {
        "image_size": square_size(source, "pos_embed", prefix, options["patch_size"]),
        "num_heads": heads(source, options["embed_dim"]),
        "position_prefix": bool(prefix),
    }


def hidden_options(config: ViTConfig) -> list[str]:
    """Options that no tensor shows, where they differ from those that reading assumes."""
    (gh, gw), reasons = config.grid, []
    if gh != gw:
        reasons.append(f"a grid of {gh}x{gw} patches, which is not square")
    if config.num_heads != default_heads(config.embed_dim):
        reasons.append(f"num_heads {config.num_heads} at embed_dim {config.embed_dim}")
    return reasons


def not_square(config: ViTConfig, *options: str) -> list[str]:
    """Options among `image_size` and `patch_size` that are not square."""
    sizes = {"image_size": config.image_hw, "patch_size": config.patch_hw}
    return [f"{name} {sizes[name]}" for name in options if sizes[name][0] != sizes[name][1]]


def unbuildable_gate(config: ViTConfig) -> list[str]:
    """A SwiGLU whose hidden layer is not a multiple of 8: DINO rounds it up."""
    if config.block.mlp != "swiglu" or config.mlp_dim % 8 == 0:
        return []
    return [f"mlp_ratio {config.block.mlp_ratio:g}: {config.mlp_dim} SwiGLU channels, not a multiple of 8"]


def _alone(values: Any) -> Any:
    """Copies of tensors that are parts of larger ones: torch would write the whole."""
    if isinstance(values, Mapping):
        return OrderedDict((name, _alone(value)) for name, value in values.items())
    is_part = isinstance(values, Tensor) and values.untyped_storage().nbytes() != values.nbytes
    return values.clone() if is_part else values
