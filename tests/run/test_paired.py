"""A classifier and the one made from it on the same images: the loss of the measure that suits these."""

import numpy as np
import pytest

from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError
from vitascope.run.average_precision import PairedPrecision, mean_average_precision, paired_difference
from vitascope.run.predictions import Predictions, paired

Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]


def drawn(seed: int, N: int = 200, K: int = 4) -> Drawn:
    """Labels (N, K), scores that tell them, and noisier ones."""
    generator = np.random.default_rng(seed)
    labels = generator.random((N, K)) < 0.25
    first = 2.0 * labels + generator.normal(size=(N, K))
    return labels, first, first + generator.normal(size=(N, K))


def predictions(labels: np.ndarray, scores: np.ndarray) -> Predictions:
    names = tuple("abcd")
    targets = ClassSets(labels, names) if labels.ndim == 2 else ClassIndices(labels, names)
    return Predictions(
        "test", np.arange(len(labels)), targets, (1 / (1 + np.exp(-scores))).astype(np.float32)
    )


def test_measure_suits_the_targets() -> None:
    labels, first, second = drawn(0)
    several = paired(predictions(labels, first), predictions(labels, second))
    assert (several.name, several.total) == ("mAP", 200)
    classes = np.arange(200) % 4
    one = paired(predictions(classes, first), predictions(classes, second))
    assert (one.name, one.total) == ("accuracy", 200)
    assert "of the mAP, 95% interval" in str(several)


def test_loss_is_the_difference_of_the_mean_average_precisions() -> None:
    labels, first, second = drawn(1)
    found = PairedPrecision.of(labels, first, second)
    before, after = (mean_average_precision(labels, scores) for scores in (first, second))
    assert found.drop == pytest.approx(before - after)
    assert [value for value, _ in found.rows()] == [f"{before:.2%}", f"{after:.2%}"]
    back = PairedPrecision.of(labels, second, first)
    assert back.drop == -found.drop
    assert back.interval == pytest.approx((-found.interval[1], -found.interval[0]))


def test_interval_contains_the_true_loss_in_most_samples_and_shrinks_with_pairing() -> None:
    labels, first, second = drawn(2, N=200_000)
    true = mean_average_precision(labels, first) - mean_average_precision(labels, second)
    found = [PairedPrecision.of(*drawn(seed)) for seed in range(100, 250)]
    # 150 samples show the share with a standard error of 1.8 points.
    assert 0.9 <= np.mean([each.interval[0] <= true <= each.interval[1] for each in found]) <= 0.99
    apart = np.mean([sum(high - low for _, low, high in (each.before, each.after)) for each in found])
    assert np.mean([each.interval[1] - each.interval[0] for each in found]) < apart / 2


def test_a_comparison_of_runs_has_the_same_interval() -> None:
    labels, first, second = drawn(5)
    loss, difference = PairedPrecision.of(labels, first, second), paired_difference(labels, first, second)
    assert difference.value == loss.drop
    assert (difference.low, difference.high) == pytest.approx(loss.interval)


def test_equal_results_on_few_images_leave_a_doubt() -> None:
    labels, first, _ = drawn(3, N=30)
    few = PairedPrecision.of(labels, first, first)
    assert few.drop == 0
    assert few.interval[1] > 0.05
    assert few.doubt(0.01, "test").startswith("30 test images cannot tell whether more than 1.00% of the mAP")
    labels, first, _ = drawn(3, N=1000)
    assert not PairedPrecision.of(labels, first, first).doubt(0.01, "test")


def test_images_and_classes_without_labels_are_no_fault() -> None:
    labels, first, second = drawn(4)
    labels[:100] = False
    labels[:, 0] = False
    found = PairedPrecision.of(labels, first, second)
    assert found.drop == pytest.approx(
        mean_average_precision(labels[:, 1:], first[:, 1:])
        - mean_average_precision(labels[:, 1:], second[:, 1:])
    )
    assert np.isfinite([*found.before, *found.after, *found.interval]).all()
    rare = np.zeros_like(labels)
    rare[0, 0] = True  # most bootstrap samples leave it out
    assert np.isfinite(PairedPrecision.of(rare, first, second).interval).all()
    with pytest.raises(UserError, match="no one of 200 images has a class"):
        PairedPrecision.of(np.zeros_like(labels), first, second)
