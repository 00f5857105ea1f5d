"""Parameters and multiply-adds, from shapes alone: no torch, so that `vitascope models` answers at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vitascope.model import resnet_shapes

if TYPE_CHECKING:
    from vitascope.model.config import ViTConfig


def num_parameters(config: ViTConfig) -> int:
    """Trainable numbers in the model."""
    D = config.embed_dim
    norms = 2 * D * (config.block.norm == "pre")  # post-norm blocks end in one of their own
    norms += 2 * D * config.embedding.embedding_norm
    tokens = D * config.num_prefix_tokens
    return (
        _stem_parameters(config)
        + tokens
        + _position_parameters(config)
        + norms
        + config.depth * _block_parameters(config)
        + _readout_parameters(config)
    )


def multiply_adds(config: ViTConfig) -> int:
    """Multiply-adds of one image's matrix products, every token through every block."""
    D, T = config.embed_dim, config.num_tokens
    hidden = (3 if config.block.mlp == "swiglu" else 2) * D * config.mlp_dim
    head = sum(rows * columns for rows, columns in _head_layers(config))
    if config.readout.pool == "map":  # one query attends to N patches
        N = T - config.num_prefix_tokens
        head += D * D + N * 2 * D * D + 2 * N * D + D * D + hidden
    return _stem_multiply_adds(config) + _encoder_multiply_adds(config, hidden) + head


def tokens_by_block(config: ViTConfig) -> list[tuple[int, int]]:
    """The tokens that the attention and the MLP of each block get: fewer and fewer with token merging."""
    P, T = config.num_prefix_tokens, config.num_tokens
    counts = []
    for _ in range(config.depth):
        left = T - min(config.block.token_merging, (T - P) // 2)
        counts.append((T, left))
        T = left
    return counts


def _encoder_multiply_adds(config: ViTConfig, hidden: int) -> int:
    """Those of all blocks; `hidden` are a token's in an MLP."""
    D, inner, P = config.embed_dim, config.attention_dim, config.num_prefix_tokens
    if not config.block.token_merging:
        return config.depth * (
            config.num_tokens * (4 * D * inner + hidden) + 2 * inner * attended_pairs(config)
        )
    total = 0
    for T, left in tokens_by_block(config):
        total += T * 4 * D * inner + 2 * inner * T * T + left * hidden
        if left < T:  # keys of the two sets, and what those that leave add to those that stay
            first = (T - P) // 2
            total += first * (T - P - first) * config.head_dim + left * (T - left) * D
    return total


def attended_pairs(config: ViTConfig) -> int:
    """(query, key) pairs that one head of one block compares: T^2, or fewer where attention is local."""
    (gh, gw), P, T = config.grid, config.num_prefix_tokens, config.num_tokens
    prefix_rows = P * T  # prefix tokens attend to everything, in each pass
    windows = config.windows_of((gh, gw))
    return sum(prefix_rows + gh * gw * (P + math.prod(window)) for window in windows)


def _stem_parameters(config: ViTConfig) -> int:
    D, (ph, pw), embedding = config.embed_dim, config.patch_hw, config.embedding
    bias = D * embedding.patch_bias
    if embedding.stem != "resnet":
        return config.in_channels * ph * pw * D + bias
    shape = (config.in_channels, embedding.resnet_layers, embedding.resnet_width)
    step = resnet_shapes.total_stride(embedding.resnet_layers)
    channels = resnet_shapes.out_channels(embedding.resnet_layers, embedding.resnet_width)
    return resnet_shapes.num_parameters(*shape) + channels * (ph // step) * (pw // step) * D + bias


def _stem_multiply_adds(config: ViTConfig) -> int:
    D, (ph, pw), embedding = config.embed_dim, config.patch_hw, config.embedding
    patches = config.grid[0] * config.grid[1]
    if embedding.stem != "resnet":
        return patches * config.in_channels * ph * pw * D
    shape = (config.in_channels, embedding.resnet_layers, embedding.resnet_width)
    step = resnet_shapes.total_stride(embedding.resnet_layers)
    channels = resnet_shapes.out_channels(embedding.resnet_layers, embedding.resnet_width)
    projection = patches * channels * (ph // step) * (pw // step) * D
    return resnet_shapes.multiply_adds(config.image_hw, *shape) + projection


def _position_parameters(config: ViTConfig) -> int:
    D, (gh, gw) = config.embed_dim, config.grid
    prefix = config.num_prefix_tokens
    match config.embedding.positions:
        case "learned":
            return D * (gh * gw + prefix * config.embedding.position_prefix)
        case "learned_2d":
            return D * (gh + gw)
        case "relative":
            return config.num_heads * ((2 * gh - 1) * (2 * gw - 1) + (3 if prefix else 0))
        case _:
            return 0


def _block_parameters(config: ViTConfig) -> int:
    D, inner, hidden = config.embed_dim, config.attention_dim, config.mlp_dim
    qkv_bias = {"all": 3 * inner, "no_key": 2 * inner, "none": 0}[config.block.qkv_bias]
    attention = 3 * D * inner + qkv_bias + inner * D + D
    wide = 2 * hidden if config.block.mlp == "swiglu" else hidden
    mlp = (D * wide + wide) + (hidden * D + D)
    scales = 2 * D if config.block.layer_scale is not None else 0
    return 2 * (2 * D) + attention + mlp + scales


def _head_layers(config: ViTConfig) -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer of the head."""
    D, K, readout = config.embed_dim, config.num_classes, config.readout
    pooled = D * readout.num_pooled
    if readout.distillation_token and readout.head != "none":
        return [(D, K), (D, K)]
    return {
        "linear": [(pooled, K)],
        "zero": [(pooled, K)],
        "mlp": [(pooled, D), (D, K)],
        "pre_logits": [(pooled, D)],
        "none": [],
    }[readout.head]


def _readout_parameters(config: ViTConfig) -> int:
    head = sum(inputs * outputs + outputs for inputs, outputs in _head_layers(config))
    if config.readout.pool != "map":
        return head
    D, hidden = config.embed_dim, config.mlp_dim
    wide = 2 * hidden if config.block.mlp == "swiglu" else hidden
    attention = D + 4 * (D * D + D)  # the query itself, and four linear layers
    return head + attention + 2 * D + (D * wide + wide) + (hidden * D + D)
