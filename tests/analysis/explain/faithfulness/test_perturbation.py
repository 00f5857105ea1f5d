"""Images without some cells, against loops over pixels."""

import math

import numpy as np
import pytest
import torch

from tests.models import random_images
from vitascope.analysis.explain.faithfulness.perturbation import (
    NOISE,
    Perturbation,
    PerturbationPlan,
    blur,
    impute,
)


def plan(cells: int, steps: int = 4, shares: tuple[float, ...] = (0.25, 0.5)) -> PerturbationPlan:
    return PerturbationPlan(cells=cells, steps=steps, shares=shares)


def perturbed(
    image: torch.Tensor, grid: tuple[int, int], made: PerturbationPlan, seed: int = 0
) -> Perturbation:
    return Perturbation(image, grid, made, np.random.default_rng(seed))


@pytest.mark.parametrize("size", [(8, 8), (5, 12), (1, 6)])
def test_blur_is_the_gaussian_mean_of_the_image(size: tuple[int, int]) -> None:
    image = random_images(2, *size).double()
    H, W = size
    expected = np.zeros((2, H, W))
    for y in range(H):
        for x in range(W):
            weights = np.array(
                [
                    [math.exp(-0.5 * (((v - y) / (H / 8)) ** 2 + ((u - x) / (W / 8)) ** 2)) for u in range(W)]
                    for v in range(H)
                ]
            )
            expected[:, y, x] = (image.numpy() * weights).sum(axis=(1, 2)) / weights.sum()
    np.testing.assert_allclose(blur(image), expected, atol=1e-12)


@pytest.mark.parametrize(("grid", "size"), [((4, 4), (32, 32)), ((2, 6), (16, 48)), ((3, 2), (10, 7))])
def test_variants_lack_the_cells_given_by_the_order(grid: tuple[int, int], size: tuple[int, int]) -> None:
    N = math.prod(grid)
    made = plan(N, steps=N)
    image = random_images(3, *size)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    holder = perturbed(image, grid, made)
    whole, nothing, blurred = holder.ends()
    variants = list(holder.variants(order))
    assert len(variants) == made.variants
    noise = None
    for count in range(1, N):
        gone = torch.zeros(size, dtype=torch.bool)
        for cell in order[:count].tolist():
            for y in range(size[0]):
                for x in range(size[1]):
                    # The centre of the pixel is in the cell.
                    row, column = (y + 0.5) * grid[0] / size[0], (x + 0.5) * grid[1] / size[1]
                    if (int(row), int(column)) == divmod(cell, grid[1]):
                        gone[y, x] = True
        assert torch.equal(variants[count - 1], torch.where(gone, nothing, whole))
        assert torch.equal(variants[N - 2 + count], torch.where(gone, whole, blurred))
        for share, most, least in zip(made.shares, variants[-2:], variants[-4:-2], strict=True):
            if round(share * N) == count:
                noise = (most - impute(image, gone))[:, gone]
                assert torch.equal(most[:, ~gone], image[:, ~gone])
            if N - round(share * N) == count:  # the least relevant remain
                assert torch.equal(least[:, gone], image[:, gone])
                assert not torch.equal(least[:, ~gone], image[:, ~gone])
    assert 0.5 * NOISE < noise.std() < 2 * NOISE


def test_variants_are_the_same_under_autocast() -> None:
    """A model may run in bf16, but images are perturbed in fp32."""
    image, order = random_images(3, 16, 16), torch.randperm(16)
    exact = [*perturbed(image, (4, 4), plan(16)).ends(), *perturbed(image, (4, 4), plan(16)).variants(order)]
    with torch.autocast("cpu", torch.bfloat16):
        holder = perturbed(image, (4, 4), plan(16))
        under = [*holder.ends(), *holder.variants(order)]
    assert all(torch.equal(a, b) for a, b in zip(exact, under, strict=True))


def test_counts_rise_evenly_from_nothing_to_everything() -> None:
    for cells, steps in ((64, 10), (7, 7), (7, 5), (196, 16), (9, 1)):
        counts = plan(cells, steps).counts
        assert (counts[0], counts[-1], len(counts)) == (0, cells, steps + 1)
        assert set(np.diff(counts)) <= {cells // steps, -(-cells // steps)}


def test_shares_remove_at_least_one_cell_and_keep_at_least_one() -> None:
    assert plan(4, shares=(0.01, 0.3, 0.5, 0.99)).imputed == [1, 1, 2, 3]
    assert plan(64, shares=(0.1, 0.9)).imputed == [6, 58]


# --- ROAD's imputation against its equations, pixel by pixel


def mean_of_neighbours(image: np.ndarray, y: int, x: int) -> np.ndarray:
    """Rong et al. 2022: 1/6 of each adjacent pixel, 1/12 of each diagonal one; existing ones sum to 1."""
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


def test_noise_is_added_to_removed_pixels_only() -> None:
    image, noise = random_images(3, 8, 8), random_images(3, 8, 8, seed=2)
    removed = random_mask(8, 8, share=0.5)
    difference = impute(image, removed, noise) - impute(image, removed)
    torch.testing.assert_close(difference, noise * removed, atol=1e-6, rtol=0)
