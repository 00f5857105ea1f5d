"""Explanations lie where the evidence is, in the picture's own coordinates."""

import numpy as np
import pytest
import torch

from tests.models import small_model, with_preprocess
from vitascope.analysis.explain.methods import METHODS
from vitascope.deploy.predict.predictor import Predictor
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer

GRIDS = {"wide": (3, 8), "tall": (8, 3)}
"""Patches of 4 pixels."""
CORNERS = {"wide": (0, -1), "tall": (-1, 0)}


@torch.no_grad()
def light_detector(grid: tuple[int, int]) -> VisionTransformer:
    """A model whose class token attends to light patches, and whose class 1 they are evidence for.

    A black patch is a token of zeros, and a light one has feature 0, also after a norm.
    """
    size = (4 * grid[0], 4 * grid[1])
    model = small_model(
        image_size=size,
        patch_size=4,
        in_channels=1,
        embed_dim=4,
        depth=1,
        num_heads=1,
        num_classes=2,
        positions="none",
        norm_eps=0.01,  # a dark patch stays dark
    )
    for parameter in model.parameters():
        parameter.zero_()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.fill_(1)
    model.patch_embedding.weight[0] = 1 / 16
    attention = model.encoder.blocks[0].attention
    attention.qkv.bias[0] = 6.0  # every query asks for feature 0,
    attention.qkv.weight[4, 0] = 1.0  # which keys
    attention.qkv.weight[8, 0] = 1.0  # and values have
    attention.proj.weight.copy_(torch.eye(4))
    (head,) = (module for module in model.head.modules() if isinstance(module, torch.nn.Linear))
    head.weight[:, 0] = torch.tensor([-1.0, 1.0])
    fit = Preprocess(image_size=size, channels=1, mean=(0.0,), std=(1.0,))
    return with_preprocess(model, fit)


def marked(side: tuple[int, int], top: int, left: int, size: int) -> np.ndarray:
    """A black picture with a light square, uint8 (H, W)."""
    pixels = np.zeros(side, np.uint8)
    pixels[top : top + size, left : left + size] = 250
    return pixels


@pytest.mark.parametrize(("shape", "corner"), CORNERS.items())
@pytest.mark.parametrize("method", METHODS)
def test_a_light_mark_in_a_corner_of_a_picture_that_is_not_square_is_found_there(
    method: str, shape: str, corner: tuple[int, int]
) -> None:
    grid = GRIDS[shape]
    predict = Predictor(light_detector(grid))
    # Five pixels of the picture per pixel of the model, and a margin that the crop leaves out.
    rows, columns = 20 * grid[0], 20 * grid[1]
    margin = (0, 30) if shape == "tall" else (30, 0)
    top = margin[0] + (0 if corner[0] == 0 else rows - 20)
    left = margin[1] + (0 if corner[1] == 0 else columns - 20)
    picture = marked((rows + 2 * margin[0], columns + 2 * margin[1]), top, left, 20)

    found = predict.explain(picture, method=method)
    assert found.target in (None, 1)
    assert found.heatmap.shape == grid
    row, column = np.unravel_index(found.heatmap.argmax(), grid)
    assert (row, column) == (corner[0] % grid[0], corner[1] % grid[1])
    assert found.picture.shape == picture.shape
    x0, y0, x1, y1 = found.box
    x = x0 + (column + 0.5) * (x1 - x0) / grid[1]
    y = y0 + (row + 0.5) * (y1 - y0) / grid[0]
    assert top < y < top + 20
    assert left < x < left + 20
