"""Shapley values of the patches, by dropping tokens.

A patch's value is its mean effect on the score, over all orders in which the patches can be added. It is
estimated by KernelSHAP (Lundberg and Lee 2017, "A Unified Approach to Interpreting Model Predictions",
theorem 2) with pairs of complementary masks (Covert and Lee 2021, "Improving KernelSHAP", section 4). The
encoder does not compute the dropped tokens (Covert et al. 2023, "Learning to Estimate Shapley Values with
Vision Transformers", section 4), so that a mask costs what its tokens cost.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from vitascope.arguments import Range, checked
from vitascope.errors import UserError
from vitascope.explain.attention import attending
from vitascope.explain.heatmaps import Count, not_finite, to_unit
from vitascope.explain.inputs import Images, as_images, call_hook, pooled_and_logits
from vitascope.explain.targets import Target, TargetLike, as_target
from vitascope.model.config import ViTConfig
from vitascope.model.vision_model import VisionModel, evaluation_mode
from vitascope.model.vit import VisionTransformer

Masks = Annotated[int, Range(ge=64)]


@checked
def shapley(
    model: VisionModel,
    images: Images,
    target: TargetLike = None,
    *,
    masks: Masks = 256,
    batch_size: Count = 64,
    scaled: bool = True,
) -> Tensor:
    """The values of `shapley_values` as a heatmap: where a value is negative, the heat is 0."""
    return to_unit(shapley_values(model, images, target, masks=masks, batch_size=batch_size)[0], scaled)


@torch.no_grad()
@checked
def shapley_values(
    model: VisionModel,
    images: Images,
    target: TargetLike = None,
    *,
    masks: Masks = 256,
    batch_size: Count = 64,
) -> tuple[Tensor, Tensor]:
    """Shapley values of the patches, and the standard errors of their estimates: float32 (B, gh, gw) each.

    The values sum to the target's score minus that of a blank image, which stands for an image without
    patches. More masks make the errors smaller. They are drawn by a fixed seed, the same for every image.

    Args:
        masks: sets of patches that the model sees, in pairs; the model runs once for each.
        batch_size: sets per forward pass, at most.

    Raises:
        UserError: fewer than 64 masks; a batch size below 1; a grid of one patch; a model that does not run
            on some of the patches: a ResNet, attention in windows or along axes, relative positions.
    """
    model, images = attending(model), as_images(model, images)
    if not drops_patches(model.config):
        raise UserError(
            "dropped patches break up the grid that axial, window and relative attention need: use occlusion"
        )
    grid = model.grid_of(images)
    if grid == (1, 1):
        raise UserError("an image of one patch has none to drop: use larger images")
    parts = [pooled_and_logits(model, part) for part in images.split(batch_size)]
    pooled, logits = (torch.cat(values) for values in zip(*parts, strict=True))
    asked = as_target(target, model.config, logits)
    blank = pooled_and_logits(model, images.new_zeros(1, *images.shape[1:]))
    signs = mask_pairs(grid[0] * grid[1], masks // 2)  # (n, N)
    values, errors = [], []
    if not len(images):
        return images.new_zeros(0, *grid), images.new_zeros(0, *grid)
    with evaluation_mode(model):
        scores = asked.score(pooled, logits).double()  # (B,)
        for index, image in enumerate(images):
            about = asked.select(index)
            whole = scores[index] - about.score(*blank).double()[0]
            seen, unseen = (_masked(model, image, side > 0, about, batch_size) for side in (signs, -signs))
            value, error = fit(signs, (seen - unseen).double().cpu(), whole.cpu())
            values.append(value)
            errors.append(error)
    shares, deviations = (
        torch.stack(v).float().unflatten(1, grid).to(images.device) for v in (values, errors)
    )
    if not shares.isfinite().all():
        raise not_finite("the Shapley values are not finite")
    return shares, deviations


def drops_patches(config: ViTConfig) -> bool:
    """Whether a model runs on some patches of an image: its attention does not need their grid."""
    return config.block.attention == "global" and not config.embedding.relative


def mask_pairs(patches: int, pairs: int) -> Tensor:
    """Sets of patches as 1, and -1 outside: float64 (pairs, N); the complement of each is its partner.

    Sizes k are at even quantiles of the kernel's weight (N - 1) / (k (N - k)) (theorem 2), in rising order.
    """
    k = torch.arange(1, patches, dtype=torch.float64)
    shares = (1 / (k * (patches - k))).cumsum(0)
    quantiles = (torch.arange(pairs) + 0.5) / pairs * shares[-1:]
    sizes = 1 + torch.searchsorted(shares, quantiles)
    sizes = torch.minimum(sizes, patches - sizes).sort().values
    ranks = (
        torch.rand(pairs, patches, generator=torch.Generator().manual_seed(0)).argsort(dim=1).argsort(dim=1)
    )
    return 2.0 * (ranks < sizes[:, None]).double() - 1


def _masked(model: VisionTransformer, image: Tensor, sets: Tensor, target: Target, batch_size: int) -> Tensor:
    """The scores (n,) of an image (C, H, W) of which the model sees sets of patches, bool (n, N)."""
    grid, tokens = model.grid_of(image[None]), model.prepare_tokens(image[None])  # (1, T, D)
    scores = []
    # Sets of one size are beside each other, and run together.
    for group in sets.split(sets.sum(dim=1).unique_consecutive(return_counts=True)[1].tolist()):
        for part in group.split(batch_size):
            call_hook()
            visible = part.nonzero()[:, 1].view(len(part), -1).to(image.device)  # (n, N')
            states = tokens.expand(len(part), -1, -1)
            states = model.encode(states, grid, queries=model.pool.queries, visible=visible)
            pooled = model.pool_features(model.norm(states))  # (n, D)
            scores.append(target.score(pooled, model.head(pooled)))
    return torch.cat(scores)


def fit(signs: Tensor, differences: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The values (N,) that explain the differences (n,) of pairs (n, N) best and sum to `total`, and their
    errors: float64.

    For pairs, theorem 2 is a regression of v(S) - v(not S) on the signs. With few pairs it needs a prior: the
    values are normal around their mean. Its variance is the one with the smallest errors of predicting each
    pair from the others, which are also the noise. The errors are the posterior's standard deviations.
    """
    n, N = signs.shape
    x = signs - signs.mean(dim=1, keepdim=True)  # regressors of a value minus the mean value
    y = differences - signs.mean(dim=1) * total
    # The rows of x sum to 0. Adding n makes the matrix positive, and leaves the values' mean at 0.
    e, V = torch.linalg.eigh(x.T @ x + n)
    u = x @ V  # (n, N)
    ratios = (
        n * torch.logspace(-4, 2, 49, dtype=torch.float64)[:, None]
    )  # of the noise's variance to the prior's
    variances = 1 / (e + ratios)  # (49, N), in units of the noise
    predicted = (variances * (y @ u)) @ u.T  # (49, n)
    left_out = (y - predicted) / (
        1 - variances @ u.square().T
    )  # errors of pairs that are left out of the fit
    noise = left_out.square().mean(dim=1)  # (49,)
    best = noise.argmin()
    values = total / N + V @ (variances[best] * (y @ u))
    return values, (noise[best] * (V.square() @ variances[best])).sqrt()
