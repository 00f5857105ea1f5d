"""The original `.npz` files: google-research's vision_transformer ("vit_jax", AugReg), and big_vision's.

Facts: vit_jax/models_vit.py, models_resnet.py, checkpoint.py, input_pipeline.py; big_vision/models/vit.py,
configs/vit_s16_i1k.py, configs/transfer.py, configs/proj/image_text. Both run jax.nn.gelu's tanh
approximation, and a LayerNorm epsilon of 1e-6.

The files have no preprocessing. vit_jax squashes the picture into the model's size; big_vision resizes the
shorter side to 256 and crops 224 (448 and 384), but squashes for two-tower models such as SigLIP. Both are
bilinear, to [-1, 1]. Their `tf.image.resize` has no antialiasing; ours has.

A file is written under the names that vit_jax's `checkpoint.load` and big_vision's `models/vit.py` both read,
and models that only big_vision has (attention pooling, positions of the patches alone) under big_vision's. It
has no place for class names and preprocessing.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.pth import shorter_side
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import (
    Family,
    Source,
    State,
    Stored,
    Table,
    checked_config,
    reshaped,
    supporting,
)
from vitascope.models.weights.preprocess import default_preprocess

# The table, with the names of vit_jax's first published files. In flax a dense layer multiplies from the
# left, a convolution's kernel is (height, width, inputs, outputs), and attention keeps its heads apart.
BLOCK = "Transformer/encoderblock_{i}/"
POSITIONS = "Transformer/posembed_input/pos_embedding"
WHOLE: Table = {"class_token": "cls", "positions.weight": POSITIONS, "pool.query": "MAPHead_0/probe"}
NORMS = {
    "encoder.blocks.{i}.norm1": BLOCK + "LayerNorm_0",
    "encoder.blocks.{i}.norm2": BLOCK + "LayerNorm_2",
    "norm": "Transformer/encoder_norm",
    "pool.norm": "MAPHead_0/LayerNorm_0",
}
DENSE = {
    "encoder.blocks.{i}.mlp.fc1": BLOCK + "MlpBlock_3/Dense_0",
    "encoder.blocks.{i}.mlp.fc2": BLOCK + "MlpBlock_3/Dense_1",
    "pool.mlp.fc1": "MAPHead_0/MlpBlock_0/Dense_0",
    "pool.mlp.fc2": "MAPHead_0/MlpBlock_0/Dense_1",
    "head.pre_logits": "pre_logits",
    "head.linear": "head",
    "head": "head",
}
INTO_HEADS = {  # in our order, in one tensor
    "encoder.blocks.{i}.attention.qkv": (BLOCK + "MultiHeadDotProductAttention_1/", "query key value"),
    "pool.q": ("MAPHead_0/MultiHeadDotProductAttention_0/", "query"),
    "pool.kv": ("MAPHead_0/MultiHeadDotProductAttention_0/", "key value"),
}
OUT_OF_HEADS = {
    "encoder.blocks.{i}.attention.proj": BLOCK + "MultiHeadDotProductAttention_1/out",
    "pool.proj": "MAPHead_0/MultiHeadDotProductAttention_0/out",
}

_PREFIXES = ("params/img/", "opt/target/", "params/", "")
_SCANNED = "Transformer/encoderblock/"
_IN_BLOCK = re.compile(r"(Transformer/encoderblock_\d+/)(\w+)(/.+)")
# The modules of a block: numbered by their place in it, and as flax does it today, each kind for itself.
_RENUMBERED = {
    "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
    "LayerNorm_2": "LayerNorm_1",
    "MlpBlock_3": "MlpBlock_0",
}
_FIRST_NUMBERS = {today: first for first, today in _RENUMBERED.items()}
# The first ViT-G had its attention pooling among the model's own modules.
_POOL_INLINED = re.compile(r"probe|(MlpBlock|MultiHeadDotProductAttention|LayerNorm)_0/.+")
_GROUP_NORM = re.compile(r"(.+/)?gn(\d|_root|_proj)/(scale|bias)")


class Jax(Family):
    """vit_jax's VisionTransformer with its hybrids, and big_vision's."""

    name = "jax"
    supports = supporting(
        "resnet_layers resnet_width position_prefix mlp_ratio class_token",
        stem=("conv", "resnet"),
        positions=("learned", "sincos_2d_big_vision"),
        mlp=("gelu_tanh",),
        pool=("cls", "mean", "map"),
        head=("linear", "mlp", "pre_logits", "none"),
    )

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        """Their models have an epsilon of 1e-6, one rule of interpolation, and ResNets of their own."""
        config = config.replace(norm_eps=1e-6, resample="jax")
        return config.replace(resnet_dialect="jax") if config.embedding.stem == "resnet" else config

    def conflicts(self, config: ViTConfig) -> list[str]:
        embedding, pool, (gh, gw) = config.embedding, config.readout.pool, config.grid
        reasons = []
        if config.readout.has_class_token != (pool == "cls"):
            reasons.append(f"class_token True with pool {pool!r}")
        if embedding.positions == "learned" and gh != gw:
            reasons.append(f"a grid of {gh}x{gw} patches, which is not square")
        if embedding.stem == "resnet" and embedding.resnet_width % 32:
            reasons.append(f"resnet_width {embedding.resnet_width}, not a multiple of 32 groups")
        if embedding.stem == "resnet" and _is_big_vision(config):
            reasons.append("stem 'resnet' with attention pooling or positions of the patches alone")
        return reasons

    def recognizes(self, source: Source) -> bool:
        prefix = _prefix(source)
        return source.has(prefix + "embedding/kernel") and source.has_any(prefix + "Transformer/")

    def before_reading(self, source: Source) -> Source:
        """The image model with separate blocks, under vit_jax's names; `config` has the kind of resize."""
        prefix = _prefix(source)
        tensors = {  # without those of an optimizer, a step, SigLIP's text model
            name.removeprefix(prefix): tensor
            for name, tensor in source.tensors.items()
            if name.startswith(prefix)
        }
        squash = prefix == "params/img/" or POSITIONS in tensors
        if not source.has_any(prefix + BLOCK.format(i=0)):
            tensors = dict(_unstacked(tensors))
        for name, tensor in tensors.items():
            if _GROUP_NORM.fullmatch(name) and tensor.shape[:-1] == (1, 1, 1):
                tensors[name] = tensor.flatten()
        settings = {**source.config, "resize": "squash" if squash else "crop"}
        return dataclasses.replace(source, tensors=tensors, config=settings).renamed(_first_name)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        if not _is_big_vision(config):
            return state
        return {_todays_name(name): tensor for name, tensor in state.items()}

    def table(self, config: ViTConfig) -> Table:
        D, heads = config.embed_dim, (config.num_heads, config.head_dim)
        is_hybrid = config.embedding.stem == "resnet"
        tables = [
            *(resnet(config) if is_hybrid else [convolution("patch_embedding", "embedding")]),
            WHOLE,
            *(norm(ours, theirs) for ours, theirs in NORMS.items()),
            *(into_heads(ours, *theirs, D, heads) for ours, theirs in INTO_HEADS.items()),
            *(out_of_heads(ours, theirs, D, heads) for ours, theirs in OUT_OF_HEADS.items()),
            *(dense(ours, theirs) for ours, theirs in DENSE.items()),
        ]
        return {ours: stored for table in tables for ours, stored in table.items()}

    def read_config(self, source: Source) -> ViTConfig:
        block = BLOCK.format(i=0)
        D, heads, _ = source.shape(block + "MultiHeadDotProductAttention_1/query/kernel", 3)
        hidden = source.shape(block + "MlpBlock_3/Dense_0/kernel", 2)[1]
        pool = "map" if source.has_any("MAPHead_0/") else "cls" if source.has("cls") else "mean"
        options: dict[str, Any] = {
            "embed_dim": D,
            "depth": source.count(BLOCK + "LayerNorm_0/scale"),
            "num_heads": heads,
            "mlp_ratio": hidden / D,
            "mlp": "gelu_tanh",
            "norm_eps": 1e-6,
            "resample": "jax",
            "pool": pool,
            **_stem_options(source),
        }
        hidden = source.has("pre_logits/kernel")
        options["head"] = "pre_logits" if hidden else "none"
        if source.has("head/kernel"):
            options["head"] = "mlp" if hidden else "linear"
            options["num_classes"] = source.shape("head/kernel", 2)[1]
        return checked_config(source, options | _place_options(source, options["patch_size"]))

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of the code around such files, with Pillow's filter instead of TensorFlow's."""
        options: dict[str, Any] = {"resize": "squash"}
        if source.config.get("resize") != "squash":
            # big_vision's `resize_small` and `central_crop`: the nearest pixel, then the lower one.
            share = 384 / 448 if config.image_hw == (384, 384) else 224 / 256
            resized = shorter_side(config.image_hw, share)
            options = {"resize_to": resized, "side_rounding": "nearest", "crop_rounding": "down"}
        return dataclasses.replace(default_preprocess(config), interpolation="bilinear", **options)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        arrays: dict[str, Any] = {  # NumPy has no bfloat16
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in state.items()
        }
        np.savez(folder / "model.npz", **arrays)
        return [folder / "model.npz"]


def _is_big_vision(config: ViTConfig) -> bool:
    """Whether only big_vision has such a model: vit_jax learns positions and has no attention pooling."""
    covered = config.embedding.position_prefix or not config.readout.has_class_token
    return config.readout.pool == "map" or config.embedding.positions != "learned" or not covered


def _prefix(source: Source) -> str:
    """The prefix of the image model in a training checkpoint or a two-tower model."""
    return next((prefix for prefix in _PREFIXES if source.has(prefix + "embedding/kernel")), "")


def _unstacked(tensors: State) -> Iterable[tuple[str, Tensor]]:
    """The tensors, with the blocks of a loop ("scan") taken apart along their first axis."""
    for name, tensor in tensors.items():
        if name.startswith(_SCANNED) and tensor.ndim and tensor.numel():
            for index, part in enumerate(tensor):
                yield BLOCK.format(i=index) + name.removeprefix(_SCANNED), part
        else:
            yield name, tensor


def _first_name(name: str) -> str:
    """vit_jax's name of a tensor from any version."""
    if name in ("pos_embedding", "Transformer/pos_embedding"):
        return POSITIONS
    if _POOL_INLINED.fullmatch(name):
        return f"MAPHead_0/{name}"
    match = _IN_BLOCK.fullmatch(name)
    return f"{match[1]}{_FIRST_NUMBERS.get(match[2], match[2])}{match[3]}" if match else name


def _todays_name(name: str) -> str:
    """big_vision's name of a tensor of vit_jax's."""
    if name == POSITIONS:
        return "pos_embedding"
    match = _IN_BLOCK.fullmatch(name)
    return f"{match[1]}{_RENUMBERED.get(match[2], match[2])}{match[3]}" if match else name


def _stem_options(source: Source) -> dict[str, Any]:
    ph, pw, channels, _ = source.shape("embedding/kernel", 4)
    if not source.has("conv_root/kernel"):
        return {"patch_size": (ph, pw), "in_channels": channels}
    stages = source.count("block{i}/unit1/conv1/kernel")
    layers = [source.count(f"block{stage + 1}/unit{{i}}/conv1/kernel") for stage in range(stages)]
    step = 4 * 2 ** max(0, stages - 1)
    _, _, channels, width = source.shape("conv_root/kernel", 4)
    return {
        "stem": "resnet",
        "resnet_layers": tuple(layers),
        "resnet_width": width,
        "resnet_dialect": "jax",
        "in_channels": channels,
        "patch_size": (ph * step, pw * step),
    }


def _place_options(source: Source, patch: tuple[int, int]) -> dict[str, Any]:
    """The image size that the positions were made for, and whether they cover a class token."""
    if not source.has(POSITIONS):
        # A vit_jax model with `add_position_embedding=False` would look the same; none is published.
        size = max(1, 224 // patch[0]) * patch[0], max(1, 224 // patch[1]) * patch[1]
        return {"positions": "sincos_2d_big_vision", "image_size": size}
    length = source.shape(POSITIONS, 3)[1]
    for prefix in (1, 0) if source.has("cls") else (0,):
        side = math.isqrt(length - prefix)
        if side and side * side == length - prefix:
            return {"image_size": (side * patch[0], side * patch[1]), "position_prefix": bool(prefix)}
    raise CheckpointError(
        f"{source.name}: {length} positions do not form a square grid; "
        "give the architecture: from_pretrained(..., config=ViTConfig(image_size=(height, width), ...))"
    )


def norm(ours: str, theirs: str) -> Table:
    """A LayerNorm or GroupNorm."""
    return {f"{ours}.weight": f"{theirs}/scale", f"{ours}.bias": f"{theirs}/bias"}


def dense(ours: str, theirs: str) -> Table:
    """A linear layer: ours (outputs, inputs), theirs (inputs, outputs)."""
    return {f"{ours}.weight": _permuted(f"{theirs}/kernel", (1, 0)), f"{ours}.bias": f"{theirs}/bias"}


def convolution(ours: str, theirs: str) -> Table:
    """A convolution: ours (outputs, inputs, height, width), theirs (height, width, inputs, outputs)."""
    return {f"{ours}.weight": _permuted(f"{theirs}/kernel", (3, 2, 0, 1)), f"{ours}.bias": f"{theirs}/bias"}


def _permuted(name: str, ours: tuple[int, ...]) -> Stored:
    theirs = tuple(ours.index(axis) for axis in range(len(ours)))
    return reshaped(name, lambda it: it.permute(theirs), lambda it: it.permute(ours).contiguous())


def resnet(config: ViTConfig) -> Iterable[Table]:
    """The ResNet stem: stages and units are counted from 1."""
    yield convolution("patch_embedding.projection", "embedding")
    stem = "patch_embedding.resnet"
    yield convolution(f"{stem}.root.conv", "conv_root")
    yield norm(f"{stem}.root.norm", "gn_root")
    for stage, units in enumerate(config.embedding.resnet_layers):
        for unit in range(units):
            ours, theirs = f"{stem}.stages.{stage}.{unit}", f"block{stage + 1}/unit{unit + 1}"
            yield convolution(f"{ours}.shortcut.conv", f"{theirs}/conv_proj")
            yield norm(f"{ours}.shortcut.norm", f"{theirs}/gn_proj")
            for number in (1, 2, 3):
                yield convolution(f"{ours}.conv{number}", f"{theirs}/conv{number}")
                yield norm(f"{ours}.norm{number}", f"{theirs}/gn{number}")


def into_heads(ours: str, theirs: str, parts: str, embed_dim: int, heads: tuple[int, int]) -> Table:
    """Queries, keys, values: their kernels are (D, heads, hd), their biases (heads, hd)."""
    names = [theirs + part for part in parts.split()]
    return {
        f"{ours}.weight": _heads_last([f"{name}/kernel" for name in names], (embed_dim, *heads)),
        f"{ours}.bias": _heads_last([f"{name}/bias" for name in names], heads),
    }


def _heads_last(names: list[str], shape: tuple[int, ...]) -> Stored:
    """Our tensor, (outputs, ...), is the concatenation of theirs, each (..., heads, hd)."""

    def ours(part: Tensor) -> Tensor:
        return _checked(part, shape).flatten(-2).movedim(-1, 0)

    def theirs(part: Tensor) -> Tensor:
        return part.movedim(0, -1).reshape(shape)

    return Stored(
        tuple(names),
        lambda parts: torch.cat([ours(part) for part in parts]),
        lambda tensor: [theirs(part) for part in tensor.chunk(len(names))],
    )


def out_of_heads(ours: str, theirs: str, embed_dim: int, heads: tuple[int, int]) -> Table:
    """The projection behind attention: their kernel is (heads, hd, D)."""
    shape = (*heads, embed_dim)
    kernel = reshaped(
        f"{theirs}/kernel",
        lambda weight: weight.T.reshape(shape),
        lambda kernel: _checked(kernel, shape).flatten(0, 1).T.contiguous(),
    )
    return {f"{ours}.weight": kernel, f"{ours}.bias": f"{theirs}/bias"}


def _checked(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor, if it has the shape: another number of heads of the same total width would go unnoticed."""
    if tensor.shape != shape:
        raise ValueError(f"{tuple(tensor.shape)} is not {shape}")
    return tensor
