import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from vitascope.errors import UserError
from vitascope.training.checkpoint import folders as checkpoint
from vitascope.training.checkpoint.folders import (
    MANIFEST,
    STATE,
    checkpoints,
    load_checkpoint,
    load_checkpoint_at,
    save_checkpoint,
)
from vitascope.training.checkpoint.state import file_record


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value), "nested": {"best_loss": value, "names": ["a"]}}


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


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 3, 4, 100_000_000):  # sorted as numbers: the last has one more digit
        save_checkpoint(tmp_path, step, state(step), keep=keep)
    steps = [1, 2, 3, 4, 100_000_000][-keep:]
    assert [path.name for path in checkpoints(tmp_path)] == [folder_of(step) for step in steps]
    assert load_checkpoint(tmp_path)[0] == 100_000_000


def test_old_checkpoints_are_removed_only_after_the_new_one_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_intact_checkpoint_is_not_rewritten_and_a_broken_one_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    "": "an empty file",
    '{"step": 2, "files"': "not readable as JSON",
    "[1]": "not a JSON object",
    "{}": "lists no files",
    '{"step": 2, "files": []}': "lists no files",
    '{"step": 2, "files": {"state.pt": {"bytes": 1}}}': "lists no files",
    '{"step": 2, "files": {"state.pt": {"bytes": true, "sha256": "0"}}}': "lists no files",
    f'{{"step": 2, "files": {{{GOOD}, "../x": {{"bytes": 1, "sha256": ""}}}}}}': "lists no files",
    f'{{"step": 1, "files": {{{GOOD}}}}}': "of step 1, in the folder step-00000002",
    f'{{"step": 2, "files": {{{GOOD}}}}}': "bytes, but 1 were written",
}


@pytest.mark.parametrize(("content", "message"), NONSENSE.items())
def test_wrong_manifest_makes_a_checkpoint_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    save_checkpoint(tmp_path, 1, state(1))
    newest = save_checkpoint(tmp_path, 2, state(2))
    (newest / MANIFEST).write_text(content)
    assert load_checkpoint(tmp_path)[0] == 1
    warning = capsys.readouterr().err
    assert message in warning
    assert folder_of(2) in warning
    assert "falls back to step 1" in warning
    with pytest.raises(UserError, match=message):
        load_checkpoint_at(newest)


def test_error_lists_every_checkpoint_if_none_is_intact(tmp_path: Path) -> None:
    (save_checkpoint(tmp_path, 1, state(1)) / STATE).write_bytes(b"")
    (save_checkpoint(tmp_path, 2, state(2)) / STATE).unlink()
    with pytest.raises(UserError) as caught:
        load_checkpoint(tmp_path)
    message = str(caught.value)
    assert f"{folder_of(1)}/{STATE}: 0 bytes, but" in message
    assert f"{folder_of(2)}/{STATE}: cannot be read: No such file" in message
    assert "\n" not in message


@pytest.mark.parametrize("path", ["nowhere", "checkpoints", "checkpoints/best"])
def test_an_explicit_path_must_be_a_checkpoint(tmp_path: Path, path: str) -> None:
    save_checkpoint(tmp_path, 1, state(1))
    (tmp_path / "checkpoints" / "best").mkdir()
    with pytest.raises(UserError, match="not a checkpoint, which is a folder step-00001234"):
        load_checkpoint_at(tmp_path / path)


def replace_state(folder: Path, value: object) -> None:
    """Replace the state and update the manifest to match."""
    if isinstance(value, bytes):
        (folder / STATE).write_bytes(value)
    else:
        torch.save(value, folder / STATE)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][STATE] = file_record(folder / STATE)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_loading_a_checkpoint_executes_no_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    folder = save_checkpoint(tmp_path, 1, state(1))
    replace_state(folder, {"weights": Attack()})
    for load in (lambda: load_checkpoint(tmp_path), lambda: load_checkpoint_at(folder)):
        with pytest.raises(
            UserError, match=rf"{STATE}: complete, but .* nothing was executed: .*posix\.mkdir"
        ) as caught:
            load()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}.", b"(lp0\n."])
def test_state_that_is_not_a_pickle_fails_in_one_line(tmp_path: Path, content: bytes) -> None:
    replace_state(save_checkpoint(tmp_path, 1, state(1)), content)
    with pytest.raises(UserError, match=STATE) as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_unwritable_run_folder_is_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    save_checkpoint(tmp_path, 1, state(1))
    monkeypatch.setattr(checkpoint.Path, "mkdir", fail)
    with pytest.raises(UserError, match=r"cannot be written: Read-only file system; .*train --resume "):
        save_checkpoint(tmp_path, 2, state(2))
    assert load_checkpoint(tmp_path)[0] == 1
