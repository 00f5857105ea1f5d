"""What is left of an image without some cells, against loops over pixels."""

import math

import numpy as np
import pytest
import torch

from tests.model import random_images
from vitascope.explain.faithfulness.imputation import impute
from vitascope.explain.faithfulness.perturbation import NOISE, Perturbation, Plan, blur


def plan(cells: int, steps: int = 4, shares: tuple[float, ...] = (0.25, 0.5)) -> Plan:
    return Plan(cells=cells, steps=steps, shares=shares)


def perturbed(image: torch.Tensor, grid: tuple[int, int], made: Plan, seed: int = 0) -> Perturbation:
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


def test_blur_keeps_a_colour() -> None:
    image = torch.tensor([0.5, -2.0, 1.0])[:, None, None].expand(3, 16, 24)
    torch.testing.assert_close(blur(image), image)


@pytest.mark.parametrize(("grid", "size"), [((4, 4), (32, 32)), ((2, 6), (16, 48)), ((3, 2), (10, 7))])
def test_variants_lack_the_cells_that_the_order_says(grid: tuple[int, int], size: tuple[int, int]) -> None:
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
            if N - round(share * N) == count:  # the least relevant are those that are not yet gone
                assert torch.equal(least[:, gone], image[:, gone])
                assert not torch.equal(least[:, ~gone], image[:, ~gone])
    assert noise is not None
    assert 0.5 * NOISE < noise.std() < 2 * NOISE


def test_deletion_leaves_zero_and_insertion_starts_blurred() -> None:
    image = random_images(3, 16, 16)
    whole, nothing, blurred = perturbed(image, (4, 4), plan(16)).ends()
    assert torch.equal(whole, image)
    assert not nothing.any()
    assert torch.equal(blurred, blur(image))


def test_variants_are_the_same_under_autocast() -> None:
    """A model may run in bf16; what is done to its images may not."""
    image, order = random_images(3, 16, 16), torch.randperm(16)
    exact = [*perturbed(image, (4, 4), plan(16)).ends(), *perturbed(image, (4, 4), plan(16)).variants(order)]
    with torch.autocast("cpu", torch.bfloat16):
        holder = perturbed(image, (4, 4), plan(16))
        under = [*holder.ends(), *holder.variants(order)]
    assert all(torch.equal(a, b) for a, b in zip(exact, under, strict=True))


def test_noise_is_the_same_for_every_order() -> None:
    holder = perturbed(random_images(3, 16, 16), (2, 2), plan(4, steps=1, shares=(0.5,)))
    forward = list(holder.variants(torch.tensor([0, 1, 2, 3])))
    backward = list(holder.variants(torch.tensor([3, 2, 1, 0])))
    assert torch.equal(forward[0], backward[1])
    assert torch.equal(forward[1], backward[0])


@pytest.mark.parametrize(("cells", "steps"), [(64, 10), (7, 7), (7, 5), (196, 16), (9, 1)])
def test_counts_rise_evenly_from_nothing_to_everything(cells: int, steps: int) -> None:
    counts = plan(cells, steps).counts
    assert (counts[0], counts[-1], len(counts)) == (0, cells, steps + 1)
    assert set(np.diff(counts)) <= {cells // steps, -(-cells // steps)}


def test_shares_leave_something_to_remove_and_something_to_fill_in_from() -> None:
    assert plan(4, shares=(0.01, 0.3, 0.5, 0.99)).imputed == [1, 1, 2, 3]
    assert plan(64, shares=(0.1, 0.9)).imputed == [6, 58]
