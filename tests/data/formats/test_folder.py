import os
import random
from pathlib import Path

import pytest

from tests.data import write_picture, write_tree
from vitascope.data.all_images import AllImages, all_images
from vitascope.data.datasets import class_counts, described, open_data, read_data, stream_of_folder
from vitascope.data.formats import folder as module
from vitascope.data.formats.folder import OUTSIDE, FolderStream, split_of
from vitascope.deploy.predict.predictor import find_images
from vitascope.errors import UserError

NAMES = ("a", "a b", "a.png", "B", "train", "val", "Test-set", "ü", ".hidden", "x1.jpg", "x10.jpg", "n.txt")


def grow(folder: Path, draw: random.Random, depth: int = 0) -> None:
    """Random files and folders, some of them hidden, empty, links, or named like images."""
    folder.mkdir()
    for name in draw.sample(NAMES, draw.randint(0, 5)):
        kind = draw.random()
        if depth < 3 and kind < 0.6:
            grow(folder / name, draw, depth + 1)
        elif kind < 0.65:
            (folder / name).symlink_to(folder)
        else:
            (folder / name).touch()


def rows(images: AllImages) -> list[tuple[str, str, str]]:
    labels = images.labels or [""] * len(images)
    return list(zip(images.names, labels, images.splits, strict=True))


def test_stream_has_the_images_labels_and_splits_of_the_folder(tmp_path: Path) -> None:
    kinds = set()
    for seed in range(80):
        root = tmp_path / str(seed)
        grow(root, random.Random(seed))
        try:
            expected = all_images(str(root))
        except UserError:  # no images, or two folders of one split
            continue
        stream = stream_of_folder(str(root))
        if stream is not None:  # there are folders of classes
            assert list(stream) == rows(expected), seed
            assert list(stream) == list(stream)
            assert stream.class_names == expected.class_names
            kinds |= {(split, label == "") for _, label, split in stream}
    assert kinds >= {("all", True), ("all", False), ("train", False), ("test", False)}


def test_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path / "photos", {"cat": 1, "dog": 1})
    stream = FolderStream(tmp_path / "photos")
    scandir = os.scandir

    def failing(path: str) -> object:
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr("os.scandir", failing)
    assert next(iter(stream))[1] == "cat"
    for listing in (lambda: list(stream), lambda: FolderStream(tmp_path / "photos")):
        with pytest.raises(UserError, match=r"photos/dog: cannot be listed: Permission denied"):
            listing()
    assert module.os.scandir is failing


@pytest.mark.parametrize("inside", ["steam", ""])
def test_train_is_a_class_beside_several_others(tmp_path: Path, inside: str) -> None:
    write_tree(tmp_path, {"bus": 6, "car": 6, str(Path("train", inside)): 6})
    assert open_data(str(tmp_path)).train.class_names == ("bus", "car", "train")
    assert stream_of_folder(str(tmp_path)).class_names == ("bus", "car", "train")


def test_train_beside_one_folder_is_ambiguous_and_the_numbers_are_named(tmp_path: Path) -> None:
    write_tree(tmp_path, {"bus": 6, "train": 5})
    for read in (open_data, stream_of_folder):
        with pytest.raises(UserError, match=r"train \(5 images\) a split or a class\?.* bus \(6\)"):
            read(str(tmp_path))


def test_a_folder_that_only_wraps_others_is_rejected_with_the_inner_one(tmp_path: Path) -> None:
    write_tree(tmp_path, {"photos/train/a": 3, "photos/val/b": 3, "@eaDir": 1})
    with pytest.raises(UserError, match=rf"only one class, 'photos'.*did you mean {tmp_path / 'photos'}\?"):
        open_data(str(tmp_path))
    write_tree(tmp_path / "cats", {"cat": 3})
    with pytest.raises(UserError, match=r"only one class, 'cat'; a classifier needs two or more$"):
        open_data(str(tmp_path / "cats"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *((name, "train") for name in ("Train", "training_set", "train2017", "train_images", "TRAIN-data")),
        *(
            (name, "val")
            for name in ("dev", "validate", "val2", "Validation images", "valid_set", "images_val")
        ),
        *((name, "test") for name in ("test1", "eval", "Hold-Out", "holdout_photos", "test images")),
        *((name, None) for name in ("trains", "trainee", "value", "devil", "contest", "cat", "1", "images")),
    ],
)
def test_usual_names_of_splits_are_known(name: str, split: str | None) -> None:
    assert split_of(name) == split


@pytest.mark.parametrize(
    ("system", "place"),
    [
        *(("@eaDir", ""), ("$RECYCLE.BIN", "a"), ("System Volume Information", ""), ("__MACOSX", "a")),
        *(("lost+found", ""), ("_thumbs", "a")),
    ],
)
def test_system_folders_are_no_classes_and_their_files_no_images(tmp_path, system: str, place: str) -> None:
    write_tree(tmp_path, {"a": 6, "b": 6, str(Path(place, system)): 5, f"b/{system}/deep": 1})
    splits = open_data(str(tmp_path))
    assert splits.train.class_names == ("a", "b")
    assert sum(map(len, splits.parts.values())) == 12
    assert f"6 files in 2 system folders: {system}" in described(splits)[-1]
    assert len(list(find_images([str(tmp_path)]))) == len(list(stream_of_folder(str(tmp_path)))) == 12


def write_flat(folder: Path, counts: dict[str, int], name: str = "{}.{}.png") -> Path:
    seed = len(list(folder.rglob("*.*")))
    for label, count in counts.items():
        for number in range(1, count + 1):
            seed += 1
            write_picture(folder / name.format(label, number), seed=seed)
    return folder


@pytest.mark.parametrize(
    ("name", "below"),
    [
        *(("{}.{}.jpg", ""), ("{}_{:03}.png", "train"), ("{}{}.bmp", ""), ("{} ({}).JPG", "train")),
        ("{}-{}.png", ""),
    ],
)
def test_flat_folder_has_the_classes_in_its_names(tmp_path: Path, name: str, below: str) -> None:
    write_flat(tmp_path / below, {"golden_retriever": 5, "cat": 6}, name)
    before = sorted(tmp_path.rglob("*"))
    splits = open_data(str(tmp_path))
    assert splits.train.class_names == ("cat", "golden_retriever")
    assert sum(class_counts(images)["cat"] for images in splits.parts.values()) == 6
    assert "classes from file names: cat 6, golden_retriever 5" in described(splits)
    assert sorted(tmp_path.rglob("*")) == before


def test_cats_and_dogs_with_unlabelled_test_images_are_trained_on(tmp_path: Path) -> None:
    write_flat(tmp_path / "train", {"cat": 50, "dog": 50})
    for folder in ("test1", "test"):
        for number in range(3):
            write_picture(tmp_path / folder / f"{number}.png", seed=900 + number)
    splits = open_data(str(tmp_path))
    assert {name: len(images) for name, images in splits.parts.items()} == {"train": 90, "val": 10}
    assert described(splits)[2:] == [
        "classes from file names: cat 50, dog 50",
        "unused: 6 images without a class, 3 images in the folder test1, which is a second folder of "
        "the test split",
    ]
    assert {images.name for images in read_data(str(tmp_path)).sets} == {"train", OUTSIDE}


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
        ([f"w{'x' * n}_{m}.jpg" for n in range(9) for m in range(2)], "9 different words .* 18 names are"),
        ([f"dog_{n}.jpg" for n in range(8)] + ["cat_1.jpg"], "2 different words .*: cat"),
    ],
)
def test_names_without_a_plain_rule_are_refused_with_the_reason(tmp_path, names, reason) -> None:
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
