import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vitascope.errors import UserError
from vitascope.report.records import read_metrics
from vitascope.training.recipes import TrainConfig
from vitascope.training.run import Recorder, create_run, open_run


def test_an_existing_run_is_never_overwritten(tmp_path) -> None:
    config = TrainConfig(run=str(tmp_path / "r"))
    run = create_run(config)
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=r"exists.*--resume"):
        create_run(TrainConfig(run=str(tmp_path / "r"), seed=3))
    assert (run / "config.yaml").read_bytes() == before


def test_unnamed_runs_are_called_after_the_data_and_numbered(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(create_run(TrainConfig(data="some/photos/"))) for _ in range(3)] == [
        "runs/photos",
        "runs/photos-2",
        "runs/photos-3",
    ]


def test_a_run_opens_with_its_configuration(tmp_path) -> None:
    config = TrainConfig(run=str(tmp_path / "r"), seed=5)
    assert open_run(create_run(config)) == (tmp_path / "r", config)
    with pytest.raises(UserError, match="not a run folder"):
        open_run(tmp_path)


def test_records_after_the_resumed_step_are_dropped(tmp_path) -> None:
    first = Recorder(tmp_path)
    for step in (10, 20, 30):
        first.record("step", step, {"loss": float(step)})
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # a crash in the middle of a line
    second = Recorder(tmp_path, step=20)
    second.record("step", 30, {"loss": -1.0})
    second.close()
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [
        (10, 10.0),
        (20, 20.0),
        (30, -1.0),
    ]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_tensorboard_gets_the_same_numbers(tmp_path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record("epoch", 5, {"val_accuracy": 0.25, "split": "val"})
    recorder.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["epoch/val_accuracy"]
    point = events.Scalars("epoch/val_accuracy")[0]
    assert (point.step, point.value) == (5, 0.25)
