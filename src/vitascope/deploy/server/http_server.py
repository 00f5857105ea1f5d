"""A server process: it accepts connections, bounds their number, and stops without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from vitascope.deploy.server.connections import MAX_HEAD, Connection
from vitascope.deploy.server.rejections import Rejection, raw_response
from vitascope.deploy.server.service import Service
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vitascope.deploy.predict.engine import Engine

FAREWELL = 1.0
"""Seconds that open connections have, once the port is closed, to send a last request and get its 503."""
MOST_CONNECTIONS, OTHER_FILES = 8192, 128
"""Open connections of a process, where the limit of open files allows more, and its other open files."""
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before the event loop does anything else."""
ACCEPT_PAUSE = 0.1
"""Seconds until the next attempt after a connection could not be accepted."""
WARNING_INTERVAL = 10.0
"""Seconds between two warnings of the same text: an attack must not fill the disk."""
SWITCH_INTERVAL = 0.0005
"""Seconds after which a Python thread yields to the model's, which asks between any two operations; with
Python's own 5 ms a small model mostly waits."""
FULL = Rejection(503, "too many connections are open", close=True)

OpenEngine = Callable[[], "Engine"]

log = logging.getLogger("vitascope.server")


class HTTPServer(uvicorn.Server):
    """uvicorn with bounded connections, and a stop that rejects new requests and finishes the others.

    While it stops it still listens, so that new clients get a 503 instead of a broken connection. It also
    stops when the process `parent` has ended.
    """

    def __init__(self, config: uvicorn.Config, service: Service, parent: int | None = None) -> None:
        super().__init__(config)
        self.held: set[Connection] = set()
        self._service = service
        self._parent = parent
        self._give_up_at = math.inf
        self._closed_at = 0.0
        self._limit = connection_limit(service.settings)
        self._next_warning: dict[str, float] = {}
        self._ports: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connecting: set[asyncio.Task[Any]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl-C: begin to stop; the second time, stop at once."""
        if self._parent is not None and sig == signal.SIGINT:
            return  # a terminal sends it to all processes; the parent forwards a SIGTERM
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._begin_to_stop()

    def _begin_to_stop(self) -> None:
        self._service.draining = True
        self._give_up_at = time.monotonic() + self._service.settings.grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections; uvicorn would accept without a limit."""
        self._ports = sockets or []
        await super().startup([])
        for port in self._ports:
            port.setblocking(False)
            self._accepting.append(asyncio.get_running_loop().create_task(self._accept(port)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and end."""
        await self._stop_accepting()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Ten times per second, end overdue connections; returns whether to end now."""
        clock, now = asyncio.get_running_loop().time(), time.monotonic()
        for connection in list(self.held):
            connection.end_if_overdue(clock)
        if self._parent is not None and os.getppid() != self._parent and not self._service.draining:
            self._begin_to_stop()
        if now > self._give_up_at:
            self._service.give_up()
        done = now > self._give_up_at or self._service.fault is not None
        if self._closed_at:
            done = done or not self.server_state.connections or now > self._closed_at + FAREWELL
        elif self._service.draining and not self._service.in_flight:
            await self._close_port()
            self._closed_at = now
        return await super().on_tick(counter) or done

    async def _close_port(self) -> None:
        """Take the clients that have connected, whose connections closing would break; then close."""
        await self._stop_accepting()
        for port in self._ports:
            with contextlib.suppress(OSError):  # BlockingIOError: that was the last
                while True:
                    self._take(port.accept()[0])
            port.close()

    async def _stop_accepting(self) -> None:
        for accepting in self._accepting:
            accepting.cancel()
        if self._accepting:
            await asyncio.wait(self._accepting)

    async def _accept(self, port: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            try:
                connection, _ = await loop.sock_accept(port)
            except OSError as error:  # no more open files or memory, or the client has left
                self._warn(f"cannot accept a connection: {error.strerror}")
                self._end_idle()
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            self._take(connection)
            if number % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _take(self, connection: socket.socket) -> None:
        """Serve a new connection; at the limit, idle ones make room, and if none is idle it gets 503."""
        if len(self.held) >= self._limit:
            self._warn(f"{self._limit} connections are open, which is the limit (--max-connections)")
            if not self._end_idle():
                _turn_away(connection)
                return
        loop = asyncio.get_running_loop()
        protocol = Connection(
            self._service,
            self.held,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        connecting = loop.create_task(loop.connect_accepted_socket(lambda: protocol, connection))
        self._connecting.add(connecting)
        connecting.add_done_callback(functools.partial(self._connected, protocol))

    def _connected(self, protocol: Connection, connecting: asyncio.Task[Any]) -> None:
        self._connecting.discard(connecting)
        if connecting.cancelled() or connecting.exception() is not None:
            self.held.discard(protocol)
            if not connecting.cancelled():
                self._warn(f"a connection failed: {connecting.exception()}")

    def _end_idle(self) -> bool:
        """End the sixteenth of all connections that has been idle longest; returns whether any is idle."""
        idle = [held for held in self.held if held.is_idle and not held.transport.is_closing()]
        for held in heapq.nsmallest(max(1, self._limit // 16), idle, key=lambda held: held.due):
            held.end(FULL)
        return bool(idle)

    def _warn(self, text: str) -> None:
        """Log a warning, but the same one rarely."""
        now = time.monotonic()
        if now >= self._next_warning.get(text, 0.0):
            self._next_warning[text] = now + WARNING_INTERVAL
            log.warning(text)


def _turn_away(connection: socket.socket) -> None:
    """Answer 503 as far as that is possible without waiting, and close the connection."""
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(b"%s\r\n%s" % raw_response(FULL))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(MAX_HEAD)  # closing with unread bytes would discard the response


def connection_limit(settings: Settings) -> int:
    """The number of connections that a process may have open.

    Raises:
        UserError: `max_connections` is over what the limit of open files allows.
    """
    files = open_files_limit()
    allowed = max(files // 2, files - OTHER_FILES)
    if settings.max_connections > allowed:
        raise UserError(
            f"--max-connections {settings.max_connections} is too many: this process may open {files} "
            f"files, which leaves {allowed} connections; give fewer, or raise `ulimit -n`"
        )
    return settings.max_connections or min(allowed, MOST_CONNECTIONS)


def open_files_limit() -> int:
    """The number of files and sockets that this process may have open."""
    if sys.platform == "win32":
        return MOST_CONNECTIONS + OTHER_FILES
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS + OTHER_FILES if soft == resource.RLIM_INFINITY else soft


def server_of(app: FastAPI, parent: int | None = None) -> HTTPServer:
    """The server of an application that `create_app` made; it serves on the sockets that it is run with."""
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,  # `access_log` writes a shorter one
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=math.ceil(service.settings.keep_alive_s),
        timeout_graceful_shutdown=1,  # requests in flight are finished before
    )
    return HTTPServer(config, service, parent)


def run(
    open_engine: OpenEngine,
    settings: Settings,
    token: str | None,
    port: socket.socket,
    *,
    parent: int | None = None,
    wait_for_model: bool = False,
) -> None:
    """Serve on a listening socket until a signal; `wait_for_model` before connections are accepted.

    Raises:
        UserError: the model cannot be loaded.
    """
    from vitascope.deploy.server.app import create_app  # heavy: not for the process that supervises workers

    sys.setswitchinterval(SWITCH_INTERVAL)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("vitascope.access").setLevel(logging.INFO)
    app = create_app(open_engine, settings, token, wait_for_model=wait_for_model)
    service: Service = app.state.service
    server_of(app, parent).run(sockets=[port])
    if service.fault is not None:
        raise service.fault
    if service.unanswered:
        print(f"vitascope: stopped; requests unanswered: {service.unanswered}", file=sys.stderr)
    if service.batcher.is_computing:  # there is no other way to end a thread in the middle of its work
        sys.stdout.flush()
        os._exit(1 if service.unanswered else 0)
