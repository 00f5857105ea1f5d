"""Wrong labels are listed, and the least probable ones first."""

import numpy as np
import pytest

from tests.analysis.probing.digits import DIGITS, PIXELS, PROPERTIES, drawn
from vitascope.analysis.probing.label_errors import Suspect, suspects
from vitascope.data.folds import Division
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.training.linear.classifiers import LogisticRegression
from vitascope.training.linear.selection import out_of_fold

SOME = drawn(0)[:500]


def suspects_among(targets: ClassIndices | ClassSets) -> list[Suspect]:
    folds = Division.of(targets).folds()
    (held_out,) = out_of_fold(LogisticRegression((0.01,)), PIXELS[SOME], targets, folds)
    listed = suspects(targets, held_out)
    assert len({suspect.image for suspect in listed} & set(range(10))) >= 7
    assert [each.confidence for each in listed] == sorted(each.confidence for each in listed)
    assert listed[:3] == suspects(targets, held_out, 3)
    return listed


def test_wrong_labels_are_suspects() -> None:
    labels = DIGITS.labels[SOME].copy()
    labels[:10] = (labels[:10] + 1) % 10
    listed = suspects_among(ClassIndices(labels, DIGITS.class_names))
    assert len(listed) < 30
    for suspect in listed:
        assert suspect.image >= 10 or suspect.suggested == str(DIGITS.labels[SOME][suspect.image])
        assert 0 < suspect.margin <= 1


def test_missing_and_superfluous_classes_are_suspects() -> None:
    labels = PROPERTIES.labels[SOME].copy()
    labels[:10] = ~labels[:10]
    for suspect in suspects_among(ClassSets(labels, PROPERTIES.class_names)):
        assert (suspect.given is None) != (suspect.suggested is None)
        k = PROPERTIES.class_names.index(suspect.given or suspect.suggested or "")
        assert labels[suspect.image, k] == (suspect.given is not None)


def test_a_classifier_that_is_never_sure_suspects_nothing() -> None:
    probabilities = np.random.default_rng(0).dirichlet(np.full(10, 20.0), size=500)
    assert probabilities.max() < 0.5
    assert suspects(ClassIndices(np.arange(500) % 10, DIGITS.class_names), probabilities) == []


def test_self_confidence_is_the_probability_of_the_label_as_it_is() -> None:
    probabilities = np.array([[0.9, 0.1], [0.3, 0.7]])
    one = ClassIndices(np.array([1, 1]), ("a", "b")).self_confidence(probabilities)
    several = ClassSets(np.array([[True, True], [False, False]]), ("a", "b")).self_confidence(probabilities)
    assert one.tolist() == [[0.1], [0.7]]
    assert several == pytest.approx(np.array([[0.9, 0.1], [0.7, 0.3]]))
