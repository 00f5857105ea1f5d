"""Activation patching against a computation block by block in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.analysis.explain import MODELS
from tests.models import random_images, small_model
from vitascope.analysis.explain.patching import patching
from vitascope.analysis.explain.targets import ClassDifference
from vitascope.models.vit import VisionTransformer

OF_EACH_KIND = (
    "registers",
    "distilled_registers",
    "mean",
    "map",
    "class_and_mean",
    "axial",
    "window_mean",
    "rotary",
)
OF_EACH_KIND += ("relative", "post_norm", "overlap")


@torch.no_grad()
def by_hand(model: VisionTransformer, image: Tensor, index: int, layers: range) -> Tensor:
    """A logit of a blank image with the states of each patch of an image, minus its own: (N,)."""
    grid, P = model.config.grid, model.config.num_prefix_tokens

    def step(tokens: Tensor, block: int) -> Tensor:
        return model.encode(tokens, grid, blocks=range(block, block + 1))

    rises = []
    for patch in range(grid[0] * grid[1]):
        source, tokens = model.prepare_tokens(image), model.prepare_tokens(torch.zeros_like(image))
        for block in range(model.config.depth):
            if block in layers:
                tokens[:, P + patch] = source[:, P + patch]
            source, tokens = step(source, block), step(tokens, block)
        rises.append(model.forward_head(model.norm(tokens)) - model(torch.zeros_like(image)))
    return torch.cat(rises)[:, index]


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        *((None, MODELS[name]) for name in OF_EACH_KIND),
        ((0, 1), {}),
        ((1, 4), {}),
        ((0, 4), {"pool": "mean"}),
    ],
)
def test_heat_is_the_rise_of_the_score_of_a_blank_image(layers: Any, options: dict[str, Any]) -> None:
    model = small_model(depth=4, **options).double()
    images = random_images(2, 3, 32, 32).double()
    heat = patching(model, images, [1, 3], layers=layers, batch_size=5)
    patched = range(*(layers or (0, 2)))
    rises = torch.stack([by_hand(model, images[i : i + 1], c, patched) for i, c in enumerate((1, 3))])
    expected = rises.clamp_min(0) / rises.amax(dim=1, keepdim=True)
    torch.testing.assert_close(heat, expected.float().view_as(heat), atol=1e-5, rtol=0)


def test_blank_image_and_a_score_that_no_patch_changes_have_no_evidence() -> None:
    images = random_images(2, 3, 32, 32)
    assert not patching(small_model(), torch.zeros_like(images)).any()
    same = ClassDifference(torch.tensor([1]), torch.tensor([1]))
    assert not patching(small_model(), images, same).any()
