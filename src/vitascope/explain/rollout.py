"""Attention rollout: attention through all layers (Abnar and Zuidema 2020, "Quantifying Attention Flow")."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.explain.attention import attending, attention_weights, to_heatmap
from vitascope.model.classifier import Classifier


@torch.no_grad()
def rollout(model: Classifier, images: Tensor) -> Tensor:
    """How much of each patch flows into the image's representation, over all layers.

    The product of (A_l + I) / 2 over the layers, A_l the mean of layer l's heads; the identity stands for
    the residual connection (section 3, "Attention rollout"). Of it, the rows that `attention` takes.

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W).

    Returns:
        float32 (B, grid_h, grid_w), each image's largest value 1.

    Raises:
        UserError: a ResNet.
    """
    model = attending(model)
    layers = attention_weights(model, images)
    identity = torch.eye(layers[0].shape[-1], device=images.device)  # (T, T)
    flow = identity.expand(images.shape[0], -1, -1)
    for weights in layers:
        flow = (weights.float().mean(dim=1) + identity) / 2 @ flow  # (B, T, T)
    return to_heatmap(model, images, flow)
