"""How far attention reaches, by layer and head (paper, section 4.5 and figure 7, right)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.attention import attending
from vitascope.explain.streams import stream_attention
from vitascope.model.classifier import Classifier
from vitascope.model.config import ViTConfig

_WEIGHTS_AT_ONCE = 2**26
"""Attention weights of one layer that are held at a time: 256 MB of float32."""


@torch.no_grad()
def attention_distance(model: Classifier, images: Tensor) -> Tensor:
    """How far from a patch the patches lie that it attends to: the receptive field of each head.

    For each patch, the mean distance to all patches under its attention weights; then the mean over the
    image's patches and over images (Dosovitskiy et al. 2021, appendix D.7). A patch's place is its centre.
    Only attention from patch to patch counts: the rows are brought to sum to one over the patches, as
    class, distillation and register tokens have no place. A patch that attends to such tokens alone is left
    out of the mean. A hybrid's patch is a cell of its feature map, and counts as many pixels as that steps.

    One layer's weights are held at a time.

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W), B at least 1; a few dozen give a stable mean.

    Returns:
        float32 (depth, heads), pixels; NaN for a head in which no patch attends to patches. Compare
        `uniform_distance`.

    Raises:
        UserError: a ResNet; no images; attention that is not finite.
    """
    model = attending(model)
    config = model.config
    between = patch_distances(config, model.grid_of(images)).to(images.device)  # (N, N)
    if not len(images):
        raise UserError("attention distance is a mean over images: give at least one")
    T = config.num_prefix_tokens + len(between)
    total, count = torch.zeros(2, config.depth, config.num_heads, dtype=torch.float64)
    for chunk in images.split(max(1, _WEIGHTS_AT_ONCE // (config.num_heads * T * T))):
        rows: list[Tensor] = []  # one (heads, b * N) a layer

        def consume(weights: Tensor, rows: list[Tensor] = rows) -> None:
            rows.append(_distances_of_rows(weights, between, config.num_prefix_tokens))

        stream_attention(model, chunk, consume)
        reached = torch.stack(rows).cpu().double()  # (depth, heads, b * N)
        total += reached.nansum(dim=2)
        count += (~reached.isnan()).sum(dim=2)
    return (total / count).float().to(images.device)


def uniform_distance(model: Classifier, images: Tensor) -> float:
    """The attention distance, in pixels, of a head that attends to every patch alike, itself included.

    Heads far below it look near by. It depends on the images' size alone.

    Raises:
        UserError: a ResNet.
    """
    model = attending(model)
    return patch_distances(model.config, model.grid_of(images)).mean().item()


def patch_distances(config: ViTConfig, grid: tuple[int, int]) -> Tensor:
    """Distances between the centres of the patches of a grid, in pixels: float32 (N, N)."""
    cells = torch.cartesian_prod(*(torch.arange(side) for side in grid))  # (N, 2), row by row
    centres = cells * torch.tensor(config.patch_stride, dtype=torch.float32)  # from that of the first
    return torch.linalg.vector_norm(centres[:, None] - centres, dim=2)


def _distances_of_rows(weights: Tensor, between: Tensor, num_prefix_tokens: int) -> Tensor:
    """Each patch's mean distance, NaN where it attends to no patch: (b, heads, T, T) -> (heads, b * N)."""
    means = []
    for head in weights[:, :, num_prefix_tokens:, num_prefix_tokens:].unbind(1):  # one at a time: (b, N, N)
        share = head.float().sum(dim=2)  # (b, N)
        if not share.isfinite().all():
            raise UserError(
                "the attention weights are not finite: look for NaN or infinity in the images and in the "
                "weights, or run the model in float32"
            )
        means.append(((head.float() * between).sum(dim=2) / share).flatten())  # 0 / 0 is NaN
    return torch.stack(means)
