"""What a network has learned: where its heads look, its positions, its filters, its features."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.attention import attending, check_layer, stream_attention
from vitascope.explain.pca import principal_components
from vitascope.model.classifier import Classifier
from vitascope.model.config import ViTConfig
from vitascope.model.evaluation_mode import evaluation_mode
from vitascope.model.patches import ConvPatches
from vitascope.model.vit import VisionTransformer

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


_WITHOUT_TABLE = {
    "none": "this model has no positions at all",
    "relative": "relative positions are a number for each offset that adds to the attention scores",
    "rotary": "rotary positions turn queries and keys",
}


@torch.no_grad()
def position_similarity(model: Classifier) -> Tensor:
    """Cosine similarity between the position embeddings of every two patches.

    Of the model's own grid, learned and fixed ones alike (Dosovitskiy et al. 2021, section 4.5 and figure 7,
    centre).

    Args:
        model: a `VisionTransformer` whose positions add to the tokens.

    Returns:
        float32 (grid_h, grid_w, grid_h, grid_w) in [-1, 1]: [i, j, k, l] compares the patch in row i, column
        j with that in row k, column l. 0 where an embedding is all zeros.

    Raises:
        UserError: positions that add nothing to the tokens, saying what they do; a ResNet.
    """
    if not isinstance(model, VisionTransformer):
        raise UserError("a ResNet has no position embeddings: this is for Vision Transformers")
    gh, gw = grid = model.config.grid
    table = model.positions.table(grid)  # (1, T, D), or (1, N, D)
    if table is None:
        kind = model.config.embedding.positions
        raise UserError(
            f"{_WITHOUT_TABLE[kind]}, so there are no position embeddings to compare; positions "
            "learned, learned_2d and sincos_* have them"
        )
    unit = F.normalize(table[0, -gh * gw :].double(), dim=1)  # (N, D)
    return (unit @ unit.T).clamp(-1, 1).float().reshape(*grid, *grid)


@dataclasses.dataclass(frozen=True)
class PatchFilters:
    """Principal components of the filters of a patch embedding, strongest first."""

    components: Tensor
    """float32 (k, C, ph, pw), each of length 1; the entry of largest magnitude is positive."""
    shares: Tensor
    """float32 (k,): the share of the filters' variance that each explains."""


def patch_filters(model: Classifier, count: int = 28) -> PatchFilters:
    """The patterns of pixels that the patch embedding tells apart.

    Its D filters, a pattern of (C, ph, pw) for each channel of a token, as D points: the principal
    components of those (Dosovitskiy et al. 2021, section 4.5 and figure 7, left).

    Args:
        model: a `VisionTransformer` whose stem embeds pixels: "conv", "linear" or "overlap".
        count: components, at least 1; fewer where the filters have fewer.

    Raises:
        UserError: a count below 1; filters that are all the same; a ResNet, or a ResNet stem.
    """
    if count < 1:
        raise UserError(f"count is how many components to show, at least 1, not {count}")
    if not isinstance(model, VisionTransformer):
        raise UserError("a ResNet has no patch embedding: this is for Vision Transformers")
    if not isinstance(model.patch_embedding, ConvPatches):
        raise UserError(
            "this hybrid embeds patches of a ResNet's feature map, so its filters are no patterns of "
            'pixels; the stems "conv", "linear" and "overlap" have such filters'
        )
    weight = model.patch_embedding.weight  # (D, C, ph, pw)
    components, shares = principal_components(weight.flatten(1), count)
    if not len(components):
        raise UserError(
            f"the {len(weight)} filters of this patch embedding are all the same: nothing to show"
        )
    return PatchFilters(components.float().reshape(-1, *weight.shape[1:]), shares.float())


_REACH = 2.0
"""Standard deviations of a component from the middle of the scale to either end."""


@torch.no_grad()
def feature_colours(model: Classifier, images: Tensor, layer: int = -1) -> Tensor:
    """The first three principal components of the patches' features, as red, green and blue.

    Patches of one colour have like features (the picture that DINOv2 made popular: Oquab et al. 2024,
    figure 1; no patch is taken for background here). Components are of all patches of all images together,
    so a colour means the same in each image of the batch, and nothing across batches. The mean of all
    patches is 0.5; two standard deviations of a component below and above it are 0 and 1, as a few patches
    far out would otherwise leave one colour to all the others. A component's sign is fixed by the rule of
    `principal_components`.

    Args:
        model: any `VisionTransformer`; it is run as in evaluation.
        images: normalized floats (B, C, H, W), B at least 1.
        layer: the features are what this block gives, of `depth`, from 0, under the model's final norm;
            negative counts from the last, so that -1 is what `forward_features` gives.

    Returns:
        float32 (B, grid_h, grid_w, 3) in [0, 1]; a component that does not exist, because the features
        differ in fewer than three directions, is 0.5.

    Raises:
        UserError: no such layer, naming the range; a ResNet; no images; features that are not finite.
    """
    model = attending(model)
    if not len(images):
        raise UserError("colours are relations between the patches of images: give at least one")
    features = _patch_features(model, images, check_layer(model.config, layer)).flatten(0, 1)  # (B * N, D)
    components, _ = principal_components(features, count=3)  # (k, D)
    features = features.cpu().double()
    scores = (features - features.mean(dim=0)) @ components.T  # (B * N, k)
    colours = torch.full((len(features), 3), 0.5)
    reach = _REACH * scores.square().mean(dim=0).sqrt()  # never 0: what does not vary is no component
    colours[:, : len(components)] = (0.5 + 0.5 * scores / reach).clamp(0, 1).float()
    return colours.reshape(len(images), *model.grid_of(images), 3).to(images.device)


def _patch_features(model: VisionTransformer, images: Tensor, layer: int) -> Tensor:
    """The patches as a block gives them, under the final norm: (B, N, D). Later blocks are not run."""
    with evaluation_mode(model):
        z0, grid = model.prepare_tokens(images), model.grid_of(images)
        tokens = model.norm(model.encode(z0, grid, blocks=range(layer + 1)))  # (B, T, D)
    return tokens[:, model.config.num_prefix_tokens :]
