"""Checkpoint folders, and injected faults: kills, full disks, corrupt files, failing deletes."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from tests.forked import ending, fork
from tests.training.checkpoint import replace_file, save_checkpoint
from vitascope.errors import UserError
from vitascope.training.checkpoint import folders as checkpoint
from vitascope.training.checkpoint.folders import (
    MANIFEST,
    STATE,
    checkpoints,
    load_checkpoint,
    load_checkpoint_at,
)


def state(value: float, size: int = 1000) -> dict[str, Any]:
    return {"weights": torch.full((size,), float(value)), "nested": {"best_loss": value, "names": ["a"]}}


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def folder_of(step: int) -> str:
    return f"step-{step:08d}"


def test_saved_state_is_loaded_unchanged(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 7, state(1.5))
    assert folder == tmp_path / "checkpoints" / folder_of(7)
    for step, found in (load_checkpoint(tmp_path), load_checkpoint_at(folder)):
        assert step == 7
        assert torch.equal(found["weights"], state(1.5)["weights"])
        assert found["nested"] == {"best_loss": 1.5, "names": ["a"]}


@pytest.mark.parametrize("keep", [1, 3])
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    steps = [1, 2, 3, 4, 100_000_000]  # sorted as numbers: the last has one more digit
    for step in steps:
        save_checkpoint(tmp_path, step, state(step), keep=keep)
    assert [path.name for path in checkpoints(tmp_path)] == [folder_of(step) for step in steps[-keep:]]
    assert load_checkpoint(tmp_path)[0] == 100_000_000


def test_old_checkpoints_are_removed_only_after_the_new_one_is_renamed(tmp_path, monkeypatch) -> None:
    events = []

    def note(name: str, function: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            events.append((name, *(Path(arg).name for arg in args if not isinstance(arg, int))))
            return function(*args, **options)

        return noted

    save_checkpoint(tmp_path, 1, state(1))
    monkeypatch.setattr(os, "fsync", note("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", note("rename", os.replace))
    monkeypatch.setattr(shutil, "rmtree", note("remove", shutil.rmtree))
    save_checkpoint(tmp_path, 2, state(2), keep=1)
    new, old = f".{folder_of(2)}.{os.getpid()}", f".{folder_of(1)}.old"
    assert events == [
        ("fsync",),  # state
        ("fsync",),  # manifest
        ("fsync",),  # the checkpoint's folder
        ("rename", new, folder_of(2)),
        ("fsync",),  # its parent,
        ("fsync",),  # and the run folder, which is new
        ("rename", folder_of(1), old),
        ("remove", old),
    ]


def test_intact_checkpoint_is_not_rewritten_and_a_broken_one_is(tmp_path, capsys) -> None:
    folder = save_checkpoint(tmp_path, 1, state(1))
    before = (folder / MANIFEST).stat().st_ino
    save_checkpoint(tmp_path, 1, state(1))
    assert (folder / MANIFEST).stat().st_ino == before
    (folder / STATE).write_bytes(b"")
    save_checkpoint(tmp_path, 1, state(1))
    assert "it is written again" in capsys.readouterr().err
    assert load_checkpoint(tmp_path)[0] == 1
    shutil.rmtree(folder)
    folder.mkdir()  # no manifest: somebody removed half of it
    (folder / STATE).write_bytes(b"half")
    save_checkpoint(tmp_path, 1, state(1))
    assert load_checkpoint(tmp_path)[0] == 1
    assert names(tmp_path) == [folder_of(1)]


GOOD = '"state.pt": {"bytes": 1, "sha256": "0"}'
NONSENSE = {
    "": "is broken: Expecting value",
    '{"step": 2, "files"': "is broken: Expecting",
    "[1]": "a list, not an object; remove this checkpoint",
    "{}": "it has no step, files",
    '{"step": 2, "files": []}': "a list, not an object",
    f'{{"step": 1, "files": {{{GOOD}}}}}': "step must be in",
    f'{{"step": 2, "files": {{{GOOD}}}}}': "its size or SHA-256 is not that of",
}


def test_wrong_manifest_makes_a_checkpoint_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path, 1, state(1))
    newest = save_checkpoint(tmp_path, 2, state(2))
    for content, message in NONSENSE.items():
        (newest / MANIFEST).write_text(content)
        assert load_checkpoint(tmp_path)[0] == 1
        warning = capsys.readouterr().err
        assert all(part in warning for part in (message, folder_of(2), "falls back to step 1"))
        with pytest.raises(UserError, match=message):
            load_checkpoint_at(newest)


def test_error_lists_every_checkpoint_if_none_is_intact(tmp_path: Path) -> None:
    (save_checkpoint(tmp_path, 1, state(1)) / STATE).write_bytes(b"")
    (save_checkpoint(tmp_path, 2, state(2)) / STATE).unlink()
    with pytest.raises(UserError) as caught:
        load_checkpoint(tmp_path)
    message = str(caught.value)
    assert f"{folder_of(1)}/{STATE}: its size or SHA-256 is not that of" in message
    assert f"{folder_of(2)}/{STATE}: cannot be read: No such file" in message
    assert "\n" not in message


def test_an_explicit_path_must_be_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state(1))
    (tmp_path / "checkpoints" / "best").mkdir()
    for path in ("nowhere", "checkpoints", "checkpoints/best"):
        with pytest.raises(UserError, match="not a checkpoint, which is a folder step-00001234"):
            load_checkpoint_at(tmp_path / path)


def test_loading_a_checkpoint_executes_no_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    folder, attack = save_checkpoint(tmp_path, 1, state(1)), io.BytesIO()
    torch.save({"weights": Attack()}, attack)
    replace_file(folder, STATE, attack.getvalue())
    for load in (lambda: load_checkpoint(tmp_path), lambda: load_checkpoint_at(folder)):
        with pytest.raises(
            UserError, match=rf"{STATE}: complete, but .* nothing was executed: .*posix\.mkdir"
        ) as caught:
            load()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()


def test_state_that_is_not_a_pickle_fails_in_one_line(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, state(1))
    for content in (b"", b"PK\x03\x04", b"\x80\x02}.", b"(lp0\n."):
        replace_file(folder, STATE, content)
        with pytest.raises(UserError, match=STATE) as caught:
            load_checkpoint(tmp_path)
        assert "\n" not in str(caught.value)


def test_unwritable_run_folder_is_an_error_with_advice(tmp_path, monkeypatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    save_checkpoint(tmp_path, 1, state(1))
    monkeypatch.setattr(checkpoint.Path, "mkdir", fail)
    with pytest.raises(UserError, match=r"cannot be written: Read-only file system; .*train --resume "):
        save_checkpoint(tmp_path, 2, state(2))
    assert load_checkpoint(tmp_path)[0] == 1


def assert_loads(run: Path, *steps: int) -> None:
    step, found = load_checkpoint(run)
    assert step in steps
    assert torch.equal(found["weights"], torch.full_like(found["weights"], step))
    assert found["nested"]["best_loss"] == step


# 1: SIGKILL


def save_and_die(run: Path, number: int) -> None:
    """Save, and be killed just before file system operation `number`."""
    left = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "fsync"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        count("fsync", ())  # it has no audit event
        fsync(descriptor)

    os.fsync = fsync
    sys.addaudithook(count)
    save_checkpoint(run, 2, state(2), keep=1)


def test_intact_checkpoint_loads_after_a_kill_at_any_point_of_a_save(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "before", 1, state(1))
    number, ended = 0, -signal.SIGKILL
    while ended == -signal.SIGKILL:
        number += 1
        run = shutil.copytree(tmp_path / "before", tmp_path / f"run-{number}")
        ended = ending(fork(partial(save_and_die, run, number)))
        assert_loads(run, 1, 2)
        save_checkpoint(run, 3, state(3), keep=1)  # half-written and half-deleted checkpoints are removed
        assert names(run) == ["step-00000003"]
        assert_loads(run, 3)
    assert ended == 0
    assert number > 15  # the number of kills


# 2: a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 256 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_full_disk_at_any_point_of_a_save_loses_nothing(small_disk: Path) -> None:
    save_checkpoint(small_disk, 1, state(1, size=8000))
    ballast, rejected = small_disk / "ballast", 0
    for free in range(0, 65536, 4096):  # bytes available to the next save
        with open(ballast, "wb") as file:
            file.write(bytes(shutil.disk_usage(small_disk).free - free))
        try:
            save_checkpoint(small_disk, 2, state(2, size=8000))
            break
        except UserError as error:
            message = str(error)
        rejected += 1
        for part in (f"{small_disk}/checkpoints/step-00000002: ", "No space left on device", "make room"):
            assert part in message
        assert "\n" not in message
        assert names(small_disk) == ["step-00000001"]
        assert_loads(small_disk, 1)
        ballast.unlink()
    assert rejected > 8  # the state alone needs nine pages
    assert_loads(small_disk, 2)


# 3: corrupt files


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs with two checkpoints each: one with unsharded states, one with shards (of one process)."""
    runs = {kind: tmp_path_factory.mktemp(kind) for kind in ("whole", "sharded")}
    for step in (1, 2):
        save_checkpoint(runs["whole"], step, state(step))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for step in (1, 2):
            save_checkpoint(
                runs["sharded"],
                step,
                state(step) | {"weights": distribute_tensor(state(step)["weights"], mesh)},
            )
    finally:
        dist.destroy_process_group()
    return runs


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_corrupt_newest_checkpoint_is_named_and_the_previous_one_resumed(
    two: dict[str, Path], tmp_path: Path, capsys, kind: str, damage: Callable[[Path], None]
) -> None:
    for name in (STATE, MANIFEST, *((".metadata", "__0_0.distcp") if kind == "sharded" else ())):
        run = shutil.copytree(two[kind], tmp_path / name)
        assert_loads(run, 2)
        newest = checkpoints(run)[-1]
        damage(newest / name)
        assert_loads(run, 1)
        warning = capsys.readouterr().err
        assert all(part in warning for part in ("falls back to step 1", name, newest.name))
        assert warning.count("\n") == 1
        with pytest.raises(UserError, match=name):
            load_checkpoint_at(newest)  # an explicit path never falls back
        assert load_checkpoint_at(checkpoints(run)[0])[0] == 1


# 4: deletion


def test_stray_folders_and_the_best_model_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    strays = ["best", "step-1", "step-00000000-mine", "step-later", ".step-notes", "step-00000000"]
    for stray in strays:
        (folder / stray).mkdir(parents=True)
        (folder / stray / "state.pt").write_text("mine")  # the last is a half-deleted checkpoint
    for stray in ("step-00000001", "notes.txt", ".step-00000001.99"):
        (folder / stray).write_text("mine")
    for step in (2, 3):
        save_checkpoint(tmp_path, step, state(step), keep=1)
    files = ("step-00000001", "notes.txt", ".step-00000001.99")
    assert set(names(tmp_path)) == {*strays, *files, "step-00000003"}
    assert all((folder / stray / "state.pt").read_text() == "mine" for stray in strays)
    assert (folder / "step-00000001").read_text() == "mine"
    assert_loads(tmp_path, 3)


def save_as_unprivileged_user(run: Path, step: int) -> None:
    """Save without root's permission to delete anything."""
    os.chdir(run)  # only root can reach the folder
    if os.geteuid() == 0:
        os.seteuid(65534)
    save_checkpoint(Path(), step, state(step), keep=1)


def test_failed_delete_is_a_warning_and_the_run_continues(tmp_path, capfd) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path / "run", step, state(step))
    for path in (tmp_path / "run", *tmp_path.glob("run/**/*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (tmp_path / "run/checkpoints/step-00000001").chmod(0o555)  # its files cannot be deleted
    for step in (3, 4):
        assert ending(fork(partial(save_as_unprivileged_user, tmp_path / "run", step))) == 0
        assert ".step-00000001.old cannot be removed: Permission denied" in capfd.readouterr().err
        assert [path.name for path in checkpoints(tmp_path / "run")] == [f"step-{step:08d}"]
        assert_loads(tmp_path / "run", step)
