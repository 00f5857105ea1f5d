"""The losses of single steps: read a step late on a GPU, at once on a CPU."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pretended_gpu import GPU, pretended_gpu
from tests.training import tiny_config, trainer_of, undrawn
from vitascope.data.transfer import Fetched
from vitascope.errors import UserError
from vitascope.run.layout import METRICS
from vitascope.run.metrics import read_metrics
from vitascope.training import loop, step_losses, train
from vitascope.training.checkpoint.folders import checkpoints
from vitascope.training.step_losses import StepLosses


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


def records_of(data: Path, run: Path) -> list[dict[str, Any]]:
    """The recorded metrics of a short run, without times."""
    with undrawn():
        train.train(tiny_config(data, epochs=2, run=str(run)))
    timed = {"seconds", "images_per_second", "time"}
    records = read_metrics(run / METRICS)
    return [{key: value for key, value in record.items() if key not in timed} for record in records]


def test_late_losses_are_recorded_under_their_own_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RECORD_EVERY", 2)
    expected = records_of(data, tmp_path / "at once")
    assert len([record for record in expected if record["kind"] == "step"]) >= 4
    monkeypatch.setattr(step_losses, "Fetched", Late)
    assert records_of(data, tmp_path / "late") == expected


def test_a_late_loss_that_diverges_ends_the_run_before_a_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_losses, "Fetched", Late)
    trainer = trainer_of(tiny_config(data, run=str(tmp_path / "run")))
    trainer.step, trainer.rate = 11, 0.1
    trainer.losses.add(10, 0.2, torch.tensor(math.nan))
    with pytest.raises(UserError, match=r"the loss is nan at step 10, with learning rate 0\.2"):
        trainer.save()
    assert not checkpoints(trainer.run.path)
