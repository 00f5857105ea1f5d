"""Learned parts of a network: the reach of its heads, its positions, its filters, its features (figure 7)."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.analysis.explain.attention import attending, stream_attention
from vitascope.analysis.explain.heatmaps import Count, not_finite
from vitascope.analysis.explain.inputs import Images, as_images, check_some
from vitascope.arguments import checked
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.patches import ConvPatches
from vitascope.models.vision_model import VisionModel, evaluation_mode

_WEIGHTS_AT_ONCE = 2**26
"""Attention weights of one layer held at a time: 256 MB of float32."""
_REACH = 2.0
"""Standard deviations of a component from the middle of the colour scale to either end."""
_ROUNDING = 1e-6
"""Smallest relative spread that counts: below it, values differ only by float32 rounding."""


@torch.no_grad()
@checked
def attention_distance(model: VisionModel, images: Images) -> Tensor:
    """The mean distance over which each head attends: its receptive field.

    For each patch, the mean distance to all patches under its attention weights, averaged over patches and
    images (Dosovitskiy et al. 2021, section 4.5, figure 7 right and appendix D.7). Distances are between the
    centres of patches; a hybrid's patch is a cell of its feature map. Attention to class, distillation and
    register tokens is dropped and the rest normalized; a patch that attends to such tokens only is left out.

    A few dozen images give a stable mean; none are a `UserError`, as is attention that is not finite.

    Returns float32 (depth, heads), in pixels; NaN for a head in which no patch attends to patches. Compare
    with `uniform_distance`.
    """
    model, images = attending(model), as_images(model, images)
    config = model.config
    between = patch_distances(config, model.grid_of(images)).to(images.device)  # (N, N)
    check_some(images)
    T = config.num_prefix_tokens + len(between)
    total, count = torch.zeros(2, config.depth, config.num_heads, dtype=torch.float64)
    for chunk in images.split(max(1, _WEIGHTS_AT_ONCE // (config.num_heads * T * T))):
        rows: list[Tensor] = []  # one (heads, b * N) per layer

        def add_layer(weights: Tensor, rows: list[Tensor] = rows) -> None:
            rows.append(_distances_of_rows(weights, between, config.num_prefix_tokens))

        stream_attention(model, chunk, add_layer)
        reached = torch.stack(rows).cpu().double()  # (depth, heads, b * N)
        total += reached.nansum(dim=2)
        count += (~reached.isnan()).sum(dim=2)
    return (total / count).float().to(images.device)


def uniform_distance(model: VisionModel, images: Images) -> float:
    """The attention distance, in pixels, of a head with equal attention to every patch."""
    model, images = attending(model), as_images(model, images)
    return patch_distances(model.config, model.grid_of(images)).mean().item()


def patch_distances(config: ViTConfig, grid: tuple[int, int]) -> Tensor:
    """Distances between the centres of the patches of a grid, in pixels: float32 (N, N)."""
    cells = torch.cartesian_prod(*(torch.arange(side) for side in grid))  # (N, 2), row by row
    centres = cells * torch.tensor(config.patch_stride, dtype=torch.float32)  # relative to the first
    return torch.linalg.vector_norm(centres[:, None] - centres, dim=2)


def _distances_of_rows(weights: Tensor, between: Tensor, num_prefix_tokens: int) -> Tensor:
    """Each patch's mean distance, NaN where it attends to no patch: (b, heads, T, T) -> (heads, b * N)."""
    means = []
    for head in weights[:, :, num_prefix_tokens:, num_prefix_tokens:].unbind(1):  # one at a time: (b, N, N)
        share = head.float().sum(dim=2)  # (b, N)
        if not share.isfinite().all():
            raise not_finite("the attention weights are not finite")
        means.append(((head.float() * between).sum(dim=2) / share).flatten())  # 0 / 0 is NaN
    return torch.stack(means)


@torch.no_grad()
@checked
def position_similarity(model: VisionModel) -> Tensor:
    """Cosine similarity between the position embeddings of every two patches of the model's own grid.

    Learned and fixed embeddings alike (Dosovitskiy et al. 2021, section 4.5 and figure 7, centre).

    Returns float32 (grid_h, grid_w, grid_h, grid_w) in [-1, 1]: [i, j, k, l] compares the patch in row i,
    column j with that in row k, column l. 0 where an embedding is all zeros. Positions that are not added to
    the tokens are a `UserError`, as is a ResNet.
    """
    model = attending(model)
    gh, gw = grid = model.config.grid
    table = model.positions.table(grid)  # (1, T, D), or (1, N, D)
    if table is None:
        raise UserError(
            f"positions {model.config.embedding.positions!r} add nothing to the tokens, so there are no "
            "position embeddings to compare; positions learned, learned_2d and sincos_* have them"
        )
    unit = F.normalize(table[0, -gh * gw :].double(), dim=1)  # (N, D)
    return (unit @ unit.T).clamp(-1, 1).float().reshape(*grid, *grid)


@dataclasses.dataclass(frozen=True, eq=False)
class PatchFilters:
    """Principal components of the filters of a patch embedding, strongest first."""

    components: Tensor
    """float32 (k, C, ph, pw), each of length 1; the largest entry is positive."""
    shares: Tensor
    """float32 (k,): each one's share of the filters' variance."""


@checked
def patch_filters(model: VisionModel, count: Count = 28) -> PatchFilters:
    """The pixel patterns that the patch embedding distinguishes.

    The principal components of its D filters, each a point (C, ph, pw) (Dosovitskiy et al. 2021, section 4.5
    and figure 7, left).

    Args:
        count: number of components; fewer where the filters have fewer.

    Raises:
        UserError: a ResNet, or another stem than "conv" and "overlap".
    """
    model = attending(model)
    if not isinstance(model.patch_embedding, ConvPatches):
        raise UserError(
            f"the stem {model.config.embedding.stem!r} embeds patches of a feature map, so its filters are "
            'not pixel patterns; the stems "conv" and "overlap" have such filters'
        )
    weight = model.patch_embedding.weight  # (D, C, ph, pw)
    components, shares = principal_components(weight.flatten(1), count)
    return PatchFilters(components.float().reshape(-1, *weight.shape[1:]), shares.float())


@torch.no_grad()
@checked
def feature_colours(model: VisionModel, images: Images, layer: int = -1) -> Tensor:
    """The first three principal components of the patches' features, as red, green and blue.

    Similar features have similar colours (as in Oquab et al. 2024, figure 1, without removing the
    background). The components are those of all patches of all images, so colours are comparable within a
    batch only. The mean is 0.5; 0 and 1 are two standard deviations from it, because of outliers.

    Args:
        layer: whose output, under the model's final norm, is shown; negative counts from the last.

    Returns float32 (B, grid_h, grid_w, 3) in [0, 1]; 0.5 for a missing component.

    Raises:
        UserError: no such layer; no images; features that are not finite.
    """
    model, images = attending(model), as_images(model, images)
    check_some(images)
    with evaluation_mode(model):
        (tokens,) = model.forward_intermediates(images, [layer])
    features = tokens[:, model.config.num_prefix_tokens :].flatten(0, 1)  # (B * N, D)
    components, _ = principal_components(features, count=3)  # (k, D)
    features = features.cpu().double()
    scores = (features - features.mean(dim=0)) @ components.T  # (B * N, k)
    colours = torch.full((len(features), 3), 0.5)
    reach = _REACH * scores.square().mean(dim=0).sqrt()  # never 0: a constant is not a component
    colours[:, : len(components)] = (0.5 + 0.5 * scores / reach).clamp(0, 1).float()
    return colours.reshape(len(images), *model.grid_of(images), 3).to(images.device)


def principal_components(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The directions in which rows of (M, D) vary most, strongest first, and their shares of the variance:
    float64 (k, D) and (k,), on the CPU. Each one's largest entry is positive; k < `count` if rows vary in
    fewer directions."""
    if not values.isfinite().all():
        raise not_finite("principal components need finite numbers")
    values = values.detach().cpu().double()
    centred = values - values.mean(dim=0)  # (M, D)
    M, D = centred.shape
    # The smaller of the two products: M is thousands for patches, D is for filters of 32x32 pixels.
    if M < D:
        variances, vectors = torch.linalg.eigh(centred @ centred.T)  # (M,), (M, M), rising
        directions = (vectors.T @ centred).flip(0)
    else:
        variances, vectors = torch.linalg.eigh(centred.T @ centred)  # (D,), (D, D), rising
        directions = vectors.T.flip(0)
    variances = variances.flip(0)
    kept = (variances > _ROUNDING**2 * values.square().sum()).nonzero()[:count, 0]
    components = F.normalize(directions[kept], dim=1)  # (k, D)
    largest = components.abs().argmax(dim=1, keepdim=True)
    return components * components.gather(1, largest).sign(), variances[kept] / variances.sum()
