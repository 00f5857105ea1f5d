"""ROAD's imputation against its equations, pixel by pixel."""

import numpy as np
import pytest
import torch

from tests.model import random_images
from vitascope.errors import UserError
from vitascope.explain.faithfulness.imputation import impute


def mean_of_neighbours(image: np.ndarray, y: int, x: int) -> np.ndarray:
    """Rong et al. 2022: 1/6 of each pixel beside, 1/12 of each across a corner; what exists sums to 1."""
    _, H, W = image.shape
    total, weights = np.zeros(len(image)), 0.0
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            if (dy, dx) == (0, 0) or not (0 <= y + dy < H and 0 <= x + dx < W):
                continue
            weight = 1 / 12 if dy and dx else 1 / 6
            total += weight * image[:, y + dy, x + dx]
            weights += weight
    return total / weights


def random_mask(*size: int, share: float, seed: int = 0) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("size", [(9, 9), (6, 17), (1, 12), (11, 1), (2, 2)])
def test_each_removed_pixel_is_the_mean_of_its_neighbours(size: tuple[int, int], share: float) -> None:
    image = random_images(3, *size).double()
    removed = random_mask(*size, share=share)
    removed[0, 0], removed[-1, -1] = False, True
    filled = impute(image, removed)
    for y, x in removed.nonzero().tolist():
        np.testing.assert_allclose(
            filled[:, y, x], mean_of_neighbours(filled.numpy(), y, x), rtol=0, atol=1e-12
        )
    assert torch.equal(filled[:, ~removed], image[:, ~removed])


def test_solution_is_that_of_a_dense_solver() -> None:
    """The system built again, row by row, for the removed pixels of a corner, a border and the middle."""
    size = (7, 10)
    image = random_images(2, *size).double()
    removed = torch.zeros(size, dtype=torch.bool)
    removed[:3, :4] = removed[4:, 6:] = removed[3:6, 4:7] = True
    places = removed.nonzero().tolist()
    matrix, right = np.eye(len(places)), np.zeros((len(places), 2))
    only_known = torch.where(removed, 0.0, image).numpy()
    for row, (y, x) in enumerate(places):
        right[row] = mean_of_neighbours(only_known, y, x)
        for column, (v, u) in enumerate(places):
            one = np.zeros((1, *size))
            one[0, v, u] = 1
            matrix[row, column] -= mean_of_neighbours(one, y, x)[0]
    expected = np.linalg.solve(matrix, right).T  # (C, U)
    np.testing.assert_allclose(impute(image, removed)[:, removed], expected, atol=1e-12)


def test_linear_ramp_is_continued_exactly() -> None:
    y, x = np.mgrid[:20, :14]
    ramp = torch.from_numpy(np.stack([0.3 * y - 0.1 * x + 2, x, -2.0 * y]))
    removed = torch.zeros(20, 14, dtype=torch.bool)
    removed[1:-1, 1:-1] = random_mask(18, 12, share=0.9)
    torch.testing.assert_close(impute(ramp, removed), ramp, rtol=0, atol=1e-12)


def test_what_removed_pixels_held_is_not_read() -> None:
    image = random_images(3, 16, 16)
    removed = random_mask(16, 16, share=0.6)
    other = torch.where(removed, 1e6, image)
    assert torch.equal(impute(image, removed), impute(other, removed))


def test_filled_pixels_stay_between_the_known() -> None:
    """A mean lies between what it is of."""
    image = random_images(1, 32, 24)
    removed = random_mask(32, 24, share=0.8)
    filled, known = impute(image, removed)[0], image[0, ~removed]
    assert known.min() - 1e-6 <= filled.min()
    assert filled.max() <= known.max() + 1e-6


def test_turned_and_mirrored_images_are_filled_alike() -> None:
    image = random_images(2, 12, 20).double()
    removed = random_mask(12, 20, share=0.7)
    filled = impute(image, removed)
    torch.testing.assert_close(impute(image.flip(2), removed.flip(1)), filled.flip(2))
    torch.testing.assert_close(impute(image.mT, removed.mT), filled.mT)


def test_noise_is_added_to_removed_pixels_only() -> None:
    image, noise = random_images(3, 8, 8), random_images(3, 8, 8, seed=2)
    removed = random_mask(8, 8, share=0.5)
    difference = impute(image, removed, noise) - impute(image, removed)
    torch.testing.assert_close(difference, noise * removed, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_images_keep_their_type_and_are_not_changed(dtype: torch.dtype) -> None:
    image = random_images(3, 8, 8).to(dtype)
    before = image.clone()
    filled = impute(image, random_mask(8, 8, share=0.5))
    assert filled.dtype == dtype
    assert torch.equal(image, before)


def test_images_in_any_memory_layout_are_filled_alike() -> None:
    image = random_images(3, 8, 12)
    removed = random_mask(8, 12, share=0.5)
    channels_last = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert torch.equal(impute(channels_last, removed), impute(image, removed))


def test_nothing_removed_changes_nothing() -> None:
    image = random_images(3, 8, 8)
    filled = impute(image, torch.zeros(8, 8, dtype=torch.bool), noise=1.0)
    assert torch.equal(filled, image)
    assert filled.data_ptr() != image.data_ptr()


def test_removing_everything_is_refused() -> None:
    with pytest.raises(UserError, match="all 64 pixels"):
        impute(random_images(3, 8, 8), torch.ones(8, 8, dtype=torch.bool))
