"""Attention through all layers, plain and weighted by the gradient of a score."""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from vitascope.analysis.explain.attention import attending, read_rows, stream_attention, to_heatmap
from vitascope.analysis.explain.heatmaps import to_unit
from vitascope.analysis.explain.inputs import Images, as_images
from vitascope.analysis.explain.targets import TargetLike, score_gradient
from vitascope.arguments import Range, checked
from vitascope.models.trace import Trace
from vitascope.models.vision_model import VisionModel, evaluation_mode
from vitascope.models.vit import VisionTransformer

Fusion = Literal["mean", "max", "min"]
Share = Annotated[float, Range(ge=0, lt=1)]


@torch.no_grad()
@checked
def rollout(
    model: VisionModel, images: Images, fusion: Fusion = "mean", discard: Share = 0.0, *, scaled: bool = True
) -> Tensor:
    """The flow of each patch into the image's representation, over all layers.

    Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", section 3: the product of A_l + I
    over the layers, rows normalized to sum to one, where A_l is layer l's attention fused over its heads and
    the identity stands for the residual connection (with mean fusion this is the paper's (A_l + I) / 2). The
    map is the mean row of the tokens that pooling reads, as in `attention`. One layer's weights and one
    product are held at a time.

    Args:
        fusion: how heads are fused: the mean, largest or smallest weight of each pair of tokens.
        discard: share of each layer's fused weights, the smallest of each image, that are set to zero.
    """
    model, images = attending(model), as_images(model, images)
    flow: Tensor | None = None  # (B, T, T)

    def add_layer(weights: Tensor) -> None:  # (B, heads, Q, T)
        nonlocal flow
        flow = next_flow(flow, without_smallest(_FUSE[fusion](weights.float(), dim=1), discard))

    # Discarding in the last layer depends on all of its rows.
    stream_attention(model, images, add_layer, model.pool.queries if discard == 0 else slice(None))
    assert flow is not None
    return to_heatmap(model, images, flow)


def next_flow(flow: Tensor | None, fused: Tensor) -> Tensor:
    """Extend the flow (B, T, T), None before the first layer, by fused weights (B, Q, T): (B, Q, T)."""
    fused = fused + torch.eye(*fused.shape[1:], dtype=fused.dtype, device=fused.device)
    fused = fused / fused.sum(dim=-1, keepdim=True)  # not in place: exported graphs have it too
    return fused if flow is None else fused @ flow


_FUSE: dict[str, Callable[..., Tensor]] = {"mean": Tensor.mean, "max": Tensor.amax, "min": Tensor.amin}


def without_smallest(weights: Tensor, share: float) -> Tensor:
    """Set a share of each image's weights (B, Q, T), the smallest, to zero, in place."""
    flat = weights.flatten(1)  # (B, Q*T)
    count = int(share * flat.shape[1])
    if count:
        flat.scatter_(1, flat.topk(count, dim=1, largest=False, sorted=False).indices, 0.0)
    return flat.view_as(weights)


@checked
def gradient_rollout(
    model: VisionModel, images: Images, target: TargetLike = None, *, scaled: bool = True
) -> Tensor:
    """The flow of each patch into the target's score, over all layers, by attention that raises it.

    Chefer, Gur and Wolf 2021, "Generic Attention-model Explainability for Interpreting Bi-Modal and
    Encoder-Decoder Transformers".
    R <- R + E_h[(dA * A)+] R for each layer, from R = I (equations 5 and 6), where A are the attention
    weights, dA is the gradient of the target's score and E_h the mean over the heads. The map is the mean row
    of R - I of the tokens that pooling reads, as in `attention`. Only these rows are computed, from the last
    layer down beside the gradient, so one block's attention is held at a time.
    """
    model, images = attending(model), as_images(model, images)
    grid = model.grid_of(images)
    # The caller may be in inference mode, which has no gradients.
    with torch.inference_mode(False), evaluation_mode(model):
        states = token_states(model, images)
        with torch.enable_grad():
            zL = states[-1].requires_grad_()
            gradient = score_gradient(model, zL, model.pool_features(model.norm(zL)), target)  # (B, T, D)
        identity = torch.eye(gradient.shape[1], device=images.device)[None]  # (1, T, T)
        direct = rows = read_rows(model, identity)  # (1, T): the tokens that pooling reads
        for index in reversed(range(model.config.depth)):
            relevance, gradient = _through_block(model, states.pop(index), grid, index, gradient)
            rows = rows + (rows[:, None] @ relevance)[:, 0]  # (B, T)
    patches = (rows - direct)[:, model.config.num_prefix_tokens :]  # (B, N)
    return to_unit(patches.unflatten(1, grid), scaled)


@torch.no_grad()
def token_states(model: VisionTransformer, images: Tensor) -> list[Tensor]:
    """z_0 to z_L, (B, T, D) each."""
    trace = model.trace(images)
    return [trace["embeddings"], *(trace[f"block{index}"] for index in range(model.config.depth))]


def _through_block(
    model: VisionTransformer, state: Tensor, grid: tuple[int, int], index: int, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """E_h[(dA * A)+] of a block, (B, T, T), and the gradient at z_(l-1) from the gradient at z_l."""
    trace = Trace(attention=True)
    with torch.enable_grad():
        state.requires_grad_()  # z_(l-1), (B, T, D)
        after = model.encode(state, grid, trace, blocks=range(index, index + 1))
    weights = trace.attention[0]  # (B, heads, T, T)
    d_weights, before = torch.autograd.grad(after, (weights, state), gradient)
    return (d_weights * weights.detach()).clamp_min_(0).float().mean(dim=1), before
