"""Attention rollout: attention through all layers (Abnar and Zuidema 2020, "Quantifying Attention Flow")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from vitascope.errors import UserError, check_choice
from vitascope.explain.attention import attending, stream_attention, to_heatmap
from vitascope.model.classifier import Classifier

Fusion = Literal["mean", "max", "min"]


@torch.no_grad()
def rollout(model: Classifier, images: Tensor, fusion: Fusion = "mean", discard: float = 0.0) -> Tensor:
    """How much of each patch flows into the image's representation, over all layers.

    The product of the layers' A_l + I with rows brought to a sum of one, A_l the fused heads of layer l; the
    identity stands for the residual connection (section 3, "Attention rollout"; with mean fusion this is the
    paper's (A_l + I) / 2). Of it, the rows that `attention` takes. Layer by layer: of all that is quadratic
    in the tokens, one layer's weights and one product are there at a time.

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W).
        fusion: what becomes of the heads: their mean, the strongest or the weakest of each pair of tokens.
        discard: share of each image's fused weights, the smallest of each layer, that is set to zero.

    Returns:
        float32 (B, grid_h, grid_w), each image's largest value 1.

    Raises:
        UserError: a ResNet, an unknown fusion, a share outside [0, 1).
    """
    model = attending(model)
    check_choice("fusion", fusion, get_args(Fusion))
    if not 0 <= discard < 1:
        raise UserError(f"discard is a share in [0, 1), not {discard}")
    flow: Tensor | None = None  # (B, T, T)

    def add_layer(weights: Tensor) -> None:  # (B, heads, Q, T)
        nonlocal flow
        flow = next_flow(flow, without_smallest(_FUSE[fusion](weights.float()), discard))

    # What is discarded of the last layer depends on all of its rows.
    stream_attention(model, images, add_layer, model.pool.read if discard == 0 else slice(None))
    assert flow is not None
    return to_heatmap(model, images, flow)


def next_flow(flow: Tensor | None, fused: Tensor) -> Tensor:
    """The flow (B, Q, T) through one layer more.

    Args:
        flow: through the layers before (B, T, T); None before the first.
        fused: one weight for each pair of tokens (B, Q, T), of all tokens or of the first Q; overwritten.
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
    """Weights (B, Q, T) with a share of each image's, the smallest, set to zero, in place."""
    flat = weights.flatten(1)  # (B, Q*T)
    count = int(share * flat.shape[1])
    if count:
        flat.scatter_(1, flat.topk(count, dim=1, largest=False, sorted=False).indices, 0.0)
    return flat.view_as(weights)
