"""Experiment trackers get the metrics of a run, and never end it."""

import logging
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trackers import Service, install
from tests.training import tiny_config, undrawn
from vitascope import runs
from vitascope.errors import Interrupted, UserError
from vitascope.training.loop import Trainer
from vitascope.training.run import trackers
from vitascope.training.run.metrics import MetricsWriter
from vitascope.training.run.run import Run
from vitascope.training.run.trackers import TRACKERS, Tracker


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Run:
    return Run.create(tiny_config(data, run=str(tmp_path / "run")).to_dict())


def numbers(run: Run) -> list[tuple[int, str, float]]:
    return [
        (record["step"], f"{record['kind']}/{name}", value)
        for record in run.metrics
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float)
    ]


def write_steps(run: Run, count: int) -> None:
    writer = run.write_metrics()
    for step in range(1, count + 1):
        writer.record("step", step, {"loss": 0.5})
    writer.close()


def only(service: SimpleNamespace) -> SimpleNamespace:
    (run,) = service.runs.values()
    return run


@pytest.mark.parametrize("name", TRACKERS)
def test_tracker_gets_the_config_and_every_number_of_a_run_that_is_resumed(
    data, tmp_path, monkeypatch, name: str
) -> None:
    service, run = install(monkeypatch, name), Run(tmp_path / "run")
    step = Trainer._training_step

    def stopping(self: Trainer, *rest: object) -> object:
        if self.step == 7:
            self.save()
            raise Interrupted(self.run.path, 2)
        return step(self, *rest)

    with undrawn():
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_training_step", stopping)
            with pytest.raises(Interrupted):
                runs.train(tiny_config(data, run=str(run.path), epochs=2, tracker=name))
        tracked = only(service)
        assert (tracked.name, tracked.sessions) == ("run", 1)
        assert tracked.state == ("finished" if name == "trackio" else "failed")
        assert tracked.project == ("" if name == "mlflow" else "vitascope")
        assert {key: str(value) for key, value in tracked.config.items()} == {
            key: str(value) for key, value in run.config.items()
        }
        runs.resume(run.path, workers=0)  # another value than before, which MLflow and W&B reject
    tracked = only(service)
    assert (tracked.state, tracked.sessions) == ("finished", 2)
    assert {kind for _, kind, _ in numbers(run)} > {"step/loss", "epoch/val_accuracy", "test/accuracy"}
    assert tracked.metrics == numbers(run)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlflow", "the tracker mlflow is not installed: pip install mlflow"),
        ("trackio", "the tracker trackio failed: ConnectionError: no route; train without"),
        ("wandb", "the tracker wandb failed: no answer within 0.3 s; train without"),
    ],
)
def test_tracker_that_is_missing_or_cannot_start_leaves_no_run(
    data, tmp_path, monkeypatch, caplog, name: str, message: str
) -> None:
    service = install(monkeypatch, name)
    if "installed" in message:
        monkeypatch.setitem(sys.modules, name, None)
    elif "route" in message:
        service.broken = "no\nroute"
    else:
        monkeypatch.setattr(trackers, "START_LIMIT", 0.3)
        service.released.clear()
    with pytest.raises(UserError, match=message):
        runs.train(tiny_config(data, run=str(tmp_path / "run"), tracker=name))
    assert not (tmp_path / "run").exists()
    assert not caplog.records
    service.released.set()


@pytest.mark.parametrize(
    ("name", "raised", "reason"),
    [
        ("mlflow", [None, ConnectionError("gone"), ConnectionError("again")], "ConnectionError: gone"),
        ("wandb", [SystemExit(3)] * 3, "SystemExit: 3"),
    ],
)
def test_tracker_that_raises_anything_is_off_after_one_warning(
    run, monkeypatch, caplog, name: str, raised: list[Any], reason: str
) -> None:
    service = install(monkeypatch, name)
    with caplog.at_level(logging.WARNING), run.lock():
        run.start_tracker(name)
        service.raised = iter(raised)
        write_steps(run, 3)
    assert [record["step"] for record in run.metrics] == [1, 2, 3]
    assert only(service).metrics == [(1, "step/loss", 0.5)] * raised.count(None)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(f"the tracker {name} failed: {reason}; it gets no more metrics")


# Trackers that hang


@pytest.fixture
def service(monkeypatch) -> Service:
    """That of a tracker that may take 0.1 s."""
    monkeypatch.setattr(trackers, "LIMIT", 0.1)
    return install(monkeypatch, "mlflow")


NO_ANSWER = "the tracker mlflow failed: no answer within 0.1 s; it gets no more metrics"


def test_training_ends_beside_a_tracker_that_hangs(data, tmp_path, monkeypatch, caplog, service) -> None:
    record = MetricsWriter.record

    def hanging(*rest: Any) -> None:
        service.released.clear()
        record(*rest)

    monkeypatch.setattr(MetricsWriter, "record", hanging)
    with caplog.at_level(logging.WARNING), undrawn():
        runs.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1, tracker="mlflow"))
    assert [record["kind"] for record in Run(tmp_path / "run").metrics][-1] == "test"
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(NO_ANSWER)
    service.released.set()


def test_tracker_that_hangs_is_off_after_one_warning(run, caplog, service) -> None:
    others = set(threading.enumerate())
    with caplog.at_level(logging.WARNING), run.lock():
        run.start_tracker("mlflow")
        service.released.clear()
        calls = service.calls
        write_steps(run, 1)
        while service.calls == calls:
            time.sleep(0.01)
        time.sleep(2 * trackers.LIMIT)
        write_steps(run, 2)
        assert len(caplog.records) == 1
        calls = service.calls
        service.released.set()
        (thread,) = {each for each in threading.enumerate() if each.name == "request"} - others
        thread.join()
    assert service.calls == calls
    assert len(caplog.records) == 1


def test_tracker_that_hangs_at_the_end_ends_nevertheless(run, caplog, service) -> None:
    with caplog.at_level(logging.WARNING), run.lock():
        run.start_tracker("mlflow")
        service.released.clear()
    assert caplog.records[0].getMessage().startswith(NO_ANSWER)
    service.released.set()


def test_interrupt_while_a_tracker_hangs_at_the_end_is_raised(run, monkeypatch) -> None:
    service = install(monkeypatch, "mlflow")
    main = threading.main_thread().ident
    assert main is not None

    def hang() -> None:
        time.sleep(0.1)  # the main thread waits by then: a signal before it may be noticed only at its end
        signal.pthread_kill(main, signal.SIGINT)
        service.released.wait()

    with pytest.raises(KeyboardInterrupt), run.lock():  # noqa: PT012
        run.start_tracker("mlflow")
        service.released.clear()
        monkeypatch.setattr(service, "reach", hang)
    service.released.set()


def test_resumed_run_goes_on_without_a_tracker_that_fails_to_start(run, monkeypatch, caplog) -> None:
    name = "mlflow"
    service = install(monkeypatch, name)
    with run.lock():
        run.start_tracker(name)
    service.broken = "gone"
    with caplog.at_level(logging.WARNING), run.lock():
        run.start_tracker(name)
        writer = run.write_metrics()
        writer.record("step", 1, {"loss": 1.0})
        writer.close()
    assert len(caplog.records) == 1
    assert not only(service).metrics
    service.broken = ""
    with run.lock():
        run.start_tracker(name)
    assert only(service).sessions == 2


def test_mlflow_run_ends_if_its_options_are_rejected(run, monkeypatch) -> None:
    service = install(monkeypatch, "mlflow")
    monkeypatch.setattr(sys.modules["mlflow"], "log_params", lambda params: 1 / 0)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        Tracker("mlflow", "name", {}, None)
    assert only(service).state == "failed"


def test_trackio_run_of_a_taken_name_keeps_the_name_that_it_got(run, monkeypatch) -> None:
    service = install(monkeypatch, "trackio")
    service.begin("run", "run")
    for _ in range(2):
        with run.lock():
            run.start_tracker("trackio")
    assert {name: found.sessions for name, found in service.runs.items()} == {"run": 1, "run-other": 2}


@pytest.mark.parametrize("variable", ["WANDB_PROJECT", "TRACKIO_PROJECT_NAME"])
def test_environment_names_the_project(run, monkeypatch, variable: str) -> None:
    name = variable.partition("_")[0].lower()
    service = install(monkeypatch, name)
    monkeypatch.setenv(variable, "own")
    with run.lock():
        run.start_tracker(name)
    assert only(service).project == "own"


def test_broken_record_of_the_tracker_is_named(run, monkeypatch) -> None:
    install(monkeypatch, "wandb")
    (run.path / "tracker.json").write_text("[]")
    with run.lock(), pytest.raises(UserError, match=r"tracker\.json is broken: a list, not an object"):
        run.start_tracker("wandb")
