import numpy as np
import pytest
import torch

from tests.contracts.target import check_target
from vitascope.data.targets import ClassIndices, ClassSets, Targets, targets_from_json

NAMES = ("ant", "bee", "cat")


def targets_of(kind: str, count: int, random: np.random.Generator, *, absent: bool) -> Targets:
    """Labels of random images; none has the last class if it is absent."""
    if kind == "classes":
        return ClassIndices(random.integers(0, 2 if absent else 3, count), NAMES)
    labels = random.random((count, 3)) < [0.5, 0.3, 0.0 if absent else 0.3]
    unknown = (random.random((count, 3)) < 0.3) & ~labels
    return ClassSets(labels, NAMES, unknown if kind == "partly unknown" and unknown.any() else None)


@pytest.mark.parametrize("count", [0, 1, 2, 16])
@pytest.mark.parametrize("kind", ["classes", "several", "partly unknown"])
def test_target(kind: str, count: int) -> None:
    random = np.random.default_rng(count)
    for absent in (False, True):
        check_target(targets_of(kind, count, random, absent=absent), random)


def test_an_image_may_have_any_number_of_classes() -> None:
    targets = ClassSets.of_names([("cat", "ant"), (), ("bee",)], NAMES)
    assert targets.labels.tolist() == [[True, False, True], [False] * 3, [False, True, False]]
    assert targets.counts.tolist() == [1, 1, 1]
    assert targets.names() == [("ant", "cat"), (), ("bee",)]
    assert [places.tolist() for places in targets.by_class()] == [[0], [2], [0]]
    assert targets.shares(torch.from_numpy(targets.labels)).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


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


def test_other_labels_or_classes_are_other_targets_and_uneven_from_a_ratio_on() -> None:
    targets = ClassIndices(np.array([0, 1]), NAMES)
    assert targets != ClassIndices(np.array([0, 2]), NAMES)
    assert targets != ClassIndices(np.array([0, 1]), NAMES[::-1])
    for counts, uneven in (([3, 1, 0], False), ([4, 1, 0], True), ([9, 0, 0], False)):
        assert ClassIndices(np.repeat(np.arange(3), counts), NAMES).uneven == uneven
