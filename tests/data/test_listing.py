import contextlib
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.data import image_files, read_tree, splits_of, write_picture, write_tree
from vitascope.data.datasets import described, open_data, open_pictures, read_data
from vitascope.data.formats.folder import Folder, FolderStream
from vitascope.data.listing import visible_files
from vitascope.data.loading import Loader
from vitascope.data.split_record import record_of, restore
from vitascope.deploy.predict.predictor import find_images
from vitascope.models.preprocess import Preprocess


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder of links to two class folders."""
    write_tree(tmp_path / "disk", {"felines": 12, "canines": 12})
    root = tmp_path / "photos"
    root.mkdir()
    (root / "cat").symlink_to(tmp_path / "disk" / "felines")
    (root / "dog").symlink_to("../disk/canines")
    return root


def test_every_function_finds_the_same_files_behind_links(linked: Path) -> None:
    splits = open_data(str(linked))
    restored = restore(record_of(splits), read_data(str(linked)), ("train", "val", "test"))
    assert (restored.complete, restored.note()) == (True, "")
    assert restored.as_recorded().train.sources == splits.train.sources
    assert sum(map(len, splits.parts.values())) == 24
    (linked / "dog" / "more").symlink_to(write_tree(linked.parent / "shelf", {"old": 2}))
    expected = image_files(linked)
    assert len(expected) == 26
    assert read_tree(linked).sources == read_data(str(linked)).sets[0].sources == expected
    assert open_pictures(str(linked)) == expected
    assert sorted(map(Path, find_images(linked))) == expected
    assert not [line for line in described(open_data(str(linked))) if "unused" in line]


def test_what_is_called_as_images_are_and_is_no_file_is_counted_once(tmp_path: Path, caplog) -> None:
    root = write_tree(tmp_path / "photos", {"cat": 3, "dog": 3})
    expected = image_files(root)
    for name in ("nowhere.png", "self.JPG"):
        (root / "cat" / name).symlink_to(name if name == "self.JPG" else "nothing.png")
    os.mkfifo(root / "dog" / "pipe.png")
    (root / "dog" / "empty.jpg").mkdir()
    (root / "dog" / "notes.txt").touch()
    for read in (
        lambda: [source for images in read_data(str(root)).sets for source in images.sources],
        lambda: list(map(Path, find_images(root))),
        lambda: [Path(path) for path, *_ in FolderStream(root)],
    ):
        caplog.clear()
        assert sorted(read()) == expected
        (record,) = caplog.records
        assert record.message == (
            f"{root}: left out, with names of images: 2 broken links, 1 pipe or device, 1 empty folder"
        )
    assert read_data(str(root)).unused == ("1 .txt",)


def test_pictures_of_several_pages_are_counted_after_the_last(tmp_path: Path, caplog) -> None:
    page = Image.new("L", (9, 9), 7)
    for name, more in (("a.tif", 2), ("b.gif", 3), ("c.TIFF", 0), ("d.png", 2), ("e.tif", 0)):
        pages = [Image.new("L", (9, 9), number) for number in range(more)]
        page.save(tmp_path / name, save_all=True, append_images=pages)
    (tmp_path / "f.tif").write_bytes((tmp_path / "a.tif").read_bytes()[:20])
    assert len(list(find_images(tmp_path))) == 6
    assert [record.message for record in caplog.records] == [
        "2 images of several pages or frames: the first counts"
    ]


def test_links_that_lead_back_are_not_entered(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "photos", {"cat": 3, "dog": 3})
    expected = image_files(root)
    (root / "cat" / "up").symlink_to(root)
    (root / "cat" / "here").symlink_to(".")
    (root / "loop").symlink_to(tmp_path)
    (root / "dog" / "self").symlink_to("self")
    (root / "dog" / "nowhere.png").symlink_to("nothing.png")
    assert image_files(root) == read_tree(root).sources == read_data(str(root)).sets[0].sources == expected
    write_picture(tmp_path / "a" / "1.png")
    write_picture(tmp_path / "b" / "2.png")
    (tmp_path / "a" / "to_b").symlink_to("../b")
    (tmp_path / "b" / "to_a").symlink_to("../a")
    assert [path.relative_to(tmp_path).as_posix() for path in image_files(tmp_path / "a")] == [
        "a/1.png",
        "a/to_b/2.png",
    ]


def test_without_links_the_order_is_that_of_the_paths(tmp_path: Path) -> None:
    for name in ("b/10.png", "b/9.png", "b.x/1.png", "B/1.PNG", "a/z/1.png", "a/y.png", "a-1/1.jpg"):
        write_picture(tmp_path / name)
    write_picture(tmp_path / "a" / ".hidden" / "1.png")
    (tmp_path / "a" / "folder.png").mkdir()
    shown = [path for path in tmp_path.rglob("*") if path.is_file() and ".hidden" not in path.parts]
    assert image_files(tmp_path) == sorted(shown)


def test_a_folder_that_vanishes_meanwhile_is_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tree(tmp_path / "photos", {"cat": 6, "dog": 6})
    scandir, gone = os.scandir, root / "cat" / "gone"

    def vanishing(path="."):
        if not isinstance(path, int) and Path(path) == gone:
            shutil.rmtree(gone, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    for listed in (lambda: splits_of(Folder(), str(root), seed=0), lambda: list(find_images(root))):
        write_picture(gone / "1.png")
        listed()
        assert not gone.exists()
    write_picture(gone / "1.png")
    failed: list[str] = []
    assert len(list(visible_files(root, lambda folder, error: failed.append(folder)))) == 12
    assert failed == [str(gone)]


def test_a_file_that_vanishes_after_it_was_listed_is_counted(tmp_path: Path, monkeypatch) -> None:
    root = write_tree(tmp_path / "photos", {"cat": 12, "dog": 12})
    scandir, gone = os.scandir, root / "cat" / "005.png"

    def vanishing(path="."):
        entries = list(scandir(path))
        if Path(path) == gone.parent:
            gone.unlink(missing_ok=True)
        return contextlib.nullcontext(entries)

    monkeypatch.setattr(os, "scandir", vanishing)
    loader = Loader(read_tree(root), Preprocess(image_size=(8, 8)), 4)
    assert len(loader) == 23
    assert loader.faults.reasons == {str(gone): f"{gone}: no such file"}
