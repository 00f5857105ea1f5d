"""The names and layouts of the original JAX checkpoints: `weights/families/jax.py`'s table.

The names are those of vit_jax's first published files. In flax a dense layer multiplies from the left, a
convolution's kernel is (height, width, inputs, outputs), and attention keeps its heads apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitascope.model.config import ViTConfig
from vitascope.weights.mapping import Stored, Table, reshaped

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


def table(config: ViTConfig) -> Table:
    """The place of each of our tensors, for the options of a configuration."""
    D, heads = config.embed_dim, (config.num_heads, config.head_dim)
    tables = [
        *(
            resnet(config)
            if config.embedding.stem == "resnet"
            else [convolution("patch_embedding", "embedding")]
        ),
        WHOLE,
        *(norm(ours, theirs) for ours, theirs in NORMS.items()),
        *(into_heads(ours, *theirs, D, heads) for ours, theirs in INTO_HEADS.items()),
        *(out_of_heads(ours, theirs, D, heads) for ours, theirs in OUT_OF_HEADS.items()),
        *(dense(ours, theirs) for ours, theirs in DENSE.items()),
    ]
    return {ours: stored for table in tables for ours, stored in table.items()}


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
    return reshaped(
        name, lambda tensor: tensor.permute(theirs), lambda tensor: tensor.permute(ours).contiguous()
    )


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
