import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from vitascope.errors import UserError
from vitascope.training import checkpoint
from vitascope.training.checkpoint import MANIFEST, STATE, checkpoints, load_checkpoint, save_checkpoint


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value), "best_loss": value}


def test_what_was_saved_comes_back(tmp_path) -> None:
    save_checkpoint(tmp_path, 7, state(1.5))
    step, found = load_checkpoint(tmp_path)
    assert step == 7
    assert torch.equal(found["weights"], state(1.5)["weights"])
    assert found["best_loss"] == 1.5


def test_only_the_newest_is_kept_and_strangers_are_left_alone(tmp_path) -> None:
    stray = tmp_path / "checkpoints" / "notes.txt"
    stray.parent.mkdir()
    stray.write_text("mine")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, state(step))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]
    assert stray.read_text() == "mine"


def test_without_checkpoints_there_is_none(tmp_path) -> None:
    assert load_checkpoint(tmp_path) is None


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "no state"])
def test_a_broken_checkpoint_falls_back_to_the_one_before(tmp_path, monkeypatch, capsys, damage: str) -> None:
    save_checkpoint(tmp_path, 1, state(1))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **options: None)  # keep the old one
    newest = save_checkpoint(tmp_path, 2, state(2)) / STATE
    content = bytearray(newest.read_bytes())
    if damage == "truncated":
        newest.write_bytes(content[:-100])
    elif damage == "flipped bit":
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    else:
        newest.unlink()
    step, found = load_checkpoint(tmp_path)
    assert (step, found["best_loss"]) == (1, 1)
    assert "step-00000002" in capsys.readouterr().err


def test_nothing_but_broken_checkpoints_is_an_error_that_names_them(tmp_path) -> None:
    (save_checkpoint(tmp_path, 1, state(1)) / STATE).write_bytes(b"")
    with pytest.raises(UserError, match="step-00000001"):
        load_checkpoint(tmp_path)


def test_a_checkpoint_executes_nothing(tmp_path) -> None:
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    folder = save_checkpoint(tmp_path, 1, state(1))
    torch.save(Attack(), folder / STATE)
    digest = checkpoint.sha256(folder / STATE)
    (folder / MANIFEST).write_text(f'{{"step": 1, "sha256": {{"{STATE}": "{digest}"}}}}')
    with pytest.raises(UserError):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("stage", ["save", "fsync", "sha256", "replace"])
def test_killed_at_any_stage_of_a_save_the_previous_checkpoint_loads(tmp_path, stage: str) -> None:
    save_checkpoint(tmp_path, 1, state(1))
    worker = multiprocessing.get_context("fork").Process(target=_die_saving, args=(tmp_path, stage))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    step, found = load_checkpoint(tmp_path)
    assert (step, found["best_loss"]) == (1, 1)
    save_checkpoint(tmp_path, 2, state(2))  # what was left half-written is not in the way
    assert load_checkpoint(tmp_path)[0] == 2


def _die_saving(run: Path, stage: str) -> None:
    def die(*args: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    owner = {"save": checkpoint.torch, "sha256": checkpoint}.get(stage, checkpoint.os)
    setattr(owner, stage, die)
    save_checkpoint(run, 2, state(2))


def test_a_full_disk_is_reported_and_leaves_the_old_checkpoint_and_no_rest(tmp_path, monkeypatch) -> None:
    save_checkpoint(tmp_path, 1, state(1))

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", no_space)
    with pytest.raises(UserError, match="No space left"):
        save_checkpoint(tmp_path, 2, state(2))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001"]
    assert load_checkpoint(tmp_path)[0] == 1
