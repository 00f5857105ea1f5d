"""Experiment trackers that get the metrics of a run as well: MLflow, Trackio, Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from vitascope.errors import UserError, check_choice

log = logging.getLogger(__name__)

T = TypeVar("T")

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
    known = {"id": run_id, "resume": "allow"} if run_id else {"name": name, "config": config}
    run = wandb.init(project=project, **known)
    # W&B's own step only grows, and drops what a resumed run repeats.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return TrackedRun(run.id, lambda values, step: run.log({**values, "step": step}), run.finish)


TRACKERS = {"mlflow": start_mlflow, "trackio": start_trackio, "wandb": start_wandb}
"""By name, which is also that of the library: start a new run with a name and the options of the run, or
continue the one of a `run_id`."""


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

    Its library runs in one thread: MLflow knows the active run of a thread only. It is a daemon thread with a
    time limit, so that a library that hangs holds up neither the training nor the end of the process.

    A failure of the tracker is one warning, and it gets nothing any more. A new run that cannot start is a
    `UserError`.
    """

    def __init__(self, tracker: str, name: str, config: Mapping[str, Any], run_id: str | None) -> None:
        check_tracker(tracker)
        self.name, self.run_id = tracker, run_id
        self._records: queue.Queue[tuple[dict[str, float], int] | int] = queue.Queue(MOST_WAITING)
        self._began: float | None = None  # when the thread's present call into the library began
        self._failure = ""
        self._hangs = self._warned = False
        self._started, self._ended = threading.Event(), threading.Event()

        start = partial(TRACKERS[tracker], name, dict(config), run_id)
        threading.Thread(target=self._follow, args=(start,), name=f"tracker {tracker}", daemon=True).start()
        if not self._started.wait(START_LIMIT):
            self._give_up(START_LIMIT)
        if self._failure and run_id is None:
            raise UserError(f"{self._failure}; train without a tracker, or set it up")
        self._warn()

    def log(self, values: dict[str, float], step: int) -> None:
        """Pass numbers by name on to the tracker; waits only if it is far behind."""
        if (began := self._began) is not None and time.monotonic() - began > LIMIT:
            self._give_up(LIMIT)
        if not self._failure:
            self._put((values, step))
        self._warn()

    def finish(self, exit_code: int) -> None:
        """End the tracker's run, after all that it was given: with 0 as finished, otherwise as failed."""
        if not self._hangs:
            self._put(exit_code)
        if not self._hangs and not self._ended.wait(LIMIT):
            self._give_up(LIMIT)
        self._warn()

    def _put(self, record: tuple[dict[str, float], int] | int) -> None:
        try:
            self._records.put(record, timeout=LIMIT)
        except queue.Full:
            self._give_up(LIMIT)

    def _give_up(self, seconds: float) -> None:
        self._hangs = True
        self._failure = self._failure or f"the tracker {self.name} failed: no answer within {seconds:g} s"

    def _warn(self) -> None:
        if self._failure and not self._warned:
            self._warned = True
            log.warning("%s; it gets no more metrics of this run, which continues", self._failure)

    def _follow(self, start: Callable[[], TrackedRun]) -> None:
        """The thread's program: start the run, log every record until one fails, end the run."""
        run = self._call(start)
        if run is not None:
            self.run_id = run.run_id
        self._started.set()
        while run is not None and not self._hangs:
            record = self._records.get()
            if isinstance(record, int):
                self._call(partial(run.finish, record))
                break
            if not self._failure:
                self._call(partial(run.log, *record))
        self._ended.set()

    def _call(self, call: Callable[[], T]) -> T | None:
        """The result of a call into the library; None if it fails."""
        self._began = time.monotonic()
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - whatever it raises, SystemExit too, is a failure of it
            self._failure = self._failure or f"the tracker {self.name} failed: {_described(error)}"
            return None
        finally:
            self._began = None


def _described(error: BaseException) -> str:
    """The type and the message of an exception, whose own method may fail."""
    kind = type(error).__name__
    try:
        reason = " ".join(str(error).split())[:300]
    except BaseException as other:  # noqa: BLE001 - as above
        return f"{kind}, whose message cannot be printed ({type(other).__name__})"
    return f"{kind}: {reason}".removesuffix(": ")
