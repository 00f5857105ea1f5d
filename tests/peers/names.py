"""What each peer calls our parameters, and how its weights become ours: strictly, every name used once."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitascope.model.vit import VisionTransformer

Names = dict[str, tuple[str, ...]]
"""Our name -> the peer's names, whose tensors follow each other along the first axis; `{i}` is the block."""


def layer(ours: str, *theirs: str) -> Names:
    return {f"{ours}.{part}": tuple(f"{name}.{part}" for name in theirs) for part in ("weight", "bias")}


OURS = "encoder.blocks.{i}"

TIMM: Names = {
    "class_token": ("cls_token",),
    "positions.weight": ("pos_embed",),
    **layer("patch_embedding", "patch_embed.proj"),
    **layer(f"{OURS}.norm1", "blocks.{i}.norm1"),
    **layer(f"{OURS}.attention.qkv", "blocks.{i}.attn.qkv"),
    **layer(f"{OURS}.attention.proj", "blocks.{i}.attn.proj"),
    **layer(f"{OURS}.norm2", "blocks.{i}.norm2"),
    **layer(f"{OURS}.mlp.fc1", "blocks.{i}.mlp.fc1"),
    **layer(f"{OURS}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    **layer("norm", "norm"),
    **layer("head", "head"),
}

_HF = "vit.layers.{i}"

HUGGINGFACE: Names = {
    "class_token": ("vit.embeddings.cls_token",),
    "positions.weight": ("vit.embeddings.position_embeddings",),
    **layer("patch_embedding", "vit.embeddings.patch_embeddings.projection"),
    **layer(f"{OURS}.norm1", f"{_HF}.layernorm_before"),
    **layer(f"{OURS}.attention.qkv", *(f"{_HF}.attention.{part}_proj" for part in "qkv")),
    **layer(f"{OURS}.attention.proj", f"{_HF}.attention.o_proj"),
    **layer(f"{OURS}.norm2", f"{_HF}.layernorm_after"),
    **layer(f"{OURS}.mlp.fc1", f"{_HF}.mlp.fc1"),
    **layer(f"{OURS}.mlp.fc2", f"{_HF}.mlp.fc2"),
    **layer("norm", "vit.layernorm"),
    **layer("head", "classifier"),
}

_TV = "encoder.layers.encoder_layer_{i}"

TORCHVISION: Names = {
    "class_token": ("class_token",),
    "positions.weight": ("encoder.pos_embedding",),
    **layer("patch_embedding", "conv_proj"),
    **layer(f"{OURS}.norm1", f"{_TV}.ln_1"),
    f"{OURS}.attention.qkv.weight": (f"{_TV}.self_attention.in_proj_weight",),
    f"{OURS}.attention.qkv.bias": (f"{_TV}.self_attention.in_proj_bias",),
    **layer(f"{OURS}.attention.proj", f"{_TV}.self_attention.out_proj"),
    **layer(f"{OURS}.norm2", f"{_TV}.ln_2"),
    **layer(f"{OURS}.mlp.fc1", f"{_TV}.mlp.0"),
    **layer(f"{OURS}.mlp.fc2", f"{_TV}.mlp.3"),
    **layer("norm", "encoder.ln"),
    **layer("head", "heads.head"),
    **layer("head.pre_logits", "heads.pre_logits"),
    **layer("head.linear", "heads.head"),
}


def translate(theirs: Mapping[str, Tensor], names: Names, ours: VisionTransformer) -> dict[str, Tensor]:
    """A peer's tensors under our names; KeyError where one is missing, wanted twice or left over."""
    remaining = dict(theirs)
    translated = {}
    for name in ours.state_dict():
        template = re.sub(r"\.\d+\.", ".{i}.", name)
        index = re.search(r"\.(\d+)\.", name)
        keys = [key.format(i=index and index[1]) for key in names[template]]
        translated[name] = torch.cat([remaining.pop(key) for key in keys])
    if remaining:
        raise KeyError(f"left over: {', '.join(remaining)}")
    return translated


def copy_weights(peer: nn.Module, names: Names, ours: VisionTransformer) -> VisionTransformer:
    ours.load_state_dict(translate(peer.state_dict(), names, ours), strict=True)
    return ours.eval()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest number of what is expected."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
