"""Folds hold every class and divide no group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.probing.digits import DIGITS, PROPERTIES
from vitascope.data.folds import Division
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError


def test_folds_have_equal_shares_of_each_class() -> None:
    folds = Division.of(DIGITS).folds(seed=1)
    counts = np.array([DIGITS.take(np.flatnonzero(folds == fold)).counts for fold in range(5)])
    assert (np.abs(counts - DIGITS.counts / 5) <= 1).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([DIGITS, PROPERTIES]))
def test_no_fold_and_no_sample_divides_a_group(seed: int, targets: ClassIndices | ClassSets) -> None:
    few = targets.take(np.arange(300))
    groups = np.random.default_rng(seed).integers(0, 40, 300).astype(str)
    division = Division.of(few, groups)
    folds = division.folds(seed)
    assert set(folds.tolist()) == set(range(5))
    taken = division.sample(0.3, np.random.default_rng(seed))
    for group in np.unique(groups):
        assert len(np.unique(folds[groups == group])) == 1
        assert len(np.unique(taken[groups == group])) == 1


def test_seeds_give_other_folds_and_the_same_seed_the_same() -> None:
    division = Division.of(DIGITS)
    assert np.array_equal(division.folds(3), division.folds(3))
    assert not np.array_equal(division.folds(3), division.folds(4))


def test_a_rare_class_lowers_the_number_of_folds() -> None:
    targets = ClassIndices(np.array([0] * 9 + [1] * 3), ("many", "few"))
    folds = Division.of(targets).folds()
    assert folds.max() == 2
    assert all(targets.take(np.flatnonzero(folds == fold)).counts[1] == 1 for fold in range(3))


def test_a_class_of_two_groups_has_two_folds() -> None:
    targets = ClassIndices(np.array([0] * 9 + [1] * 4), ("many", "few"))
    groups = np.array([*"abcdefghi", *"xxyy"])
    assert Division.of(targets, groups).fold_count() == 2


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        ([0] * 9 + [1], "", "class 'few' has 1 image; cross-validation needs images in 2 folds"),
        ([0] * 9 + [1] * 3, "abcdefghixxx", "class 'few' has 3 images, all in one group; .* in 2 groups"),
        ([0] * 5, "", "all 5 images have the same label, many; a classifier needs different ones"),
    ],
)
def test_labels_that_cannot_be_divided_are_rejected(labels: list[int], groups: str, message: str) -> None:
    targets = ClassIndices(np.array(labels), ("many", "few"))
    with pytest.raises(UserError, match=message):
        Division.of(targets, np.array([*groups])).folds()


def test_a_single_image_of_one_of_several_classes_lowers_nothing() -> None:
    labels = PROPERTIES.labels[:100].copy()
    labels[:, 2] = False
    labels[7, 2] = True
    assert Division.of(ClassSets(labels, PROPERTIES.class_names)).fold_count() == 5
