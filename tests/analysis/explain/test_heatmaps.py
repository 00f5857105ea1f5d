"""The cells of a heatmap, their pixels, and the scale."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law, random_images, small_model, small_resnet
from vitascope.analysis.explain.heatmaps import cell_of_pixels, grid_of, to_unit
from vitascope.errors import UserError


@pytest.mark.parametrize("size", [(32, 32), (17, 40), (5, 9)])
@pytest.mark.parametrize("root", ["imagenet", "cifar"])
def test_grid_of_a_resnet_is_its_last_feature_map(size: tuple[int, int], root: str) -> None:
    model, images = small_resnet(root=root), random_images(1, 3, *size)
    assert grid_of(model, images) == tuple(model.features(images).shape[2:])


@pytest.mark.parametrize("model", [small_model(), small_resnet()], ids=["vit", "resnet"])
def test_input_that_is_not_a_batch_of_images_has_no_grid(model: torch.nn.Module) -> None:
    for images in (random_images(3, 32, 32), torch.zeros(1, 3, 32, 32, dtype=torch.uint8)):
        with pytest.raises(UserError, match=r"images must be normalized floats \(batch, 3, height, width\)"):
            grid_of(model, images)


@law
@given(sides=st.tuples(st.integers(1, 40), st.integers(1, 40)), data=st.data())
def test_a_pixel_belongs_to_the_cell_that_its_centre_is_in(sides, data) -> None:
    grid = (data.draw(st.integers(1, sides[0])), data.draw(st.integers(1, sides[1])))
    for cells, side, count in zip(cell_of_pixels(grid, sides), sides, grid, strict=True):
        assert cells.dtype == torch.int64
        edges = np.arange(1, count) * side  # edges of the cells, in units of 1/count of a pixel
        centres = np.arange(side) * count + count / 2
        np.testing.assert_array_equal(cells, np.searchsorted(edges, centres, side="right"))
        assert set(cells.tolist()) == set(range(count))


def test_unit_is_the_evidence_over_its_largest_and_zero_where_negative() -> None:
    heat = torch.tensor([[[-1.0, 2.0], [4.0, 1.0]], [[0.5, 0.0], [-9.0, 0.25]], [[0, 0], [-3, 0]]])
    expected = torch.tensor([[[0.0, 0.5], [1.0, 0.25]], [[1.0, 0.0], [0.0, 0.5]], [[0, 0], [0, 0]]])
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        assert to_unit(heat.to(dtype)).dtype == torch.float32
        assert torch.equal(to_unit(heat.to(dtype)), expected)


def test_heat_that_is_not_finite_is_rejected_naming_the_image() -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        heat = torch.ones(4, 2, 2)
        heat[1, 0, 1] = heat[3, 1, 1] = value
        with pytest.raises(UserError, match="heatmap of image 1, 3 has values that are not finite"):
            to_unit(heat)
