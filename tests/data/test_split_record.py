import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data import write_picture, write_tree
from vitascope.data.contents import UNREADABLE, contents_of
from vitascope.data.datasets import open_data, read_data
from vitascope.data.pack import pack
from vitascope.data.split_record import Gone, Restored, SplitRecord, record_of, restore
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.models.decoding import ImageError, read_image

ALL = ("train", "val", "test")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "photos", {"cat": 12, "dog": 12})


def recorded(data: Path | str) -> SplitRecord:
    return record_of(open_data(str(data)))


def again(record: SplitRecord, data: Path | str, check: tuple[str, ...] = ALL) -> Restored:
    return restore(record, read_data(str(data)), check)


def part_of(record: SplitRecord, split: str, root: Path) -> list[Path]:
    return [root / name for name in record.parts[split].names]


def same(one: ImageSet, other: ImageSet) -> bool:
    pairs = zip(one.sources, other.sources, strict=True)
    return (
        type(one) is type(other)
        and (one.labels == other.labels).all()
        and one.class_names == other.class_names
        and all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    )


@pytest.mark.parametrize("kind", ["tree", "splits", "shards", "digits"])
def test_unchanged_data_have_the_recorded_splits(tmp_path: Path, kind: str) -> None:
    data = str(tmp_path / "data")
    if kind == "splits":
        write_tree(tmp_path / "data" / "Train", {"cat": 12, "dog": 12})
        write_tree(tmp_path / "data" / "Test", {"cat": 2, "dog": 2})
    elif kind == "digits":
        data = kind
    else:
        write_tree(tmp_path / "data", {"cat": 12, "dog": 12})
    if kind == "shards":
        pack(data, tmp_path / "shards")
        data = str(tmp_path / "shards")
    before = open_data(data)
    record = record_of(before)
    record.write(tmp_path / "split.jsonl.gz")
    found = again(SplitRecord.read(tmp_path / "split.jsonl.gz"), data)
    assert (found.complete, found.note()) == (True, "")
    after = found.as_recorded()
    assert after.channels == before.channels
    for split in ALL:
        assert same(getattr(after, split), getattr(before, split))


def test_deleted_images_do_not_change_the_split_of_others(photos: Path) -> None:
    record = recorded(photos)
    deleted = [part_of(record, "test", photos)[0], *part_of(record, "train", photos)[:2]]
    for path in deleted:
        path.unlink()
    found = again(record, photos, ("test",))
    assert found.counts() == {"missing": 3, "changed": 0, "renamed": 0, "new": 0}
    assert found.note().startswith("3 missing (2 train, 1 test): ")
    present = found.present("test", ("cat", "dog"))
    assert sorted(map(str, present.sources)) == sorted(map(str, part_of(record, "test", photos)[1:]))
    whole = found.as_recorded().measured
    assert len(whole) == len(present) + 1
    assert isinstance(whole.sources[0], Gone)
    with pytest.raises(ImageError, match=r"cat/\d+\.png: cannot be read: no longer there"):
        read_image(whole.sources[0])


def test_an_image_in_another_unicode_form_of_its_name_is_the_same(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    photos = write_tree(tmp_path / "photos", {decomposed: 12, "dog": 12})
    record = recorded(photos)
    (photos / decomposed).rename(photos / composed)
    found = again(record, photos)
    assert (found.complete, found.new, found.note()) == (True, 0, "")
    shutil.copytree(photos / composed, photos / decomposed)  # as recorded, so that the others are new
    shutil.copy(photos / "dog" / "000.png", photos / composed / "000.png")
    assert again(record, photos).complete


def test_images_without_a_label_or_a_split_are_not_new(tmp_path: Path) -> None:
    for number in range(30):
        write_picture(tmp_path / f"{number}.png", seed=number)
    splits = ["train"] * 16 + ["test"] * 8 + [""] * 6
    rows = [f"{n}.png,{'' if n < 4 else 'ab'[n % 2]},{split}" for n, split in enumerate(splits)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,label,split", *rows]))
    record = recorded(tmp_path / "labels.csv")
    assert record.images() == 20
    assert again(record, tmp_path / "labels.csv").note() == ""


def test_changed_images_and_training_images_with_the_name_of_a_test_image_are_left_out(photos: Path) -> None:
    record = recorded(photos)
    kept, changed = part_of(record, "test", photos)
    write_picture(changed, seed=999)
    found = again(record, photos, ("test",))
    assert found.counts() == {"missing": 0, "changed": 1, "renamed": 0, "new": 0}
    assert found.present("test", ("cat", "dog")).sources == [kept]
    part_of(record, "train", photos)[0].replace(changed)
    assert again(record, photos, ("test",)).present("test", ("cat", "dog")).sources == [kept]
    for path in (kept, changed):
        path.unlink()
    with pytest.raises(UserError, match=r"none of the 2 test images .* missing \(1 train, 2 test\)"):
        again(record, photos).present("test", ("cat", "dog"))


def test_images_that_could_not_be_read_are_not_taken_for_one_another(photos: Path, monkeypatch) -> None:
    record = recorded(photos)
    part_of(record, "test", photos)[0].rename(photos / "dog" / "zz.png")
    record.parts["test"].contents[0] = UNREADABLE

    def unreadable(sources: list[Path]) -> np.ndarray:
        return np.where([path.name == "zz.png" for path in sources], UNREADABLE, contents_of(sources))

    monkeypatch.setattr("vitascope.data.split_record.contents_of", unreadable)
    assert again(record, photos).counts() == {"missing": 1, "changed": 0, "renamed": 0, "new": 1}


def test_training_images_that_move_into_the_test_folder_stay_training_images(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("test", 3)):
        write_tree(tmp_path / split, {"cat": count, "dog": count}, size=(8 + count, 8))
    record = recorded(tmp_path)
    moved = part_of(record, "train", tmp_path)[0]
    moved.rename(tmp_path / "test" / "cat" / "moved.png")
    found = again(record, tmp_path, ("test",))
    assert found.note() == "1 renamed (1 train)"
    assert found.present("test", ("cat", "dog")).sources == part_of(record, "test", tmp_path)
    shutil.rmtree(tmp_path / "train")  # for example, to save room
    assert len(again(record, tmp_path, ("test",)).present("test", ("cat", "dog"))) == 6


def test_training_images_are_recognized_by_content_in_any_form(photos: Path, tmp_path: Path) -> None:
    record = recorded(photos)
    copies = tmp_path / "copies"
    for number, path in enumerate([*part_of(record, "train", photos)[:3], *part_of(record, "test", photos)]):
        (copies / "cat").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copies / "cat" / f"{number}.png")
    write_picture(copies / "dog" / "x.png", seed=12345)
    inventory = read_data(str(copies))
    assert record.trained_on(inventory.sets[0]).tolist() == [True] * 3 + [False] * 3
    pack(str(photos), tmp_path / "shards")
    assert record.trained_on(open_data(str(tmp_path / "shards")).train).all()
    assert not record.trained_on(open_data(str(tmp_path / "shards")).measured).any()


def test_a_line_of_another_type_or_class_is_rejected(photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "split.jsonl.gz"
    recorded(photos).write(path)
    lines = list(map(json.loads, gzip.decompress(path.read_bytes()).splitlines()))
    labels = [("label", value) for value in (2, -1, 0.5, "0", 10**30)]
    for name, value in (*labels, ("content", None), ("name", 5)):
        changed = [*lines[:4], lines[4] | {name: value}, *lines[5:]]
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, changed)).encode()))
        with pytest.raises(UserError, match=r"is broken: (an image without|(name|content) must be)"):
            SplitRecord.read(path)


def test_a_damaged_record_is_one_line(photos: Path, tmp_path: Path) -> None:
    record, path = recorded(photos), tmp_path / "split.jsonl.gz"
    record.write(path)
    whole = path.read_bytes()
    dataclasses.replace(record, parts={"train": record.parts["train"]}).write(path)
    for content in (
        path.read_bytes(),
        whole[:-40],
        b"no gzip",
        gzip.compress(b'{"version": 99}\n'),
        gzip.compress(b'{"version": 1}\n'),
        gzip.compress(b"[" * 100_000),
    ):
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"gz.* (broken|version 99.*update it|version 1.*again)"
        ) as raised:
            SplitRecord.read(path)
        assert "\n" not in str(raised.value)


def test_unlabelled_images_are_recorded_without_labels(photos: Path, tmp_path: Path) -> None:
    shutil.rmtree(photos / "dog")
    splits, path = open_data(str(photos), labelled=False), tmp_path / "split.jsonl.gz"
    record_of(splits).write(path)
    head, *lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    assert head["class_names"] == []
    assert {line["label"] for line in lines} == {None}
    found = again(SplitRecord.read(path), photos)
    assert (found.complete, found.note()) == (True, "")
    assert found.as_recorded().train.targets is None
    assert found.present("val", ()).sources == splits.val.sources


def test_a_renamed_image_is_found_by_content_with_the_class_of_its_new_folder(photos: Path) -> None:
    record = recorded(photos)
    first, *others = part_of(record, "test", photos)
    assert first.parent.name == "cat"
    renamed = first.rename(photos / "dog" / "zz.png")
    found = again(record, photos, ("test",))
    assert (found.complete, found.note()) == (False, "1 renamed (1 test)")
    present = found.present("test", ("cat", "dog"))
    assert present.sources == [renamed, *others]
    assert present.truth.names()[0] == ("dog",)
    assert found.as_recorded().measured.labels[0] == 0  # as it was
    loose = renamed.rename(photos / "loose.png")
    present = again(record, photos, ("test",)).present("test", ("cat", "dog"))
    assert (present.sources[0], present.truth.names()[0]) == (loose, ("cat",))  # as recorded


def test_changed_labels_of_a_table_are_noted_and_those_of_the_record_stay(tmp_path: Path) -> None:
    for number in range(30):
        write_picture(tmp_path / f"{number}.png", seed=number)
    table = tmp_path / "labels.csv"
    rows = [f"{number}.png,{'a;b' if number % 2 else 'b;c'}" for number in range(30)]
    table.write_text("\n".join(["image,tags", *rows]) + "\n")
    record = recorded(table)
    assert again(record, table).note() == ""
    table.write_text("\n".join(["image,tags", "0.png,c", "1.png,b;a", *rows[2:]]) + "\n")
    found = again(record, table)
    assert (found.complete, found.note()) == (True, "1 with other labels, which are taken as recorded")
    for split, images in (("train", found.as_recorded().train), ("val", found.as_recorded().val)):
        assert images.targets == record.parts[split].targets
