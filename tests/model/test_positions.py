import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model import law, random_images
from vitascope.model.positions import LearnedPositions, resample_positions

GRIDS = st.tuples(st.integers(1, 7), st.integers(1, 7))
PREFIX = st.integers(0, 2)


def random_positions(grid: tuple[int, int], prefix: int, seed: int = 0) -> torch.Tensor:
    return random_images(1, prefix + grid[0] * grid[1], 6, seed=seed)


def transpose_patches(positions: torch.Tensor, grid: tuple[int, int], prefix: int) -> torch.Tensor:
    patches = positions[:, prefix:].unflatten(1, grid).transpose(1, 2).flatten(1, 2)
    return torch.cat([positions[:, :prefix], patches], dim=1)


@law
@given(grid=GRIDS, prefix=PREFIX)
def test_resampling_to_the_same_grid_changes_nothing(grid: tuple[int, int], prefix: int) -> None:
    positions = random_positions(grid, prefix)
    assert torch.equal(resample_positions(positions, grid, grid, prefix), positions)


@law
@given(old=GRIDS, new=GRIDS, prefix=PREFIX)
def test_resampling_leaves_the_prefix_alone_and_fills_the_new_grid(
    old: tuple[int, int], new: tuple[int, int], prefix: int
) -> None:
    positions = random_positions(old, prefix)
    resampled = resample_positions(positions, old, new, prefix)
    assert resampled.shape == (1, prefix + new[0] * new[1], 6)
    assert torch.equal(resampled[:, :prefix], positions[:, :prefix])


@law
@given(old=GRIDS, new=GRIDS)
def test_resampling_keeps_a_constant(old: tuple[int, int], new: tuple[int, int]) -> None:
    constant = random_images(1, 1, 6)
    positions = constant.expand(1, old[0] * old[1], 6)
    expected = constant.expand(1, new[0] * new[1], 6)
    torch.testing.assert_close(resample_positions(positions, old, new, 0), expected)


@law
@given(old=GRIDS, new=GRIDS, prefix=PREFIX)
def test_rows_and_columns_are_treated_alike(old: tuple[int, int], new: tuple[int, int], prefix: int) -> None:
    positions = random_positions(old, prefix)
    flipped = transpose_patches(positions, old, prefix)
    expected = transpose_patches(resample_positions(positions, old, new, prefix), new, prefix)
    torch.testing.assert_close(resample_positions(flipped, old[::-1], new[::-1], prefix), expected)


def test_a_parabola_over_the_rows_stays_one_over_the_rows() -> None:
    def over_the_rows(values: torch.Tensor, columns: int) -> torch.Tensor:
        return values.view(1, -1, 1, 1).expand(1, -1, columns, 6)

    positions = over_the_rows(torch.arange(8.0) ** 2, 4).flatten(1, 2)
    resampled = resample_positions(positions, (8, 4), (16, 6), 0).unflatten(1, (16, 6))
    # Twice as many rows over the same extent lie half a step apart, shifted by a quarter. Cubic interpolation
    # is exact for parabolas, linear is not; the edges lack neighbours.
    expected = over_the_rows((torch.arange(16.0) / 2 - 0.25) ** 2, 6)
    torch.testing.assert_close(resampled[:, 4:12], expected[:, 4:12])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_resampling_keeps_the_dtype(dtype: torch.dtype) -> None:
    positions = random_positions((4, 4), 1).to(dtype)
    assert resample_positions(positions, (4, 4), (6, 5), 1).dtype == dtype


def test_a_vector_is_added_to_each_token() -> None:
    layer = LearnedPositions((2, 3), 1, 6)
    torch.nn.init.normal_(layer.weight)
    tokens = random_images(2, 7, 6)
    assert torch.equal(layer(tokens, (2, 3)), tokens + layer.weight)


def test_another_grid_than_its_own_is_interpolated_to() -> None:
    layer = LearnedPositions((4, 4), 1, 6)
    torch.nn.init.normal_(layer.weight)
    tokens = random_images(2, 1 + 5 * 3, 6)
    added = resample_positions(layer.weight, (4, 4), (5, 3), 1)
    assert torch.equal(layer(tokens, (5, 3)), tokens + added)


def test_gradients_reach_the_positions_through_the_interpolation() -> None:
    layer = LearnedPositions((2, 2), 1, 6)
    layer(torch.zeros(1, 1 + 9, 6), (3, 3)).sum().backward()
    # What each old vector gives to the new ones: the prefix itself once, the patches 9 between 4 of them.
    given = layer.weight.grad[0, :, 0]
    torch.testing.assert_close(given, torch.tensor([1.0, 2.25, 2.25, 2.25, 2.25]))


def test_positions_do_not_change_the_dtype_of_the_tokens() -> None:
    layer = LearnedPositions((2, 2), 1, 6)
    assert layer(torch.zeros(1, 5, 6, dtype=torch.bfloat16), (2, 2)).dtype == torch.bfloat16


@law
@given(old=GRIDS, new=GRIDS, prefix=PREFIX)
def test_resize_makes_another_grid_its_own(old: tuple[int, int], new: tuple[int, int], prefix: int) -> None:
    layer = LearnedPositions(old, prefix, 6)
    torch.nn.init.normal_(layer.weight)
    tokens = random_images(1, prefix + new[0] * new[1], 6)
    on_the_fly = layer(tokens, new)
    layer.resize(new)
    assert layer.grid == new
    assert layer.weight.shape == tokens.shape
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    torch.testing.assert_close(layer(tokens, new), on_the_fly)


def test_resized_positions_still_learn() -> None:
    layer = LearnedPositions((2, 2), 1, 6)
    layer.resize((3, 3))
    layer(torch.ones(1, 10, 6), (3, 3)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(1, 10, 6))
