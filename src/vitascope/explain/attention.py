"""The attention of one layer, as a map over the patches."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer


@torch.no_grad()
def attention(model: Classifier, images: Tensor, layer: int = -1, head: int | None = None) -> Tensor:
    """How much the image's representation attends to each patch in a layer.

    The mean row of the tokens that pooling reads. Pool "cls" reads the class token, and the distillation
    token where there is one; "mean" and "map" the patches, each counted alike; "cls_mean" the class token for
    one half, the patches for the other. Attention to tokens that are not patches is left out.

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W).
        layer: of `depth`, from 0; negative counts from the last.
        head: of `num_heads`, from 0; None takes the mean of all heads.

    Returns:
        float32 (B, grid_h, grid_w), each image's largest value 1.

    Raises:
        UserError: no such layer or head, naming the range; a ResNet.
    """
    model = attending(model)
    depth, heads = model.config.depth, model.config.num_heads
    if not -depth <= layer < depth:
        raise UserError(f"no layer {layer}: the model has {depth}, 0 to {depth - 1} (or -{depth} to -1)")
    if head is not None and not 0 <= head < heads:
        raise UserError(f"no head {head}: each layer has {heads}, 0 to {heads - 1}")
    weights = attention_weights(model, images)[layer]  # (B, heads, T, T)
    mixed = weights.mean(dim=1) if head is None else weights[:, head]  # (B, T, T)
    return to_heatmap(model, images, mixed)


def attending(model: Classifier) -> VisionTransformer:
    """A model that attends.

    Raises:
        UserError: a ResNet, which does not.
    """
    if not isinstance(model, VisionTransformer):
        raise UserError("a ResNet has no attention to show: this method is for Vision Transformers")
    return model


def attention_weights(model: VisionTransformer, images: Tensor) -> list[Tensor]:
    """The softmax weights of every layer, (B, heads, T, T) each, of the model as it is in evaluation."""
    was_training = model.training
    try:
        weights = model.eval().trace(images, attention=True).attention
    finally:
        model.train(was_training)
    assert weights is not None
    return weights


def to_heatmap(model: VisionTransformer, images: Tensor, rows: Tensor) -> Tensor:
    """From relations between tokens (B, T, T) to a map over the patches (B, gh, gw), largest value 1."""
    patches = read_rows(model, rows.float())[:, model.config.num_prefix_tokens :]  # (B, N)
    heat = patches.unflatten(1, model.grid_of(images))  # (B, gh, gw)
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def read_rows(model: VisionTransformer, rows: Tensor) -> Tensor:
    """The mean row of the tokens that pooling reads, as `attention` says: (B, T, T) -> (B, T)."""
    readout = model.config.readout
    if readout.pool == "cls":
        return rows[:, : readout.num_pooled].mean(dim=1)
    patches = rows[:, readout.num_prefix_tokens :].mean(dim=1)
    return (rows[:, 0] + patches) / 2 if readout.pool == "cls_mean" else patches
