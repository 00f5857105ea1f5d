"""The attention of one layer, as a map over the patches."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.heatmaps import to_unit
from vitascope.model.classifier import Classifier
from vitascope.model.config import ViTConfig
from vitascope.model.modes import evaluation_mode
from vitascope.model.trace import Trace
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
    check_head(model.config, head)
    weights = layer_attention(model, images, layer)
    return to_heatmap(model, images, weights.mean(dim=1) if head is None else weights[:, head])


@torch.no_grad()
def layer_attention(model: VisionTransformer, images: Tensor, layer: int) -> Tensor:
    """The attention weights of one layer, (B, heads, T, T), as in evaluation; nothing above it is computed.

    Raises:
        UserError: no such layer, naming the range.
    """
    index, grid = check_layer(model.config, layer), model.grid_of(images)
    trace = Trace(attention=True)
    with evaluation_mode(model):
        tokens = model.encode_tokens(model.embeddings(images), grid, blocks=range(index))
        model.encode_tokens(tokens, grid, trace, blocks=range(index, index + 1))
    assert trace.attention is not None
    return trace.attention[0]


def attending(model: Classifier) -> VisionTransformer:
    """A model that attends.

    Raises:
        UserError: a ResNet, which does not.
    """
    if not isinstance(model, VisionTransformer):
        raise UserError("a ResNet has no attention to show: this method is for Vision Transformers")
    return model


def check_layer(config: ViTConfig, layer: int) -> int:
    """The number of a layer, from 0, of one that may count from the last.

    Raises:
        UserError: no such layer, naming the range.
    """
    depth = config.depth
    if not isinstance(layer, int) or not -depth <= layer < depth:
        raise UserError(f"no layer {layer}: the model has {depth}, 0 to {depth - 1} (or -{depth} to -1)")
    return layer % depth


def check_head(config: ViTConfig, head: int | None) -> None:
    """Refuse a head that is not there, naming the range."""
    if head is not None and not (isinstance(head, int) and 0 <= head < config.num_heads):
        raise UserError(f"no head {head}: each layer has {config.num_heads}, 0 to {config.num_heads - 1}")


def to_heatmap(model: VisionTransformer, images: Tensor, rows: Tensor) -> Tensor:
    """From relations between tokens (B, Q, T) to a map over the patches (B, gh, gw), largest value 1.

    `rows` are those of all tokens, or of those that pooling reads.
    """
    patches = read_rows(model, rows.float())[:, model.config.num_prefix_tokens :]  # (B, N)
    return to_unit(patches.unflatten(1, model.grid_of(images)))  # (B, gh, gw)


def read_rows(model: VisionTransformer, rows: Tensor) -> Tensor:
    """The mean row of the tokens that pooling reads, as `attention` says: (B, Q, T) -> (B, T)."""
    readout = model.config.readout
    if readout.pool == "cls":
        return rows[:, : readout.num_pooled].mean(dim=1)
    patches = rows[:, readout.num_prefix_tokens :].mean(dim=1)
    return (rows[:, 0] + patches) / 2 if readout.pool == "cls_mean" else patches
