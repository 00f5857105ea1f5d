"""The images of a folder, listed one at a time: the same as those that are read at once, in their order."""

import os
import random
from pathlib import Path

import pytest

from tests.data import write_tree
from vitascope.data.all_images import AllImages, all_images
from vitascope.data.datasets import stream_of_folder
from vitascope.data.formats import folder as module
from vitascope.data.formats.folder import FolderStream
from vitascope.errors import UserError

NAMES = ("a", "a b", "a.png", "B", "train", "val", "Test-set", "ü", ".hidden", "x1.jpg", "x10.jpg", "n.txt")

SEEDS = 250


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


@pytest.mark.parametrize("seed", range(SEEDS))
def test_stream_has_the_images_labels_and_splits_of_the_folder(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "root"
    grow(root, random.Random(seed))
    try:
        expected = all_images(str(root))
    except UserError:  # no images, or two folders of one split
        return
    stream = stream_of_folder(str(root))
    if stream is not None:  # there are folders of classes
        assert list(stream) == rows(expected)
        assert list(stream) == list(stream)
        assert stream.class_names == expected.class_names


def test_random_folders_are_streamed_with_and_without_splits(tmp_path: Path) -> None:
    """The test above is worth something."""
    found = set()
    for seed in range(SEEDS):
        grow(tmp_path / str(seed), random.Random(seed))
        try:
            stream = stream_of_folder(str(tmp_path / str(seed)))
        except UserError:
            continue
        if stream is not None:
            found |= {(split, label == "") for _, label, split in stream}
    assert found >= {("all", True), ("all", False), ("train", True), ("train", False), ("test", False)}


@pytest.mark.parametrize("data", [".", "photos/", "./photos", "../here/photos"])
def test_paths_are_those_of_the_folder_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    write_tree(tmp_path / "here" / "photos", {"cat": 2, "dog": 3})
    (tmp_path / "here" / "photos" / "000.png").touch()
    monkeypatch.chdir(tmp_path / "here")
    stream = stream_of_folder(data)
    assert stream is not None
    assert list(stream) == rows(all_images(data))


def test_names_of_files_and_other_data_are_not_streamed(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    root.mkdir()
    for name in ("cat", "dog"):
        for number in range(4):
            (root / f"{name}_{number}.png").touch()
    assert all_images(str(root)).class_names == ("cat", "dog")
    assert stream_of_folder(str(root)) is None
    assert stream_of_folder("digits") is None


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
