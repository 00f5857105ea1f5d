import warnings
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import accuracy_score, average_precision_score, f1_score

from tests.models import law
from vitascope.data.label_measures import best_thresholds, label_score, pairs_confused, pairs_together
from vitascope.data.measures import ClassPair

TOLERANCE = {"rtol": 0, "atol": 1e-12}


def sample(seed: int, N: int = 200, K: int = 4, digits: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Labels (N, K), and probabilities that know something about them, with many ties."""
    generator = np.random.default_rng(seed)
    labels = generator.random((N, K)) < np.linspace(0.1, 0.5, K)
    return labels, expit(generator.normal(size=(N, K)) + 1.5 * labels - 0.75).round(digits)


@settings(law, max_examples=10)
@given(seed=st.integers(0, 1000), digits=st.integers(1, 6))
def test_measures_are_those_of_scikit_learn(seed: int, digits: int) -> None:
    labels, probabilities = sample(seed, digits=digits)
    thresholds = np.array([0.2, 0.4, 0.6, 0.8])
    score = label_score(labels, probabilities, thresholds, intervals=False)
    values = {name: estimate.value for name, estimate in score.estimates.items()}
    wanted = {"exact": accuracy_score(labels, probabilities >= thresholds)}
    for average, name in (("macro", "map"), ("micro", "micro_map")):
        wanted[name] = average_precision_score(labels, probabilities, average=average)
    for name, at in (("f1", 0.5), ("f1_tuned", thresholds)):
        for average in ("macro", "micro"):
            wanted[f"{average}_{name}"] = f1_score(
                labels, probabilities >= at, average=average, zero_division=0
            )
    assert values == pytest.approx(wanted, rel=0, abs=1e-12)
    ap = average_precision_score(labels, probabilities, average=None)
    f1 = f1_score(labels, probabilities >= 0.5, average=None, zero_division=0)
    np.testing.assert_allclose(score.ap, ap, **TOLERANCE)
    np.testing.assert_allclose(score.f1, f1, **TOLERANCE)
    assert score.right == round(values["exact"] * 200)


@pytest.mark.parametrize(("thresholds", "at"), [([0.2, 0.4, 0.6, 0.8], "the thresholds"), (None, "0.5")])
def test_one_line_has_all_measures_at_the_thresholds_and_says_so(thresholds, at: str) -> None:
    labels, probabilities = sample(3)
    cuts = None if thresholds is None else np.array(thresholds)
    answers = probabilities >= (0.5 if cuts is None else cuts)
    line = label_score(labels, probabilities, cuts, intervals=False).compared()
    _, measures = line.split(f"; at {at}: ")
    macro, micro = (f1_score(labels, answers, average=average) for average in ("macro", "micro"))
    assert measures.startswith(f"macro F1 {macro:.2%} (")
    assert f", micro F1 {micro:.2%} (" in measures
    assert f", all classes right {accuracy_score(labels, answers):.2%} (" in measures


def test_a_constant_answer_has_the_prevalence_as_its_average_precision() -> None:
    labels, probabilities = sample(0)
    estimates = label_score(labels, probabilities, intervals=False).estimates
    assert estimates["map"].constant == pytest.approx(labels.mean())
    always = f1_score(labels, np.ones_like(labels), average="macro")
    assert estimates["macro_f1"].constant == pytest.approx(always)
    some = [f1_score(labels, np.tile(np.arange(4) >= k, (200, 1)), average="micro") for k in range(4)]
    assert estimates["micro_f1"].constant == pytest.approx(max(some))


def test_classes_and_images_without_labels_divide_nothing_by_zero() -> None:
    labels, probabilities = sample(1, N=30)
    labels[:, 2] = False
    labels[:10] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score = label_score(labels, probabilities)
        empty = label_score(np.zeros((5, 3), np.bool_), np.full((5, 3), 0.1))
        one = label_score(labels[20:21], probabilities[20:21])
    assert np.isnan([score.ap[2], *score.ap_interval[2]]).all()
    assert score.estimates["map"].value == pytest.approx(np.nanmean(score.ap))
    assert np.isnan(empty.estimates["map"].value)
    assert empty.estimates["exact"].value == 1
    assert one.total == 1


def test_a_perfect_model_has_an_interval_that_is_not_empty() -> None:
    labels, _ = sample(3)
    score = label_score(labels, labels.astype(np.float32))
    assert all(each.value == each.high == 1 and each.low < 1 for each in score.estimates.values())
    assert not score.no_better
    assert not score.warning()


def test_95_of_100_intervals_contain_the_truth() -> None:
    truth = label_score(*sample(4, N=50_000, digits=9), intervals=False)
    scores = [label_score(*sample(seed, N=300, digits=9)) for seed in range(10, 60)]
    for name in ("map", "micro_map", "macro_f1", "micro_f1", "exact"):
        value = truth.estimates[name].value
        inside = np.mean([each.estimates[name].low <= value <= each.estimates[name].high for each in scores])
        # 50 samples show the share with a standard error of 3 points.
        assert 0.9 <= inside <= 0.98, (name, inside)


@law
@given(seed=st.integers(0, 1000), digits=st.integers(1, 4))
def test_no_threshold_has_a_higher_f1(seed: int, digits: int) -> None:
    labels, probabilities = sample(seed, N=40, digits=digits)
    thresholds = best_thresholds(labels, probabilities)
    for own, scores, threshold in zip(labels.T, probabilities.T, thresholds, strict=True):
        found, *others = (
            2 * (own & answers).sum() / max(1, own.sum() + answers.sum())
            for answers in (scores >= other for other in (threshold, 0.5, *scores))
        )
        assert found == pytest.approx(max(others)) or not own.any()


def test_the_threshold_is_even_where_no_other_is_better() -> None:
    labels = np.array([[True, False], [False, False]])
    assert best_thresholds(labels, np.array([[0.9, 0.3], [0.2, 0.6]])).tolist() == [0.5, 0.5]
    assert 0.2 < best_thresholds(labels, np.array([[0.4, 0.3], [0.2, 0.6]]))[0] < 0.4


@law
@given(N=st.integers(1, 30), K=st.integers(1, 6), seed=st.integers(0, 10**6), count=st.integers(1, 40))
def test_pairs_are_counted_and_the_most_frequent_come_first(N: int, K: int, seed: int, count: int) -> None:
    labels, answers = np.random.default_rng(seed).random((2, N, K)) < 0.4
    together = {(i, j): int((labels[:, i] & labels[:, j]).sum()) for i, j in combinations(range(K), 2)}
    missed, wrong = labels & ~answers, ~labels & answers
    confused = {(i, j): int((missed[:, i] & wrong[:, j]).sum()) for i, j in permutations(range(K), 2)}
    for found, counts in (
        (pairs_together(labels, count), together),
        (pairs_confused(labels, answers, count), confused),
    ):
        ranked = sorted((-number, pair) for pair, number in counts.items() if number)
        assert found == [ClassPair(*pair, -number) for number, pair in ranked[:count]]
