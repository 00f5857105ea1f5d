"""Occlusion against a computation cell by cell, for every kind of model."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.explain import MODELS
from tests.models import random_images, small_model, small_resnet
from vitascope.analysis.explain.occlusion import occlusion
from vitascope.models.vision_model import VisionModel

HYBRID = {"stem": "resnet", "resnet_layers": (1, 2), "resnet_width": 4}
ALL = {name: (small_model, MODELS[name]) for name in ("class_token", "map", "window", "overlap")}
ALL |= {
    "hybrid": (small_model, HYBRID),
    "mlp_head": (small_model, {"head": "mlp"}),
    "oblong_patches": (small_model, {"image_size": (24, 32), "patch_size": (12, 4)}),
    "resnet": (small_resnet, {}),
    "resnet_cifar": (small_resnet, {"root": "cifar", "layers": (1, 1, 1)}),
}
of_every_model = pytest.mark.parametrize(("build", "options"), ALL.values(), ids=ALL)


def images_of(model: VisionModel, count: int = 2) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


def outputs(model: VisionModel, image: Tensor) -> Tensor:
    """The logits (K,) of one image (C, H, W)."""
    with torch.no_grad():
        return model(image[None])[0]


def directly(
    model: VisionModel, images: Tensor, grid: tuple[int, int], window: int, score: Any
) -> np.ndarray:
    """The reference: image by image, window by window, in float64; `score` takes (model, image, index)."""
    model, maps = copy.deepcopy(model).double(), []
    cell_of_y, cell_of_x = (
        ((np.arange(side) + 0.5) / side * cells).astype(int)
        for side, cells in zip(images.shape[2:], grid, strict=True)
    )
    for index, image in enumerate(images.double()):
        total, times = np.zeros(grid), np.zeros(grid)
        for row in range(grid[0] - window + 1):
            for column in range(grid[1] - window + 1):
                hidden = image.clone()
                down = (row <= cell_of_y) & (cell_of_y < row + window)
                across = (column <= cell_of_x) & (cell_of_x < column + window)
                hidden[:, torch.from_numpy(np.outer(down, across))] = 0
                covered = np.s_[row : row + window, column : column + window]
                total[covered] += score(model, image, index) - score(model, hidden, index)
                times[covered] += 1
        heat = (total / times).clip(min=0)
        maps.append(heat / heat.max())
    return np.stack(maps)


def class_score(classes: list[int]) -> Any:
    return lambda model, image, index: float(outputs(model, image)[classes[index]])


@of_every_model
def test_heat_is_the_drop_of_the_predicted_class(build: Any, options: dict[str, Any]) -> None:
    model = build(**options)
    images = images_of(model)
    heat = occlusion(model, images)
    assert heat.dtype == torch.float32
    assert heat.shape == (2, *model.config.grid)
    predicted = [int(outputs(model, image).argmax()) for image in images]
    expected = directly(model, images, model.config.grid, 1, class_score(predicted))
    np.testing.assert_allclose(heat, expected, atol=1e-4)


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("build", [small_model, small_resnet])
def test_heat_under_a_larger_window_is_the_mean_over_those_that_cover_the_cell(build, window) -> None:
    model = build(image_size=(24, 48))
    images = images_of(model)
    predicted = model(images).argmax(dim=1).tolist()
    heat = occlusion(model, images, predicted, window=window)
    expected = directly(model, images, model.config.grid, window, class_score(predicted))
    np.testing.assert_allclose(heat, expected, atol=1e-4)


@pytest.mark.parametrize(("build", "size"), [(small_model, (48, 16)), (small_resnet, (33, 47))])
def test_other_resolution_has_its_own_cells(build: Any, size: tuple[int, int]) -> None:
    model, images = build(), random_images(2, 3, *size)
    grid = (-(-size[0] // 8), -(-size[1] // 8))
    heat = occlusion(model, images, 3)
    np.testing.assert_allclose(heat, directly(model, images, grid, 1, class_score([3, 3])), atol=1e-4)
