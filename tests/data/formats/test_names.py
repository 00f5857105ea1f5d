"""Flat folders: classes in the names of files, and the reasons why names have none."""

from pathlib import Path

import pytest

from tests.data import read_tree, write_picture, write_tree
from vitascope.data.datasets import class_counts, described, open_data, open_for_evaluation, read_data
from vitascope.data.formats.folder import OUTSIDE
from vitascope.data.formats.names import classes_in_names
from vitascope.errors import UserError


def write_flat(folder: Path, counts: dict[str, int], name: str = "{}.{}.png") -> Path:
    seed = len(list(folder.rglob("*.*")))
    for label, count in counts.items():
        for number in range(1, count + 1):
            seed += 1
            write_picture(folder / name.format(label, number), seed=seed)
    return folder


@pytest.mark.parametrize("name", ["{}.{}.jpg", "{}_{:03}.png", "{}{}.bmp", "{} ({}).JPG", "{}-{}.png"])
@pytest.mark.parametrize("below", ["", "train"])
def test_flat_folder_has_the_classes_in_its_names(tmp_path: Path, name: str, below: str) -> None:
    write_flat(tmp_path / below, {"golden_retriever": 5, "cat": 6}, name)
    before = sorted(tmp_path.rglob("*"))
    splits = open_data(str(tmp_path))
    assert splits.train.class_names == ("cat", "golden_retriever")
    assert sum(class_counts(images)["cat"] for images in splits.parts.values()) == 6
    assert "classes from file names: cat 6, golden_retriever 5" in described(splits)
    assert sorted(tmp_path.rglob("*")) == before


def test_flat_folder_is_split_like_the_folder_of_its_classes(tmp_path: Path) -> None:
    flat = write_flat(tmp_path / "flat", {"cat": 20, "dog": 20})
    for path in flat.iterdir():
        target = tmp_path / "sorted" / path.name[:3] / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    one, other = (open_data(str(tmp_path / name), seed=3) for name in ("flat", "sorted"))
    for name, images in one.parts.items():
        assert [Path(str(source)).name for source in images.sources] == [
            Path(str(source)).name for source in other.parts[name].sources
        ]
        assert images.targets == other.parts[name].targets


def test_cats_and_dogs_with_unlabelled_test_images_are_trained_on(tmp_path: Path) -> None:
    write_flat(tmp_path / "train", {"cat": 100, "dog": 100})
    for folder in ("test1", "test"):
        for number in range(3):
            write_picture(tmp_path / folder / f"{number}.png", seed=900 + number)
    splits = open_data(str(tmp_path))
    assert {name: len(images) for name, images in splits.parts.items()} == {"train": 180, "val": 20}
    assert described(splits)[2:] == [
        "classes from file names: cat 100, dog 100",
        "unused: 6 images without a class, 3 images in the folder test1, which is a second folder of "
        "the test split",
    ]
    assert {images.name for images in read_data(str(tmp_path)).sets} == {"train", OUTSIDE}


def test_flat_splits_are_kept(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_flat(tmp_path / split, {"cat": 4, "dog": 4})
    splits = open_data(str(tmp_path))
    assert splits.drawn == ()
    assert class_counts(splits.measured) == {"cat": 4, "dog": 4}
    assert len(open_for_evaluation(str(tmp_path), ("dog", "cat"))) == 8


def test_class_folders_come_before_names(tmp_path: Path) -> None:
    write_tree(tmp_path, {"cat": 5, "dog": 5})
    write_flat(tmp_path, {"fox": 5, "owl": 5})
    assert read_tree(tmp_path).class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["1.jpg", "2.jpg"], "2 of 2 names have no class and number, as cat.1.jpg has: 1.jpg, 2.jpg"),
        ([f"dog.{n}.jpg" for n in range(8)] + ["cat.jpg"], "1 of 9 names .*: cat.jpg"),
        ([f"IMG_{n}.jpg" for n in range(8)], "cameras and programs give: IMG"),
        ([f"IMG_20240101_{n}.jpg" for n in range(8)], "cameras and programs give: IMG_20240101"),
        ([f"{w}_{n}.jpg" for w in ("DSC", "pie") for n in range(8)], "cameras and programs give: DSC"),
        ([f"dog_{n}.jpg" for n in range(8)], "only one class, 'dog'"),
        ([f"{w}_{n}.jpg" for w in ("dog", "Dog") for n in range(8)], "differ in case only: Dog, dog"),
        (
            [f"w{'x' * n}_{m}.jpg" for n in range(9) for m in range(2)],
            "9 different words .* 18 names are too",
        ),
        ([f"dog_{n}.jpg" for n in range(8)] + ["cat_1.jpg"], "2 different words .*: cat"),
    ],
)
def test_names_without_a_plain_rule_are_refused_with_the_reason(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    for number, name in enumerate(names):
        write_picture(tmp_path / name, seed=number)
    with pytest.raises(UserError, match=f"expected .*<class>/<image>; .*{reason}"):
        open_data(str(tmp_path))
    assert len(open_data(str(tmp_path), labelled=False).train) > 0


def test_table_beside_images_without_classes_is_offered(tmp_path: Path) -> None:
    write_picture(tmp_path / "train" / "1.png")
    (tmp_path / "labels.csv").write_text("path,label\n")
    with pytest.raises(UserError, match=r"; if .*labels\.csv has the classes, give it as the data$"):
        open_data(str(tmp_path))


def test_rule_holds_in_any_script() -> None:
    paths = [Path(f"{name}_{number}.jpg") for name in ("猫", "собака") for number in range(4)]
    found = classes_in_names(paths)
    assert isinstance(found, dict)
    assert list(found) == ["собака", "猫"]
