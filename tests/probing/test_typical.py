"""Typical images, wrong labels and confused classes."""

import numpy as np

from tests.probing.digits import DIGITS, PIXELS, PROPERTIES, drawn
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.probing.classifiers import LogisticRegression
from vitascope.probing.folds import Division
from vitascope.probing.selection import out_of_fold
from vitascope.probing.typical import class_examples, confused, suspects

SOME = drawn(0)[:500]


def test_examples_are_the_extremes_of_their_class() -> None:
    targets = ClassIndices(np.array([0, 0, 0, 0, 1, 1]), ("a", "b"))
    own = np.array([0.9, 0.1, 0.5, 0.7, 0.2, 0.8])
    probabilities = np.where(targets.labels[:, None] == np.arange(2), own[:, None], 1 - own[:, None])
    a, b = class_examples(targets, probabilities, 2)
    assert a.most.tolist() == [0, 3]
    assert a.least.tolist() == [1, 2]
    assert b.most.tolist() == [5]
    assert b.least.tolist() == [4]


def test_wrong_labels_are_suspects() -> None:
    labels = DIGITS.labels[SOME].copy()
    wrong = np.arange(10)
    labels[wrong] = (labels[wrong] + 1) % 10
    targets = ClassIndices(labels, DIGITS.class_names)
    (held_out,) = out_of_fold(
        LogisticRegression((0.01,)), PIXELS[SOME], targets, Division.of(targets).folds()
    )
    found = suspects(targets, held_out, 20)
    assert len({each.image for each in found} & set(wrong.tolist())) >= 7
    right = [each for each in found if each.image in wrong]
    assert all(each.suggested == DIGITS.class_names[DIGITS.labels[SOME][each.image]] for each in right)
    assert [each.margin for each in found] == sorted((each.margin for each in found), reverse=True)


def test_missing_and_superfluous_classes_are_suspects() -> None:
    labels = PROPERTIES.labels[SOME].copy()
    labels[:10] = ~labels[:10]
    targets = ClassSets(labels, PROPERTIES.class_names)
    (held_out,) = out_of_fold(
        LogisticRegression((0.01,)), PIXELS[SOME], targets, Division.of(targets).folds()
    )
    found = suspects(targets, held_out, 30)
    assert len({each.image for each in found} & set(range(10))) >= 7
    for each in found:
        assert (each.given is None) != (each.suggested is None)
        k = PROPERTIES.class_names.index(each.given or each.suggested or "")
        assert labels[each.image, k] == (each.given is not None)


def test_confused_pairs_are_counted() -> None:
    targets = ClassIndices(np.array([0, 0, 0, 1]), ("a", "b"))
    (pair,) = confused(targets, np.array([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3], [0.1, 0.9]]))
    assert (pair.first, pair.second, pair.count) == (0, 1, 2)
    sets = ClassSets(np.array([[True, False], [True, True]]), ("a", "b"))
    (pair,) = confused(sets, np.array([[0.1, 0.9], [0.8, 0.9]]))
    assert (pair.first, pair.second, pair.count) == (0, 1, 1)
