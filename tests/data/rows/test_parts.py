import errno
import logging
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.forked import ending, fork
from vitascope.data.rows import parts as module
from vitascope.data.rows.on_ray import RayPartWorker
from vitascope.data.rows.parts import (
    MOST_DEATHS,
    Images,
    Loop,
    PartDone,
    PartRows,
    Parts,
    PartTask,
    computed,
    job_exists,
    kept_parts,
    loop_of,
    parts_folder,
)
from vitascope.errors import UserError

ENGINE = cast("Any", None)
HERE = loop_of(ENGINE)


class Names(PartTask):
    """The result of an image is its name."""

    def results(self, engine: Any, parts: Iterator[Images]) -> Generator[PartRows, None, None]:
        for images in parts:
            yield PartRows("".join(f"{name}\n" for (name,) in images).encode(), {0: "broken"})


def listed(folder: Path, images: list[tuple[str, ...]], batch_size: int = 4) -> Parts:
    return Parts.create(folder, images, batch_size=batch_size, about={"top_k": 3})


def names(count: int) -> list[tuple[str, ...]]:
    return [(f"{number:03}.png",) for number in range(count)]


def run(out: Path, loop: Loop = HERE, images: int = 19, top_k: int = 3) -> list[int]:
    """Write the names of images to a file; returns the parts that were computed now."""

    def differences(about: Any) -> list[str]:
        return [] if about["top_k"] == top_k else [f"top_k was {about['top_k']}"]

    task = Names(batch_size=4)
    with computed(out, task, loop, names(images), {"top_k": top_k}, differences) as (parts, now):
        results = [parts.read(part) for part in range(len(parts))]
        out.write_bytes(b"".join(part.rows for part in results))
        assert all(part.faults == {0: "broken"} for part in results)
    return now


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNIT_IMAGES", 6)


def test_parts_have_all_images_in_order_and_whole_batches_and_become_larger_not_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = names(19)
    parts = listed(tmp_path, images)
    assert parts.part_images == 8  # batches of 4 up to at least 6 images
    assert [parts.count(part) for part in range(len(parts))] == [8, 8, 3]
    assert [image for part in range(len(parts)) for image in parts.texts(part)] == images
    assert Parts.open(tmp_path) == parts
    monkeypatch.setattr(module, "MOST_PARTS", 3)
    images = names(70)  # 9 units of 8 images
    parts = listed(tmp_path / "many", images)
    assert [parts.count(part) for part in range(len(parts))] == [24, 24, 22]
    assert [image for part in range(len(parts)) for image in parts.texts(part)] == images


def test_any_path_and_empty_labels_are_listed(tmp_path: Path) -> None:
    images = [("a\nb.png", "", "all"), (os.fsdecode(b"\xe9.png"), "\ud800;dog", "all"), ("日本.png", "", "")]
    assert listed(tmp_path, images).texts(0) == images
    with pytest.raises(UserError, match="no images"):
        listed(tmp_path / "out.jsonl.parts", [])
    assert not job_exists(tmp_path / "out.jsonl")


def test_list_that_was_cut_short_or_damaged_is_rejected(tmp_path: Path) -> None:
    listed(tmp_path, names(19))
    images, job = ((tmp_path / name).read_bytes() for name in ("images", "job.json"))
    of_0_2_0 = job.replace(b'"format": 2', b'"images": 19')
    changed = (
        job.replace(b'"part_images": 8', b'"part_images": 0'),
        job.replace(b'"part_images": 8', b'"part_images": 6'),
        job.replace(b'"images": 19', b'"imagos": 19'),
        job.replace(b'"format": 2', b'"format": 3'),
    )
    pairs = [(images[:-3], job), (images + b"x", job)]
    pairs += [(images, content) for content in (job[:-9], b"[]", of_0_2_0, *changed)]
    for written, described in pairs:
        assert (written, described) != (images, job)
        (tmp_path / "images").write_bytes(written)
        (tmp_path / "job.json").write_bytes(described)
        with pytest.raises(UserError, match="begin again"):
            Parts.open(tmp_path)


def test_list_that_changes_or_that_a_node_does_not_see_is_rejected(tmp_path: Path) -> None:
    parts = listed(tmp_path, names(19))
    path = tmp_path / "images"
    path.write_bytes(path.read_bytes().replace(b"018.png\0", b"018-png?"))
    assert parts.texts(1)
    with pytest.raises(UserError, match="cut short or changed"):
        parts.texts(2)
    path.unlink()
    with pytest.raises(UserError, match="a folder that all nodes share"):
        parts.texts(0)


def test_job_is_joined_from_all_parts_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def second(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        with pytest.raises(UserError, match="is in use by process"):
            run(out)
        return HERE(parts, task, wanted)

    assert run(out, second) == [0, 1, 2]
    assert out.read_text().split() == [name for (name,) in names(19)]
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(UserError, match="2 of 3 parts are not computed"):
        run(tmp_path / "other", lambda parts, task, wanted: HERE(parts, task, wanted[:1]))


def test_interrupted_job_computes_the_missing_parts_only(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stopping(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        yield from HERE(parts, task, wanted[:2])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out, stopping)
    assert job_exists(out)
    assert not out.exists()
    with pytest.raises(
        UserError, match=r"out\.parts was made with other options .*: top_k was 3; use the same"
    ):
        run(out, top_k=5)
    assert run(out, images=99) == [2]  # the images are those that were listed
    assert len(out.read_text().split()) == 19


def test_job_that_was_not_listed_completely_or_not_removed_completely_begins_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts_folder(out).mkdir()
    (parts_folder(out) / "images").write_bytes(b"000.png\0")
    (parts_folder(out) / "00000.part").write_text("old")
    assert run(out) == [0, 1, 2]
    assert "old" not in out.read_text()


def test_killed_process_leaves_no_results_and_is_reported(tmp_path: Path, caplog) -> None:
    def die(parts: Parts) -> None:
        module.settle = lambda *_: os.kill(os.getpid(), 9)  # before it is renamed
        parts.begin(1)
        parts.write(1, PartRows(b"half", {}))

    def dying(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        assert [ending(fork(lambda: die(parts))) for _ in range(2)] == [-9, -9]
        assert parts.missing() == [0, 1, 2]
        return HERE(parts, task, wanted)

    with caplog.at_level(logging.WARNING):
        assert run(tmp_path / "out", dying) == [0, 1, 2]
    assert "2 workers died at part 2 of 3, and another has taken over" in caplog.text
    assert "half" not in (tmp_path / "out").read_text()


def test_part_at_which_workers_die_stops_the_job_and_names_its_images(tmp_path: Path) -> None:
    def dying(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        for _ in range(MOST_DEATHS):
            parts.begin(1)
        return HERE(parts, task, wanted)

    with pytest.raises(UserError, match=r"5 workers died at the images from 008\.png to 015\.png"):
        run(tmp_path / "out", dying)
    assert run(tmp_path / "out") == [1, 2]  # deaths are forgotten by the next command


def test_job_that_ends_or_is_killed_keeps_whole_parts_alone_and_says_how_many(tmp_path: Path) -> None:
    """As on a full disk, where one worker has the error and others are in the middle of a part."""
    out = tmp_path / "out"
    whole = ["00000.part", "images", "job.json", "lock"]

    def fail(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        yield from HERE(parts, task, wanted[:1])
        parts.begin(2)
        (parts.folder / ".0123.part").write_bytes(b"of a worker that was killed")
        parts.begin(1)
        raise UserError("no")

    assert kept_parts(out, "out", "again") == "nothing is kept"
    with pytest.raises(UserError, match="no"):
        run(out, fail)
    assert kept_parts(out, "out", "again") == "kept: 1 finished part of out; again"
    assert sorted(os.listdir(parts_folder(out))) == whole
    for left in (".0123.part", "00001.tries"):  # of a command that was killed
        (parts_folder(out) / left).write_bytes(b"x\n")
    assert kept_parts(out, "out", "again") == "kept: 1 finished part of out; again"
    assert run(out) == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_worker_that_died_after_its_part_was_written_is_counted(tmp_path: Path) -> None:
    parts = listed(tmp_path, names(19))
    assert parts.deaths(0) == parts.begin(0) == 0
    parts.write(0, PartRows(b"whole", {}))
    assert parts.deaths(0) == 1  # until it is reported
    worker = RayPartWorker(parts, Names(batch_size=4), cast("Any", None))
    assert worker({"part": [0]})["deaths"] == [1]


def test_disk_that_is_full_is_named_before_a_part_begins(tmp_path: Path, monkeypatch) -> None:
    parts = listed(tmp_path, names(19))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(UserError, match=r"00000\.part: .* No space left on device .* other parts are kept"):
        parts.begin(0)
