"""Attention rollout: attention through all layers (Abnar and Zuidema 2020, "Quantifying Attention Flow")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from vitascope.errors import UserError, check_choice
from vitascope.explain.attention import attending, stream_attention, to_heatmap
from vitascope.explain.inputs import Images, as_images
from vitascope.model.classifier import Classifier

Fusion = Literal["mean", "max", "min"]


@torch.no_grad()
def rollout(model: Classifier, images: Images, fusion: Fusion = "mean", discard: float = 0.0) -> Tensor:
    """How much of each patch flows into the image's representation, over all layers.

    The product of A_l + I over the layers, rows normalized to sum to one, where A_l is layer l's attention
    fused over its heads and the identity stands for the residual connection (section 3, "Attention rollout";
    with mean fusion this is the paper's (A_l + I) / 2). The map is the mean row of the tokens that pooling
    reads, as in `attention`. One layer's weights and one product are held at a time.

    Args:
        model: any `VisionTransformer`; runs in evaluation mode.
        images: pictures, or normalized floats (B, C, H, W).
        fusion: how heads are fused: the mean, largest or smallest weight of each pair of tokens.
        discard: share of each layer's fused weights, the smallest of each image, that are set to zero.

    Returns:
        float32 (B, grid_h, grid_w), each image's largest value 1.

    Raises:
        UserError: a ResNet, an unknown fusion, a share outside [0, 1).
    """
    model, images = attending(model), as_images(model, images)
    check_choice("fusion", fusion, get_args(Fusion))
    if not 0 <= discard < 1:
        raise UserError(f"discard is a share in [0, 1), not {discard}")
    flow: Tensor | None = None  # (B, T, T)

    def add_layer(weights: Tensor) -> None:  # (B, heads, Q, T)
        nonlocal flow
        flow = next_flow(flow, without_smallest(_FUSE[fusion](weights.float()), discard))

    # Discarding in the last layer depends on all of its rows.
    stream_attention(model, images, add_layer, model.pool.read if discard == 0 else slice(None))
    assert flow is not None
    return to_heatmap(model, images, flow)


def next_flow(flow: Tensor | None, fused: Tensor) -> Tensor:
    """Extend the flow (B, T, T), None before the first layer, by a layer's fused weights (B, Q, T): (B, Q,
    T).

    The weights are overwritten.
    """
    fused.diagonal(dim1=1, dim2=2).add_(1)
    fused /= fused.sum(dim=-1, keepdim=True)
    return fused if flow is None else fused @ flow


_FUSE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weights: weights.mean(dim=1),
    "max": lambda weights: weights.amax(dim=1),
    "min": lambda weights: weights.amin(dim=1),
}
"""(B, heads, Q, T) -> (B, Q, T)."""


def without_smallest(weights: Tensor, share: float) -> Tensor:
    """Set a share of each image's weights (B, Q, T), the smallest, to zero, in place."""
    flat = weights.flatten(1)  # (B, Q*T)
    count = int(share * flat.shape[1])
    if count:
        flat.scatter_(1, flat.topk(count, dim=1, largest=False, sorted=False).indices, 0.0)
    return flat.view_as(weights)
