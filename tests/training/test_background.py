from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from tests.forked import in_group
from tests.pretended_gpu import GPU, pretended_gpu
from tests.training import (
    assert_bitwise,
    let_losses_be,
    records,
    run_of,
    tiny_config,
    trainer_of,
    undrawn,
    write_folder,
)
from vitascope import runs
from vitascope.errors import UserError
from vitascope.models.engines.transfer import Fetched
from vitascope.models.weights.loading import from_pretrained
from vitascope.training import background, loop
from vitascope.training.background import BestWeights, CheckpointWriter, StepLosses
from vitascope.training.checkpoint import folders
from vitascope.training.checkpoint.folders import checkpoints, load_checkpoint
from vitascope.training.loop import Trainer
from vitascope.training.run.run import Run


def test_a_loss_on_a_gpu_is_read_after_the_next_step_is_started() -> None:
    with pretended_gpu() as gpu, gpu.watched():
        losses = StepLosses(lambda step, rate, loss: gpu.log.append(f"loss {step} at {rate}"))
        for step in range(1, 5):
            gpu.log.append(f"step {step}")
            losses.read()
            if step % 2 == 0:
                losses.add(step, step / 10, torch.zeros((), device=GPU))
        losses.read()
        losses.read()
    copied = "copy from the GPU in main"
    assert gpu.log == [
        *("step 1", "step 2", copied, "step 3", "process waits for main 1", "loss 2 at 0.2"),
        *("step 4", copied, "process waits for main 2", "loss 4 at 0.4"),
    ]


def test_a_loss_on_a_cpu_is_read_at_once() -> None:
    found: list[Any] = []
    StepLosses(lambda *given: found.append(given)).add(3, 0.5, torch.tensor(2.0))
    assert found == [(3, 0.5, torch.tensor(2.0))]


class Late(Fetched):
    """On the CPU, as if it were on the way from a GPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self.late = True


def test_late_losses_are_recorded_under_their_own_steps(data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "RECORD_EVERY", 1)
    with undrawn():
        expected = records(run_of(tiny_config(data, epochs=1, run=str(tmp_path / "at once"))))
        assert len([record for record in expected if record["kind"] == "step"]) >= 4
        monkeypatch.setattr(background, "Fetched", Late)
        assert records(run_of(tiny_config(data, epochs=1, run=str(tmp_path / "late")))) == expected


def test_a_late_loss_that_diverges_ends_the_run_before_a_checkpoint(data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(background, "Fetched", Late)
    trainer = trainer_of(tiny_config(data, run=str(tmp_path / "run")))
    trainer.step, trainer.rate = 11, 0.1
    trainer.losses.add(10, 0.2, torch.tensor(math.nan))
    with pytest.raises(UserError, match=r"the loss is nan at step 10, with learning rate 0\.2"):
        trainer.save()
    assert not checkpoints(trainer.run.path)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2,), value)}


def test_weights_wait_in_memory_until_they_are_due(monkeypatch) -> None:
    written: list[float] = []
    clock = iter([1.0, 1.0, 5.0, 9.0, 12.0, 12.0])
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    best = BestWeights(lambda state: written.append(float(state["weight"][0])))
    best.write()
    best.take(weights(1.0))
    assert written == [1.0]
    state = weights(2.0)
    best.take(state)
    state["weight"] += 5  # training continues
    best.take(state)
    assert written == [1.0]
    state["weight"] += 5
    best.take(state)
    assert written == [1.0, 12.0]
    best.write()
    assert written == [1.0, 12.0]


@pytest.fixture
def written(monkeypatch) -> list[int]:
    steps: list[int] = []
    write = Trainer._write_model

    def counted(self: Trainer, folder: Path, state: Any) -> None:
        if folder == self.run.best:
            steps.append(self.step)
        write(self, folder, state)

    monkeypatch.setattr(Trainer, "_write_model", counted)
    return steps


def test_a_run_keeps_its_best_weights_however_seldom_they_are_written(
    data, tmp_path, monkeypatch, written
) -> None:
    monkeypatch.setattr(background, "WRITE_SECONDS", 1e9)
    let_losses_be(monkeypatch, 1.0, 0.5, 0.3, 9.0)
    kept: dict[str, torch.Tensor] = {}
    validate = Trainer._validate

    def watched(self: Trainer, *arguments: Any) -> None:
        validate(self, *arguments)
        if self.best_step == self.step:
            kept.update({name: value.clone() for name, value in self.trained.state_dict().items()})

    monkeypatch.setattr(Trainer, "_validate", watched)
    with undrawn():
        run = runs.train(tiny_config(data, run=str(tmp_path / "run"), epochs=4, keep="best")).run
    assert Run(run).records("kept")[0]["epoch"] == 3
    assert_bitwise(dict(from_pretrained(run).state_dict()), kept)
    assert written == [5, 20]


def test_weights_that_a_checkpoint_refers_to_are_written_before_it(
    data, tmp_path, monkeypatch, written
) -> None:
    """A run that is killed after a checkpoint and resumed ends as an uninterrupted one."""
    monkeypatch.setattr(background, "WRITE_SECONDS", 1e9)
    let_losses_be(monkeypatch, 1.0, 0.5, 9.0, 9.0, 9.0, 9.0)
    whole, again = tmp_path / "whole", tmp_path / "again"
    saved, save = [], Trainer.save

    def killed(self: Trainer) -> None:  # a copy of the run as a power failure would leave it
        save(self)
        self.checkpoint_writer.wait()
        saved.append(self.step)
        if self.step == 12:
            shutil.copytree(whole, again)

    monkeypatch.setattr(Trainer, "save", killed)
    config = tiny_config(data, run=str(whole), epochs=4, keep="best", checkpoint_seconds=0.0)
    with undrawn():
        runs.train(config)
        assert written == [5, 10]
        runs.resume(again)
    assert_bitwise(*(dict(from_pretrained(run).state_dict()) for run in (whole, again)))


def test_best_weights_that_a_kill_left_incomplete_are_replaced_by_the_next_ones(
    data, tmp_path, monkeypatch
) -> None:
    """Also if no later validation is better than that of the checkpoint: not all machines repeat a run."""
    let_losses_be(monkeypatch, 1.0, 0.5, 8.0, 9.0)
    run, save = Run(tmp_path / "run"), Trainer.save

    def stop(self: Trainer) -> None:
        save(self)
        self.checkpoint_writer.wait()
        if self.step >= 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save", stop)
    config = tiny_config(data, run=str(run.path), epochs=4, keep="best", checkpoint_seconds=0.0)
    with undrawn(), pytest.raises(KeyboardInterrupt):
        runs.train(config)
    monkeypatch.setattr(Trainer, "save", save)
    (run.best / "config.json").unlink()
    with undrawn():
        runs.resume(run.path)
    assert run.records("kept")[0]["epoch"] == 3


def test_a_run_that_diverges_leaves_its_best_weights(data, tmp_path, monkeypatch, written) -> None:
    monkeypatch.setattr(background, "WRITE_SECONDS", 1e9)
    let_losses_be(monkeypatch, 1.0, 0.5, math.nan)
    with undrawn(), pytest.raises(UserError, match="the validation loss is nan"):
        runs.train(tiny_config(data, run=str(tmp_path / "run"), keep="best"))
    assert written == [5, 15]


def test_with_more_validation_than_training_images_whole_epochs_are_skipped(tmp_path) -> None:
    for split, count in {"train": 3, "val": 8}.items():
        write_folder(tmp_path / "data" / split, per_class=count)
    trainer = trainer_of(tiny_config(tmp_path / "data", batch_size=3, epochs=7))
    assert trainer.steps_per_epoch == 2
    assert [step for step in range(1, 15) if trainer.schedule.validates(step)] == [6, 12, 14]


def test_checkpoint_has_the_state_of_its_step_while_training_changes_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, commit, weights = threading.Event(), folders._commit, torch.zeros(100)
    monkeypatch.setattr(folders, "_commit", lambda *given: (allowed.wait(30), commit(*given)))
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


def test_failure_in_the_thread_is_raised_once_and_older_checkpoints_stay(tmp_path, monkeypatch) -> None:
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


def test_shards_are_those_of_their_step_while_training_communicates(tmp_path: Path) -> None:
    def work() -> None:
        weights = distribute_tensor(torch.arange(7.0), init_device_mesh("cpu", (2,)))
        writer = CheckpointWriter(Run(tmp_path / "run"), keep=2)
        for step in range(1, 4):
            writer.save(step, {"weights": weights})
            for _ in range(20):
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total == 2
            weights.add_(1)
        writer.close()

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
