"""The place of each exercise's function in the model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from vitascope.models.attention import EVERY_TOKEN, fused_attention, join_heads
from vitascope.models.vit import VisionTransformer
from vitascope_lessons.faults import Function

OPTIONS = {"qkv_bias": "none", "linear_bias": False, "patch_bias": False, "pool": "cls"}
"""Options of a model that computes the paper's equations as they stand there, without biases."""


def place_functions(model: VisionTransformer, functions: Mapping[str, Function]) -> None:
    """Replace the parts of a model with `OPTIONS` by functions, by exercise; its weights stay.

    The loss has no place in a model.
    """
    vit: Any = model  # whose methods are replaced
    stem = vit.patch_embedding
    if patches := functions.get("patches"):
        stem.forward = lambda images: patches(images, stem.weight.flatten(1).T, model.config.patch_hw[0])
    if positions := functions.get("positions"):  # the rest of equation 1
        vit.prepare_tokens = lambda images, trace=None: positions(
            stem(images), model.class_token, model.positions.table(model.grid_of(images))
        )
    if pool := functions.get("pool"):  # equation 4

        def classify(images: Tensor) -> Tensor:
            z_L = model.encode(model.prepare_tokens(images), model.grid_of(images))
            return model.head(pool(z_L, model.norm))

        vit.forward = classify
    for block in vit.encoder.blocks:
        place_in_block(block, functions)


def place_in_block(block: Any, functions: Mapping[str, Function]) -> None:
    """Replace the parts of a block, or all of it."""
    msa, mlp = block.attention, block.mlp
    if "attention" in functions:  # equations 6 and 7

        def mix(qkv: Tensor, layout: object, queries: slice, rate: float) -> Tensor:
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, hd)
            return join_heads(functions["attention"](q[:, :, queries], k, v))

        msa.mix = mix
    if "multi_head" in functions:  # equations 5 and 8
        attention = functions.get("attention", fused_attention)

        def attend(z: Tensor, layout: object, trace: None = None, queries: slice = EVERY_TOKEN) -> Tensor:
            U_qkv, U_msa = msa.qkv.weight.T, msa.proj.weight.T
            return functions["multi_head"](z, U_qkv, U_msa, msa.num_heads, attention)[:, queries]

        msa.forward = attend
    if "mlp" in functions:
        mlp.forward = lambda z: functions["mlp"](z, mlp.fc1.weight.T, mlp.fc2.weight.T)
    if "block" in functions:  # equations 2 and 3

        def forward(z: Tensor, layout: object, trace: None = None, queries: slice = EVERY_TOKEN) -> Tensor:
            z = functions["block"](z, block.norm1, partial(msa, layout=layout), block.norm2, mlp)
            return z[:, queries]

        block.forward = forward
