"""Gradient-weighted attention rollout: attention that the score depends on, through all layers.

Chefer, Gur and Wolf 2021, "Generic Attention-model Explainability for Interpreting Bi-Modal and
Encoder-Decoder Transformers".
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.explain.attention import attending, read_rows
from vitascope.explain.heatmaps import to_unit
from vitascope.explain.inputs import Images, as_images
from vitascope.explain.targets import TargetLike, as_target
from vitascope.model.classifier import Classifier, evaluation_mode
from vitascope.model.trace import Trace
from vitascope.model.vit import VisionTransformer


def gradient_rollout(model: Classifier, images: Images, target: TargetLike = None) -> Tensor:
    """How much of each patch flows into the target's score, over all layers, by attention that raises it.

    R <- R + E_h[(dA * A)+] R for each layer, from R = I (equations 5 and 6), where A are the attention
    weights, dA is the gradient of the target's score and E_h the mean over the heads. The map is the mean row
    of R - I of the tokens that pooling reads, as in `attention`. Only these rows are computed, from the last
    layer down beside the gradient, so one block's attention is held at a time.

    Args:
        model: any `VisionTransformer`; runs in evaluation mode.
        images: pictures, or normalized floats (B, C, H, W).
        target: a class by number or name, one per image, or a `Target`; None is the predicted class.

    Returns:
        float32 (B, grid_h, grid_w), each image's largest value 1; zeros where nothing raises the score.

    Raises:
        UserError: a ResNet; no such class.
    """
    model, images = attending(model), as_images(model, images)
    grid = model.grid_of(images)
    # The caller may be in inference mode, which has no gradients.
    with torch.inference_mode(False), evaluation_mode(model):
        states = token_states(model, images)
        gradient = _last_gradient(model, states[-1], target)  # (B, T, D)
        identity = torch.eye(gradient.shape[1], device=images.device)[None]  # (1, T, T)
        direct = rows = read_rows(model, identity)  # (1, T): the tokens that pooling reads
        for index in reversed(range(model.config.depth)):
            relevance, gradient = _through_block(model, states.pop(index), grid, index, gradient)
            rows = rows + (rows[:, None] @ relevance)[:, 0]  # (B, T)
    patches = (rows - direct)[:, model.config.num_prefix_tokens :]  # (B, N)
    return to_unit(patches.unflatten(1, grid))


@torch.no_grad()
def token_states(model: VisionTransformer, images: Tensor) -> list[Tensor]:
    """z_0 to z_L, (B, T, D) each."""
    trace = model.trace(images)
    return [trace["embeddings"], *(trace[f"block{index}"] for index in range(model.config.depth))]


def _through_block(
    model: VisionTransformer, state: Tensor, grid: tuple[int, int], index: int, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """E_h[(dA * A)+] of a block, (B, T, T), and the gradient with respect to z_(l-1) from that of z_l.

    The block's attention and graph are freed when this returns.
    """
    trace = Trace(attention=True)
    with torch.enable_grad():
        state.requires_grad_()  # z_(l-1), (B, T, D)
        after = model.encode(state, grid, trace, blocks=range(index, index + 1))
    assert trace.attention is not None
    weights = trace.attention[0]  # (B, heads, T, T)
    d_weights, before = torch.autograd.grad(after, (weights, state), gradient)
    return (d_weights * weights.detach()).clamp_min_(0).float().mean(dim=1), before


def _last_gradient(model: VisionTransformer, zL: Tensor, target: TargetLike) -> Tensor:
    """The gradient of the target's score with respect to z_L, (B, T, D)."""
    with torch.enable_grad():
        zL.requires_grad_()
        pooled = model.pool_features(model.norm(zL))
        logits = model.head(pooled)
        score = as_target(target, model.config, logits).score(pooled, logits)
        return torch.autograd.grad(score.sum(), zL)[0]
