import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import average_precision_score

from tests.data.test_label_measures import TOLERANCE, sample
from tests.models import law
from vitascope.data.average_precision import (
    ResampledPrecision,
    average_precision,
    bootstrap_samples,
    class_precision,
    mean_average_precision,
)


@law
@given(seed=st.integers(0, 1000))
def test_weights_count_how_often_an_image_is_drawn(seed: int) -> None:
    labels, scores = (each[:, 3] for each in sample(seed, N=60))
    weights = np.random.default_rng(seed).multinomial(60, np.full(60, 1 / 60), size=3).T
    wanted = [average_precision_score(labels, scores, sample_weight=column) for column in weights.T]
    np.testing.assert_allclose(
        average_precision(labels, scores, weights.astype(np.int32)), wanted, **TOLERANCE
    )


def test_the_mean_is_over_the_classes_that_occur() -> None:
    labels, probabilities = sample(6)
    labels[:, 0] = False
    wanted = average_precision_score(labels[:, 1:], probabilities[:, 1:])
    assert mean_average_precision(labels, probabilities) == pytest.approx(wanted)


def rare(seed: int, N: int = 300, K: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Labels (N, K) of classes that 1 to 4 of 100 images have, and scores that know something about them."""
    generator = np.random.default_rng(seed)
    labels = generator.random((N, K)) < np.linspace(0.01, 0.04, K)
    return labels, expit(generator.normal(size=(N, K)) + 2.5 * labels)


def test_95_of_100_intervals_of_rare_classes_contain_the_truth() -> None:
    labels, scores = rare(0, N=200_000)
    once = np.ones((len(labels), 1), dtype=np.int32)
    true = class_precision(labels, scores, once)[0]
    weights = bootstrap_samples(300)
    found = [ResampledPrecision.of(*rare(seed), weights) for seed in range(1, 101)]
    inside = np.mean([low <= true.mean() <= high for low, high in (each.mean_limits for each in found)])
    assert 0.91 <= inside <= 0.99, inside
    # The interval of a class with 1, 2 or 3 images is wide.
    few = [(each.limits, each.positives) for each in found]
    inside = np.mean(
        np.concatenate([((low <= true) & (true <= high))[(n > 0) & (n <= 3)] for (low, high), n in few])
    )
    assert inside >= 0.88, inside


def test_n_values_drawn_from_n_have_too_small_a_variance() -> None:
    drawn = np.array([[0.2, 0.5], [0.4, np.nan], [0.6, 0.5]])
    found = ResampledPrecision(9, np.array([2, 1]), np.array([0.4, 0.5]), drawn)
    np.testing.assert_allclose(found.samples[:, 0] - 0.4, [-(0.08**0.5), 0, 0.08**0.5], atol=1e-12)
    assert found.samples[[0, 2], 1].tolist() == [0.5, 0.5]


def test_a_class_that_bootstrap_samples_leave_out_has_a_finite_interval() -> None:
    labels, scores = np.zeros((50, 2), np.bool_), np.random.default_rng(0).random((50, 2))
    labels[scores[:, 0].argsort()[25], 0] = True
    found = ResampledPrecision.of(labels, scores, bootstrap_samples(50))
    assert np.isnan(found.drawn[:, 0]).any()
    low, high = found.limits[:, 0]
    assert 0 < low < found.values[0] < high < 1
    assert np.isnan(found.limits[:, 1]).all()
    assert np.isfinite([found.mean, *found.mean_limits]).all()


@law
@given(seed=st.integers(0, 1000), slips=st.integers(0, 3), K=st.integers(1, 10))
def test_every_interval_contains_its_value(seed: int, slips: int, K: int) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.random((300, K)) < 0.2
    probabilities = 0.5 * labels + 0.5 * generator.random((300, K))
    for k in range(min(slips, K)):  # the last positive is ranked below the first negative
        last = np.where(labels[:, k], probabilities[:, k], 1).argmin()
        first = np.where(labels[:, k], 0, probabilities[:, k]).argmax()
        probabilities[[last, first], k] = probabilities[[first, last], k]
    found = ResampledPrecision.of(labels, probabilities, bootstrap_samples(300))
    low, high = found.mean_limits
    assert low <= found.mean <= high
    assert high - low > 1e-3  # 300 images never exclude that more of them would differ
    known = ~np.isnan(found.values)
    limits, values = found.limits[:, known], found.values[known]
    assert (limits[0] <= values).all()
    assert (values <= limits[1]).all()
