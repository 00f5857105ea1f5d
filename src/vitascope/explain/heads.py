"""Every head of every layer at a glance."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.explain.attention import attending, to_heatmap
from vitascope.explain.streams import stream_attention
from vitascope.model.classifier import Classifier


@torch.no_grad()
def head_maps(model: Classifier, images: Tensor) -> Tensor:
    """What `attention` gives for each layer and each head, in one pass; one layer's weights at a time.

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W).

    Returns:
        float32 (B, depth, heads, grid_h, grid_w), the largest value of each map 1.

    Raises:
        UserError: a ResNet; attention that is not finite.
    """
    model = attending(model)
    layers: list[Tensor] = []

    def consume(weights: Tensor) -> None:  # (B, heads, Q, T)
        maps = [to_heatmap(model, images, rows) for rows in weights.unbind(1)]  # (B, gh, gw) a head
        layers.append(torch.stack(maps, dim=1))

    stream_attention(model, images, consume, model.pool.read)
    return torch.stack(layers, dim=1)
