"""The place of each exercise's function in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from vitascope.learn.faults import Function
from vitascope.model.attention import EVERY_TOKEN, fused_attention, join_heads
from vitascope.model.vit import VisionTransformer

OPTIONS = {"qkv_bias": "none", "linear_bias": False, "patch_bias": False, "pool": "cls"}
"""Options of a model that computes the paper's equations as they stand there, without biases."""


def place(model: VisionTransformer, functions: Mapping[str, Function]) -> None:
    """Replace the parts of a model with `OPTIONS` by functions, by exercise; its weights stay.

    The loss has no place in a model.
    """
    for name, function in functions.items():
        if name == "multi_head":
            place_multi_head(model, function, functions.get("attention", fused_attention))
        elif name in PLACES:
            PLACES[name](model, function)


def place_patches(model: VisionTransformer, patches: Function) -> None:
    """Replace the patch embedding."""
    stem: Any = model.patch_embedding
    stem.forward = lambda images: patches(images, stem.weight.flatten(1).T, model.config.patch_hw[0])


def place_positions(model: VisionTransformer, positions: Function) -> None:
    """Replace the rest of equation 1."""

    def prepare_tokens(images: Tensor, trace: None = None) -> Tensor:
        E_pos = model.positions.table(model.grid_of(images))
        return positions(model.patch_embedding(images), model.class_token, E_pos)

    model.prepare_tokens = prepare_tokens  # type: ignore[method-assign, assignment]


def place_attention(model: VisionTransformer, attention: Function) -> None:
    """Replace equations 6 and 7."""

    def mix(qkv: Tensor, layout: object, queries: slice, rate: float) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, hd)
        return join_heads(attention(q[:, :, queries], k, v))

    for block in blocks_of(model):
        block.attention.mix = mix


def place_multi_head(model: VisionTransformer, multi_head: Function, attention: Function) -> None:
    """Replace equations 5 and 8; `attention` is what the function calls."""

    def forward(
        part: Any, z: Tensor, layout: object, trace: None = None, queries: slice = EVERY_TOKEN
    ) -> Tensor:
        return multi_head(z, part.qkv.weight.T, part.proj.weight.T, part.num_heads, attention)[:, queries]

    for block in blocks_of(model):
        block.attention.forward = partial(forward, block.attention)


def place_mlp(model: VisionTransformer, mlp: Function) -> None:
    """Replace the MLPs."""

    def forward(part: Any, z: Tensor) -> Tensor:
        return mlp(z, part.fc1.weight.T, part.fc2.weight.T)

    for block in blocks_of(model):
        block.mlp.forward = partial(forward, block.mlp)


def place_block(model: VisionTransformer, block: Function) -> None:
    """Replace equations 2 and 3."""

    def forward(
        part: Any, z: Tensor, layout: object, trace: None = None, queries: slice = EVERY_TOKEN
    ) -> Tensor:
        attention = partial(part.attention, layout=layout)
        return block(z, part.norm1, attention, part.norm2, part.mlp)[:, queries]

    for part in blocks_of(model):
        part.forward = partial(forward, part)


def place_pool(model: VisionTransformer, pool: Function) -> None:
    """Replace equation 4."""

    def forward(images: Tensor) -> Tensor:
        z_L = model.encode(model.prepare_tokens(images), model.grid_of(images))
        return model.head(pool(z_L, model.norm))

    model.forward = forward  # type: ignore[method-assign]


def blocks_of(model: VisionTransformer) -> list[Any]:
    """The blocks; `Any`, because their methods are replaced."""
    return list(model.encoder.blocks)


PLACES: dict[str, Callable[[VisionTransformer, Function], None]] = {
    "patches": place_patches,
    "positions": place_positions,
    "attention": place_attention,
    "mlp": place_mlp,
    "block": place_block,
    "pool": place_pool,
}
"""By exercise, but for `multi_head`, which calls another one, and the loss."""
