"""Several server processes behind one port: started, watched, started again, stopped together.

The first answers while its model loads; the others begin to listen when theirs is there.
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

from prometheus_client import multiprocess

from vitascope.deploy.server.metrics import SHARED_FOLDER
from vitascope.deploy.server.server import OpenEngine, run
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError

PAUSE = 1.0
"""Seconds before a worker that died is started again."""
REFUSED = 2
"""A worker's exit status when its model cannot be loaded."""


def supervise(open_engine: OpenEngine, settings: Settings, token: str | None, port: socket.socket) -> None:
    """Run `settings.workers` processes until a signal, which they are passed on.

    Raises:
        UserError: the model cannot be loaded; a worker has said so.
    """
    with tempfile.TemporaryDirectory(prefix="vitascope-metrics-") as shared:
        os.environ[SHARED_FOLDER] = shared  # before a worker imports prometheus_client
        workers = Workers(open_engine, settings, token, port)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, workers.stop)
        workers.watch()


class Workers:
    """The processes."""

    def __init__(
        self, open_engine: OpenEngine, settings: Settings, token: str | None, port: socket.socket
    ) -> None:
        self._given = (open_engine, settings, token)
        self._port = port
        self._count = settings.workers
        self._kill_after = settings.grace_s + 5
        self._stopping: float | None = None
        self._refused = False
        self._spawn = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
        self._may_complain = self._spawn.Lock()
        self._processes: dict[int, BaseProcess] = {}

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Tell all to finish; the second time, to end at once."""
        self._stopping = self._stopping or time.monotonic()
        self._port.close()  # what connects from now on finds nobody, once the workers close it too
        for process in self._processes.values():
            process.terminate()

    def watch(self) -> None:
        """Keep all numbers occupied until told to stop; then wait for all to end.

        Raises:
            UserError: a worker's model cannot be loaded.
        """
        for number in range(self._count):
            self._start(number, listen_at_once=number == 0)
        while self._processes:
            wait([process.sentinel for process in self._processes.values()], timeout=1)
            if self._stopping and time.monotonic() - self._stopping > self._kill_after:
                for process in self._processes.values():
                    process.kill()
            for number, process in list(self._processes.items()):
                if not process.is_alive():
                    self._ended(number, process)
        if self._refused:
            refusal = UserError("the model cannot be loaded")
            refusal.said_elsewhere = True
            raise refusal

    def _ended(self, number: int, process: BaseProcess) -> None:
        process.join()
        del self._processes[number]
        multiprocess.mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
        if process.exitcode == REFUSED:
            self._refused = True
            self.stop(signal.SIGTERM, None)
        elif not self._stopping:
            print(f"vitascope: worker {number} ended ({process.exitcode}); starting another", file=sys.stderr)
            time.sleep(PAUSE)
            self._start(number, listen_at_once=False)

    def _start(self, number: int, *, listen_at_once: bool) -> None:
        given = (self._may_complain, os.getpid(), listen_at_once, *self._given, self._port)
        process = self._spawn.Process(target=work, args=given)
        process.start()
        self._processes[number] = process


def work(
    may_complain: Lock,
    parent: int,
    listen_at_once: bool,
    open_engine: OpenEngine,
    settings: Settings,
    token: str | None,
    port: socket.socket,
) -> None:
    """What a worker's process does."""
    try:
        run(open_engine, settings, token, port, parent=parent, listen_at_once=listen_at_once)
    except UserError as error:
        if may_complain.acquire(block=False):  # never released: the first to fail says why, for all
            print(f"vitascope: error: {error}", file=sys.stderr)
        sys.exit(REFUSED)
