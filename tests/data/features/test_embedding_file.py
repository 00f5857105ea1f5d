import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.deploy.predict import PARQUET
from tests.models import law
from vitascope.data.features.embedding_file import (
    FORMATS,
    EmbeddingColumns,
    Part,
    check_out,
    is_embedding_file,
    read_blocks,
    read_columns,
    read_features,
    write_embeddings,
)
from vitascope.errors import UserError

MADE = {"model": "m", "layer": None, "several": False}


def part(start: int, count: int, labelled: bool = True, width: int = 3) -> Part:
    numbers = range(start, start + count)
    columns = EmbeddingColumns(
        images=np.array([f"photos/{'x' * (number % 7)}ü{number}.png" for number in numbers], np.str_),
        labels=np.array([["cat", "", "a dog"][number % 3] for number in numbers]) if labelled else None,
        splits=np.array(["train" if number % 2 else "test" for number in numbers]),
    )
    return columns, np.arange(start * width, (start + count) * width, dtype=np.float32).reshape(count, width)


@law
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.sampled_from(FORMATS))
def test_what_was_written_in_parts_is_read_back(tmp_path_factory, counts, labelled, suffix) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (vitascope[parquet])")
    folder = tmp_path_factory.mktemp("out")
    starts = np.cumsum([0, *counts]).tolist()
    parts = [part(start, count, labelled) for start, count in zip(starts, counts, strict=False)]
    write_embeddings(folder / f"f{suffix}", iter(parts), 100, MADE)
    columns, made = read_columns(folder / f"f{suffix}")
    whole, features = part(0, starts[-1], labelled)
    assert made == MADE
    assert columns.images.tolist() == whole.images.tolist()
    assert columns.splits.tolist() == whole.splits.tolist()
    assert (columns.labels is None) == (not labelled)
    if labelled:
        assert columns.labels.tolist() == whole.labels.tolist()
    found = read_features(folder / f"f{suffix}")
    assert found.dtype == np.float32
    assert np.array_equal(found, features)
    blocks = list(read_blocks(folder / f"f{suffix}", 3))
    assert np.array_equal(np.concatenate(blocks), features)
    assert all(block.dtype == np.float32 and len(block) <= 3 for block in blocks)
    assert is_embedding_file(folder / f"f{suffix}")
    extra = {"f.npy.json"} if suffix == ".npy" else set()
    assert {path.name for path in folder.iterdir()} == {f"f{suffix}", *extra}


def test_files_are_plain_ones_of_their_formats(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (vitascope[parquet])")
    for suffix in FORMATS:
        write_embeddings(tmp_path / f"f{suffix}", iter([part(0, 4)]), 4, MADE)
    with np.load(tmp_path / "f.npz", allow_pickle=False) as arrays:
        assert set(arrays.files) == {"image", "label", "split", "feature", "made"}
        assert arrays["feature"].shape == (4, 3)
        assert json.loads(str(arrays["made"])) == MADE
    assert np.load(tmp_path / "f.npy", allow_pickle=False).shape == (4, 3)
    beside = json.loads((tmp_path / "f.npy.json").read_text())
    assert set(beside) == {"image", "label", "split", "made"}
    table = pq.read_table(tmp_path / "f.parquet")
    assert table.column_names == ["image", "label", "split", "feature"]
    assert str(table.schema.field("feature").type) == "fixed_size_list<element: float>[3]"
    assert json.loads(table.schema.metadata[b"made"]) == MADE


def test_parquet_is_written_in_groups_of_bounded_size(tmp_path: Path, monkeypatch) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (vitascope[parquet])")
    monkeypatch.setattr("vitascope.data.features.embedding_file.GROUP_BYTES", 6 * 12)
    write_embeddings(tmp_path / "f.parquet", (part(4 * number, 4) for number in range(5)), 20, MADE)
    file = pq.ParquetFile(tmp_path / "f.parquet")
    assert [file.metadata.row_group(number).num_rows for number in range(4)] == [6, 6, 6, 2]


@pytest.mark.parametrize("suffix", [".npz", ".npy", PARQUET])
def test_failure_on_the_way_leaves_no_file_and_a_path_that_is_no_utf8_is_escaped(tmp_path, suffix) -> None:
    def failing() -> Iterator[Part]:
        yield part(0, 4)
        raise KeyboardInterrupt

    path, image = tmp_path / f"f{suffix}", os.fsdecode(b"photos/\xe9.png")
    with pytest.raises(KeyboardInterrupt):
        write_embeddings(path, failing(), 8, MADE)
    assert list(tmp_path.iterdir()) == []
    columns = EmbeddingColumns(images=np.array([image]), labels=None, splits=np.array(["all"]))
    write_embeddings(path, iter([(columns, np.zeros((1, 2), np.float32))]), 1, MADE)
    assert read_columns(path)[0].images.tolist() == ["photos/\\udce9.png"]


def test_disk_without_room_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"f\.npy takes about .* MB, and the disk has .* MB free"):
        write_embeddings(tmp_path / "f.npy", iter([part(0, 4)]), 10**13, MADE)
    assert list(tmp_path.iterdir()) == []


def test_names_that_cannot_be_written_are_rejected(tmp_path: Path) -> None:
    for existing in ("there.npz", "half.npy.json"):
        (tmp_path / existing).write_text("")
    for name, reason in (
        ("f.csv", "ends in .npz, .npy, .parquet"),
        ("f", "ends in .npz"),
        ("missing/f.npz", "missing: no such folder"),
        ("there.npz", "there.npz exists and is not overwritten"),
        ("half.npy", "half.npy.json exists and is not overwritten"),
    ):
        with pytest.raises(UserError, match=reason):
            check_out(tmp_path / name)
    check_out(tmp_path / "new.npz")


@pytest.mark.parametrize("suffix", [".npz", ".npy", PARQUET])
def test_damaged_files_are_one_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f{suffix}"
    write_embeddings(path, iter([part(0, 40)]), 40, MADE)
    for content in (b"", path.read_bytes()[:-50], b"x" * 500, None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        readers = (read_features, lambda path: list(read_blocks(path, 16)), read_columns)
        for read in readers[: 2 if suffix == ".npy" else 3]:
            with pytest.raises(UserError, match=path.name):
                read(path)


def test_files_of_other_origin_are_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", a=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", image=np.array([object()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "number.npz", image=np.array(["a"]), split=np.array(["b"]), made=np.array(3))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", bytes(2**26))
    np.save(tmp_path / "alone.npy", np.zeros((2, 2), np.float32))
    np.save(tmp_path / "other.npy", np.zeros((2, 2), np.float32))
    (tmp_path / "other.npy.json").write_text('{"made": {}, "image": 3, "split": null}')
    np.save(tmp_path / "f8.npy", np.zeros((2, 2)))
    for path in sorted(tmp_path.glob("*.np[yz]")):
        with pytest.raises(UserError, match=path.name):
            read_columns(path)
    for name in ("f8.npy", "weights.npz"):
        with pytest.raises(UserError, match=name):
            read_features(tmp_path / name)
        with pytest.raises(UserError, match=name):
            list(read_blocks(tmp_path / name, 2))
    with pytest.raises(UserError, match=r"f\.txt: no such file"):
        read_columns(tmp_path / "f.txt")


@pytest.mark.parametrize(
    "change",
    [{"image": []}, {"split": ["all"] * 5}, {"label": ["cat"]}, {"image": [["a"]] * 4}, {"label": {"a": 1}}],
)
def test_columns_that_do_not_fit_together_are_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    write_embeddings(tmp_path / "f.npy", iter([part(0, 4)]), 4, MADE)
    described = tmp_path / "f.npy.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), **change}))
    with pytest.raises(UserError, match=r"f\.npy: not a file of features .* different lengths"):
        read_columns(tmp_path / "f.npy")
