"""The attention of one layer, as a map over the patches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.heatmaps import to_unit
from vitascope.model.classifier import Classifier
from vitascope.model.config import ViTConfig
from vitascope.model.evaluation_mode import evaluation_mode
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


@torch.no_grad()
def patch_attention(
    model: Classifier,
    images: Tensor,
    patch: tuple[int, int],
    layer: int = -1,
    head: int | None = None,
) -> Tensor:
    """How much one patch attends to each patch in a layer.

    The patch's row of the attention weights; what goes to class, distillation and register tokens is left
    out. (With a class token nothing reads what patches attend to in the last layer: it was not trained to
    mean anything.)

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W).
        patch: row and column in the grid, from 0.
        layer: of `depth`, from 0; negative counts from the last.
        head: of `num_heads`, from 0; None takes the mean of all heads.

    Returns:
        float32 (B, grid_h, grid_w), each image's largest value 1; all zeros where the patch attends to
        other tokens alone.

    Raises:
        UserError: no such patch, layer or head, naming the range; a ResNet.
    """
    model = attending(model)
    grid, P = model.grid_of(images), model.config.num_prefix_tokens
    number = _number_of(patch, grid)
    check_head(model.config, head)
    rows = layer_attention(model, images, layer)[:, :, P + number, P:].float()  # (B, heads, N)
    row = rows.mean(dim=1) if head is None else rows[:, head]  # (B, N)
    return to_unit(row.unflatten(1, grid))


def _number_of(patch: tuple[int, int], grid: tuple[int, int]) -> int:
    """A patch's place in the sequence of patches, row by row.

    Raises:
        UserError: no such patch.
    """
    (row, column), (gh, gw) = patch, grid
    if not (0 <= row < gh and 0 <= column < gw):
        raise UserError(
            f"no patch ({row}, {column}): the grid is {gh}x{gw}, rows 0 to {gh - 1} and columns 0 to {gw - 1}"
        )
    return row * gw + column


@torch.no_grad()
def layer_attention(model: VisionTransformer, images: Tensor, layer: int) -> Tensor:
    """The attention weights of one layer, (B, heads, T, T), as in evaluation; nothing above it is computed.

    Raises:
        UserError: no such layer, naming the range.
    """
    index, grid = check_layer(model.config, layer), model.grid_of(images)
    trace = Trace(attention=True)
    with evaluation_mode(model):
        tokens = model.encode(model.prepare_tokens(images), grid, blocks=range(index))
        model.encode(tokens, grid, trace, blocks=range(index, index + 1))
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
        model.forward_features(images, AttentionStream(consume), read)
