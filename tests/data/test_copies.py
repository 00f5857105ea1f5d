"""Equal contents stay in one part of a split, are counted, and are warned about where they do not."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data import noise, write_tree
from vitascope.data.contents import content_of
from vitascope.data.copies import find_copies
from vitascope.data.datasets import open_data
from vitascope.data.pack import pack
from vitascope.data.split_record import record_of
from vitascope.data.splits import ImageSet, Inventory, Splits, complete_splits
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError


def contents_by_part(splits: Splits) -> dict[str, set[bytes]]:
    return {name: set(map(content_of, images.sources)) for name, images in splits.parts.items()}


def assert_no_leak(splits: Splits) -> None:
    train, val, test = contents_by_part(splits).values()
    assert not (train & val | train & test | val & test)
    assert find_copies(splits).across == {}


def copied(root: Path, *, every: int = 2) -> Path:
    """A tree in which every second image has a copy under another name in its class."""
    for number, path in enumerate(sorted(root.rglob("*.png"))):
        if number % every == 0:
            shutil.copy(path, path.with_name(f"copy of {path.name}"))
    return root


@pytest.mark.parametrize("kind", ["tree", "train", "shards", "unlabelled"])
def test_copies_stay_in_one_part(tmp_path: Path, kind: str) -> None:
    data = tmp_path / "photos"
    copied(write_tree(data / "train" if kind == "train" else data, {"cat": 30, "dog": 30}))
    if kind == "train":
        write_tree(data / "test", {"cat": 3, "dog": 3}, size=(9, 9))
    if kind == "unlabelled":
        shutil.rmtree(data / "dog")
    if kind == "shards":
        pack(str(data), tmp_path / "packed")
        for shard in (tmp_path / "packed").glob("*.tar"):  # of no split
            (tmp_path / "shards").mkdir(exist_ok=True)
            split, _, number = shard.name.partition("-")
            shutil.move(shard, tmp_path / "shards" / f"{ {'train': 1, 'val': 2, 'test': 3}[split] }-{number}")
        data = tmp_path / "shards"
    for seed in range(3):
        splits = open_data(str(data), seed=seed, labelled=kind != "unlabelled")
        parts = contents_by_part(splits)
        assert not parts["train"] & parts["val"]
        assert find_copies(splits).across == {}
        assert find_copies(splits).count == (15 if kind == "unlabelled" else 30)
        if kind not in {"train", "unlabelled"}:
            assert_no_leak(splits)


def test_copies_in_memory_stay_in_one_part() -> None:
    pixels = [noise(8, 8, seed=number % 20) for number in range(40)]  # each twice
    images = ImageSet("all", pixels, ClassIndices(np.arange(40) % 2, ("even", "odd")))
    splits = complete_splits(Inventory((images,), 3, None), "memory", seed=0)
    assert sum(map(len, splits.parts.values())) == 40
    assert_no_leak(splits)


def test_copies_under_two_labels_stay_in_one_part_and_are_named(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "photos", {"cat": 20, "dog": 20})
    for number in range(5):
        shutil.copy(root / "cat" / f"{number:03}.png", root / "dog" / f"cat{number}.png")
    for seed in range(5):
        splits = open_data(str(root), seed=seed)
        assert_no_leak(splits)
        found = find_copies(splits)
        assert found.count == len(found.mislabelled) == 5
    (warning,) = found.warnings()
    assert warning.startswith("5 pictures with two labels: cat/00")
    assert warning.count(" = dog/cat") == 3
    assert found.warnings(labelled=False) == []


def test_without_copies_the_draw_is_the_one_of_earlier_versions(tmp_path: Path) -> None:
    """The digest is what earlier versions drew, so that old runs can be repeated."""
    splits = open_data(str(write_tree(tmp_path / "photos", {"cat": 23, "dog": 31, "fox": 5})), seed=7)
    (tmp_path / "photos" / "cat" / "a.png").touch()  # empty files are no copies of each other
    drawn = record_of(splits).parts
    names = "|".join(f"{part}:{','.join(drawn[part].names)}" for part in ("train", "val", "test"))
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == "daf11932cf737085"


def test_copies_in_given_splits_are_counted_and_not_moved(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("val", 3), ("test", 4)):
        write_tree(tmp_path / split, {"cat": count, "dog": count}, size=(8 + count, 8))
    before = {name: len(images) for name, images in open_data(str(tmp_path)).parts.items()}
    for number in range(3):
        shutil.copy(tmp_path / f"train/cat/{number:03}.png", tmp_path / f"test/cat/x{number}.png")
    shutil.copy(tmp_path / "train/dog/003.png", tmp_path / "val/dog/x.png")
    splits = open_data(str(tmp_path))
    after = {name: len(images) for name, images in splits.parts.items()}
    assert after == {**before, "val": before["val"] + 1, "test": before["test"] + 3}
    found = find_copies(splits)
    assert (found.count, found.across) == (4, {"val": 1, "test": 3})
    assert found.described() == ["4 images are copies of others"]
    assert found.warnings()[0].startswith("1 val and 3 test images are copies of images in another split")


def test_a_class_of_copies_cannot_be_split(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "photos", {"cat": 9, "dog": 1})
    for number in range(5):
        shutil.copy(root / "dog" / "000.png", root / "dog" / f"copy{number}.png")
    with pytest.raises(
        UserError, match=r"class 'dog' has 6 images, 1 if copies count once; train, val and test"
    ):
        open_data(str(root))
