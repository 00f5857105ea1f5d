"""Positions at another resolution equal those of the library named by the rule."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import random_images
from tests.peers.comparison import relative_error
from vitascope.models.positions import resample_positions

Grid = tuple[int, int]

D, PATCH = 8, 14
SQUARE_GRIDS: list[tuple[Grid, Grid]] = [
    ((14, 14), (24, 24)),
    ((14, 14), (7, 7)),
    ((7, 7), (16, 16)),
    ((37, 37), (16, 16)),
    ((5, 5), (6, 6)),
    ((16, 16), (5, 5)),
]
# Their models have a square of positions, resized to images of any shape.
GRIDS_FROM_SQUARES: list[tuple[Grid, Grid]] = [
    *SQUARE_GRIDS,
    ((14, 14), (10, 20)),
    ((14, 14), (28, 7)),
    ((37, 37), (20, 41)),
    ((6, 6), (9, 4)),  # the same number of patches
]
GRIDS: list[tuple[Grid, Grid]] = [*GRIDS_FROM_SQUARES, ((4, 6), (6, 4)), ((4, 6), (9, 5)), ((10, 3), (5, 12))]


def positions_of(grid: Grid, prefix: int = 1) -> Tensor:
    return random_images(1, prefix + grid[0] * grid[1], D)


def patches_as_image(positions: Tensor, grid: Grid, prefix: int = 1) -> Tensor:
    return positions[:, prefix:].mT.reshape(1, D, *grid)


def image_as_patches(image: Tensor, positions: Tensor, prefix: int = 1) -> Tensor:
    return torch.cat([positions[:, :prefix], image.flatten(2).mT], dim=1)


def assert_agreement(rule: str, old: Grid, new: Grid, expected: Tensor, prefix: int = 1) -> None:
    actual = resample_positions(positions_of(old, prefix), old, new, prefix, rule)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_timm_rule_equals_timm(old: Grid, new: Grid, prefix: int) -> None:
    layers = pytest.importorskip("timm.layers", reason="timm is not installed (vitascope[peers])")
    expected = layers.resample_abs_pos_embed(
        positions_of(old, prefix), list(new), list(old), num_prefix_tokens=prefix
    )
    assert_agreement("timm", old, new, expected, prefix)


# Our rule for each family of transformers. Its Dinov2 has neither the offset of the original nor,
# unlike its Dinov2WithRegisters, antialiasing.
HUGGINGFACE = {"vit": "huggingface", "dinov2": "huggingface", "dinov2_with_registers": "timm"}


def huggingface_embeddings(family: str, grid: Grid) -> nn.Module:
    """The embeddings of a model of transformers 5, with our positions."""
    transformers = pytest.importorskip(
        "transformers", minversion="5", reason="transformers 5 is not installed (vitascope[peers])"
    )
    names = {"vit": "ViT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
    options = {"image_size": grid[0] * PATCH, "patch_size": PATCH, "hidden_size": D, "num_attention_heads": 2}
    model = getattr(transformers, f"{names[family]}Model")(
        getattr(transformers, f"{names[family]}Config")(**options, num_hidden_layers=1)
    )
    model.embeddings.position_embeddings.data = positions_of(grid)
    return model.embeddings


@pytest.mark.parametrize("family", HUGGINGFACE)
@pytest.mark.parametrize(("old", "new"), GRIDS_FROM_SQUARES)
@torch.no_grad()
def test_stated_rule_equals_transformers(family: str, old: Grid, new: Grid) -> None:
    tokens = torch.zeros(1, 1 + new[0] * new[1], D)
    expected = huggingface_embeddings(family, old).interpolate_pos_encoding(
        tokens, new[0] * PATCH, new[1] * PATCH
    )
    assert_agreement(HUGGINGFACE[family], old, new, expected)


@pytest.mark.parametrize("family", HUGGINGFACE)
@torch.no_grad()
def test_other_rules_differ_from_transformers(family: str) -> None:
    old, new = (14, 14), (7, 10)
    tokens = torch.zeros(1, 1 + new[0] * new[1], D)
    theirs = huggingface_embeddings(family, old).interpolate_pos_encoding(tokens, 7 * PATCH, 10 * PATCH)
    for rule in {"timm", "huggingface", "torchvision", "jax", "dinov2"} - {HUGGINGFACE[family]}:
        assert relative_error(resample_positions(positions_of(old), old, new, 1, rule), theirs) > 1e-3


@pytest.mark.parametrize(("old", "new"), SQUARE_GRIDS)
def test_torchvision_rule_equals_torchvision(old: Grid, new: Grid) -> None:
    peer = pytest.importorskip("torchvision.models.vision_transformer", reason="torchvision is not installed")
    state = {"encoder.pos_embedding": positions_of(old)}
    resized = peer.interpolate_embeddings(new[0] * PATCH, PATCH, state)
    assert_agreement("torchvision", old, new, resized["encoder.pos_embedding"])


def cubic(distance: float) -> float:
    """The kernel of cubic convolution (Keys 1981) with torch's a = -0.75."""
    a, x = -0.75, abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def cubic_matrix(old: int, new: int, scale: float) -> np.ndarray:
    """The weight of each old place in each new one, (new, old), stepping by 1 / scale from pixel centres."""
    matrix = np.zeros((new, old))
    for index in range(new):
        centre = (index + 0.5) / scale - 0.5
        for neighbour in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            matrix[index, min(max(neighbour, 0), old - 1)] += cubic(centre - neighbour)
    return matrix


def by_cubic_convolution(positions: Tensor, old: Grid, new: Grid, offset: float) -> Tensor:
    """Bicubic interpolation with scale factors (new + offset) / old, in float64."""
    rows, columns = (
        cubic_matrix(before, after, (after + offset) / before) for before, after in zip(old, new, strict=True)
    )
    image = patches_as_image(positions, old).double().numpy()
    return image_as_patches(torch.from_numpy(rows @ image @ columns.T).float(), positions)


# facebookresearch/dinov2, models/vision_transformer.py, `interpolate_pos_encoding`: interpolate_offset is 0.1
# by default, 0 in the models with registers, which are antialiased besides.
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_dinov2_rule_scales_by_the_grid_plus_a_tenth(old: Grid, new: Grid) -> None:
    assert_agreement("dinov2", old, new, by_cubic_convolution(positions_of(old), old, new, offset=0.1))


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_jax_rule_equals_scipys_zoom(old: Grid, new: Grid) -> None:
    # vit_jax/checkpoint.py, `interpolate_posembed`.
    ndimage = pytest.importorskip("scipy.ndimage")
    positions = positions_of(old)
    grid = positions[0, 1:].reshape(*old, D).numpy()
    zoomed = ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    assert zoomed.shape == (*new, D)
    image = torch.from_numpy(zoomed).permute(2, 0, 1)[None]
    assert_agreement("jax", old, new, image_as_patches(image, positions))
