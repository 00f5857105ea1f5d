"""Wrong labels are found by classifiers that did not see them; classes that are one are reported."""

import numpy as np
import pytest

from tests.analysis.probing.digits import DIGITS, PIXELS, PROPERTIES, drawn
from vitascope.analysis.auditing.labels import confusable_names, held_out_probabilities, wrong_labels
from vitascope.data.folds import Division
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError

SOME = drawn(1)[:600]
FEATURES = PIXELS[SOME]
NOISE = np.random.default_rng(0).normal(size=(600, 8))


def flipped() -> ClassIndices:
    labels = DIGITS.labels[SOME].copy()
    labels[:30] = (labels[:30] + 3) % 10
    return ClassIndices(labels, DIGITS.class_names)


@pytest.fixture(scope="module")
def probabilities() -> np.ndarray:
    return held_out_probabilities([NOISE, FEATURES], Division.of(flipped()))


def test_wrong_labels_are_ranked_first_with_the_true_class(probabilities: np.ndarray) -> None:
    findings = wrong_labels(flipped(), probabilities)
    planted = [finding for finding in findings if finding.image < 30]
    assert len(planted) > 20
    assert len(findings) < 45
    right = [each.label == str(DIGITS.labels[SOME][each.image]) for each in planted if each.label]
    assert np.mean(right) > 0.9
    assert [each.score for each in findings] == sorted((each.score for each in findings), reverse=True)


def test_the_body_that_predicts_better_is_used_and_is_calibrated(probabilities: np.ndarray) -> None:
    only = held_out_probabilities([FEATURES], Division.of(flipped()))
    assert np.array_equal(probabilities, only)
    accuracy = (probabilities.argmax(axis=1) == flipped().labels).mean()
    assert abs(probabilities.max(axis=1).mean() - accuracy) < 0.05


def test_groups_stay_together() -> None:
    """Noise is the same within a group, so it tells the labels where groups are divided."""
    groups = np.repeat(np.arange(60), 10)
    targets = ClassIndices(np.repeat(np.arange(60) % 2, 10), ("a", "b"))
    noise = np.random.default_rng(0).normal(size=(60, 40))[groups]
    right = [
        (held_out_probabilities([noise], division).argmax(axis=1) == targets.labels).mean()
        for division in (Division.of(targets), Division.of(targets, groups))
    ]
    assert right[0] > 0.9
    assert right[1] < 0.75


def test_missing_and_superfluous_classes_are_found() -> None:
    labels = PROPERTIES.labels[SOME].copy()
    labels[:15, 0] = ~labels[:15, 0]
    targets = ClassSets(labels, PROPERTIES.class_names)
    probabilities = held_out_probabilities([FEATURES], Division.of(targets))
    findings = wrong_labels(targets, probabilities)
    assert len({each.image for each in findings} & set(range(15))) > 9
    assert all("'even'" in each.detail for each in findings if each.image < 15)


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 0, 1]], ids=["one class", "a class of one image"])
def test_labels_that_no_classifier_can_learn_are_rejected(labels: list[int]) -> None:
    with pytest.raises(UserError):
        held_out_probabilities([PIXELS[:3]], Division.of(ClassIndices(np.array(labels), ("a", "b"))))


def test_names_of_one_class() -> None:
    one = ("Cat cats", "box Boxes", "berry berries", "café CAFE", "t-shirt T_shirt", "ice_cream icecream")
    for names in (*one, "cat car", "glass glas", "1_0 10", "か が"):
        first, second = names.split()
        findings = confusable_names(ClassIndices(np.array([0, 1, 1]), (first, second)), None)
        assert len(findings) == (names in one)
        assert all(finding.image is None and repr(first) in finding.detail for finding in findings)


def test_a_class_that_was_divided_at_random_is_found() -> None:
    labels = DIGITS.labels.copy()
    threes = np.flatnonzero(labels == 3)
    labels[np.random.default_rng(0).permutation(threes)[:60]] = 10
    targets = ClassIndices(labels, (*DIGITS.class_names, "tres"))
    (finding,) = confusable_names(targets, held_out_probabilities([PIXELS], Division.of(targets)))
    assert "'3' may be 'tres'" in finding.detail
    few = targets.take(np.flatnonzero(np.isin(labels, (3, 10)))[:12])
    assert confusable_names(few, np.full((12, 11), 1 / 11)) == []


def test_classes_that_are_hard_to_tell_apart_are_two() -> None:
    """A third of the images is confused, and yet the probabilities tell them apart."""
    labels = np.arange(400) % 2
    shift = np.where(labels == 1, 0.5, -0.5)
    second = 1 / (1 + np.exp(-np.random.default_rng(0).normal(shift, size=400)))
    probabilities = np.stack([1 - second, second], axis=1)
    assert 0.25 < (probabilities.argmax(axis=1) != labels).mean() < 0.4
    assert confusable_names(ClassIndices(labels, ("cat", "dog")), probabilities) == []
