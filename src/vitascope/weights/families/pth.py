"""What torchvision's and facebook's families share: `.pth` files with nothing beside the tensors.

Such a file tells neither its image size nor its heads, so both are read by one rule, and a model that the
rule would read otherwise is not written.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.storage import settle
from vitascope.weights.families.timm_body import GIVE_CONFIG, default_heads
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import Source

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Facebook's own names of what timm's table calls otherwise.
_TIMMS_NAMES = {
    r"(register|storage)_tokens": "reg_token",
    r"(blocks\.\d+\.)gamma_([12])": r"\1ls\2.gamma",
    r"(blocks\.\d+\.mlp\.)w12?\.(\w+)": r"\1fc1.\2",
    r"(blocks\.\d+\.mlp\.)w3\.(\w+)": r"\1fc2.\2",
}


def imagenet(config: ViTConfig, **options: Any) -> Preprocess:
    """A preprocessing with ImageNet's statistics; a model of other than 3 channels has a half of each.

    Torchvision's transforms do it, on pictures of Pillow's: a resize of the shorter side, then a crop.
    """
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


def size_for_evaluation(config: ViTConfig) -> tuple[int, int]:
    """224 pixels, or what patches tile just below: DINO evaluates there whatever the positions' own size."""
    ph, pw = config.patch_hw
    return max(ph, 224 // ph * ph), max(pw, 224 // pw * pw)


def has_timms_body(source: Source) -> bool:
    """Whether these are the tensors of a ViT as facebook and timm name them, without timm's settings."""
    wanted = ("patch_embed.proj.weight", "cls_token", "norm.weight")
    return not source.config and all(map(source.has, wanted)) and source.has_any("blocks.0.")


def is_named(source: Source, family: str) -> bool:
    """Whether the training checkpoint or the name of the file says one of facebook's own models."""
    names = (str(source.training.get("arch", "")), source.file, Path(source.name).name)
    return any(re.match(rf"{family}(?![a-z])", name) for name in names)


def with_timms_names(source: Source) -> Source:
    """The same tensors under timm's names, for reading shapes."""
    tensors = {}
    for name, tensor in source.tensors.items():
        for pattern, replacement in _TIMMS_NAMES.items():
            name, renamed = re.subn(rf"\A{pattern}\Z", replacement, name)
            if renamed:
                break
        tensors[name] = tensor
    return dataclasses.replace(source, tensors=tensors)


def square_side(source: Source, key: str, prefix: int) -> int:
    """Patches along the side of the square that a position embedding (1, prefix + N, D) was made for.

    Raises:
        CheckpointError: no square.
    """
    length = source.shape(key, 3)[1]
    side = math.isqrt(max(0, length - prefix))
    if side == 0 or side * side != length - prefix:
        raise CheckpointError(
            f"{source.name}: {length} positions in {key}, {prefix} of them not of patches, are no square "
            f"grid; {GIVE_CONFIG}"
        )
    return side


def untold(config: ViTConfig) -> list[str]:
    """What no tensor tells, where it differs from what a reader takes it to be."""
    (gh, gw), reasons = config.grid, []
    if gh != gw:
        reasons.append(f"a grid of {gh}x{gw} patches, which is not square")
    if config.num_heads != default_heads(config.embed_dim):
        reasons.append(f"num_heads {config.num_heads} at embed_dim {config.embed_dim}")
    return reasons


def not_square(config: ViTConfig, *options: str) -> list[str]:
    """Those of `image_size` and `patch_size` that are not square."""
    sizes = {"image_size": config.image_hw, "patch_size": config.patch_hw}
    return [f"{name} {sizes[name]}" for name in options if sizes[name][0] != sizes[name][1]]


def unbuildable_gate(config: ViTConfig) -> list[str]:
    """DINO's SwiGLU has a hidden layer of a multiple of 8, whatever ratio it is asked for."""
    if config.block.mlp != "swiglu" or config.mlp_dim % 8 == 0:
        return []
    return [f"a SwiGLU of {config.mlp_dim} channels (mlp_ratio {config.block.mlp_ratio:g}), no multiple of 8"]


def write_pth(path: Path, values: Mapping[str, Any]) -> Path:
    """Write tensors by name, or such a mapping under a name, for `torch.load(path, weights_only=True)`.

    Raises:
        CheckpointError: it cannot be written, for want of space say.
    """
    aside = path.with_name(f".{path.name}")
    try:
        torch.save(_alone(values), aside)
    except (OSError, RuntimeError) as error:  # a full disk, as Python and as torch's own writer report it
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    return settle(aside, path)


def _alone(values: Any) -> Any:
    """A part of a larger tensor would drag all of it into the file: copied out."""
    if isinstance(values, Mapping):
        return OrderedDict((name, _alone(value)) for name, value in values.items())
    is_part = isinstance(values, Tensor) and values.untyped_storage().nbytes() != values.nbytes
    return values.clone() if is_part else values
