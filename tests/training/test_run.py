import datetime
import json
import platform
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import vitascope
from vitascope.errors import UserError
from vitascope.report.records import read_metrics
from vitascope.training.options import ExecutionOptions
from vitascope.training.recipes import TrainConfig
from vitascope.training.run import Recorder, create_run, lasting_path, open_run


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


def test_the_configuration_names_its_files_for_any_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("photos", "home/trained"):
        Path(folder).mkdir(parents=True)
    config = TrainConfig(data="photos/", run="r", weights="home/trained")
    written = open_run(create_run(config))[1]
    assert (written.data, written.weights) == (str(tmp_path / "photos"), "~/trained")
    assert lasting_path("digits") == "digits"
    assert lasting_path("owner/name") == "owner/name"


def test_a_run_says_where_it_was_started(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/ada/bin/vitascope", "train", "--data", "/home/ada/my photos"])
    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/home/ada"))
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    run = create_run(TrainConfig(run=str(tmp_path / "r"), engine=ExecutionOptions(device="cpu")))
    text = (run / "environment.json").read_text()
    found = json.loads(text)
    assert found["command"] == "vitascope train --data '~/my photos'"
    assert found["torch"] == torch.__version__
    assert found["vitascope"] == vitascope.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (found["device"], found["processes"]) == ("cpu", 1)
    assert found["cores"] >= 1
    assert found["cpu"]
    began = datetime.datetime.fromisoformat(found["started"])
    assert began.tzinfo is not None
    assert abs(datetime.datetime.now(datetime.UTC) - began) < datetime.timedelta(hours=1)
    assert "ada" not in text
    assert "hunter2" not in text
    assert f'"{platform.node()}"' not in text


def test_a_device_that_is_not_here_leaves_no_run(tmp_path) -> None:
    with pytest.raises(UserError, match="cannot be used here"):
        create_run(TrainConfig(run=str(tmp_path / "r"), engine=ExecutionOptions(device="cuda:99")))
    assert not (tmp_path / "r").exists()


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
