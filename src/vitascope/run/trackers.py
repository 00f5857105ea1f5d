"""Experiment trackers that get the metrics of a run as well: MLflow, Trackio, Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vitascope.errors import UserError, check_choice

log = logging.getLogger(__name__)

PROJECT = "vitascope"
"""Project in Trackio and W&B, unless their environment variables name another."""


class TrackedRun(Protocol):
    """A run in a tracker: a new one with this name and configuration, or the one of a `run_id`."""

    run_id: str

    def __init__(self, name: str, config: Mapping[str, Any], run_id: str | None) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name."""

    def finish(self, exit_code: int) -> None:
        """End the run, as finished for 0, otherwise as failed."""


class MlflowRun:
    """A run of MLflow, on the server and in the experiment that are set there."""

    def __init__(self, name: str, config: Mapping[str, Any], run_id: str | None) -> None:
        import mlflow

        self._mlflow = mlflow
        self.run_id: str = mlflow.start_run(run_id=run_id, run_name=None if run_id else name).info.run_id
        if run_id is None:  # MLflow rejects another value of a parameter, such as the device
            try:
                mlflow.log_params(dict(config))
            except Exception:
                mlflow.end_run("FAILED")  # while it is active, no other run can start
                raise

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name."""
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        """End the run."""
        self._mlflow.end_run("FAILED" if exit_code else "FINISHED")


class TrackioRun:
    """A run of Trackio, which continues runs by name."""

    def __init__(self, name: str, config: Mapping[str, Any], run_id: str | None) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT_NAME", PROJECT)
        resume = "allow" if run_id else "never"
        self._run = trackio.init(project=project, name=run_id or name, config=dict(config), resume=resume)
        self.run_id: str = self._run.name  # another one if the project has a run of this name

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name."""
        self._run.log(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        """End the run; Trackio has no failed runs."""
        self._run.finish()


class WandbRun:
    """A run of Weights & Biases."""

    def __init__(self, name: str, config: Mapping[str, Any], run_id: str | None) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        known = {"id": run_id, "resume": "allow"} if run_id else {"name": name, "config": dict(config)}
        self._run = wandb.init(project=project, **known)
        # W&B's own step only grows, and drops what a resumed run repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.run_id: str = self._run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name."""
        self._run.log({**values, "step": step})

    def finish(self, exit_code: int) -> None:
        """Upload the rest and end the run."""
        self._run.finish(exit_code=exit_code)


TRACKERS: dict[str, type[TrackedRun]] = {"mlflow": MlflowRun, "trackio": TrackioRun, "wandb": WandbRun}
"""By name, which is also that of the library."""


def check_tracker(name: str) -> None:
    """Reject a tracker that is unknown or not installed."""
    check_choice("tracker", name, TRACKERS)
    if importlib.util.find_spec(name) is None:
        raise UserError(f"the tracker {name} is not installed: pip install {name}")


class Tracker:
    """A tracker that gets the numbers of a run's metrics.

    Args:
        tracker: its name.
        name: the name of a new run.
        config: the options of the run.
        run_id: the tracker's run to continue; None for a new one.

    A failure of the tracker is a warning, and it gets nothing any more; but a new run that cannot start is a
    `UserError`.
    """

    def __init__(self, tracker: str, name: str, config: Mapping[str, Any], run_id: str | None) -> None:
        check_tracker(tracker)
        self.name, self.run_id = tracker, run_id
        self._failed = False
        self._run: TrackedRun | None = None
        try:
            self._run = TRACKERS[tracker](name, config, run_id)
            self.run_id = self._run.run_id
        except Exception as error:
            if run_id is None:
                raise UserError(f"{self._complaint(error)}; train without a tracker, or set it up") from error
            self._fail(error)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name."""
        self._call(lambda run: run.log(values, step))

    def finish(self, exit_code: int) -> None:
        """End the tracker's run: with 0 as finished, otherwise as failed."""
        if not self._failed:
            self._call(lambda run: run.finish(exit_code))
        elif self._run is not None:
            with contextlib.suppress(Exception):  # of the failure that is reported already
                self._run.finish(exit_code)

    def _call(self, call: Callable[[TrackedRun], None]) -> None:
        if self._run is None or self._failed:
            return
        try:
            call(self._run)
        except Exception as error:  # noqa: BLE001 - whatever it raises, it must not end the training
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        log.warning("%s; it gets no more metrics of this run, which continues", self._complaint(error))

    def _complaint(self, error: Exception) -> str:
        reason = " ".join(str(error).split())[:300]
        return f"the tracker {self.name} failed: {type(error).__name__}: {reason}".removesuffix(": ")
