import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import read_tree, write_picture, write_tree
from vitascope.data import datasets
from vitascope.data.contents import content_of
from vitascope.data.datasets import (
    class_counts,
    described,
    find_copies,
    greatest_value,
    open_data,
    open_for_evaluation,
    open_pictures,
    read_data,
    sampled_sizes,
)
from vitascope.data.formats.format import DataFormat
from vitascope.data.pack import pack
from vitascope.data.split_record import record_of, restore
from vitascope.data.splits import ImageSet, Inventory, Splits
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError


def paths(images: ImageSet) -> list[Path]:
    return [Path(str(source)) for source in images.sources]


def write_file(path: Path) -> None:
    """A file that is no picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


def all_sets(splits: Splits) -> list[ImageSet]:
    return [splits.train, splits.val, *([splits.test] if splits.test is not None else [])]


def test_without_val_a_tenth_of_each_class_of_train_is_validation(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", {"cat": 20, "dog": 30})
    write_tree(tmp_path / "test", {"cat": 2, "dog": 3})
    splits = open_data(str(tmp_path))
    assert class_counts(splits.train) == {"cat": 18, "dog": 27}
    assert class_counts(splits.val) == {"cat": 2, "dog": 3}
    assert splits.test is splits.measured
    assert all(path.is_relative_to(tmp_path / "test") for path in paths(splits.measured))
    found = sorted(paths(splits.train) + paths(splits.val))
    assert found == sorted((tmp_path / "train").rglob("*.png"))


def test_one_tree_is_split_by_class_without_overlap_or_loss(tmp_path: Path) -> None:
    write_tree(tmp_path, {"cat": 50, "dog": 100})
    splits = open_data(str(tmp_path))
    assert class_counts(splits.train) == {"cat": 40, "dog": 80}
    assert class_counts(splits.val) == {"cat": 5, "dog": 10}
    assert class_counts(splits.measured) == {"cat": 5, "dog": 10}
    everything = [path for images in all_sets(splits) for path in paths(images)]
    assert sorted(everything) == sorted(tmp_path.rglob("*.png"))  # all, and none twice


def test_images_of_a_class_lie_at_any_depth_below_its_folder_and_are_not_hidden(tmp_path: Path) -> None:
    root = write_tree(tmp_path / ".datasets" / "pets", {"cat": 3, "dog": 3})
    for name in ("A.PNG", "b.JpG", "c.jpeg", "d.WEBP", "e.bmp", "f.Tiff", "g.gif", "2024/may/deep.png"):
        write_picture(root / "cat" / name)
    for name in ("cat/.hidden.png", "cat/.ipynb_checkpoints/copy.png", ".cache/x.png"):
        write_picture(root / name)
    for name in ("cat/notes.txt", "cat/Thumbs.db", "README.md"):
        write_file(root / name)
    for name in ("no pictures here", "dog/folder.png"):
        (root / name).mkdir()
    assert class_counts(read_tree(root)) == {"cat": 11, "dog": 3}


def test_validation_labels_follow_the_classes_of_train(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", {"ant": 2, "cat": 2, "dog": 2})
    write_tree(tmp_path / "val", {"dog": 2})
    splits = open_data(str(tmp_path))
    assert class_counts(splits.val) == {"ant": 0, "cat": 0, "dog": 2}


@pytest.mark.parametrize("folders", [("training", "VAL", "Test"), ("TrainingData", "valid", "test data")])
def test_usual_names_of_splits_are_not_classes(tmp_path: Path, folders: tuple[str, ...]) -> None:
    for name, count in zip(folders, (4, 3, 2), strict=True):
        write_tree(tmp_path / name, {"cat": count, "dog": count})
    splits = open_data(str(tmp_path))
    assert splits.train.class_names == ("cat", "dog")
    assert [len(images) for images in all_sets(splits)] == [8, 6, 4]
    for images, split, folder in zip(all_sets(splits), ("train", "val", "test"), folders, strict=True):
        assert images.name == split
        assert all(path.is_relative_to(tmp_path / folder) for path in paths(images))
    assert len(open_for_evaluation(str(tmp_path), ("cat", "dog"))) == 4
    assert len(open_pictures(str(tmp_path))) == 4
    assert len(open_data(str(tmp_path), labelled=False).train) == 8


def test_two_folders_of_one_split_are_rejected_and_without_train_they_are_classes(tmp_path: Path) -> None:
    write_tree(tmp_path / "classes", {"valid": 4, "invalid": 4})
    assert open_data(str(tmp_path / "classes")).train.class_names == ("invalid", "valid")
    for one, other in (("train", "Training"), ("test", "test_set"), ("val", "valid")):
        for name in {"train", one, other}:
            write_tree(tmp_path / one / name, {"cat": 3, "dog": 3})
        with pytest.raises(UserError, match=rf"({one} and {other}|{other} and {one}) both mean the"):
            open_data(str(tmp_path / one))


def test_unused_files_are_counted_by_suffix(tmp_path: Path) -> None:
    write_tree(tmp_path / "Train", {"cat": 5, "dog": 4})
    write_tree(tmp_path / "Test", {"cat": 2, "dog": 2})
    for name in ("Train/cat/a.mov", "Train/cat/b.MOV", "Test/dog/c.txt", "notes.txt", "Train/fox/d.cr2"):
        write_file(tmp_path / name)
    write_picture(tmp_path / "Train" / "loose.png")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    assert described(open_data(str(tmp_path))) == [
        "7 train, 2 val, 4 test images of 2 classes",
        "cat: 7, dog: 6",
        "unused: 1 image without a class, 2 .mov, 2 .txt, 1 .cr2, the folder Train/fox, which contains no "
        "image (1 .cr2)",
    ]


def test_names_of_classes_are_escaped_and_of_many_the_smallest_and_the_largest_named(tmp_path: Path) -> None:
    write_tree(tmp_path / "few", {"cat\x1b[2J": 3, "dog": 3})
    assert described(open_data(str(tmp_path / "few")))[1] == "cat\\x1b[2J: 3, dog: 3"
    write_tree(tmp_path / "many", {f"c{number:02}": 3 + (number == 5) for number in range(13)}, size=(2, 2))
    assert described(open_data(str(tmp_path / "many")))[1:] == ["per class from 3 (c00) to 4 (c05)"]


@pytest.mark.parametrize("below", ["", "train/"])
def test_a_class_folder_without_images_is_named_if_one_class_is_left(tmp_path: Path, below: str) -> None:
    write_tree(tmp_path / below, {"cat": 3})
    for number in range(60):
        write_file(tmp_path / below / "dog" / f"{number}.mp4")
    match = rf"only one class, 'cat'.*the folder {below}dog, which contains no image \(60 \.mp4\)"
    with pytest.raises(UserError, match=match):
        open_data(str(tmp_path))


def test_names_are_suggested_for_a_name_alone_and_other_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"digit: no such folder; nearest: digits$"):
        open_data("digit")
    with pytest.raises(UserError, match=r"/digit: no such folder; give digits, "):
        open_data("/digit")
    write_file(tmp_path / "pets.txt")
    with pytest.raises(UserError, match=r"pets\.txt: not a folder.*mnist.*OWNER/NAME"):
        open_data(str(tmp_path / "pets.txt"))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("photo/cats", "photo/cats: no such folder; nearest: photos/cats; for the hub: photo/cats@main"),
        ("photos/cat", "nearest: photos/cats"),
        ("photos/zebra", "photos/zebra: no such folder; for the hub: photos/zebra@main"),
        ("photo", "photo: no such folder; nearest: photos"),
        ("photo/cats/deep", "photo/cats/deep: no such folder; give digits"),
    ],
)
def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, typed: str, message: str) -> None:
    def no_hub(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("vitascope.data.formats.hub.HubDataset.read", no_hub)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    with pytest.raises(UserError) as raised:
        open_data(typed)
    assert message in str(raised.value)


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, {"cat": 4, "dog": 4})
    monkeypatch.chdir(tmp_path)
    for read in (open_data, lambda data: open_for_evaluation(data, ("cat", "dog"))):
        with pytest.raises(UserError, match="'': no such folder"):
            read("")


@pytest.mark.parametrize(
    ("below", "classes", "message"),
    [
        (
            "",
            {"cat": 5, "dog": 2},
            "class 'dog' has 2 images; train, val and test need one each, so at least 3",
        ),
        (
            "train",
            {"cat": 5, "dog": 1},
            "class 'dog' has 1 image; train and val need one each, so at least 2",
        ),
        ("val", {"cat": 1, "dogs": 1}, "the val images of .*: 1 of 2 classes .*dogs; nearest: dog"),
        ("test", {"cat": 1, "dogs": 1}, "the test images of .*: 1 of 2 classes .*dogs; nearest: dog"),
    ],
)
def test_classes_that_are_too_small_or_not_in_train_are_rejected(tmp_path, below, classes, message) -> None:
    if below in ("val", "test"):
        write_tree(tmp_path / "train", {"cat": 3, "dog": 3})
    write_tree(tmp_path / below, classes)
    with pytest.raises(UserError, match=message):
        open_data(str(tmp_path))


def test_folder_without_images_is_rejected(tmp_path: Path) -> None:
    for below in ("", "train"):
        (tmp_path / below / "cat").mkdir(parents=True)
        for labelled in (True, False):
            with pytest.raises(UserError):
                open_data(str(tmp_path), labelled=labelled)


def test_evaluation_prefers_test_then_val_and_has_the_classes_of_the_model(tmp_path: Path) -> None:
    write_tree(tmp_path / "val", {"cat": 2, "dog": 2})
    found = open_for_evaluation(str(tmp_path), ("zebra", "dog", "horse", "cat"))
    assert found.class_names == ("zebra", "dog", "horse", "cat")
    assert found.labels.tolist() == [3, 3, 1, 1]
    assert len(open_for_evaluation(str(tmp_path), ("cat", "dog"))) == 4
    write_tree(tmp_path / "test", {"cat": 1, "dog": 2})
    assert len(open_for_evaluation(str(tmp_path), ("cat", "dog"))) == 3
    assert len(open_for_evaluation(str(tmp_path / "val"), ("cat", "dog"))) == 4


def test_the_seed_changes_the_validation_digits_but_not_the_test_digits() -> None:
    first, other = open_data("digits", seed=0), open_data("digits", seed=1)
    np.testing.assert_array_equal(np.stack(first.measured.sources), np.stack(other.measured.sources))
    assert not np.array_equal(np.stack(first.val.sources), np.stack(other.val.sources))
    assert first.channels == 1
    assert first.train.class_names == tuple("0123456789")


def test_sizes_are_those_of_images_spread_over_the_set() -> None:
    sources = [np.zeros((h, 8, 3), np.uint8) for h in range(1, 1000)]
    sizes = sampled_sizes(ImageSet("all", sources))
    assert sizes.shape == (100, 2)
    assert sizes[[0, -1]].tolist() == [[1, 8], [999, 8]]


def test_sizes_leave_out_unreadable_images(tmp_path: Path) -> None:
    write_tree(tmp_path, {"cat": 2, "dog": 2}, size=(12, 14))
    (tmp_path / "cat" / "broken.jpg").write_bytes(b"text")
    assert np.unique(sampled_sizes(read_tree(tmp_path)), axis=0).tolist() == [[12, 14]]
    for path in tmp_path.rglob("*.png"):
        write_file(path)
    with pytest.raises(UserError, match=r"none of 5 images can be read: .*[0-9]+\.png"):
        sampled_sizes(read_tree(tmp_path))


def deep_tree(root: Path, values: dict[str, int]) -> ImageSet:
    """16-bit grey images with these greatest values, by the name of the file."""
    for name, value in values.items():
        path = root / ("cat" if len(name) % 2 else "dog") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.array([[0, value], [1, 2]], dtype=np.uint16)).save(path)
    return read_tree(root)


def test_greatest_value_is_that_of_all_16_bit_images(tmp_path: Path, monkeypatch) -> None:
    names = {f"{number:02}{'x' * (number % 2)}.png": number for number in range(20)}
    names |= {"05x.png": 4000, "06.png": 3000}
    images = deep_tree(tmp_path, names)
    write_picture(tmp_path / "cat" / "photo.png")
    (tmp_path / "cat" / "broken.png").write_bytes(b"text")
    for sample in (3, 100):
        monkeypatch.setattr(datasets, "SAMPLE", sample)
        assert greatest_value(read_tree(tmp_path)) == 4000
    assert greatest_value(images) == 4000


def test_images_of_8_bits_have_no_greatest_value_and_only_a_sample_is_opened(tmp_path, monkeypatch) -> None:
    write_tree(tmp_path, {"cat": 10, "dog": 10})
    opened: list[object] = []
    monkeypatch.setattr(datasets, "SAMPLE", 3)
    monkeypatch.setattr(datasets, "greatest_integer", opened.append)
    assert greatest_value(read_tree(tmp_path)) is None
    assert len(opened) == 3


def test_images_without_classes_are_accepted_without_labels(tmp_path) -> None:
    for number in range(20):
        write_picture(tmp_path / ("a" if number % 2 else ".") / f"{number:02}.png", seed=number)
    with pytest.raises(UserError, match="only one class"):
        open_data(str(tmp_path))
    splits = open_data(str(tmp_path), labelled=False)
    assert sorted(splits.train.sources + splits.val.sources) == sorted(tmp_path.rglob("*.png"))
    assert splits.train.sources == sorted(splits.train.sources)
    assert (splits.test, splits.drawn, splits.unused) == (None, ("val",), ())
    assert splits.train.targets is splits.val.targets is None
    assert described(splits) == ["18 train, 2 val images without labels"]
    with pytest.raises(UserError, match="the 18 train images have no labels"):
        splits.train.truth  # noqa: B018


def test_a_folder_with_classes_is_split_the_same_without_labels(tmp_path) -> None:
    write_tree(tmp_path, {"cat": 12, "dog": 12})
    one, other = open_data(str(tmp_path)), open_data(str(tmp_path), labelled=False)
    assert one.test is not None
    assert other.test is not None
    assert one.test.sources == other.test.sources
    assert one.train.sources == other.train.sources


class Listed(DataFormat):
    """A text file with a path and a class per line."""

    def matches(self, data: str) -> bool:
        return data.endswith(".list")

    def read(self, data: str) -> Inventory:
        pairs = [line.split() for line in Path(data).read_text().splitlines()]
        names = tuple(sorted({name for _, name in pairs}))
        targets = ClassIndices.of_names([(name,) for _, name in pairs], names)
        images = ImageSet("all", [Path(data).parent / path for path, _ in pairs], targets)
        return Inventory((images,), channels=3, root=Path(data).parent)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(datasets, "FORMATS", (Listed(), *datasets.FORMATS))
    root = write_tree(tmp_path / "photos", {"cat": 20, "dog": 20})
    lines = (
        f"photos/{path.parent.name}/{path.name} {path.parent.name}" for path in sorted(root.rglob("*.png"))
    )
    (tmp_path / "photos.list").write_text("\n".join(lines))
    return str(tmp_path / "photos.list")


def test_a_format_that_only_reads_is_split_measured_shown_and_found_again(listed: str) -> None:
    splits = open_data(listed, seed=3)
    assert [len(images) for images in all_sets(splits)] == [32, 4, 4]
    assert splits.drawn == ("val", "test")
    folder = str(Path(listed).with_suffix(""))
    assert all_sources(splits) == all_sources(open_data(folder, seed=3))
    measured = open_for_evaluation(listed, ("dog", "zebra", "cat"))
    assert np.bincount(measured.labels).tolist() == [20, 0, 20]
    assert open_pictures(listed) == open_pictures(folder)
    found = restore(record_of(splits), read_data(listed), ("train", "val", "test"))
    assert (found.complete, found.note()) == (True, "")
    assert found.as_recorded().drawn == ("val", "test")


def all_sources(splits: Splits) -> list[list[Path]]:
    return [paths(images) for images in all_sets(splits)]


def test_images_without_splits_are_all_measured_in_any_format(listed: str, tmp_path: Path) -> None:
    folder = Path(listed).with_suffix("")
    pack(str(folder), tmp_path / "packed")
    (tmp_path / "shards").mkdir()
    for number, shard in enumerate(sorted((tmp_path / "packed").glob("*.tar"))):
        shutil.move(shard, tmp_path / "shards" / f"{number}.tar")  # of no split
    (tmp_path / "shards" / "classes.txt").write_text("cat\ndog\n")
    shutil.copytree(folder, tmp_path / "only" / "train")
    for data in (listed, str(folder), str(tmp_path / "shards"), str(tmp_path / "only")):
        assert class_counts(open_for_evaluation(data, ("cat", "dog"))) == {"cat": 20, "dog": 20}
        assert len(open_pictures(data)) == 40


def test_given_and_drawn_splits_are_told_apart(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", {"cat": 5, "dog": 4})
    assert open_data(str(tmp_path)).drawn == ("val",)
    write_tree(tmp_path / "val", {"cat": 5, "dog": 4})
    splits = open_data(str(tmp_path))
    assert (splits.drawn, splits.test, splits.channels) == ((), None, 3)
    assert splits.measured is splits.val
    assert open_data("digits").drawn == ("val",)


def test_images_outside_of_classes_and_splits_are_listed_without_a_label(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", {"cat": 5, "dog": 4})
    loose = [write_picture(tmp_path / name, seed=90) for name in ("extra/cat/1.png", "train/2.png", "3.png")]
    found = read_data(str(tmp_path)).sets
    assert sum(map(len, found)) == 12
    unlabelled = [source for images in found if images.targets is None for source in images.sources]
    assert sorted(unlabelled) == sorted(loose)
    assert any("unused: 3 images without a class" in line for line in described(open_data(str(tmp_path))))


def test_a_folder_of_test_images_alone_is_measured_but_not_trained_on(tmp_path: Path) -> None:
    write_tree(tmp_path / "test", {"cat": 5, "dog": 4})
    assert len(open_for_evaluation(str(tmp_path), ("cat", "dog"))) == 9
    for labelled in (True, False):
        with pytest.raises(UserError, match="it has test"):
            open_data(str(tmp_path), labelled=labelled)


@pytest.mark.parametrize("name", ["val", "test"])
def test_a_split_folder_without_classes_is_named(tmp_path: Path, name: str) -> None:
    write_tree(tmp_path / "train", {"cat": 5, "dog": 4})
    write_picture(tmp_path / name / "1.png")
    for read in (open_data, lambda data: open_for_evaluation(data, ("cat", "dog"))):
        with pytest.raises(UserError, match=f"expected .*/{name}/<class>/<image>"):
            read(str(tmp_path))
    assert open_pictures(str(tmp_path)) == [tmp_path / name / "1.png"]


def test_a_class_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, {"cat": 5, "dog": 4})
    scandir, seen = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path=".": seen.append(path) or scandir(path))
    open_data(str(tmp_path))
    assert len(seen) == len(set(map(str, seen))) == 3


def assert_no_leak(splits: Splits) -> None:
    parts = [set(map(content_of, images.sources)) for images in splits.parts.values()]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert find_copies(splits).across == {}


@pytest.mark.parametrize("kind", ["tree", "train", "shards", "unlabelled"])
def test_copies_stay_in_one_part(tmp_path: Path, kind: str) -> None:
    data = tmp_path / "photos"
    root = write_tree(data / "train" if kind == "train" else data, {"cat": 30, "dog": 30})
    for path in sorted(root.rglob("*.png"))[::2]:
        shutil.copy(path, path.with_name(f"copy of {path.name}"))
    if kind == "train":
        write_tree(data / "test", {"cat": 3, "dog": 3}, size=(9, 9))
    if kind == "unlabelled":
        shutil.rmtree(data / "dog")
    if kind == "shards":
        pack(str(data), tmp_path / "packed")
        (tmp_path / "shards").mkdir()
        for number, shard in enumerate(sorted((tmp_path / "packed").glob("*.tar"))):  # of no split
            shutil.move(shard, tmp_path / "shards" / f"{number}.tar")
        data = tmp_path / "shards"
    for seed in range(3):
        splits = open_data(str(data), seed=seed, labelled=kind != "unlabelled")
        assert_no_leak(splits)
        assert find_copies(splits).count == (15 if kind == "unlabelled" else 30)


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
    with pytest.raises(UserError, match="class 'dog' has 6 images, 1 if copies count once"):
        open_data(str(root))
