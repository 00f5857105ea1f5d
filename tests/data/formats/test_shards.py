import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import sets_of, splits_of, write_tar, write_tree
from tests.models import law
from vitascope.data.formats.shards import Shards, shard_streams
from vitascope.data.pack import pack
from vitascope.errors import SourceError, UserError
from vitascope.models.decoding import read_image


def write_shard(path: Path, labels: list[int], *, first: int = 0) -> Path:
    """A shard of another program, whose pictures are only bytes that identify them."""
    members = {}
    for number, label in enumerate(labels, first):
        members[f"{number:04}.jpg"] = f"picture {number} of class {label}".encode()
        members[f"{number:04}.cls"] = str(label).encode()
    return write_tar(path, members)


def one_shard(tmp_path: Path, members: Mapping[str, bytes]) -> Path:
    return write_tar(tmp_path / "a.tar", members).parent


def packed(tmp_path: Path) -> Path:
    pictures = write_tree(tmp_path / "pictures", {"cat": 10, "dog": 10})
    pack(str(pictures), tmp_path / "shards")
    return tmp_path / "shards"


@law
@given(
    counts=st.lists(st.integers(0, 30), max_size=12),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 50),
    group=st.integers(1, 5),
)
def test_order_is_a_permutation_that_reads_a_group_of_shards_to_its_end(counts, seed, epoch, group) -> None:
    order = shard_streams(seed, epoch, np.array(counts, dtype=np.int64), group=group)[0]
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(sum(counts)))
    shards = np.repeat(np.arange(len(counts)), counts)[order]
    open_at = [set(shards[:cut]) & set(shards[cut:]) for cut in range(len(shards))]
    assert max(map(len, open_at), default=0) <= group


@law
@given(
    counts=st.lists(st.integers(0, 30), max_size=12),
    epochs=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    streams=st.integers(1, 5),
)
def test_streams_share_no_shard_and_keep_theirs_in_every_epoch(counts, epochs, streams) -> None:
    shard = np.repeat(np.arange(len(counts)), counts)
    dealt = []
    for epoch in epochs:
        orders = shard_streams(0, epoch, np.array(counts, dtype=np.int64), streams)
        assert sorted(np.concatenate(orders).tolist()) == list(range(sum(counts)))
        assert max(map(len, orders)) - min(map(len, orders)) <= max(counts, default=0)
        dealt.append([set(shard[order].tolist()) for order in orders])
    assert dealt[0] == dealt[1]
    assert sum(map(len, dealt[0])) == sum(count > 0 for count in counts)


def test_pictures_and_labels_of_foreign_shards_are_read_in_their_order(tmp_path: Path) -> None:
    write_shard(tmp_path / "b-1.tar", [1, 1], first=3)
    write_shard(tmp_path / "b-0.tar", [2, 0, 1])
    images = sets_of(Shards(), tmp_path)["all"]
    assert images.labels.tolist() == [2, 0, 1, 1, 1]
    assert images.labels.dtype == np.int64
    assert images.class_names == ("0", "1", "2")
    assert [source.read_bytes().decode() for source in images.sources] == [
        f"picture {number} of class {label}" for number, label in enumerate(images.labels)
    ]
    assert [str(source) for source in images.sources[2:4]] == [
        f"{tmp_path / 'b-0.tar'}:0002.jpg",
        f"{tmp_path / 'b-1.tar'}:0003.jpg",
    ]
    again = pickle.loads(pickle.dumps(images.sources))  # noqa: S301 - our own
    assert again[1] == images.sources[1]
    assert again[-1].read_bytes() == b"picture 4 of class 1"
    with pytest.raises(IndexError):
        images.sources[5]
    part = images.subset("part", np.array([3, 0]))
    assert part.name == "part"
    assert part.labels.tolist() == [1, 2]
    assert [source.name for source in part.sources] == ["0003.jpg", "0000.jpg"]


def test_members_of_one_key_are_a_sample_and_others_are_skipped(tmp_path: Path) -> None:
    members = {
        "README": b"hello",
        "notes.json": b"[1]",
        "a.JPG": b"x",
        "a.txt": b"a cat",
        "a.seg.png": b"mask",
    }
    members |= {"a.cls": b"1", "d.x/a.jpg": b"y", "d.x/a.cls": b"0"}
    images = sets_of(Shards(), one_shard(tmp_path, members))["all"]
    assert [source.name for source in images.sources] == ["a.JPG", "d.x/a.jpg"]
    members = {"a.jpg": b"x", "a.json": b'{"label": 1, "width": 9}', "b.json": b'{"label": 0}', "b.png": b"x"}
    members |= {"c.jpg": b"x", "c.json": b'{"label": 0}', "c.cls": b" 1\n"}
    assert sets_of(Shards(), one_shard(tmp_path, members))["all"].labels.tolist() == [1, 0, 1]
    members = {"caf\u00e9.jpg": b"x", "cafe\u0301.cls": b"0", "dog.jpg": b"x", "dog.cls": b"1"}
    assert sets_of(Shards(), one_shard(tmp_path, members))["all"].labels.tolist() == [0, 1]
    members = {}
    for number in range(2):
        for name, content in ((f"{number}.jpg", b"x"), (f"{number}.cls", b"%d" % number)):
            members |= {f"._{name}": b"\0\5\x16\7", name: content}
    assert len(sets_of(Shards(), one_shard(tmp_path, members))["all"]) == 2


@pytest.mark.parametrize(
    "names",
    [
        ("train/a.tar", "validation/a.tar", "test/a.tar"),
        ("train-0.tar", "val-0.tar", "test-0.tar"),
        ("imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar", "imagenet1k_test.00.tar"),
    ],
)
def test_splits_are_those_of_folders_or_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    for count, name in zip((6, 4, 2), names, strict=True):
        write_shard(tmp_path / name, [0, 1] * count)
    assert Shards().matches(tmp_path)
    splits = splits_of(Shards(), str(tmp_path), seed=0)
    assert [len(splits.train), len(splits.val), len(splits.measured)] == [12, 8, 4]
    assert [splits.train.name, splits.val.name, splits.measured.name] == ["train", "val", "test"]
    assert splits.channels == 3


def test_a_folder_with_class_folders_is_not_a_folder_of_shards(tmp_path: Path) -> None:
    assert not Shards().matches(tmp_path)
    assert not Shards().matches(tmp_path / "missing")
    write_shard(tmp_path / "archive.tar", [0, 1])
    (tmp_path / "._archive.tar").write_bytes(b"what another system leaves")
    assert Shards().matches(tmp_path)
    write_tree(tmp_path / "train", {"cat": 1})
    assert not Shards().matches(tmp_path)


def test_a_label_of_minus_one_is_none_but_beside_one_alone(tmp_path: Path) -> None:
    write_shard(tmp_path / "a" / "train-0.tar", [-1, 2, 1, -1])
    write_shard(tmp_path / "a" / "test-0.tar", [-1], first=4)
    secret, train, others = Shards().read(str(tmp_path / "a")).sets
    assert [names for (names,) in train.truth.names()] == ["2", "1"]
    assert [source.read_bytes()[:9] for source in train.sources] == [b"picture 1", b"picture 2"]
    assert [(each.name, each.targets, len(each)) for each in (others, secret)] == [
        ("train", None, 2),
        ("outside", None, 1),
    ]
    write_shard(tmp_path / "b" / "0.tar", [-1, 1, -1])
    assert sets_of(Shards(), tmp_path / "b")["all"].truth.names() == [("-1",), ("1",), ("-1",)]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jpg": b"x"}, r"sample 'a' has no label \(\.cls"),
        ({"a.jpg": b"x", "a.json": b'{"width": 2}'}, "sample 'a' has no label"),
        ({"a.cls": b"1"}, "sample 'a' has 0 pictures"),
        ({"a.jpg": b"x", "a.png": b"x", "a.cls": b"1"}, "sample 'a' has 2 pictures"),
        ({"a.jpg": b"x", "b.jpg": b"x", "a.cls": b"1", "b.cls": b"0"}, "one after the other"),
        ({"a.jpg": b"x", "a.cls": b"dog"}, r"'a\.cls' contains b'dog', not an integer"),
        ({"a.jpg": b"x", "a.cls": b""}, "not an integer"),
        ({"a.jpg": b"x", "a.cls": b"1" * 19}, "contains b'1+', not an integer"),
        ({"a.jpg": b"x", "a.json": b"{"}, r"'a\.json' is not JSON"),
        ({"a.jpg": b"x", "a.json": b"[" * 100_000}, "is not JSON"),
        ({"a.jpg": b"x", "a.json": b'{"label": "dog"}'}, "has the label 'dog', not an integer"),
        ({"a.jpg": b"x", "a.json": b'{"label": true}'}, "not an integer"),
        ({"a.jpg": b"x", "a.json": b'{"label": 1e3}'}, "not an integer"),
        ({"a.jpg": b"x", "b.jpg": b"x", "a.cls": b"1", "b.cls": b"0"}, "tar --sort=name"),
        ({"c.1.jpg": b"x", "c.1.cls": b"1", "d.jpg": b"x", "d.cls": b"0"}, r"'c\.1\.jpg' has a dot.* 1"),
        (
            {"c.jpg": b"x", "c.json": b'{"label": 0}', "c.1.jpg": b"x", "c.1.json": b'{"label": 1}'},
            "has a dot",
        ),
        ({"a.txt": b"x"}, "no images in its shards"),
        ({}, "no images in its shards"),
    ],
)
def test_an_invalid_shard_is_rejected(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sets_of(Shards(), one_shard(tmp_path, members))


def test_shards_without_training_images_are_rejected(tmp_path: Path) -> None:
    write_shard(tmp_path / "val-0.tar", [0, 1])
    assert list(sets_of(Shards(), tmp_path)) == ["val"]  # for evaluation
    with pytest.raises(UserError, match="no images to train on; it has val"):
        splits_of(Shards(), str(tmp_path), seed=0)
    write_shard(tmp_path / "train-0.tar", [0, 1])
    write_shard(tmp_path / "more-0.tar", [0, 1])
    with pytest.raises(UserError, match=r"more-0\.tar: its name contains no split"):
        sets_of(Shards(), tmp_path)


def test_class_names_are_the_lines_of_classes_txt(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", [0, 1])
    (tmp_path / "classes.txt").write_text("cat\ndog\n\nzebra\n")
    assert sets_of(Shards(), tmp_path)["all"].class_names == ("cat", "dog", "zebra")
    for content in (b"cat\n", b"cat\ncat\n", b"\xff\xfe\n\n"):
        (tmp_path / "classes.txt").write_bytes(content)
        with pytest.raises(UserError):
            sets_of(Shards(), tmp_path)
    write_shard(tmp_path / "a.tar", [0, 2])
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(UserError, match="label 2 in the all images, with 2 class names"):
        sets_of(Shards(), tmp_path)


def test_shorter_and_missing_shards_are_named(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    shard = folder / "val-00000.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-512])
    with pytest.raises(UserError, match=f"tar: {len(whole) - 512:,} bytes, .* {len(whole):,} bytes"):
        splits_of(Shards(), str(folder), seed=0)
    shard.unlink()
    with pytest.raises(UserError, match=r"val-00000\.tar: missing"):
        splits_of(Shards(), str(folder), seed=0)


def test_shard_of_the_same_size_from_another_packing_is_not_read_with_the_wrong_labels(tmp_path) -> None:
    pictures = write_tree(tmp_path / "pictures", {"cat": 10, "dog": 10})
    for seed in (0, 1):
        pack(str(pictures), tmp_path / str(seed), seed=seed)
    here, other = (tmp_path / str(seed) / "train-00000.tar" for seed in (0, 1))
    assert here.stat().st_size == other.stat().st_size
    here.write_bytes(other.read_bytes())
    images = splits_of(Shards(), str(tmp_path / "0"), seed=0).train
    there = splits_of(Shards(), str(tmp_path / "1"), seed=0).train
    agree = images.labels == there.labels
    assert not agree.all()
    for index in range(len(images)):
        if agree[index]:
            read_image(images.sources[index])
        else:
            with pytest.raises(SourceError, match=r"is not where samples\.npz has it: .* of another packing"):
                read_image(images.sources[index])


@pytest.mark.parametrize("name", ["index.json", "samples.npz", "classes.txt"])
def test_files_beside_shards_are_of_bounded_size(tmp_path: Path, name: str) -> None:
    folder = packed(tmp_path)
    if name == "classes.txt":
        (folder / "index.json").unlink()
    (folder / name).touch()
    os.truncate(folder / name, 2**31)
    with pytest.raises(UserError, match=f"{name}: 2,147,483,648 bytes, and .* has at most"):
        splits_of(Shards(), str(folder), seed=0)


def npy_header(count: int, dtype: str = "<i8") -> bytes:
    content = io.BytesIO()
    values = {"descr": dtype, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(content, values)
    return content.getvalue()


def zip_of(compression: str, members: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", getattr(zipfile, f"ZIP_{compression.upper()}")) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return content.getvalue()


def assert_places_rejected(folder: Path, content: bytes) -> None:
    """Check that `samples.npz` with this content, which its index confirms, is one line."""
    (folder / "samples.npz").write_bytes(content)
    index = json.loads((folder / "index.json").read_text())
    index["samples"] = hashlib.sha256(content).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"samples\.npz: not the places in the shards of index\.json"):
        splits_of(Shards(), str(folder), seed=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows | {"labels": rows["labels"] - 1},  # would be the last class
        lambda rows: rows | {"labels": rows["labels"] + 0.5},
        lambda rows: rows | {"offsets": rows["offsets"] + 0.5},
        lambda rows: rows | {"offsets": rows["offsets"] - 1024},  # a sample would begin before its shard
        lambda rows: rows | dict.fromkeys(("offsets", "sizes"), np.full(20, 2**62)),  # their sum overflows
        lambda rows: rows | {"names": rows["names"].astype(str)},
        lambda rows: rows | {"names": rows["names"].astype(object)},
        lambda rows: {name: row if name == "files" else row[:, None] for name, row in rows.items()},
        lambda rows: {name: row if name == "files" else row[0] for name, row in rows.items()},
        lambda rows: rows | {"files": np.array([b"../train.tar"] * len(rows["files"]))},
        lambda rows: rows | {"files": np.repeat(rows["files"][:1], len(rows["files"]))},
        lambda rows: rows | {"names": np.full(20, b"a" * 2**13)},  # a bomb: 160 KB in 1
    ],
)
def test_places_of_another_form_are_rejected(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    folder = packed(tmp_path)
    with np.load(folder / "samples.npz") as arrays:
        rows = change(dict(arrays))
    content = io.BytesIO()
    np.savez_compressed(content, **rows)
    assert_places_rejected(folder, content.getvalue())


def test_places_that_are_no_arrays_are_rejected(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    for content in (
        b"",
        pickle.dumps(1),
        zip_of("stored", {"offsets.npy": b""}),
        zip_of("stored", {"offsets.npy": npy_header(2**37)}),  # a terabyte
        zip_of("stored", {"offsets.npy": npy_header(2**70)}),
        zip_of("bzip2", {"offsets.npy": npy_header(20)}),  # is unpacked without a limit
    ):
        assert_places_rejected(folder, content)


def test_an_index_of_another_form_or_with_invalid_values_is_rejected(tmp_path: Path) -> None:
    index = packed(tmp_path) / "index.json"
    values = json.loads(index.read_text())
    shard = {"file": "train.tar", "count": 1, "bytes": 1, "sha256": ""}
    for change in (
        {"version": 2},
        {"class_names": [1, 2]},
        {"class_names": ["cat"]},
        {"class_names": None},
        {"channels": 4},
        {"splits": {}},
        {"splits": []},
        {"splits": {"train": [{"file": "train-00000.tar"}]}},
        {"splits": {"train": [{**shard, "file": "../train.tar"}]}},
        {"splits": {"train": [{**shard, "count": "many"}]}},
    ):
        index.write_text(json.dumps(values | change))
        with pytest.raises(
            UserError, match=r"index\.json: (not an index of vitascope's|version 2, this vita)"
        ):
            splits_of(Shards(), str(index.parent), seed=0)
    for content in (b"", b"[]", b"\xff", b"[" * 100_000, b"{}"):
        index.write_bytes(content)
        with pytest.raises(UserError, match="not an index of vitascope's"):
            sets_of(Shards(), index.parent)
