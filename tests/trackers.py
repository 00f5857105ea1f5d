"""Stand-ins for MLflow, Trackio and Weights & Biases: what we call of them, as they document it."""

import itertools
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Service:
    """A tracker's server: its runs by id, each with its name, config, metrics and state."""

    def __init__(self) -> None:
        self.runs: dict[str, SimpleNamespace] = {}
        self.broken = ""
        """The reason why every call fails, if it does."""
        self.raised: Iterator[BaseException | None] = iter(())
        """What each of the next calls raises."""
        self.released = threading.Event()
        """Unset while calls hang."""
        self.released.set()
        self.calls = 0

    def reach(self) -> None:
        self.calls += 1
        self.released.wait()
        if (error := next(self.raised, None)) is not None:
            raise error
        if self.broken:
            raise ConnectionError(self.broken)

    def begin(self, run_id: str, name: str, project: str = "") -> SimpleNamespace:
        self.reach()
        new = SimpleNamespace(name=name, project=project, config={}, metrics=[], sessions=0)
        run = self.runs.setdefault(run_id, new)
        run.sessions += 1
        run.state = "running"
        return run


def mlflow_module(service: Service) -> dict[str, Any]:
    ids = (f"{number:032x}" for number in itertools.count(1))
    active: list[SimpleNamespace] = []

    def start_run(run_id: str | None = None, *, run_name: str | None = None) -> SimpleNamespace:
        if active:
            raise RuntimeError("a run is already active; end it with mlflow.end_run()")
        if run_id is not None and run_id not in service.runs:
            raise LookupError(f"Run '{run_id}' not found")
        run_id = run_id or next(ids)
        active.append(service.begin(run_id, run_name or "random-name"))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_params(params: dict[str, Any]) -> None:
        service.reach()
        for name, value in params.items():
            if active[0].config.setdefault(name, str(value)) != str(value):
                raise ValueError(f"parameter {name} has another value")

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        service.reach()
        assert all(type(value) in (int, float) for value in metrics.values())
        active[0].metrics += [(step, name, value) for name, value in metrics.items()]

    def end_run(status: str = "FINISHED") -> None:
        active.pop().state = status.lower()
        service.reach()

    return {"start_run": start_run, "log_params": log_params, "log_metrics": log_metrics, "end_run": end_run}


def trackio_module(service: Service) -> dict[str, Any]:
    def init(
        project: str, name: str | None = None, config: dict[str, Any] | None = None, resume: str = "never"
    ) -> SimpleNamespace:
        name = name or "brave-sunset"
        if resume == "never" and name in service.runs:
            name = f"{name}-other"
        run = service.begin(name, name, project)
        run.config |= config or {}

        def log(metrics: dict[str, Any], step: int | None = None) -> None:
            service.reach()
            assert not {"project", "run", "timestamp", "step", "time", "metrics"} & metrics.keys()
            run.metrics += [(step, name, value) for name, value in metrics.items()]

        def finish() -> None:
            service.reach()
            run.state = "finished"

        return SimpleNamespace(name=name, log=log, finish=finish)

    return {"init": init}


def wandb_module(service: Service) -> dict[str, Any]:
    ids = (f"id{number}" for number in itertools.count(1))

    def init(
        *,
        project: str,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        id: str | None = None,
        resume: str | None = None,
    ) -> SimpleNamespace:
        run_id = id or next(ids)
        assert run_id not in service.runs or resume == "allow"
        run = service.begin(run_id, name or "random-name", project)
        if run.config.keys() & (config or {}).keys():
            raise ValueError("a value of the config is set already")
        run.config |= config or {}
        by: dict[str, str] = {}

        def define_metric(name: str, step_metric: str | None = None) -> None:
            if step_metric is not None:
                by[name] = step_metric

        def log(data: dict[str, Any], step: int | None = None) -> None:
            service.reach()
            assert step is None, "W&B drops a step that is not the next one"
            place = data[by["*"]]
            run.metrics += [(place, name, value) for name, value in data.items() if name != by["*"]]

        def finish(exit_code: int | None = None) -> None:
            service.reach()
            run.state = "failed" if exit_code else "finished"

        return SimpleNamespace(id=run_id, define_metric=define_metric, log=log, finish=finish)

    return {"init": init}


MODULES = {"mlflow": mlflow_module, "trackio": trackio_module, "wandb": wandb_module}


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> Service:
    """Put a stand-in for a tracker's library in its place."""
    service, module = Service(), ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(MODULES[name](service))
    monkeypatch.setitem(sys.modules, name, module)
    for variable in ("WANDB_PROJECT", "TRACKIO_PROJECT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    return service
