"""Principal components against NumPy's singular value decomposition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model import law, random_images
from vitascope.errors import UserError
from vitascope.explain.pca import principal_components


def directly(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Components and shares of the variance by singular value decomposition, signs by the stated rule."""
    _, strengths, components = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    signs = [np.sign(row[np.abs(row).argmax()]) for row in components]
    return (components * np.array(signs)[:, None])[:count], (strengths**2 / (strengths**2).sum())[:count]


@pytest.mark.parametrize("shape", [(40, 6), (6, 40), (9, 9), (2, 5)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_components_are_those_of_the_singular_value_decomposition(shape: tuple[int, int], count: int) -> None:
    values = random_images(1, 1, *shape)[0, 0] * torch.linspace(1, 3, shape[1]) + 5
    components, shares = principal_components(values, count)
    expected, expected_shares = directly(values.double().numpy(), min(count, shape[0] - 1))
    np.testing.assert_allclose(components, expected, atol=1e-6)
    np.testing.assert_allclose(shares, expected_shares, atol=1e-9)
    assert components.dtype == torch.float64


@law
@given(rows=st.integers(2, 12), width=st.integers(1, 12), seed=st.integers(0, 99))
def test_all_components_together_explain_all(rows: int, width: int, seed: int) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    components, shares = principal_components(values, 99)
    assert len(components) == min(rows - 1, width)
    torch.testing.assert_close(components @ components.T, torch.eye(len(components), dtype=torch.float64))
    assert shares.sum().item() == pytest.approx(1)
    centred = values - values.mean(dim=0)
    torch.testing.assert_close(centred @ components.T @ components, centred)


@law
@given(rows=st.integers(2, 12), width=st.integers(1, 12))
def test_entry_of_largest_magnitude_is_positive(rows: int, width: int) -> None:
    values = random_images(1, 1, rows, width)[0, 0]
    for component in (*principal_components(values, 3)[0], *principal_components(-values, 3)[0]):
        assert component[component.abs().argmax()] > 0


@pytest.mark.parametrize("shape", [(30, 7), (7, 30)], ids=str)
def test_directions_in_which_nothing_differs_are_no_components(shape: tuple[int, int]) -> None:
    left, right = random_images(1, 1, shape[0], 2)[0, 0], random_images(1, 1, 2, shape[1])[0, 0]
    assert len(principal_components(left @ right + 1000, 5)[0]) == 2
    assert len(principal_components(torch.full(shape, 0.1), 5)[0]) == 0
    assert len(principal_components(torch.zeros(shape), 5)[0]) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="finite"):
        principal_components(torch.tensor([[1.0, 2.0], [value, 0.0]]), 1)
