import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law
from vitascope.data.targets import ClassIndices, ClassSets, Targets, targets_from_json

NAMES = ("ant", "bee", "cat")
sets_of_three = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=40).map(
    lambda rows: np.array(rows, np.bool_).reshape(-1, 3)
)
labels_of_three = st.lists(st.integers(0, 2), max_size=40).map(lambda labels: np.array(labels, np.int64))


@law
@given(labels=labels_of_three)
def test_labels_are_divided_joined_and_read_back_from_json(labels: np.ndarray) -> None:
    targets = ClassIndices(labels, NAMES)
    by_class = targets.by_class()
    assert [places.tolist() for places in by_class] == [
        np.flatnonzero(labels == k).tolist() for k in range(3)
    ]
    first, rest = np.split(np.arange(len(labels)), [len(labels) // 3])
    assert targets.take(first).joined(targets.take(rest)) == targets
    assert targets_from_json(json.loads(json.dumps(targets.to_json())), NAMES) == targets


def test_an_image_may_have_any_number_of_classes() -> None:
    targets = ClassSets.of_names([("cat", "ant"), (), ("bee",)], NAMES)
    assert targets.labels.tolist() == [[True, False, True], [False] * 3, [False, True, False]]
    assert targets.counts.tolist() == [1, 1, 1]
    assert targets.names() == [("ant", "cat"), (), ("bee",)]
    assert [places.tolist() for places in targets.by_class()] == [[0], [2], [0]]
    assert targets.shares(torch.from_numpy(targets.labels)).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


@law
@given(labels=sets_of_three)
def test_sets_of_classes_are_read_back_from_json(labels: np.ndarray) -> None:
    targets = ClassSets(labels, NAMES)
    if len(labels):
        assert targets_from_json(json.loads(json.dumps(targets.to_json())), NAMES) == targets
    assert ClassSets.of_names(targets.names(), NAMES) == targets


def test_values_that_are_no_labels_of_the_classes_are_rejected() -> None:
    for values in ([[0], 1], [[0, 3]], [[True]], [["ant"]], [[0.0]]):
        with pytest.raises(ValueError, match="of its 3 classes"):
            targets_from_json(values, NAMES)
    for value in (3, -1, 0.0, True, "0", None, [0], 10**30):
        with pytest.raises(ValueError, match="without a label of its 3 classes"):
            targets_from_json([0, value], NAMES)


@pytest.mark.parametrize("kind", [ClassIndices, ClassSets])
def test_classes_of_one_name_in_two_unicode_forms_are_one(kind: type[Targets]) -> None:
    names = ("caf\u00e9", "dog", "cafe\u0301")
    rows = [("dog",), ("cafe\u0301",), ("caf\u00e9",)]
    merged = kind.of_names(rows, names).merged()
    assert merged.class_names == ("caf\u00e9", "dog")
    assert merged.names() == [("dog",), ("caf\u00e9",), ("caf\u00e9",)]
    assert kind.of_names(rows[:1], ("ant", "dog")).merged().class_names == ("ant", "dog")


def test_labels_follow_their_names_into_another_list_of_classes() -> None:
    targets = ClassIndices(np.array([2, 0, 1]), NAMES).in_classes(("zebra", "cat", "bee", "ant"))
    assert targets.labels.tolist() == [1, 3, 2]
    assert targets.names() == [("cat",), ("ant",), ("bee",)]


def test_differing_labels_are_found_by_pair() -> None:
    targets = ClassIndices(np.array([0, 1, 0]), NAMES)
    assert targets.differ(np.array([0, 0]), np.array([1, 2])).tolist() == [True, False]
    assert targets.differ(np.array([], np.int64), np.array([], np.int64)).tolist() == []


def test_other_labels_or_classes_are_other_targets_and_uneven_from_a_ratio_on() -> None:
    targets = ClassIndices(np.array([0, 1]), NAMES)
    assert targets != ClassIndices(np.array([0, 2]), NAMES)
    assert targets != ClassIndices(np.array([0, 1]), NAMES[::-1])
    for counts, uneven in (([3, 1, 0], False), ([4, 1, 0], True), ([9, 0, 0], False)):
        assert ClassIndices(np.repeat(np.arange(3), counts), NAMES).uneven == uneven


def test_predictions_are_compared_with_loops() -> None:
    targets = ClassIndices(np.array([0, 2, 2, 1]), ("a", "b", "c"))
    classes = np.array([0, 2, 1, 0])
    assert targets.correct(classes).tolist() == [True, True, False, False]
    expected = np.zeros((3, 3), dtype=np.int64)
    for true, predicted in zip(targets.labels, classes, strict=True):
        expected[true, predicted] += 1
    np.testing.assert_array_equal(targets.confusion(classes), expected)


def test_an_answer_is_right_with_exactly_the_classes_of_an_image() -> None:
    targets = ClassSets(np.array([[True, False], [True, True], [False, False]]), NAMES[:2])
    answers = np.array([[True, True], [True, True], [False, False]])
    assert targets.correct(answers).tolist() == [False, True, True]
