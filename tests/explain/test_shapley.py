"""Estimated Shapley values against the exact ones of all sets of 10 patches."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.model import random_images, small_model, small_resnet
from vitascope.errors import UserError
from vitascope.explain.shapley import fit, mask_pairs, shapley, shapley_values
from vitascope.model.vit import VisionTransformer

MODELS: dict[str, dict[str, Any]] = {
    "class token": {},
    "two class tokens and registers": {"distillation_token": True, "num_registers": 2},
    "mean": {"pool": "mean"},
    "rotary, SwiGLU": {"positions": "rotary", "mlp": "swiglu", "layer_scale": 0.5},
}


@torch.no_grad()
def exact_values(model: VisionTransformer, image: torch.Tensor, label: int) -> np.ndarray:
    """The definition, from the scores of all 2^N sets of patches of an image (1, C, H, W): (N,)."""
    grid, tokens = model.grid_of(image), model.prepare_tokens(image)
    N = grid[0] * grid[1]
    scores = {(): float(model(torch.zeros_like(image))[0, label])}
    for size in range(1, N + 1):
        sets = list(itertools.combinations(range(N), size))
        states = model.encode(tokens.expand(len(sets), -1, -1), grid, visible=torch.tensor(sets))
        scores |= dict(zip(sets, model.forward_head(model.norm(states))[:, label].tolist(), strict=True))
    values = np.zeros(N)
    for without in (each for each in scores if len(each) < N):
        share = 1 / (N * math.comb(N - 1, len(without)))
        for patch in set(range(N)) - set(without):
            values[patch] += share * (scores[tuple(sorted((*without, patch)))] - scores[without])
    return values


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_exact_values_of_ten_patches_are_within_the_stated_errors(options: dict[str, Any]) -> None:
    model, images = small_model(image_size=(16, 40), **options), random_images(2, 3, 16, 40)
    values, errors = shapley_values(model, images, [1, 3])
    exact = torch.from_numpy(
        np.stack([exact_values(model, images[i : i + 1], c) for i, c in enumerate((1, 3))])
    )
    deviations = (values.flatten(1) - exact) / errors.flatten(1)
    assert deviations.square().mean().sqrt() < 2
    assert deviations.abs().max() < 4
    assert errors.mean() < exact.std() / 3  # so that the errors say something
    torch.testing.assert_close(values.sum(dim=(1, 2)).double(), exact.sum(dim=1), atol=1e-4, rtol=0)
    heat = values.clamp_min(0) / values.amax(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(shapley(model, images, [1, 3]), heat)


def test_errors_fall_with_more_masks() -> None:
    model, images = small_model(), random_images(1, 3, 32, 32)
    few, many = (shapley_values(model, images, 1, masks=masks)[1].mean() for masks in (64, 1024))
    assert many < few / 2


@pytest.mark.parametrize(("patches", "pairs"), [(2, 32), (16, 32), (196, 128)])
def test_additive_scores_are_explained_exactly_by_enough_pairs(patches: int, pairs: int) -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=patches))
    signs = mask_pairs(patches, pairs)
    estimates, errors = fit(signs, signs @ values, values.sum())
    assert errors.isfinite().all()
    torch.testing.assert_close(estimates.sum(), values.sum())
    if pairs >= patches:
        torch.testing.assert_close(estimates, values, atol=1e-2, rtol=0)
    else:  # what the pairs do not show is near the mean, within the errors
        assert ((estimates - values) / errors).square().mean() < 4


def test_fewer_than_64_masks_one_patch_and_a_resnet_are_rejected() -> None:
    with pytest.raises(UserError, match="an image of one patch has none to drop"):
        shapley(small_model(), random_images(1, 3, 8, 8))
    with pytest.raises(UserError, match="masks must be at least 64, not 63"):
        shapley(small_model(), random_images(1, 3, 32, 32), masks=63)
    with pytest.raises(UserError, match="a ResNet has no attention"):
        shapley(small_resnet(), random_images(1, 3, 32, 32))


def test_values_that_are_not_finite_are_rejected() -> None:
    model = small_model(depth=1)
    with torch.no_grad():
        model.encoder.blocks[0].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="the Shapley values are not finite: look for NaN"):
        shapley_values(model, torch.zeros(1, 3, *model.config.image_hw), masks=64)
