"""Experiment trackers that get the metrics of a run as well: MLflow, Trackio, Weights & Biases."""

import dataclasses
import importlib.util
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from vitascope.errors import UserError, check_choice
from vitascope.network import Threads

log = logging.getLogger(__name__)

PROJECT = "vitascope"
"""Project in Trackio and W&B, unless their environment variables name another."""
START_LIMIT, LIMIT = 120.0, 60.0
"""Seconds that a tracker may take to start, and later for one call, or at the end for all that is left."""
MOST_WAITING = 100
"""Records that wait for a slow tracker; with more, the training waits for it too."""


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run that a tracker's library has started."""

    run_id: str
    log: Callable[[dict[str, float], int], object]
    """Logs numbers by name, at a step."""
    finish: Callable[[int], object]
    """Ends the run, as finished for 0, otherwise as failed."""


def start_mlflow(name: str, config: dict[str, Any], run_id: str | None) -> TrackedRun:
    """A run of MLflow, on the server and in the experiment that are set there."""
    import mlflow

    run = mlflow.start_run(run_id=run_id, run_name=None if run_id else name)
    if run_id is None:  # MLflow rejects another value of a parameter, such as the device
        try:
            mlflow.log_params(config)
        except Exception:
            mlflow.end_run("FAILED")  # while it is active, no other run can start
            raise
    return TrackedRun(
        run.info.run_id, mlflow.log_metrics, lambda code: mlflow.end_run("FAILED" if code else "FINISHED")
    )


def start_trackio(name: str, config: dict[str, Any], run_id: str | None) -> TrackedRun:
    """A run of Trackio, which continues runs by name, gives a new one another name if the project has a run
    of this name, and has no failed runs."""
    import trackio

    project = os.environ.get("TRACKIO_PROJECT_NAME", PROJECT)
    run = trackio.init(
        project=project, name=run_id or name, config=config, resume="allow" if run_id else "never"
    )
    return TrackedRun(run.name, run.log, lambda code: run.finish())


def start_wandb(name: str, config: dict[str, Any], run_id: str | None) -> TrackedRun:
    """A run of Weights & Biases, whose end uploads the rest."""
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    options = {"id": run_id, "resume": "allow"} if run_id else {"name": name, "config": config}
    run = wandb.init(project=project, **options)
    # W&B's own step only grows, and drops what a resumed run repeats.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return TrackedRun(run.id, lambda values, step: run.log({**values, "step": step}), run.finish)


TRACKERS = {"mlflow": start_mlflow, "trackio": start_trackio, "wandb": start_wandb}
"""By the library's name: start a new run with a name and the options, or continue that of a `run_id`."""


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

    Its library runs in one thread: MLflow knows the active run of a thread only. Neither the training nor the
    end of the process waits for a library that hangs.

    A failure of the tracker is one warning, and it gets nothing any more. A new run that cannot start is a
    `UserError`.
    """

    def __init__(self, tracker: str, name: str, config: Mapping[str, Any], run_id: str | None) -> None:
        check_tracker(tracker)
        self.name, self.run_id = tracker, run_id
        self._failure, self._hangs = "", False
        self._thread = Threads(1)
        self._calls: deque[Future[Any]] = deque()  # into the library, that have not ended, as far as is known
        self._since = 0.0  # when the first of them began, or earlier
        start = self._thread.submit(TRACKERS[tracker], name, dict(config), run_id)
        self._take(start, START_LIMIT, START_LIMIT, warn=run_id is not None)
        if self._failure and run_id is None:
            raise UserError(f"{self._failure}; train without a tracker, or set it up")
        self._run = None if self._failure else start.result()
        self.run_id = run_id if self._run is None else self._run.run_id

    def log(self, values: dict[str, float], step: int) -> None:
        """Pass numbers by name on to the tracker; waits only if it is far behind."""
        if self._failure or self._run is None:
            return
        if not self._calls:
            self._since = time.monotonic()
        self._calls.append(self._thread.submit(self._run.log, values, step))
        while self._calls and not self._failure:
            seconds = self._since + LIMIT - time.monotonic()
            if not self._calls[0].done() and seconds > 0 and len(self._calls) <= MOST_WAITING:
                break
            self._take(self._calls.popleft(), seconds)
            self._since = time.monotonic()

    def finish(self, exit_code: int) -> None:
        """End the tracker's run, after all that it was given: with 0 as finished, otherwise as failed."""
        if self._run is not None and not self._hangs:
            until = time.monotonic() + LIMIT
            for call in (*self._calls, self._thread.submit(self._run.finish, exit_code)):
                self._take(call, until - time.monotonic())
        self._thread.close()

    def _take(
        self, call: Future[Any], seconds: float, limit: float | None = None, *, warn: bool = True
    ) -> None:
        """Wait for a call; the first one that fails, or takes longer, is the last."""
        wait([call], max(0.0, seconds))
        if call.done() and call.exception() is None:
            return
        error = call.exception() if call.done() else None
        self._hangs = error is None
        if self._hangs:
            self._thread.close()
        if not self._failure:
            reason = f"no answer within {limit or LIMIT:g} s" if error is None else _described(error)
            self._failure = f"the tracker {self.name} failed: {reason}"
            if warn:
                log.warning("%s; it gets no more metrics of this run, which continues", self._failure)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")
