import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import StratifiedGroupKFold

from tests.analysis.probing.digits import DIGITS, PROPERTIES
from tests.training import write_folder
from vitascope.data.datasets import find_copies, open_data
from vitascope.data.folds import Division, copies_across, division_of, splits_of_fold
from vitascope.data.measures import wilson_interval
from vitascope.data.splits import OUT_OF_FOLD, ImageSet, Inventory, Splits
from vitascope.data.table_options import TableOptions
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError


def test_folds_have_equal_shares_of_each_class() -> None:
    folds = Division.of(DIGITS).folds(seed=1)
    counts = np.array([DIGITS.take(np.flatnonzero(folds == fold)).counts for fold in range(5)])
    assert (np.abs(counts - DIGITS.counts / 5) <= 1).all()


@st.composite
def drawn_images(draw: st.DrawFn) -> ImageSet:
    """Images of one or several classes, with groups of any sizes or none, some of them copies."""
    N, K, seed = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(0, 10**6))
    random, names = np.random.default_rng(seed), tuple("abcd"[:K])
    G = draw(st.integers(1, N))
    groups = random.choice(G, N, p=random.dirichlet(np.full(G, draw(st.sampled_from([0.3, 1, 10])))))
    labels = {
        "by group": random.choice(K, G)[groups],
        "any": random.choice(K, N, p=random.dirichlet(np.ones(K))),
        "several": random.random((N, K)) < 0.3,
    }[draw(st.sampled_from(["by group", "any", "several"]))]
    targets = (ClassSets if labels.ndim == 2 else ClassIndices)(labels, names)
    sources = [np.array([[number]], np.uint8) for number in range(N)]
    for copy in random.choice(N, draw(st.sampled_from([0, N // 3]))).tolist():
        sources[copy] = sources[int(random.integers(N))]
    with_groups = draw(st.booleans())
    return ImageSet("all", sources, targets, **({"groups": groups.astype(str)} if with_groups else {}))


@settings(max_examples=25, deadline=None)
@given(drawn_images(), st.integers(2, 5), st.integers(0, 99), st.sampled_from(["reject", "train"]))
def test_every_fold_has_images_of_every_part_and_divides_no_group_and_no_copies(
    images: ImageSet, folds: int, seed: int, rare: Any
) -> None:
    def parts(fold: int | None) -> Splits:
        inventory = Inventory((images,), 1, None)
        return splits_of_fold(inventory, "DATA", folds, fold, seed=seed, rare=rare)

    try:
        whole = parts(None)
    except UserError:  # and none comes after the first fold was trained
        return
    division = division_of(images.identified())
    for fold in range(folds):
        splits = parts(fold)
        assert all(len(part) for part in splits.parts.values())
        rows = {id(source): row for row, source in enumerate(images.sources)}
        sets = [
            {division.sets[rows[id(source)]] for source in part.sources} for part in splits.parts.values()
        ]
        assert sum(map(len, sets)) == len(set().union(*sets))
    if whole.train.truth.exclusive and not len(images.groups):
        counts = [parts(fold).measured.truth.counts for fold in range(folds)]
        in_a_fold = whole.train.truth.take(np.flatnonzero(whole.train.folds != "")).counts
        if whole.train.truth.counts.sum() == len(np.unique(division.sets)):
            assert (np.abs(np.array(counts) - in_a_fold / folds) <= 1).all()


@settings(max_examples=25, deadline=None)
@given(drawn_images(), st.integers(0, 99))
def test_every_fold_of_a_cross_validation_has_an_image_and_every_class_is_outside_of_it(images, seed) -> None:
    division = division_of(images.identified())
    try:
        folds = division.folds(seed)
    except UserError:
        return
    assert set(folds.tolist()) == set(range(division.fold_count()))
    assert all(len(np.unique(folds[division.sets == number])) == 1 for number in division.sets)
    taken = division.sample(0.3, np.random.default_rng(seed))
    assert all(len(np.unique(taken[division.sets == number])) == 1 for number in division.sets)
    labels = division.targets.members
    if all(len(np.unique(labels[division.sets == number], axis=0)) == 1 for number in division.sets):
        for column, count in zip(labels.T, division.sets_by_class(), strict=True):
            if division.targets.exclusive and count:  # which has as many sets as there are folds
                assert set(folds[column].tolist()) == set(folds.tolist())


def test_folds_by_group_are_as_even_as_those_of_scikit_learn() -> None:
    ours, theirs = [], []
    for seed in range(40):
        random = np.random.default_rng(seed)
        N, K, count = int(random.integers(30, 200)), int(random.integers(2, 5)), int(random.integers(2, 6))
        groups = random.choice(3 * count, N, p=random.dirichlet(np.full(3 * count, 2.0)))
        labels = random.choice(K, N, p=random.dirichlet(np.full(K, 2.0)))
        targets = ClassIndices(labels, tuple("abcd"[:K]))
        splitter = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
        other = np.empty(N, np.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes of fewer images than folds
            for fold, (_, inside) in enumerate(splitter.split(labels, labels, groups)):
                other[inside] = fold
        for found, folds in ((ours, Division.of(targets, groups).folds(seed, count)), (theirs, other)):
            counts = np.array([targets.take(np.flatnonzero(folds == fold)).counts for fold in range(count)])
            assert len(np.unique(folds)) == count
            found.append((counts / np.maximum(targets.counts, 1)).std(axis=0).mean())
    assert np.mean(ours) <= np.mean(theirs) + 0.002


def test_seeds_give_other_folds_and_the_same_seed_the_same() -> None:
    division = Division.of(DIGITS)
    assert np.array_equal(division.folds(3), division.folds(3))
    assert not np.array_equal(division.folds(3), division.folds(4))


def test_rare_classes_and_classes_of_few_groups_lower_the_number_of_folds() -> None:
    rare = ClassIndices(np.array([0] * 9 + [1] * 3), ("many", "few"))
    folds = Division.of(rare).folds()
    assert folds.max() == 2
    assert all(rare.take(np.flatnonzero(folds == fold)).counts[1] == 1 for fold in range(3))
    of_two_groups = ClassIndices(np.array([0] * 9 + [1] * 4), ("many", "few"))
    assert Division.of(of_two_groups, np.array([*"abcdefghi", *"xxyy"])).fold_count() == 2
    labels = PROPERTIES.labels[:100].copy()
    labels[:, 2] = False
    labels[7, 2] = True  # a single image of one of several classes lowers nothing
    assert Division.of(ClassSets(labels, PROPERTIES.class_names)).fold_count() == 5


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        ([0] * 9 + [1], "", "class 'few' has 1 image; cross-validation needs images in 2 folds"),
        ([0] * 9 + [1] * 3, "abcdefghixxx", "class 'few' has 3 images, all in one group; .* in 2 groups"),
        ([], "", "no class has two different images or groups"),
        ([0] * 5, "", "all 5 images have the same label, many; a classifier needs different ones"),
    ],
)
def test_labels_that_cannot_be_divided_are_rejected(labels: list[int], groups: str, message: str) -> None:
    targets = ClassIndices(np.array(labels, np.int64), ("many", "few"))
    with pytest.raises(UserError, match=message):
        Division.of(targets, np.array([*groups])).folds()


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
    assert [by_name[str(name)] for name in names] == ["abc"[n % 3] for n in range(len(names))]
    assert [set(fold_of(place, fold, 3).measured.folds) for fold in range(3)] == [{"a"}, {"b"}, {"c"}]
    with pytest.raises(UserError, match=r"column of folds has 3 values, and folds=4: set folds=3"):
        fold_of(place, 0, 4)
    grouped = TableOptions(columns=("group=patient", "fold="))
    folds = fold_of(place, None, 4, table=grouped).train
    for group in np.unique(folds.groups):
        assert len(np.unique(folds.folds[folds.groups == group])) == 1
    for fold, message in (
        (lambda n: n % 3 if n > 1 else ("", -1)[n], r"2 images without a fold \(blank or -1\)"),
        (lambda n: 0, "1 value, and folds=3: leave the column out"),
    ):
        with pytest.raises(UserError, match=message):
            fold_of(write_table(place, photos, fold, lambda n: n), 0, 3)


def test_a_table_s_folds_that_divide_its_groups_are_rejected(photos: Path, tmp_path: Path) -> None:
    place = write_table(tmp_path / "t.csv", photos, lambda n: n % 3, lambda n: f"p{n // 4}")
    with pytest.raises(UserError, match=r"10 of 10 groups are in several folds: p\d \(.*columns fold="):
        fold_of(place, None, 3, table=TableOptions(columns=("group=patient",)))


@pytest.mark.parametrize(
    ("size", "folds", "message"),
    [
        (10, 3, r"class '\w+' has images in 2 groups, fewer than folds=3: set folds=2, or set"),
        (20, 2, r"class '\w+' has images in 1 group, fewer than folds=2: leave the groups out"),
    ],
)
def test_fewer_groups_than_folds_are_one_line(photos, tmp_path, size, folds, message) -> None:
    place = write_table(tmp_path / "t.csv", photos, lambda n: "", lambda n: n // size)
    with pytest.raises(UserError, match=message):
        fold_of(place, None, folds, table=TableOptions(columns=("group=patient", "fold=")))


def test_a_table_s_folds_have_the_order_of_their_numbers(photos: Path, tmp_path: Path) -> None:
    place = write_table(tmp_path / "t.csv", photos, lambda n: n % 11, lambda n: n)
    for number in (1, 2, 10):
        assert set(fold_of(place, number, 11).measured.folds) == {str(number)}


def test_copies_that_a_table_s_folds_separate_are_counted_with_fitting_advice(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "photos", per_class=8)
    shutil.copy(data / "dark" / "000.png", data / "dark" / "001.png")
    shutil.copy(data / "dark" / "000.png", data / "dark" / "004.png")
    place = write_table(tmp_path / "t.csv", data, lambda n: n % 2, lambda n: n)
    assert copies_across(fold_of(place, None, 2).train) == 3
    (warning,) = find_copies(fold_of(place, 0, 2)).warnings()
    assert "copies of images in another fold" in warning
    assert "columns fold=" in warning
    assert copies_across(fold_of(place, None, 2, table=TableOptions(columns=("fold=",))).train) == 0


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
    with pytest.raises(UserError, match=r"class 'a' has images in 1 group, fewer than folds=3: leave the g"):
        fold_of(place, 0, 3, table=TableOptions(columns=("group=patient", "fold=")))


def test_the_interval_of_an_accuracy_out_of_fold_holds_that_of_a_large_test_set() -> None:
    def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        labels = random.integers(0, 3, count)
        return random.normal(size=(count, 6)) + 1.6 * np.eye(3, 6)[labels], labels

    many, truth = drawn(10**6, 3000)
    held = 0
    for seed in range(60):
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
    assert held / 60 >= 0.93
