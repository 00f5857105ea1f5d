"""A body under timm's names, which the files of DeiT and DINOv2 share."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from vitascope.models.config import ViTConfig
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import Source, State, Table

BODY: Table = {
    "patch_embedding.weight": "patch_embed.proj.weight",
    "patch_embedding.bias": "patch_embed.proj.bias",
    "patch_embedding.norm.*": "patch_embed.norm.*",
    "class_token": "cls_token",
    "distillation_token": "dist_token",
    "registers": "reg_token",
    "positions.weight": "pos_embed",
    "embedding_norm.*": "norm_pre.*",
    "encoder.blocks.{i}.norm1.*": "blocks.{i}.norm1.*",
    "encoder.blocks.{i}.attention.qkv.*": "blocks.{i}.attn.qkv.*",
    "encoder.blocks.{i}.attention.proj.*": "blocks.{i}.attn.proj.*",
    "encoder.blocks.{i}.attention.norm.*": "blocks.{i}.attn.norm.*",
    "encoder.blocks.{i}.attention.qk_norm.q.*": "blocks.{i}.attn.q_norm.*",
    "encoder.blocks.{i}.attention.qk_norm.k.*": "blocks.{i}.attn.k_norm.*",
    "encoder.blocks.{i}.scale1.gamma": "blocks.{i}.ls1.gamma",
    "encoder.blocks.{i}.norm2.*": "blocks.{i}.norm2.*",
    "encoder.blocks.{i}.mlp.fc1.*": "blocks.{i}.mlp.fc1.*",
    "encoder.blocks.{i}.mlp.fc2.*": "blocks.{i}.mlp.fc2.*",
    "encoder.blocks.{i}.mlp.norm.*": "blocks.{i}.mlp.norm.*",
    "encoder.blocks.{i}.scale2.gamma": "blocks.{i}.ls2.gamma",
    "norm.*": "norm.*",
    "pool_norm.*": "fc_norm.*",
    "head.linear.*": "head.*",
    "head.distillation.*": "head_dist.*",
    "head.*": "head.*",
}
GIVE_CONFIG = "give the architecture: from_pretrained(..., config=ViTConfig(...))"

# Heads whose width is not 64: by a part of the architecture's name, and by the width of a token.
_HEADS_BY_NAME = {"base_patch16_gap_224": 16, "giantopt": 16, "test_vit3": 3, "test_vit4": 3, "test_vit": 2}
_HEADS_BY_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16}


def body_options(source: Source) -> dict[str, Any]:
    """The options that the shapes of a body with timm's names show."""
    D, channels, ph, pw = source.shape("patch_embed.proj.weight", 4)
    options: dict[str, Any] = {"embed_dim": D, "patch_size": (ph, pw), "in_channels": channels}
    if source.has_any("patch_embed.backbone."):
        options |= _resnet_options(source, (ph, pw))
    wide = source.shape("blocks.0.mlp.fc1.weight", 2)[0]
    hidden = source.shape("blocks.0.mlp.fc2.weight", 2)[1]
    options |= {
        "depth": source.count("blocks.{i}.norm1.weight"),
        "patch_bias": source.has("patch_embed.proj.bias"),
        "patch_norm": source.has("patch_embed.norm.weight"),
        "embedding_norm": source.has("norm_pre.weight"),
        "norm_type": "layer" if source.has("blocks.0.norm1.bias") else "rms",
        "qkv_bias": "all" if source.has("blocks.0.attn.qkv.bias") else "none",
        "qk_norm": source.has("blocks.0.attn.q_norm.weight"),
        "linear_bias": source.has("blocks.0.attn.proj.bias"),
        "mlp": "swiglu" if wide == 2 * hidden else "gelu",
        "mlp_ratio": hidden / D,
        "layer_scale": 1e-5 if source.has("blocks.0.ls1.gamma") else None,
        "class_token": source.has("cls_token"),
        "distillation_token": source.has("dist_token"),
        "num_registers": source.shape("reg_token", 3)[1] if source.has("reg_token") else 0,
        "positions": "learned" if source.has("pos_embed") else "none",
        "head": "linear" if source.has("head.weight") else "none",
    }
    if options["head"] == "linear":
        options["num_classes"] = source.shape("head.weight", 2)[0]
    return options


def check_published(
    source: Source, name: str, options: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    """Reject a file without tensors that the architecture of its name has, although a model without them
    exists: the last norm and the registers.

    Args:
        source: a file with timm's names.
        name: of the architecture; empty if unknown.
        options: ours, as the tensors show them.
        arguments: of timm's constructor, as far as the file has them.
    """
    bare = any(arguments.get(key) is False for key in ("final_norm", "use_post_transformer_norm"))
    if options["pool_norm"] == "none" and not (
        bare or re.search("_(intern300m|radio|pe_lang|pe_spatial)_", f"{name}_")
    ):
        raise CheckpointError(
            f"{source.name}: missing norm.weight; for a model without a last norm, {GIVE_CONFIG}"
        )
    named = re.search(r"_reg(\d+)(_|$)", name)
    count = arguments.get("reg_tokens", arguments.get("num_reg_tokens"))
    if count is None and (named or "_dinov3" in name):
        count = int(named[1]) if named else 4
    if count is not None and count != options["num_registers"]:
        raise CheckpointError(
            f"{source.name}: {name} has {count} registers, and the file has reg_token of "
            f"{options['num_registers'] or 'none'}; for another model, {GIVE_CONFIG}"
        )


def join(tensors: State, whole: str, parts: str, letters: str) -> None:
    """Put the matrices of a layer that some models split, named by letters, into one, if their shapes fit."""
    names = [parts.format(letter) for letter in letters]
    if all(name in tensors for name in names) and len({tensors[name].shape for name in names}) == 1:
        tensors[whole] = torch.cat([tensors.pop(name) for name in names])


def join_gates(tensors: State) -> None:
    """Gate and values of SwiGLU in one matrix, the gate first."""
    for name in [name for name in tensors if ".mlp.fc1_g." in name]:
        join(tensors, name.replace("fc1_g", "fc1"), name.replace("fc1_g", "fc1_{}"), "gx")


def split_gates(state: State) -> None:
    """The inverse of `join_gates`."""
    for name in [name for name in state if ".mlp.fc1." in name]:
        for letter, part in zip("gx", state.pop(name).chunk(2), strict=True):
            state[name.replace(".fc1.", f".fc1_{letter}.")] = part.contiguous()


def _resnet_options(source: Source, patch: tuple[int, int]) -> dict[str, Any]:
    """The options of a ResNet stem, given the patch on its feature map."""
    stages = source.count("patch_embed.backbone.stages.{i}.*")
    layers = tuple(
        source.count(f"patch_embed.backbone.stages.{stage}.blocks.{{i}}.conv1.weight")
        for stage in range(stages)
    )
    root = "patch_embed.backbone.stem.conv.weight" if layers else "patch_embed.backbone.conv.weight"
    width, channels = source.shape(root, 4)[:2]
    step = ResNetConfig(layers=layers).stride
    return {
        "stem": "resnet",
        "resnet_layers": layers,
        "resnet_width": width,
        "resnet_dialect": "timm",
        "in_channels": channels,
        "patch_size": (patch[0] * step, patch[1] * step),
    }


def default_heads(embed_dim: int, name: str = "") -> int | None:
    """Attention heads of 64 channels, except in published models; None for a width without any."""
    if "aimv2" in name:
        return embed_dim // 128
    for part, count in _HEADS_BY_NAME.items():
        if part in name:
            return count
    return _HEADS_BY_WIDTH.get(embed_dim, None if embed_dim % 64 else embed_dim // 64)


def heads(source: Source, embed_dim: int, name: str = "") -> int:
    """The number of heads that the user named, or `default_heads`."""
    count: int | None = source.options.get("num_heads", default_heads(embed_dim, name))
    if count is None:
        raise CheckpointError(
            f"{source.name}: the number of heads does not follow from a width of {embed_dim}; {GIVE_CONFIG}"
        )
    return count


def guessed_heads(source: Source, config: ViTConfig) -> str:
    """The guessed number of heads in words; empty if the user named it."""
    return "" if "num_heads" in source.options else f"num_heads {config.num_heads}"


def place_options(source: Source, options: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """The image size of `pos_embed`, (1, N, D) or (1, P + N, D): `wanted` (a side, or height and width) or a
    square; and whether the positions cover the prefix."""
    ph, pw = options["patch_size"]
    prefix = options["class_token"] + options["distillation_token"] + options["num_registers"]
    sides = tuple(wanted) if isinstance(wanted, list | tuple) else (wanted, wanted)
    is_given = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
    candidates = [sides] if is_given else []
    if not source.has("pos_embed"):  # the images of the paper, or the largest multiple of the patch below
        return {"image_size": (*candidates, (max(1, 224 // ph) * ph, max(1, 224 // pw) * pw))[0]}
    length = source.shape("pos_embed", 3)[1]
    covers_prefix = {length: False, length - prefix: True}  # by the number of patches
    if ph == pw:
        candidates += [(math.isqrt(patches) * ph,) * 2 for patches in covers_prefix if patches > 0]
    for image in candidates:
        patches = (image[0] // ph) * (image[1] // pw)
        if patches in covers_prefix:
            return {"image_size": image, "position_prefix": covers_prefix[patches]}
    raise CheckpointError(
        f"{source.name}: {length} positions do not form a square grid, and no image size is given that fits; "
        f"{GIVE_CONFIG}"
    )
