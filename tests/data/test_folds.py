"""Folds hold every class and divide no group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from tests.probing.digits import DIGITS, PROPERTIES
from tests.training import write_folder
from vitascope.data.datasets import open_data
from vitascope.data.folds import Division
from vitascope.data.splits import OUT_OF_FOLD, Splits
from vitascope.data.table_options import TableOptions
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError
from vitascope.run.measures import wilson_interval


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


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("folds") / "photos", per_class=20)


def fold_of(place: Path, fold: int | None, folds: int = 4, **options: Any) -> Splits:
    return open_data(str(place), folds=folds, fold=fold, **options)


def test_each_image_tests_one_fold_and_the_others_are_divided(photos: Path) -> None:
    whole = fold_of(photos, None)
    parts = [fold_of(photos, fold) for fold in range(4)]
    for splits in parts:
        sources = [source for images in splits.parts.values() for source in images.sources]
        assert sorted(sources) == sorted(whole.train.sources)
        assert len(splits.val) == 4  # a tenth of all
        assert splits.measured.truth.counts.tolist() == [5, 5]
    tested = [source for splits in parts for source in splits.measured.sources]
    assert sorted(tested) == sorted(whole.train.sources)
    for fold, splits in enumerate(parts):
        inside = np.flatnonzero(whole.train.folds == str(fold + 1))
        assert splits.measured.sources == [whole.train.sources[place] for place in inside]
    assert (len(whole.val), whole.test, whole.measured.name) == (0, None, OUT_OF_FOLD)


def test_the_data_s_own_test_images_test_no_fold(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", per_class=8)
    write_folder(tmp_path / "val", per_class=4)
    write_folder(tmp_path / "test", per_class=3)
    whole, one = fold_of(tmp_path, None), fold_of(tmp_path, 0)
    assert (len(whole.train), len(whole.measured), whole.measured.name) == (24, 6, "test")
    assert not any("/test/" in str(source) for images in one.parts.values() for source in images.sources)


def write_table(
    place: Path, photos: Path, fold: Callable[[int], object], group: Callable[[int], object]
) -> Path:
    rows = ["image,label,fold,patient"]
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        rows.append(f"{path},{path.parent.name},{fold(number)},{group(number)}")
    place.write_text("\n".join(rows))
    return place


def test_a_table_s_folds_are_taken_and_its_groups_kept(photos: Path, tmp_path: Path) -> None:
    place = write_table(tmp_path / "t.csv", photos, lambda n: "abc"[n % 3], lambda n: n // 4)
    whole = fold_of(place, None, 3)
    names = sorted(photos.rglob("*.png"))
    by_name = dict(zip(map(str, whole.train.sources), whole.train.folds, strict=True))
    assert [by_name[str(name)] for name in names] == [str(1 + n % 3) for n in range(len(names))]
    with pytest.raises(UserError, match=r"column of folds has 3 values, and folds=4: set folds=3"):
        fold_of(place, 0, 4)
    grouped = TableOptions(columns=("group=patient", "fold="))
    folds = fold_of(place, None, 4, table=grouped).train
    for group in np.unique(folds.groups):
        assert len(np.unique(folds.folds[folds.groups == group])) == 1
    with pytest.raises(UserError, match="2 images without a fold"):
        fold_of(write_table(place, photos, lambda n: n % 3 if n > 1 else "", lambda n: n), 0, 3)


def test_rare_classes_are_named_or_stay_in_training(tmp_path: Path) -> None:
    write_folder(tmp_path, per_class=6, classes=("a", "b", "c"))
    for path in sorted((tmp_path / "b").iterdir())[2:]:
        path.unlink()
    with pytest.raises(UserError, match=r"class 'b' has 2 images; 3 folds need one each, so at least 3"):
        fold_of(tmp_path, 0, 3)
    kept = TableOptions(rare="train")
    parts = [fold_of(tmp_path, fold, 3, table=kept) for fold in range(3)]
    assert [splits.measured.truth.counts.tolist() for splits in parts] == [[2, 0, 2]] * 3
    assert (fold_of(tmp_path, None, 3, table=kept).train.folds == "").sum() == 2
    place = write_table(tmp_path / "t.csv", tmp_path / "a", lambda n: "", lambda n: n // 3)
    place.write_text(place.read_text().replace(",a,", ",x,", 3))
    with pytest.raises(UserError, match="fewer groups than folds=3"):
        fold_of(place, 0, 3, table=TableOptions(columns=("group=patient", "fold=")))


def test_the_interval_of_an_accuracy_out_of_fold_holds_that_of_a_large_test_set() -> None:
    def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        labels = random.integers(0, 3, count)
        return random.normal(size=(count, 6)) + 1.6 * np.eye(3, 6)[labels], labels

    many, truth = drawn(10**6, 5000)
    held = 0
    for seed in range(200):
        features, labels = drawn(seed, 200)
        folds = Division.of(ClassIndices(labels, ("a", "b", "c"))).folds(seed)
        right, accuracies = 0, []
        for fold in range(5):
            inside = folds == fold
            model = LinearDiscriminantAnalysis().fit(features[~inside], labels[~inside])
            right += int((model.predict(features[inside]) == labels[inside]).sum())
            accuracies.append((model.predict(many) == truth).mean())
        low, high = wilson_interval(right, len(labels))
        held += low <= np.mean(accuracies) <= high
    assert 0.9 <= held / 200 <= 1
