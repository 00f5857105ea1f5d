"""Parts of a job: their list of images is whole or rejected, and so are their results."""

import json
import os
from pathlib import Path

import pytest

from tests.forked import ending, fork
from vitascope.errors import UserError
from vitascope.predict import parts as module
from vitascope.predict.parts import Parts, job_exists, parts_folder


def listed(folder: Path, images: list[tuple[str, ...]], batch_size: int = 4) -> Parts:
    return Parts.create(folder, ".txt", images, batch_size=batch_size, about={"top_k": 3})


def names(count: int) -> list[tuple[str, ...]]:
    return [(f"{number:03}.png",) for number in range(count)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNIT_IMAGES", 6)


def test_parts_have_all_images_in_order_and_whole_batches(tmp_path: Path) -> None:
    images = names(19)
    parts = listed(tmp_path, images)
    assert parts.part_images == 8  # batches of 4 up to at least 6 images
    assert [parts.count(part) for part in range(len(parts))] == [8, 8, 3]
    assert [image for part in range(len(parts)) for image in parts.texts(part)] == images
    assert Parts.open(tmp_path, ".txt") == parts


def test_parts_become_larger_and_not_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PARTS", 3)
    images = names(70)  # 9 units of 8 images
    parts = listed(tmp_path, images)
    assert [parts.count(part) for part in range(len(parts))] == [24, 24, 22]
    assert [image for part in range(len(parts)) for image in parts.texts(part)] == images


def test_any_path_and_empty_labels_are_kept(tmp_path: Path) -> None:
    images = [("a\nb.png", "", "all"), (os.fsdecode(b"\xe9.png"), "cat;dog", "all"), ("日本.png", "", "")]
    assert listed(tmp_path, images).texts(0) == images


def test_nothing_is_listed_of_no_images_or_of_a_nul(tmp_path: Path) -> None:
    for images, message in ([], "no images"), ([("a\0b", "x")], "NUL"):
        with pytest.raises(UserError, match=message):
            listed(tmp_path / "out.jsonl.parts", images)
        assert not job_exists(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("images", lambda data: data[:-3]),
        ("images", lambda data: data + b"x"),
        ("job.json", lambda data: data[:-9]),
        ("job.json", lambda data: b"[]"),
        ("job.json", lambda data: data.replace(b'"part_images": 8', b'"part_images": 0')),
        ("job.json", lambda data: data.replace(b'"part_images": 8', b'"part_images": 6')),
        ("job.json", lambda data: data.replace(b'"images": 19', b'"images": "19"')),
        ("job.json", lambda data: data.replace(b'"images": 19', b'"imagos": 19')),
    ],
)
def test_list_that_was_cut_short_or_damaged_is_rejected(tmp_path: Path, file: str, change) -> None:
    listed(tmp_path, names(19))
    path = tmp_path / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match="begin again"):
        Parts.open(tmp_path, ".txt")


def test_list_that_changes_in_the_job_is_rejected(tmp_path: Path) -> None:
    parts = listed(tmp_path, names(19))
    path = tmp_path / "images"
    path.write_bytes(path.read_bytes().replace(b"018.png\0", b"018-png?"))
    assert parts.texts(1)
    with pytest.raises(UserError, match="cut short or changed"):
        parts.texts(2)


def test_list_that_a_node_does_not_see_is_explained(tmp_path: Path) -> None:
    parts = listed(tmp_path, names(19))
    (tmp_path / "images").unlink()
    with pytest.raises(UserError, match="a folder that all nodes share"):
        parts.texts(0)


def test_killed_process_leaves_no_result_and_is_counted(tmp_path: Path) -> None:
    parts = listed(tmp_path, names(19))

    def die() -> None:
        with parts.writing(1) as path:
            parts.begin(1)
            path.write_text("half")
            os.kill(os.getpid(), 9)

    assert [ending(fork(die)) for _ in range(2)] == [-9, -9]
    assert parts.missing() == [0, 1, 2]
    with parts.writing(1) as path:
        assert parts.begin(1) == 2
        path.write_text("whole")
    assert parts.missing() == [0, 2]
    assert parts.file(1).read_text() == "whole"
    assert not parts.tries(1).exists()


def test_error_leaves_no_result_and_counts_no_death(tmp_path: Path) -> None:
    parts = listed(tmp_path, names(19))

    def fail() -> None:
        with parts.writing(0) as path:
            parts.begin(0)
            path.write_text("half")
            raise UserError("no")

    with pytest.raises(UserError, match="no"):
        fail()
    assert parts.missing() == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "job.json"]


def test_deaths_are_forgotten_by_the_next_command(tmp_path: Path) -> None:
    parts = listed(tmp_path, names(19))
    parts.begin(0)
    parts.forgive()
    assert parts.begin(0) == 0


def test_removed_job_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    parts = listed(parts_folder(out), names(3))
    assert job_exists(out)
    assert json.loads((parts.folder / "job.json").read_text())["about"] == {"top_k": 3}
    parts.remove()
    assert not parts.folder.exists()


def test_results_of_a_job_whose_removal_was_interrupted_are_not_taken(tmp_path: Path) -> None:
    parts = listed(tmp_path, names(19))
    parts.file(0).write_text("old")
    (tmp_path / "job.json").unlink()
    assert listed(tmp_path, names(12)).missing() == [0, 1]
