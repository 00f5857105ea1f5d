"""`fit_labels`: the classifier is scikit-learn's, and what it tells are laws of its out-of-fold answers."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.preprocessing import StandardScaler

from tests.models import law
from vitascope.analysis.labelling.fit import CLASSIFIER, LEAST, LabelFit, fit_labels, share_interval
from vitascope.analysis.probing.label_errors import suspects
from vitascope.data.targets import ClassIndices, ClassSets, Targets

Array = npt.NDArray[Any]
NAMES = ("ant", "bee", "cat", "dog")


def pictures(count: int, K: int = 3, gap: float = 2.0, seed: int = 0, width: int = 6) -> tuple[Array, Array]:
    """Features (count, width) around one centre per class, and the classes, (count,)."""
    generator = np.random.default_rng(seed)
    classes = generator.integers(0, K, count)
    noise = generator.normal(size=(count, width))
    return (gap * np.eye(K, width)[classes] + noise).astype(np.float32), classes


def indices(classes: Array, K: int = 3) -> ClassIndices:
    return ClassIndices(classes.astype(np.int64), NAMES[:K])


def sets(classes: Array, K: int = 3) -> ClassSets:
    """Each picture has its class, and every third one the next class too."""
    labels = np.eye(K, dtype=np.bool_)[classes]
    labels[::3] |= np.eye(K, dtype=np.bool_)[(classes[::3] + 1) % K]
    return ClassSets(labels, NAMES[:K])


def reference(features: Array, targets: Targets, others: Array) -> Array:
    """Probabilities of other pictures by scikit-learn."""
    scaler = StandardScaler().fit(features)
    train, test = scaler.transform(features), scaler.transform(others)
    model = Reference(C=CLASSIFIER.strengths[0], tol=1e-8, max_iter=5000)
    if isinstance(targets, ClassIndices):
        return model.fit(train, targets.labels).predict_proba(test)
    return np.stack([model.fit(train, own).predict_proba(test)[:, 1] for own in targets.labels.T], axis=1)


def known(value: Any) -> Any:
    """A value that is not None."""
    assert value is not None
    return value


@pytest.mark.parametrize("kind", [indices, sets])
@pytest.mark.parametrize("n", [30, 200])
def test_probabilities_equal_scikit_learn(kind: Any, n: int) -> None:
    features, classes = pictures(300, seed=n)
    rows = np.random.default_rng(1).permutation(300)[:n]
    targets = kind(classes)
    found = fit_labels(features, rows, targets.take(rows))
    expected = reference(features[rows], targets.take(rows), features)
    assert np.abs(known(found.probabilities) - expected).max() < 2e-3
    folds = known(found.folds)
    for fold in range(10):
        seen, held = rows[folds != fold], folds == fold
        expected = reference(features[seen], targets.take(seen), features[rows[held]])
        assert np.abs(known(found.held_out)[held] - expected).max() < 2e-3


def test_copies_are_in_one_fold() -> None:
    features, classes = pictures(60)
    groups = np.arange(60) // 3
    rows = np.random.default_rng(0).permutation(60)[:50]
    folds = known(fit_labels(features, rows, indices(classes[rows]), groups=groups).folds)
    for group in range(20):
        assert len(set(folds[groups[rows] == group])) <= 1
    assert len(set(folds)) > 1


@given(st.integers(0, 99), st.integers(0, 99))
@law
def test_interval_is_the_exact_one_of_scipy(right: int, wrong: int) -> None:
    total = max(1, right + wrong)
    right = min(right, total)
    (low,), (high,) = share_interval(np.array([right]), np.array([total]))
    expected = binomtest(right, total).proportion_ci(0.95, method="exact")
    assert low == pytest.approx(expected.low)
    assert high == pytest.approx(expected.high)


def right_answers(fit: LabelFit, classes: Array) -> tuple[Array, Array]:
    """Confidences of the out-of-fold answers, and whether they are right."""
    held_out = known(fit.held_out)
    return held_out.max(axis=1), held_out.argmax(axis=1) == classes


def best_set(confidences: Array, right: Array) -> tuple[float, int, int, float] | None:
    """The least confidence, size, right answers and lower limit of the set to accept, by trying all sizes."""
    best = None
    for size in range(36, len(right) + 1):  # 35 right answers of 35 have a limit below 0.9
        surest = np.argsort(-confidences)[:size]
        count = int(right[surest].sum())
        low = binomtest(count, size).proportion_ci(0.95).low
        if low < LEAST:
            break
        if best is None or low >= best[3]:
            best = confidences[surest[-1]], size, count, low
    return best


@pytest.mark.parametrize("gap", [1.0, 2.5, 4.0, 8.0])
@pytest.mark.parametrize("n", [16, 60, 150])
def test_answers_as_sure_as_the_best_known_set_are_accepted(gap: float, n: int) -> None:
    features, classes = pictures(600, gap=gap, seed=n)
    rows, taken = np.arange(n), np.arange(600) % 5 == 0
    fit = fit_labels(features, rows, indices(classes[rows]), taken=taken)
    best = best_set(*right_answers(fit, classes[rows]))
    probabilities = known(fit.probabilities)
    free = np.setdiff1d(np.flatnonzero(~taken), rows)
    sure = free[probabilities[free].max(axis=1) >= (2 if best is None else best[0])]
    accepted = np.concatenate([np.arange(0), *(acceptance.rows for acceptance in fit.acceptances)])
    assert set(accepted) == set(sure)
    for acceptance in fit.acceptances:
        _, size, count, low = known(best)
        assert acceptance.value == pytest.approx((count + 1) / (size + 2))
        assert acceptance.low == pytest.approx(low)
        assert acceptance.low >= LEAST
        own = probabilities[acceptance.rows]
        assert set(own.argmax(axis=1)) == {NAMES.index(acceptance.label)}
        assert (np.diff(own.max(axis=1)) >= 0).all()


def test_only_judges_measure_and_accept() -> None:
    features, classes = pictures(400, gap=6.0)
    rows = np.arange(200)
    judges = rows % 2 == 0
    fit = fit_labels(features, rows, indices(classes[rows]), judges=judges)
    confidences, right = right_answers(fit, classes[rows])
    assert (known(fit.score).right, known(fit.score).total) == (right[judges].sum(), 100)
    assert fit.acceptances[0].low == pytest.approx(known(best_set(confidences[judges], right[judges]))[3])
    none = fit_labels(features, rows, indices(classes[rows]), judges=np.zeros(200, np.bool_))
    assert none.score is None
    assert "at random" in none.reason
    assert none.acceptances == ()
    assert np.array_equal(known(none.probabilities), known(fit.probabilities))


@pytest.mark.parametrize("kind", [indices, sets])
def test_judges_do_not_steer(kind: Any) -> None:
    features, classes = pictures(100)
    rows, judges = np.arange(60), np.arange(60) % 3 == 2
    targets = kind(classes)
    margins = known(fit_labels(features, rows, targets.take(rows), judges=judges).margins)
    p = known(fit_labels(features, rows[~judges], targets.take(rows[~judges])).probabilities)
    top = np.sort(p, axis=1)
    expected = top[:, -1] - top[:, -2] if kind is indices else np.abs(p - (1 - p)).min(axis=1)
    assert np.allclose(margins, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [indices, sets])
def test_order_of_the_pictures_changes_nothing(kind: Any) -> None:
    features, classes = pictures(300, gap=4.0)
    features[150:] = features[:150]  # ties
    rows, generator = np.arange(0, 300, 2), np.random.default_rng(3)
    targets, judges = kind(classes), np.tile(generator.random(75) < 0.9, 2)
    groups, taken = np.arange(300) % 150, generator.random(300) < 0.1
    mixed, some = generator.permutation(300), generator.permutation(150)
    place = np.argsort(mixed)  # where each picture goes
    one = fit_labels(features, rows, targets.take(rows), judges=judges, taken=taken, groups=groups)
    other = fit_labels(
        features[mixed],
        place[rows[some]],
        targets.take(rows[some]),
        judges=judges[some],
        taken=taken[mixed],
        groups=groups[mixed],
    )
    assert np.allclose(known(one.probabilities)[mixed], known(other.probabilities), atol=1e-6)
    assert np.allclose(known(one.held_out)[some], known(other.held_out), atol=1e-6)
    assert known(one.score).value_and_limits == known(other.score).value_and_limits
    assert one.confused == other.confused
    confidences = [sorted(suspect.confidence for suspect in fit.suspects) for fit in (one, other)]
    assert confidences[0] == pytest.approx(confidences[1])
    for ours, theirs in zip(one.acceptances, other.acceptances, strict=True):
        assert set(place[ours.rows]) == set(theirs.rows)
        assert dataclasses.replace(ours, rows=theirs.rows).__dict__ == theirs.__dict__


@pytest.mark.parametrize("n", [0, 1, 2, 16])
@pytest.mark.parametrize("kind", [indices, sets])
def test_few_labels_have_a_reason_or_a_score(kind: Any, n: int) -> None:
    features, classes = pictures(40)
    fit = fit_labels(features, np.arange(n), kind(classes).take(np.arange(n)))
    assert (fit.probabilities is None) == (n < 2)
    assert (fit.score is None) == (n < 16)
    assert bool(fit.reason) == (n < 16)


@pytest.mark.parametrize("n", [1, 2, 16])
def test_one_class_has_no_classifier(n: int) -> None:
    features, _ = pictures(20)
    fit = fit_labels(features, np.arange(n), indices(np.zeros(n)))
    assert fit.probabilities is None
    assert "another class" in fit.reason


def test_a_class_of_one_picture_is_in_the_classifier_and_not_in_the_measure() -> None:
    features, classes = pictures(200, K=2)
    classes[7], features[7] = 2, features[7] + 9
    fit = fit_labels(features, np.arange(100), indices(classes[:100]))
    assert known(fit.probabilities)[7].argmax() == 2
    assert known(fit.score).total == 99
    assert "cat" in fit.reason
    assert 7 not in {suspect.image for suspect in fit.suspects}


def test_pictures_that_are_all_alike_get_the_shares_of_the_classes() -> None:
    features = np.ones((30, 5), np.float32)
    fit = fit_labels(features, np.arange(20), indices(np.repeat([0, 1], [15, 5])))
    assert np.allclose(known(fit.probabilities), [0.75, 0.25, 0])
    assert known(fit.score).right == 15
    assert fit.acceptances == ()


def test_several_classes_have_a_score_and_no_acceptances() -> None:
    features, classes = pictures(300, gap=9.0)
    fit = fit_labels(features, np.arange(200), sets(classes[:200]))
    assert known(fit.score).measure == "mAP"
    assert fit.acceptances == ()


def test_suspects_are_those_of_confident_learning_by_row() -> None:
    features, classes = pictures(120, gap=6.0)
    rows = np.arange(119, 19, -1)
    wrong = classes.copy()
    wrong[[40, 80]] = (classes[[40, 80]] + 1) % 3
    fit = fit_labels(features, rows, indices(wrong[rows]))
    expected = suspects(indices(wrong[rows]), known(fit.held_out))
    assert [suspect.image for suspect in fit.suspects] == [int(rows[suspect.image]) for suspect in expected]
    assert {40, 80} <= {suspect.image for suspect in fit.suspects}
    counts = {(a, b): 0 for a in NAMES for b in NAMES}
    for row, k in zip(rows, known(fit.held_out).argmax(axis=1), strict=True):
        counts[NAMES[wrong[row]], NAMES[k]] += wrong[row] != k
    assert known(fit.confused).count == max(counts.values())
    assert counts[known(fit.confused).label, known(fit.confused).said] == max(counts.values())
