import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, multinomial, norm
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_curve,
    top_k_accuracy_score,
)

from tests.models import law
from vitascope.data.average_precision import PairedPrecision, mean_average_precision
from vitascope.data.measures import (
    ClassPair,
    PairedAccuracy,
    RiskCoverage,
    calibration,
    drop_interval,
    mcnemar,
    ranks,
    score_of,
    surest,
    wilson_interval,
    worst_pairs,
)
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError
from vitascope.training.run.predictions import Predictions, paired


@law
@given(total=st.integers(1, 5000), share=st.floats(0, 1))
def test_wilson_interval_has_the_shares_that_the_score_test_does_not_reject(total: int, share: float) -> None:
    """At its ends |p - q| is z standard errors of q: the definition, not the solved formula."""
    right = round(share * total)
    z = norm.ppf(0.975)
    low, high = wilson_interval(right, total)
    assert 0 <= low <= right / total <= high <= 1
    for end in (low, high):
        if end not in (0.0, 1.0):
            error = np.sqrt(end * (1 - end) / total)
            assert abs(right / total - end) == pytest.approx(z * error, rel=1e-5)
    assert (low == 0) == (right == 0)
    assert (high == 1) == (right == total)


@law
@given(one=st.integers(0, 3000), other=st.integers(0, 3000))
def test_mcnemar_is_the_two_sided_binomial_test(one: int, other: int) -> None:
    expected = binomtest(one, one + other).pvalue if one + other else 1.0
    assert mcnemar(one, other) == mcnemar(other, one) == pytest.approx(expected, rel=1e-6)


def test_drop_interval_is_the_published_one() -> None:
    """Of 21 children (Bentur et al. 2009), as computed by Fagerland, Lydersen and Laake (2014, table V)."""
    assert drop_interval(1, 7, 21) == pytest.approx((-0.508, -0.013), abs=5e-4)


@pytest.mark.parametrize("total", [9, 60])
def test_drop_interval_contains_the_true_loss_of_nearly_95_in_100_samples(total: int) -> None:
    counts = [(lost, won) for lost in range(total + 1) for won in range(total + 1 - lost)]
    limits = np.array([drop_interval(lost, won, total) for lost, won in counts])
    outcomes = [[lost, won, total - lost - won] for lost, won in counts]
    for loss, gain in ((0.0, 0.0), (0.05, 0.05), (0.2, 0.1), (0.02, 0.0), (0.4, 0.0)):
        chances = multinomial.pmf(outcomes, total, [loss, gain, 1 - loss - gain])
        inside = (limits[:, 0] <= loss - gain) & (loss - gain <= limits[:, 1])
        assert chances[inside].sum() > 0.925  # counts are discrete


def test_few_images_cannot_tell_whether_the_loss_is_allowed() -> None:
    right = np.ones(9, dtype=np.bool_)
    few = PairedAccuracy.of(right, right)
    assert (few.drop, few.right, few.right_after) == (0.0, 9, 9)
    assert re.match(
        r"9 test images cannot tell whether more than 1\.00% .*-25\.20% to 25\.20%",
        few.doubt(0.01, "test image"),
    )
    right = np.ones(1000, dtype=np.bool_)
    assert not PairedAccuracy.of(right, right).doubt(0.01, "test image")
    lost = PairedAccuracy.of(right, np.arange(1000) >= 100)
    assert lost.drop == 0.1
    assert not lost.doubt(0.01, "test image")  # certainly more
    assert lost.doubt(0.11, "test image")


def by_loops(confidences: np.ndarray, right: np.ndarray, bins: int) -> tuple[list[int], float]:
    """Counts and the calibration error, bin by bin as the paper defines them."""
    counts, error = [], 0.0
    for m in range(1, bins + 1):
        members = [
            i for i, p in enumerate(confidences) if (m - 1) / bins < p <= m / bins or (m == 1 and p == 0)
        ]
        counts.append(len(members))
        if members:
            accuracy = sum(bool(right[i]) for i in members) / len(members)
            error += (
                len(members)
                / len(confidences)
                * abs(accuracy - sum(map(float, confidences[members])) / len(members))
            )
    return counts, error


@law
@given(n=st.integers(1, 120), bins=st.integers(1, 20), seed=st.integers(0, 10**6), edges=st.booleans())
def test_calibration_equals_the_definition_of_the_paper(n: int, bins: int, seed: int, edges: bool) -> None:
    draw = np.random.default_rng(seed)
    confidences = draw.integers(0, bins + 1, n) / bins if edges else draw.random(n)
    right = draw.random(n) < confidences
    measured = calibration(confidences, right, bins)
    counts, error = by_loops(confidences, right, bins)
    assert measured.counts.tolist() == counts
    assert measured.error == pytest.approx(error, abs=1e-12)


def test_calibration_has_fifteen_bins_and_no_error_if_confidence_equals_accuracy() -> None:
    measured = calibration(np.full(10, 0.7), np.arange(10) < 7)
    assert len(measured.counts) == 15
    assert measured.error == pytest.approx(0)
    assert calibration(np.full(10, 0.9), np.arange(10) < 7).error == pytest.approx(0.2)


@law
@given(n=st.integers(1, 80), seed=st.integers(0, 10**6))
def test_the_risk_at_a_coverage_is_one_minus_the_precision_of_as_many_answers(n: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    confidences, right = draw.random(n), draw.random(n) < 0.7
    right[0] = True  # without one, scikit-learn's recall is undefined
    found = RiskCoverage.of(confidences, right)
    precision, _, _ = precision_recall_curve(right, confidences)
    np.testing.assert_allclose(found.risk, 1 - precision[-2::-1])
    assert found.area == pytest.approx(1 - precision[:-1].mean())


def test_equally_sure_answers_count_as_their_mean() -> None:
    found = RiskCoverage.of(np.array([0.5, 0.9, 0.5, 0.5, 0.5]), np.array([True, True, False, False, False]))
    np.testing.assert_allclose(found.risk, [0, 0.75 / 2, 1.5 / 3, 2.25 / 4, 3 / 5])
    np.testing.assert_allclose(found.coverage, [0.2, 0.4, 0.6, 0.8, 1])


@law
@given(n=st.integers(1, 80), K=st.integers(2, 5), seed=st.integers(0, 10**6), count=st.integers(1, 30))
def test_worst_pairs_are_the_most_frequent_mistakes_then_those_of_the_smaller_class(
    n: int, K: int, seed: int, count: int
) -> None:
    labels, guesses = np.random.default_rng(seed).integers(0, K, (2, n))
    tally = Counter(
        pair for pair in zip(labels.tolist(), guesses.tolist(), strict=True) if pair[0] != pair[1]
    )
    totals = np.bincount(labels, minlength=K)
    ranked = sorted((-number, -number / totals[pair[0]], *pair) for pair, number in tally.items())
    pairs = worst_pairs(confusion_matrix(labels, guesses, labels=range(K)), count)
    assert pairs == [ClassPair(first, second, -number) for number, _, first, second in ranked[:count]]


def test_surest_mistakes_are_wrong_and_sorted_by_confidence() -> None:
    confidences = np.array([0.9, 0.5, 0.8, 0.7, 0.99])
    right = np.array([False, False, True, False, True])
    assert surest(confidences, ~right, 2).tolist() == [0, 3]
    assert surest(confidences, ~right, 9).tolist() == [0, 3, 1]


@pytest.mark.filterwarnings("ignore::UserWarning:sklearn")
@law
@given(n=st.integers(1, 60), K=st.integers(2, 9), seed=st.integers(0, 10**6), skewed=st.booleans())
def test_a_score_is_that_of_scikit_learn(n: int, K: int, seed: int, skewed: bool) -> None:
    draw = np.random.default_rng(seed)
    labels, probabilities = draw.integers(0, K, n), draw.dirichlet(np.ones(K), n).astype(np.float32)
    if skewed:  # classes that do not occur, and classes that are never predicted
        labels, probabilities[:, 0] = labels // 2, 1
    guesses = probabilities.argmax(axis=1)
    score = score_of(labels, probabilities)
    assert (score.right, score.total) == (int((labels == guesses).sum()), n)
    assert score.balanced == pytest.approx(balanced_accuracy_score(labels, guesses))
    assert score.macro_f1 == pytest.approx(f1_score(labels, guesses, average="macro"))
    assert score.majority == max((labels == k).mean() for k in range(K))
    if K > 5:
        top5 = top_k_accuracy_score(labels, probabilities, k=5, labels=np.arange(K))
        assert score.top5 == pytest.approx(top5)
    else:
        assert score.top5 is None


def test_equally_probable_classes_are_ranked_in_their_order_and_nan_comes_last() -> None:
    probabilities = np.array([[0.2, 0.3, 0.3, 0.2]] * 4)
    assert ranks(np.arange(4), probabilities).tolist() == [2, 0, 1, 3]
    assert ranks(np.array([1]), np.full((1, 8), np.nan)).tolist() == [7]


def sure(guesses: np.ndarray, K: int = 2) -> np.ndarray:
    """Probabilities (N, K) of 1 for each guess."""
    return np.eye(K)[guesses]


@pytest.mark.parametrize(
    ("right", "labels", "no_better"),
    [
        (5, [0] * 6 + [1] * 5, True),  # below the most frequent class
        (8, [0] * 6 + [1] * 5, True),  # above it, in an interval of 43% to 90%
        (11, [0] * 6 + [1] * 5, False),
        (300, [0, 1] * 250, False),  # 60%, and the interval begins at 56%
        (3, [0] * 3, False),  # one class: nothing to compare with
    ],
)
def test_a_score_that_guessing_may_reach_causes_a_warning(right: int, labels, no_better: bool) -> None:
    truth = np.array(labels)
    guesses = np.where(np.arange(len(truth)) < right, truth, 1 - truth)
    score = score_of(truth, sure(guesses))
    assert score.no_better == no_better
    assert bool(score.warning()) == no_better
    assert score.warning("start elsewhere").endswith("images show; start elsewhere") == no_better


def test_a_score_is_printed_with_its_interval_and_baseline() -> None:
    labels, guesses = np.array([0] * 6 + [1] * 5), np.array([0] * 5 + [1] * 6)
    assert score_of(labels, sure(guesses)).compared() == (
        "only 11 images: 95% interval 62.3% to 98.4%; balanced accuracy 91.67%, macro F1 90.91%; "
        "always guessing the most frequent class: 54.55%"
    )
    assert "; top-5 accuracy 100.00%; balanced" in score_of(labels, sure(guesses, 6)).compared()


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
    labels, first, second = drawn(2, N=100_000)
    true = mean_average_precision(labels, first) - mean_average_precision(labels, second)
    found = [PairedPrecision.of(*drawn(seed)) for seed in range(190, 250)]
    # 60 samples show the share with a standard error of 2.8 points.
    assert 0.9 <= np.mean([each.interval[0] <= true <= each.interval[1] for each in found]) <= 0.99
    apart = np.mean([sum(high - low for _, low, high in (each.before, each.after)) for each in found])
    assert np.mean([each.interval[1] - each.interval[0] for each in found]) < apart / 2


def test_equal_results_on_few_images_leave_a_doubt() -> None:
    labels, first, _ = drawn(3, N=30)
    few = PairedPrecision.of(labels, first, first)
    assert few.drop == 0
    assert -few.interval[0] == few.interval[1] > 0.05
    assert few.doubt(0.01, "test image").startswith(
        "30 test images cannot tell whether more than 1.00% of the mAP"
    )
    labels, first, _ = drawn(3, N=1000)
    assert not PairedPrecision.of(labels, first, first).doubt(0.01, "test image")


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
