"""Checkpoints that a thread writes: the state at the step, one at a time, errors in every process."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from tests.forked import ending, fork, in_group
from vitascope.errors import UserError
from vitascope.run.run import Run
from vitascope.training.checkpoint import folders
from vitascope.training.checkpoint.background import CheckpointWriter
from vitascope.training.checkpoint.folders import checkpoints, load_checkpoint


def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let a checkpoint be completed only after the event that is returned."""
    allowed, commit = threading.Event(), folders._commit

    def later(*arguments: Any) -> None:
        assert allowed.wait(30)
        commit(*arguments)

    monkeypatch.setattr(folders, "_commit", later)
    return allowed


def test_checkpoint_has_the_state_of_its_step_while_training_changes_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, weights = begun(monkeypatch), torch.zeros(100)
    writer = CheckpointWriter(Run(tmp_path), keep=2)
    writer.save(1, {"model": {"weights": weights}})
    weights.add_(1)
    assert checkpoints(tmp_path) == []
    assert not writer.failed
    allowed.set()
    writer.save(2, {"model": {"weights": weights}})  # waits for the first
    assert [path.name for path in checkpoints(tmp_path)][:1] == ["step-00000001"]
    assert not load_checkpoint(tmp_path)[1]["model"]["weights"].any() or len(checkpoints(tmp_path)) == 2
    writer.close()
    step, state = load_checkpoint(tmp_path)
    assert (step, state["model"]["weights"].unique().tolist()) == (2, [1.0])


def test_failure_in_the_thread_is_raised_once_and_older_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(Run(tmp_path), keep=2)
    writer.save(1, {"weights": torch.zeros(3)})
    writer.wait()
    monkeypatch.setattr(
        torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    writer.save(2, {"weights": torch.ones(3)})
    writer._thread.submit(lambda: None).result()
    assert writer.failed
    with pytest.raises(UserError, match=r"step-00000002: the checkpoint cannot be written: No space left"):
        writer.wait()
    assert not writer.failed
    writer.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_process_killed_while_the_thread_writes_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_die() -> None:
        writer = CheckpointWriter(Run(tmp_path), keep=2)
        writer.save(1, {"weights": torch.zeros(3)})
        writer.wait()
        settle = folders.settle
        folders.settle = lambda *paths: (os.kill(os.getpid(), signal.SIGKILL), settle(*paths))
        writer.save(2, {"weights": torch.ones(3)})
        writer.wait()

    assert ending(fork(write_and_die)) == -signal.SIGKILL
    assert load_checkpoint(tmp_path)[0] == 1


def write_shards_beside_other_communication(run: Path) -> None:
    """What each process does: training communicates while the thread writes, and changes the shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = distribute_tensor(torch.arange(7.0), mesh)
    writer = CheckpointWriter(Run(run), keep=2)
    for step in range(1, 4):
        writer.save(step, {"weights": weights})
        for _ in range(20):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == dist.get_world_size()
        weights.add_(1)
    writer.close()


def test_shards_are_those_of_their_step_while_training_communicates(tmp_path: Path) -> None:
    def work() -> None:
        write_shards_beside_other_communication(tmp_path / "run")

    assert in_group(2, work, tmp_path / "store") == [0, 0]
    for path in checkpoints(tmp_path / "run"):
        step, state = folders.load_checkpoint_at(path)
        assert torch.equal(state["weights"], torch.arange(7.0) + step - 1)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000002", "step-00000003"]


def test_failure_in_the_thread_of_one_process_is_raised_in_all(tmp_path: Path) -> None:
    def work() -> None:
        writer = CheckpointWriter(Run(tmp_path / "run"), keep=2)
        if dist.get_rank() == 0:
            folders.settle = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        writer.save(1, {"weights": torch.zeros(3)})
        with pytest.raises(UserError, match="the checkpoint cannot be written: Input/output error") as it:
            writer.wait()
        assert it.value.printed_elsewhere == (dist.get_rank() == 1)
        writer.close()

    assert in_group(2, work, tmp_path / "store") == [0, 0]
    assert checkpoints(tmp_path / "run") == []
