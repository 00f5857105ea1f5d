"""Attention layer by layer: each layer's weights are used while they are there, and none is kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitascope.model.modes import evaluation_mode
from vitascope.model.trace import Trace
from vitascope.model.vit import VisionTransformer


class AttentionStream(Trace):
    """A trace that hands each block's attention weights on and keeps nothing.

    Of 4,097 tokens (1,024 pixels in patches of 16) one layer of ViT-B has 0.8 GB of weights, twelve have ten.
    """

    def __init__(self, consume: Callable[[Tensor], None]) -> None:
        super().__init__(attention=True)
        self.consume = consume

    def keep(self, name: str, value: Tensor) -> None:
        """Let an intermediate go."""

    def keep_attended(self, tokens: Tensor) -> None:
        """Let the tokens go."""

    def keep_attention(self, weights: Tensor) -> None:
        """Hand on the weights (B, heads, Q, T) of the next block."""
        self.consume(weights)


@torch.no_grad()
def stream_attention(
    model: VisionTransformer,
    images: Tensor,
    consume: Callable[[Tensor], None],
    read: slice = slice(None),
) -> None:
    """Run a model as in evaluation and hand on each block's attention weights, first block first.

    Args:
        model: a Vision Transformer.
        images: normalized floats (B, C, H, W).
        consume: is called with (B, heads, T, T) for each block.
        read: the rows that are wanted of the last block's weights, (B, heads, Q, T).
    """
    with evaluation_mode(model):
        model.encode(images, AttentionStream(consume), read)
