"""Integrated gradients against a quadrature by hand in float64, and their axioms."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.explain import MODELS
from tests.models import random_images, small_model, small_resnet
from vitascope.analysis.explain.inputs import pooled_and_logits
from vitascope.analysis.explain.integrated_gradients import integrated_gradients, pixel_attributions
from vitascope.analysis.explain.targets import ClassScore, Target, as_target
from vitascope.models.vision_model import VisionModel

HYBRID = {"stem": "resnet", "resnet_layers": (1,), "resnet_width": 4}
VITS = {
    name: MODELS[name] for name in ("class_token", "distilled_registers", "mean", "map", "window", "overlap")
}
VITS |= {
    "mlp_head": {"head": "mlp"},
    "oblong_patches": {"image_size": (24, 32), "patch_size": (12, 4)},
}
ALL = {name: (small_model, options) for name, options in VITS.items()}
ALL |= {"hybrid": (small_model, HYBRID), "resnet": (small_resnet, {})}
of_every_vit = pytest.mark.parametrize("options", VITS.values(), ids=VITS)
of_every_model = pytest.mark.parametrize(("build", "options"), ALL.values(), ids=ALL)


def images_of(model: VisionModel, count: int = 2) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def by_hand(model: VisionModel, images: Tensor, target: Target, steps: int = 64) -> Tensor:
    """Equation 1 of the paper by Gauss-Legendre quadrature from a blank image: float64 (B, C, H, W)."""
    model = copy.deepcopy(model).double()
    nodes, weights = (torch.from_numpy(each) for each in np.polynomial.legendre.leggauss(steps))  # on [-1, 1]
    attributions = []
    for index, image in enumerate(images.double()):
        variants = ((1 + nodes)[:, None, None, None] / 2 * image).requires_grad_()
        pooled = model.embed(variants)
        score = target.select(index).score(pooled, model.head(pooled)).sum()
        gradients = torch.autograd.grad(score, variants)[0]
        attributions.append(image * (weights[:, None, None, None] / 2 * gradients).sum(dim=0))
    return torch.stack(attributions)


def gap(model: VisionModel, images: Tensor, target: Target, steps: int) -> Tensor:
    """The error of the attributions' sum relative to the score minus the blank image's: (B,)."""
    attributions = pixel_attributions(model, images, target, steps=steps, batch_size=16)
    blank, whole = (
        target.score(*pooled_and_logits(model, each)) for each in (torch.zeros_like(images), images)
    )
    return (attributions.sum(dim=(1, 2, 3)) - (whole - blank)).abs() / (whole - blank).abs()


@of_every_vit
def test_attributions_equal_the_integral_of_the_gradients(options: dict[str, Any]) -> None:
    model = small_model(**options)
    images, target = images_of(model), ClassScore(torch.tensor([1, 3]))
    attributions = pixel_attributions(model, images, target, steps=48, batch_size=16)
    assert attributions.dtype == torch.float32
    torch.testing.assert_close(attributions.double(), by_hand(model, images, target), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("build", "options"),
    [(small_model, HYBRID | {"resnet_layers": (), "depth": 1}), (small_resnet, {"layers": (1,)})],
)
def test_attributions_sum_even_if_gradients_concentrate_near_the_blank_image(build, options) -> None:
    model = build(**options)
    images = images_of(model)
    target = as_target(None, model.config, pooled_and_logits(model, images)[1])
    blank, whole = (
        target.score(*pooled_and_logits(model, each)) for each in (torch.zeros_like(images), images)
    )
    in_even_steps = by_hand(model, images, target, 32).sum(dim=(1, 2, 3))
    assert (in_even_steps.abs() < 0.1 * (whole - blank).abs()).all()  # even steps miss nearly all of it
    assert gap(model, images, target, 100).max() < 0.1


@of_every_model
def test_heat_of_a_cell_is_the_sum_over_its_pixels_and_colours(build: Any, options: dict[str, Any]) -> None:
    model = build(**options)
    images = images_of(model)
    heat = integrated_gradients(model, images, [1, 3], steps=3)
    assert heat.dtype == torch.float32
    assert not heat.requires_grad
    grid = model.config.grid
    target = ClassScore(torch.tensor([1, 3]))
    pixels = pixel_attributions(model, images, target, steps=3, batch_size=16)
    sums = np.zeros((2, *grid))
    H, W = images.shape[2:]
    for y in range(H):
        for x in range(W):
            cell = int((y + 0.5) / H * grid[0]), int((x + 0.5) / W * grid[1])
            sums[:, cell[0], cell[1]] += pixels[:, :, y, x].double().sum(dim=1).numpy()
    expected = sums.clip(min=0) / sums.max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(heat, expected, atol=1e-4)
