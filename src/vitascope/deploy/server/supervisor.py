"""Several server processes (workers) behind one port: started, watched, replaced, stopped together.

The first one answers while its model loads; the others accept connections when theirs is loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock
from types import FrameType
from typing import Any

from prometheus_client import multiprocess

from vitascope.deploy.server.http_server import OpenEngine, run
from vitascope.deploy.server.metrics import SHARED_FOLDER
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError

PAUSE = 1.0
"""Seconds before a worker that died is replaced."""
LOAD_FAILED = 2
"""The exit status of a worker whose model cannot be loaded."""


def supervise(open_engine: OpenEngine, settings: Settings, token: str | None, port: socket.socket) -> None:
    """Run `settings.workers` processes until a signal, which is forwarded to them.

    Raises:
        UserError: the model cannot be loaded; a worker has printed why.
    """
    with tempfile.TemporaryDirectory(prefix="vitascope-metrics-") as shared:
        os.environ[SHARED_FOLDER] = shared  # before a worker imports prometheus_client
        supervisor = Supervisor(open_engine, settings, token, port)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, supervisor.stop)
        supervisor.watch()


class Supervisor:
    """Keeps the workers running; the arguments are those of `supervise`."""

    def __init__(
        self, open_engine: OpenEngine, settings: Settings, token: str | None, port: socket.socket
    ) -> None:
        self._arguments = (open_engine, settings, token, port)
        self._kill_at = float("inf")
        self._load_failed = False
        self._spawn = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
        self._may_report = self._spawn.Lock()
        self._processes: dict[int, BaseProcess] = {}

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Tell all workers to finish; the second time, to end at once."""
        _, settings, _, port = self._arguments
        self._kill_at = min(self._kill_at, time.monotonic() + settings.grace_s + 5)
        port.close()  # new clients find nobody, once the workers close it too
        for process in self._processes.values():
            process.terminate()

    def watch(self) -> None:
        """Run the workers, and replace those that die, until told to stop; then wait for all to end."""
        for number in range(self._arguments[1].workers):
            self._start(number, wait_for_model=number > 0)
        while self._processes:
            wait([process.sentinel for process in self._processes.values()], timeout=1)
            if time.monotonic() > self._kill_at:
                for process in self._processes.values():
                    process.kill()
            for number, process in list(self._processes.items()):
                if not process.is_alive():
                    self._handle_end(number, process)
        if self._load_failed:
            error = UserError("the model cannot be loaded")
            error.said_elsewhere = True
            raise error

    def _handle_end(self, number: int, process: BaseProcess) -> None:
        process.join()
        del self._processes[number]
        multiprocess.mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
        if process.exitcode == LOAD_FAILED:
            self._load_failed = True
            self.stop(signal.SIGTERM, None)
        elif self._kill_at == float("inf"):
            print(f"vitascope: worker {number} ended ({process.exitcode}); starting another", file=sys.stderr)
            time.sleep(PAUSE)
            self._start(number, wait_for_model=True)

    def _start(self, number: int, *, wait_for_model: bool) -> None:
        arguments = (self._may_report, os.getpid(), wait_for_model, *self._arguments)
        process = self._spawn.Process(target=work, args=arguments)
        process.start()
        self._processes[number] = process


def work(may_report: Lock, parent: int, wait_for_model: bool, *arguments: Any) -> None:
    """Serve in a worker process; `arguments` are those of `supervise`."""
    try:
        run(*arguments, parent=parent, wait_for_model=wait_for_model)
    except UserError as error:
        if may_report.acquire(block=False):  # never released: the first to fail reports for all
            print(f"vitascope: error: {error}", file=sys.stderr)
        sys.exit(LOAD_FAILED)
