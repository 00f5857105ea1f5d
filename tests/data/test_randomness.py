import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law
from vitascope.data.randomness import epoch_order, fractions, random_bits, sorting_keys, step_seed, uniform

seeds, counters = st.integers(0, 2**32), st.integers(0, 10**6)


@law
@given(seed=seeds, epoch=counters, length=st.integers(0, 500))
def test_epoch_order_is_a_permutation_and_repeats(seed: int, epoch: int, length: int) -> None:
    order = epoch_order(seed, epoch, length)
    assert sorted(order.tolist()) == list(range(length))
    np.testing.assert_array_equal(order, epoch_order(seed, epoch, length))


@law
@given(seed=seeds, epoch=counters, draws=st.integers(1, 9), indices=st.lists(counters, min_size=1))
def test_uniform_rows_depend_only_on_their_index(seed, epoch, draws, indices) -> None:
    rows = uniform(seed, epoch, np.array(indices), draws)
    assert rows.shape == (len(indices), draws)
    assert (rows >= 0).all()
    assert (rows < 1).all()
    for row, index in zip(rows, indices, strict=True):
        np.testing.assert_array_equal(row, uniform(seed, epoch, np.array([index]), draws)[0])
    more = uniform(seed, epoch, np.array(indices), draws + 1)
    np.testing.assert_array_equal(more[:, :draws], rows)


def test_uniform_has_the_mean_and_variance_of_uniform_numbers() -> None:
    draws = uniform(0, 0, np.arange(20_000), 9)
    n = draws.shape[0]
    assert np.abs(draws.mean(axis=0) - 1 / 2).max() < 5 * (1 / 12 / n) ** 0.5
    assert np.abs(draws.var(axis=0) - 1 / 12).max() < 5 * (1 / 180 / n) ** 0.5
    counts = np.histogram(draws, bins=16, range=(0, 1))[0]
    assert np.abs(counts - draws.size / 16).max() < 5 * (draws.size / 16) ** 0.5


def test_uniform_is_uncorrelated_between_draws_indices_epochs_and_seeds() -> None:
    n = 20_000
    here = uniform(0, 0, np.arange(n), 9)
    pairs = {
        "draws": (here[:, 0], here[:, 1]),
        "indices": (here[:-1, 0], here[1:, 0]),
        "index and draw": (here[:-1, 1], here[1:, 0]),
        "epochs": (here[:, 0], uniform(0, 1, np.arange(n), 9)[:, 0]),
        "seeds": (here[:, 0], uniform(1, 0, np.arange(n), 9)[:, 0]),
        "seed and epoch": (uniform(1, 0, np.arange(n), 9)[:, 0], uniform(0, 1, np.arange(n), 9)[:, 0]),
        "epoch and index": (uniform(0, 1, np.arange(n - 1), 9)[:, 0], here[1:, 0]),
    }
    for name, (x, y) in pairs.items():
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / n**0.5, name


@pytest.mark.parametrize("length", [1, 5, 2048, 5000])
def test_sorting_keys_have_the_order_of_the_fractions_and_end_in_the_position(length: int) -> None:
    bits = random_bits(3, 1, np.arange(4), length)
    bits[:, ::3] = bits[:1, :1]  # equal ones
    keys, mask = sorting_keys(bits)
    order = np.sort(keys, axis=1) & mask
    np.testing.assert_array_equal(order, fractions(bits).argsort(axis=1, kind="stable"))


@law
@given(seed=seeds, step=counters)
def test_step_seed_fits_a_generator_and_differs_by_seed_and_step(seed: int, step: int) -> None:
    here = step_seed(seed, step)
    assert 0 <= here < 2**63
    assert here == step_seed(seed, step)
    assert len({here, step_seed(seed, step + 1), step_seed(seed + 1, step)}) == 3
