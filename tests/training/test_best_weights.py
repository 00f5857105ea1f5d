"""The best weights are written rarely, and never lost by a run that ends or is resumed."""

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training import assert_bitwise, tiny_config, trainer_of, undrawn, write_folder
from vitascope.errors import UserError
from vitascope.run.run import Run
from vitascope.training import best_weights, train
from vitascope.training.best_weights import BestWeights
from vitascope.training.loop import Trainer
from vitascope.training.tasks.classify import Classify
from vitascope.weights.loading import from_pretrained


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "greys")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2,), value)}


def test_weights_wait_in_memory_until_they_are_due(monkeypatch) -> None:
    written: list[float] = []
    clock = iter([1.0, 1.0, 5.0, 9.0, 12.0, 12.0])
    monkeypatch.setattr(best_weights, "time", SimpleNamespace(monotonic=lambda: next(clock)))
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


def test_weights_in_memory_are_copies_and_are_written_once(monkeypatch) -> None:
    monkeypatch.setattr(best_weights, "WRITE_SECONDS", 1e9)
    written: list[float] = []
    best, state = BestWeights(lambda state: written.append(float(state["weight"][0]))), weights(2.0)
    best.take(weights(1.0))
    best.take(state)
    state["weight"] += 5
    best.write()
    best.write()
    assert written == [1.0, 2.0]


def better_each_time(monkeypatch, losses: dict[int, float] | None = None) -> None:
    """Each validation is better than the one before, apart from those with a loss by its number."""
    validate, count = Classify.validate, itertools.count(1)

    def better(self: Classify, *arguments: Any) -> dict[str, float]:
        number = next(count)
        return {**validate(self, *arguments), "loss": (losses or {}).get(number, 1 / number)}

    monkeypatch.setattr(Classify, "validate", better)


@pytest.fixture
def written(monkeypatch) -> list[int]:
    """The steps at which best weights were written."""
    steps: list[int] = []
    write = Trainer._write_model

    def counted(self: Trainer, folder: Path, state: Any) -> None:
        if folder == self.run.best:
            steps.append(self.step)
        write(self, folder, state)

    monkeypatch.setattr(Trainer, "_write_model", counted)
    return steps


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_run_keeps_its_best_weights_however_seldom_they_are_written(
    data, tmp_path, monkeypatch, written, seconds: float
) -> None:
    monkeypatch.setattr(best_weights, "WRITE_SECONDS", seconds)
    better_each_time(monkeypatch, {4: 9.0})
    kept: dict[str, torch.Tensor] = {}
    validate = Trainer._validate

    def watched(self: Trainer, *arguments: Any) -> None:
        validate(self, *arguments)
        if self.best_step == self.step:
            kept.update({name: value.clone() for name, value in self.trained.state_dict().items()})

    monkeypatch.setattr(Trainer, "_validate", watched)
    with undrawn():
        run = train.train(tiny_config(data, run=str(tmp_path / "run"), epochs=4, keep="best")).run
    assert Run(run).records("kept")[0]["epoch"] == 3
    assert_bitwise(dict(from_pretrained(run).state_dict()), kept)
    assert written == ([5, 10, 15] if seconds == 0 else [5, 20])


def test_weights_that_a_checkpoint_refers_to_are_written_before_it(
    data, tmp_path, monkeypatch, written
) -> None:
    """A run that is killed after a checkpoint and resumed ends as an uninterrupted one."""
    monkeypatch.setattr(best_weights, "WRITE_SECONDS", 1e9)
    better_each_time(monkeypatch, dict.fromkeys(range(3, 7), 9.0))
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
        train.train(config)
        assert written == [5, 10]
        train.resume(again)
    assert_bitwise(*(dict(from_pretrained(run).state_dict()) for run in (whole, again)))


@pytest.mark.parametrize("killed_writing", [False, True])
def test_best_weights_that_a_kill_left_incomplete_are_replaced_by_the_next_ones(
    data, tmp_path, monkeypatch, killed_writing: bool
) -> None:
    """Also if no later validation is better than that of the checkpoint: not all machines repeat a run."""
    better_each_time(monkeypatch, {3: 8.0, 4: 9.0})
    run, save = Run(tmp_path / "run"), Trainer.save

    def stop(self: Trainer) -> None:
        save(self)
        self.checkpoint_writer.wait()
        if self.step >= 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save", stop)
    config = tiny_config(data, run=str(run.path), epochs=4, keep="best", checkpoint_seconds=0.0)
    with undrawn(), pytest.raises(KeyboardInterrupt):
        train.train(config)
    monkeypatch.setattr(Trainer, "save", save)
    if killed_writing:
        (run.best / "config.json").unlink()
    with undrawn():
        train.resume(run.path)
    assert run.records("kept")[0]["epoch"] == (3 if killed_writing else 2)


def test_a_run_that_diverges_leaves_its_best_weights(data, tmp_path, monkeypatch, written) -> None:
    monkeypatch.setattr(best_weights, "WRITE_SECONDS", 1e9)
    better_each_time(monkeypatch, {3: float("nan")})
    with undrawn(), pytest.raises(UserError, match="the validation loss is nan"):
        train.train(tiny_config(data, run=str(tmp_path / "run"), keep="best"))
    assert written == [5, 15]


def test_with_more_validation_than_training_images_whole_epochs_are_skipped(tmp_path) -> None:
    for split, count in {"train": 3, "val": 8}.items():
        write_folder(tmp_path / "data" / split, per_class=count)
    trainer = trainer_of(tiny_config(tmp_path / "data", batch_size=3, epochs=7))
    assert trainer.steps_per_epoch == 2
    assert [step for step in range(1, 15) if trainer.schedule.validates(step)] == [6, 12, 14]
