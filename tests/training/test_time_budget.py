import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training import (
    assert_bitwise,
    clock,
    interrupted,
    last_state,
    tiny_config,
    trainer_of,
    write_folder,
)
from vitascope import runs
from vitascope.errors import UserError
from vitascope.training import loop
from vitascope.training.loop import Trainer
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run
from vitascope.training.schedule import SIDES, resized

pytestmark = pytest.mark.usefixtures("without_figures")

STEPS_PER_EPOCH = 5
STATE = ("step", "model", "average", "optimizer")


def config_for(data: Path, run: Path, **options: object) -> TrainConfig:
    return tiny_config(data, run=str(run), **{"minutes": 0.05, "dropout": 0.1, "keep": "last"} | options)


def test_the_time_sets_the_number_of_steps_and_the_schedule_ends_with_it(data, tmp_path, monkeypatch) -> None:
    clock(monkeypatch, tick=0.01)
    run = Run(runs.train(config_for(data, tmp_path / "run")).run)
    lengths = run.config["lengths"]
    assert run.config["epochs"] is None
    assert len(lengths) > 5
    last = run.records("epoch")[-1]
    assert last["step"] == lengths[-1][1]
    assert last["epoch"] == pytest.approx(last["step"] / STEPS_PER_EPOCH, abs=0.005)
    assert run.records("test")[0]["seconds"] == pytest.approx(60 * 0.05, rel=0.1)
    assert run.records("step")[-1]["lr"] < 0.3 * max(record["lr"] for record in run.records("step"))


def test_a_run_of_few_epochs_is_validated_about_twenty_times(data, tmp_path, monkeypatch) -> None:
    clock(monkeypatch, tick=0.001)
    run = Run(runs.train(config_for(data, tmp_path / "run", minutes=0.003)).run)
    epochs = [record["epoch"] for record in run.records("epoch")]
    assert len(epochs) > 1.1 * epochs[-1]
    assert 15 <= len(epochs) == len(set(epochs)) <= 20
    assert 15 <= run.config["validations"] <= 20
    assert all("val_loss" in record and "train_loss" in record for record in run.records("epoch"))


def test_an_interrupted_run_with_minutes_resumes_on_its_recorded_way_and_is_repeated_bitwise(
    data, tmp_path, monkeypatch
) -> None:
    clock(monkeypatch)
    run = tmp_path / "run"
    with interrupted(31):
        runs.train(config_for(data, run))
    before = Run(run).config["lengths"]
    runs.resume(run)
    lengths = Run(run).config["lengths"]
    assert lengths[: len(before)] == before
    assert len(lengths) > len(before)
    clock(monkeypatch, tick=0.05)  # a slower machine
    config = TrainConfig.from_yaml(run / "config.yaml").replace(run=str(tmp_path / "again"))
    assert_bitwise(last_state(run, *STATE), last_state(runs.train(config).run, *STATE))


def test_a_time_too_short_for_a_step_is_rejected_and_leaves_no_folder(data, tmp_path) -> None:
    with pytest.raises(UserError, match=r"minutes=1e-05 is too short: .* set minutes to at least 0\.\d"):
        runs.train(config_for(data, tmp_path / "run", minutes=1e-5))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("per_look", "steps"), [(1.0, 3), (0.0625, 8)])
def test_measured_steps_are_whole_ones_of_every_size_and_their_time_counts(
    data, monkeypatch, per_look: float, steps: int
) -> None:
    seconds = iter(itertools.count(step=per_look))
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    sizes, update = [], Trainer._update

    def counted(self: Trainer) -> None:
        sizes.append(self.size)
        update(self)

    monkeypatch.setattr(Trainer, "_update", counted)
    monkeypatch.setattr(Trainer, "_set_length", lambda *_: None)  # which a run would record
    trainer = trainer_of(tiny_config(data, minutes=1000.0, epochs=None, progressive=0.5, optimizer="muon"))
    before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    trainer.start_budget(minutes=1000.0, spent=7.0)
    assert sizes == [resized(trainer.model_config, side) for side in (1.0, *SIDES[:-1]) for _ in range(steps)]
    looks = next(seconds) - per_look  # from the first to the last
    assert trainer.budget is not None
    splits, forward = trainer.splits, per_look / trainer.batch_size
    end = forward * (len(splits.measured) + 2 * len(splits.val) + len(splits.train))  # test and calibration
    assert trainer.budget.seconds == pytest.approx(60_000 - 7 - looks - end, abs=0.2)
    assert_bitwise(before, dict(trainer.module.state_dict()))
    assert not trainer.optimizer.state


@pytest.mark.parametrize("keep", ["best", "auto"])
def test_minutes_for_measuring_alone_are_rejected_at_once_and_those_named_train_as_long(
    tmp_path, monkeypatch, keep: str
) -> None:
    root = tmp_path / "data"
    for part, count in (("train", 8), ("val", 40), ("test", 40)):
        write_folder(root / part, per_class=count, side=4)
    config = tiny_config(
        root, minutes=0.3 if keep == "best" else 0.5, epochs=None, run=str(tmp_path / "run"), keep=keep
    )
    clock(monkeypatch, tick=0.2)
    with pytest.raises(UserError, match="measuring by 80 validation images and 80 test images") as error:
        runs.train(config)
    assert not (tmp_path / "run").exists()
    enough = float(str(error.value).rpartition(" ")[2])
    monkeypatch.setattr(Trainer, "_set_length", lambda *_: None)
    trainer = trainer_of(config.replace(minutes=enough))
    clock(monkeypatch, tick=0.2)
    trainer.start_budget(enough, spent=0.0)
    validation, end = trainer._seconds_to_measure(0.2 / 4)
    assert end > (3 if keep == "best" else 5) * validation
    assert trainer.budget.seconds - validation >= end + validation
    assert trainer.budget.first_length(0.2) >= 20


def test_a_machine_that_slows_down_at_the_end_is_reported(data, tmp_path, monkeypatch, capsys) -> None:
    clock(monkeypatch)
    end = Trainer._validate

    def slow(trainer: Trainer, *arguments: object) -> None:
        end(trainer, *arguments)
        if trainer.step == trainer.schedule.total(trainer.step):
            clock(monkeypatch, tick=100.0)
            loop.time.monotonic()

    monkeypatch.setattr(Trainer, "_validate", slow)
    runs.train(config_for(data, tmp_path / "run"))
    assert "the machine became slower near the end" in capsys.readouterr().out
