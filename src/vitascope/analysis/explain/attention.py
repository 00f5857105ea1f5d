"""Attention of single layers as heatmaps: of the tokens that pooling reads, of each head, of one patch."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitascope.analysis.explain.heatmaps import to_unit
from vitascope.analysis.explain.inputs import Images, as_images
from vitascope.arguments import checked
from vitascope.errors import UserError
from vitascope.models.config import check_head, check_layer
from vitascope.models.trace import Trace
from vitascope.models.vision_model import VisionModel, evaluation_mode, kind_of
from vitascope.models.vit import VisionTransformer


@torch.no_grad()
@checked
def attention(
    model: VisionModel, images: Images, layer: int = -1, head: int | None = None, *, scaled: bool = True
) -> Tensor:
    """The attention of the image's representation to each patch, in one layer.

    The mean attention row of the tokens that pooling reads: with pool "cls" the class token, and the
    distillation token if there is one; with "mean", "map" and "sequence" all patches; with "cls_mean" the
    class token and the mean of the patches, half each. Attention to tokens other than patches is dropped.

    Args:
        layer: in 0 to depth - 1; negative counts from the last; another one is a `UserError`.
        head: in 0 to num_heads - 1; None is the mean of all heads.
    """
    model, images = attending(model), as_images(model, images)
    check_head(model.config, head)
    weights = layer_attention(model, images, layer)
    return to_heatmap(model, images, weights.mean(dim=1) if head is None else weights[:, head], scaled)


@torch.no_grad()
@checked
def head_maps(model: VisionModel, images: Images) -> Tensor:
    """The `attention` map of every layer and head, in one pass; one layer's weights are held at a time.

    Returns float32 (B, depth, heads, grid_h, grid_w), the largest value of each map 1.
    """
    model, images = attending(model), as_images(model, images)
    layers: list[Tensor] = []

    def add_layer(weights: Tensor) -> None:  # (B, heads, Q, T)
        maps = [to_heatmap(model, images, rows) for rows in weights.unbind(1)]  # (B, gh, gw) per head
        layers.append(torch.stack(maps, dim=1))

    stream_attention(model, images, add_layer, model.pool.queries)
    return torch.stack(layers, dim=1)


@torch.no_grad()
@checked
def patch_attention(
    model: VisionModel, images: Images, patch: tuple[int, int], layer: int = -1, head: int | None = None
) -> Tensor:
    """The attention of one patch to each patch, in one layer; attention to other tokens is dropped.

    With a class token nothing reads the patches after the last layer, so their attention there was never
    trained.

    Args:
        patch: row and column in the grid, from 0; another one is a `UserError`.
        layer, head: as in `attention`.
    """
    model, images = attending(model), as_images(model, images)
    (row, column), (gh, gw) = patch, model.grid_of(images)
    if not (0 <= row < gh and 0 <= column < gw):
        raise UserError(
            f"no patch ({row}, {column}): the grid is {gh}x{gw}, rows 0 to {gh - 1} and columns 0 to {gw - 1}"
        )
    check_head(model.config, head)
    P = model.config.num_prefix_tokens
    weights = layer_attention(model, images, layer)[:, :, P + row * gw + column, P:].float()  # (B, heads, N)
    received = weights.mean(dim=1) if head is None else weights[:, head]  # (B, N)
    return to_unit(received.unflatten(1, (gh, gw)))


@torch.no_grad()
def layer_attention(model: VisionTransformer, images: Tensor, layer: int) -> Tensor:
    """The attention weights of one layer, (B, heads, T, T), in evaluation mode; later layers do not run."""
    index, grid = check_layer(model.config, layer), model.grid_of(images)
    trace = Trace(attention=True)
    with evaluation_mode(model):
        tokens = model.encode(model.prepare_tokens(images), grid, blocks=range(index))
        model.encode(tokens, grid, trace, blocks=range(index, index + 1))
    return trace.attention[0]


class AttentionStream(Trace):
    """A trace that passes each block's attention weights to a function and keeps nothing.

    At 4,097 tokens (1,024 pixels in patches of 16) one layer of ViT-B has 0.8 GB of weights, twelve have ten.
    """

    def __init__(self, consume: Callable[[Tensor], None]) -> None:
        super().__init__(attention=True)
        self.consume = consume

    def keep(self, name: str, value: Tensor) -> None:
        """Drop an intermediate."""

    def keep_attended(self, tokens: Tensor) -> None:
        """Drop the tokens."""

    def keep_attention(self, weights: Tensor) -> None:
        """Pass on the weights (B, heads, Q, T) of the next block."""
        self.consume(weights)


@torch.no_grad()
def stream_attention(
    model: VisionTransformer, images: Tensor, consume: Callable[[Tensor], None], queries: slice = slice(None)
) -> Tensor:
    """Pass each block's attention weights (B, heads, T, T), first block first, to `consume`; return the
    tokens after the final norm, (B, T, D).

    Of the last block only the rows `queries` are computed: (B, heads, Q, T), and tokens (B, Q, D).
    """
    with evaluation_mode(model):
        return model.forward_features(images, AttentionStream(consume), queries)


def attending(model: VisionModel) -> VisionTransformer:
    """The model, if it is a Vision Transformer; another one raises UserError."""
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{kind_of(model.config)} has no attention and no tokens: give a Vision Transformer")
    return model


def to_heatmap(model: VisionTransformer, images: Tensor, rows: Tensor, scaled: bool = True) -> Tensor:
    """A heatmap (B, gh, gw) of relations between tokens (B, Q, T); Q are all, or those that pooling reads."""
    patches = read_rows(model, rows.float())[:, model.config.num_prefix_tokens :]  # (B, N)
    return to_unit(patches.unflatten(1, model.grid_of(images)), scaled)  # (B, gh, gw)


def read_rows(model: VisionTransformer, rows: Tensor) -> Tensor:
    """The mean row of the tokens that pooling reads, as in `attention`: (B, Q, T) -> (B, T)."""
    readout = model.config.readout
    if readout.pool == "cls":
        return rows[:, : readout.num_pooled].mean(dim=1)
    patches = rows[:, model.config.num_prefix_tokens :].mean(dim=1)
    return (rows[:, 0] + patches) / 2 if readout.pool == "cls_mean" else patches
