"""The server's life: a socket, one process or several, signals, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import heapq
import itertools
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import uvicorn

from vitascope.deploy.server.connections import SheddingProtocol
from vitascope.deploy.server.service import Service
from vitascope.deploy.server.settings import TOKEN, Settings
from vitascope.errors import UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vitascope.deploy.predict.engine import Engine

FAREWELL = 1.0
"""Seconds that open connections have, once the port is closed, to send a last request and get its 503."""
MAX_HEAD = 65536
"""Bytes of a request's first line and headers, and as many as one read brings."""
MOST_CONNECTIONS = 8192
"""Open connections of a process, at most, where the limit of open files allows more."""
OTHER_FILES = 128
"""Files that a process opens besides its connections: the model's, pipes, and connections about to close."""
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before the event loop does anything else."""
ACCEPT_PAUSE = 0.1
"""Seconds before a connection is accepted again after that failed."""
RARELY = 10.0
"""Seconds between two warnings of the same text."""
SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that runs Python gives way to the model's, which asks for it between any two
operations: with Python's own 5 ms a small model mostly waits."""

YIELDING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
"""For OpenMP, which reads it when torch is first imported: threads that wait for each other sleep. By default
they spin, on the core that the event loop, another worker or another program needs."""

OpenEngine = Callable[[], "Engine"]

log = logging.getLogger("vitascope.server")


class RareWarnings:
    """Warnings that are logged at a limited rate: an attack must not fill the disk."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._left_out: collections.Counter[str] = collections.Counter()

    def warn(self, text: str) -> None:
        """Log a text at most every `RARELY` seconds, with how often it was left out."""
        now = time.monotonic()
        if now < self._next.get(text, 0.0):
            self._left_out[text] += 1
            return
        self._next[text] = now + RARELY
        times = self._left_out.pop(text, 0)
        log.warning("%s%s", text, f" ({times} times more before this line)" if times else "")


class Connection(SheddingProtocol):
    """uvicorn's fast HTTP with bounds on headers, idleness and unread answers, for which it has none.

    Args:
        settings: the limits.
        held: the connections that are open; this one is in it until it is lost.
        **of_uvicorn: uvicorn's own arguments.
    """

    def __init__(self, settings: Settings, held: set[Connection], **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._header_timeout = settings.header_timeout_s
        self._keep_alive = settings.keep_alive_s
        self._held = held
        self._in_head = False
        self._head_size = 0
        self.due = math.inf
        """When an idle connection is ended, on the event loop's clock."""
        self._unsent: float = math.inf
        held.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The event loop's: the connection is open, and its first headers are awaited."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.due = self.loop.time() + self._header_timeout

    def connection_lost(self, exc: Exception | None) -> None:
        """The event loop's: the connection is gone."""
        self._held.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """uvicorn's: a request is answered."""
        self.due, self._unsent = self.loop.time() + self._keep_alive, math.inf
        super().on_response_complete()

    def on_shed(self) -> None:
        """A request is refused before it becomes one of uvicorn's."""
        self.due, self._unsent = self.loop.time() + self._keep_alive, math.inf
        super().on_shed()

    @property
    def is_idle(self) -> bool:
        """Whether the server waits for the client, which has to send a request or to read an answer."""
        if self.transport is None:
            return False
        return self.cycle is None or self.cycle.response_complete or self.flow.write_paused

    def end_if_overdue(self, now: float) -> None:
        """End the connection if its client kept the server waiting for too long."""
        if now < self.due or not self.is_idle:
            return
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:  # a large answer is read slowly, but it is read
            self._unsent, self.due = unsent, now + self._keep_alive
        else:
            self.end(
                HTTPStatus.REQUEST_TIMEOUT, f"the headers were not whole after {self._header_timeout:g} s"
            )

    def end(self, status: HTTPStatus, reason: str) -> None:
        """End an idle connection; a client in the middle of its headers is told why."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        if self._in_head:
            self.transport.write(bare_answer(status, reason))
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Some bytes; a request's headers may go on in them."""
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self.send_400_response(f"the headers are over the limit of {MAX_HEAD} bytes")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The parser's: a request begins."""
        self._in_head, self._head_size = True, 0
        self.due = self.loop.time() + self._header_timeout
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser's: its headers are whole."""
        self._in_head = False
        super().on_headers_complete()


class GracefulServer(uvicorn.Server):
    """uvicorn, with another end: on a signal it refuses what is new and finishes what it has accepted.

    While that goes on it still listens: whoever comes is told so by a 503, and not by a broken connection.

    Args:
        config: uvicorn's.
        service: knows what is in flight.
        parent: the process that this one has to end with; None for a process of its own.
    """

    def __init__(self, config: uvicorn.Config, service: Service, parent: int | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._parent = parent
        self._give_up = float("inf")
        self._closed_at = 0.0
        self._limit = connection_limit(service.settings)
        self._warnings = RareWarnings()
        self._ports: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._held: set[Connection] = set()
        self._taking: set[asyncio.Task[Any]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl-C: begin to stop; the second time, stop at once."""
        if self._parent is not None and sig == signal.SIGINT:
            return  # a terminal sends it to all; the parent passes on a SIGTERM
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._begin_to_stop()

    def _begin_to_stop(self) -> None:
        self._service.draining = True
        self._give_up = time.monotonic() + self._service.settings.grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections.

        uvicorn would accept without a limit, as many in a row as the port's backlog has room for.
        """
        self._ports = sockets or []
        await super().startup([])
        for port in self._ports:
            port.setblocking(False)
            self._accepting.append(asyncio.get_running_loop().create_task(self._accept(port)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end."""
        await self._stop_accepting()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: end overdue connections; returns whether to end now."""
        clock = asyncio.get_running_loop().time()
        for connection in list(self._held):
            connection.end_if_overdue(clock)
        if self._parent is not None and os.getppid() != self._parent and not self._service.draining:
            self._begin_to_stop()
        now = time.monotonic()
        if now > self._give_up:
            self._service.give_up()
        done = now > self._give_up or self._service.fault is not None
        if self._closed_at:
            done = done or not self.server_state.connections or now > self._closed_at + FAREWELL
        elif self._service.draining and not self._service.in_flight:
            await self._close_port()
            self._closed_at = now
        return await super().on_tick(counter) or done

    async def _close_port(self) -> None:
        """Take whoever has connected, for closing would break their connections; then close."""
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
        """Connection after connection, for ever."""
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            try:
                connection, _ = await loop.sock_accept(port)
            except OSError as error:  # no more open files or memory, or the client has gone again
                self._warnings.warn(f"cannot accept a connection: {error.strerror}")
                self._end_idle()
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            self._take(connection)
            if number % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _take(self, connection: socket.socket) -> None:
        """Serve a new connection; at the limit, idle ones make room, or if none is idle it is turned away."""
        if len(self._held) >= self._limit:
            self._warnings.warn(f"{self._limit} connections are open, which is the limit (--max-connections)")
            if not self._end_idle():
                _turn_away(connection)
                return
        loop = asyncio.get_running_loop()
        protocol = Connection(
            self._service.settings,
            self._held,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        taking = loop.create_task(loop.connect_accepted_socket(lambda: protocol, connection))
        self._taking.add(taking)
        taking.add_done_callback(functools.partial(self._taken, protocol))

    def _taken(self, protocol: Connection, taking: asyncio.Task[Any]) -> None:
        self._taking.discard(taking)
        if taking.cancelled() or taking.exception() is not None:
            self._held.discard(protocol)
            if not taking.cancelled():
                self._warnings.warn(f"a connection failed: {taking.exception()}")

    def _end_idle(self) -> bool:
        """End the connections that have been idle for longest, a sixteenth of all; returns whether any is."""
        idle = [held for held in self._held if held.is_idle and not held.transport.is_closing()]
        for held in heapq.nsmallest(max(1, self._limit // 16), idle, key=lambda held: held.due):
            held.end(HTTPStatus.SERVICE_UNAVAILABLE, TOO_MANY)
        return bool(idle)


TOO_MANY = "too many connections are open"


def bare_answer(status: HTTPStatus, reason: str) -> bytes:
    """An error as it goes over the wire, for what never becomes a request; it ends the connection."""
    content = json.dumps({"error": reason}).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


def _turn_away(connection: socket.socket) -> None:
    """Answer 503 to a connection as far as that goes without waiting, and close it."""
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(bare_answer(HTTPStatus.SERVICE_UNAVAILABLE, TOO_MANY))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(MAX_HEAD)  # closing with unread bytes would take the answer back


def connection_limit(settings: Settings) -> int:
    """The open connections that a process may have, below its limit of open files.

    Raises:
        UserError: `max_connections` is over what that limit allows.
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
    """The files and sockets that this process may have open."""
    if sys.platform == "win32":
        return MOST_CONNECTIONS + OTHER_FILES
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS + OTHER_FILES if soft == resource.RLIM_INFINITY else soft


def server_of(app: FastAPI, parent: int | None = None) -> GracefulServer:
    """The server of an application that `create_app` made; it serves on the sockets that it is run with."""
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,  # `gate` writes a shorter one
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=math.ceil(service.settings.keep_alive_s),
        timeout_graceful_shutdown=1,  # what is in flight has been waited for
    )
    return GracefulServer(config, service, parent)


def run(
    open_engine: OpenEngine,
    settings: Settings,
    token: str | None,
    port: socket.socket,
    *,
    parent: int | None = None,
    listen_at_once: bool = True,
) -> None:
    """Serve in this process until a signal.

    Args:
        open_engine: opens the model.
        settings: the limits.
        token: what clients have to send; None asks for none.
        port: where to listen.
        parent: the process that this one has to end with; None for a process of its own.
        listen_at_once: whether to answer, with 503, while the model loads.

    Raises:
        UserError: the model cannot be loaded.
    """
    from vitascope.deploy.server.app import create_app  # heavy: not for the process that only watches workers

    sys.setswitchinterval(SWITCH_INTERVAL)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("vitascope.access").setLevel(logging.INFO)
    app = create_app(open_engine, settings, token, wait_for_model=not listen_at_once)
    service: Service = app.state.service
    server_of(app, parent).run(sockets=[port])
    if service.fault is not None:
        raise service.fault
    if service.unanswered:
        print(f"vitascope: stopped; requests unanswered: {service.unanswered}", file=sys.stderr)
    if service.is_computing:  # a thread in the middle of its work cannot be ended in any other way
        sys.stdout.flush()
        os._exit(1 if service.unanswered else 0)


def open_for_serving(ref: str, precision: str, device: str, threads: int) -> Engine:
    """The engine of a MODEL argument or an exported file, with a number of threads to compute with."""
    import torch

    from vitascope.deploy.predict.runtimes import open_engine
    from vitascope.model.hardware import reuse_freed_memory

    reuse_freed_memory()
    torch.set_num_threads(threads)
    return open_engine(ref, precision=precision, device=device)


def serve(ref: str, settings: Settings, *, precision: str = "auto", device: str = "auto") -> None:
    """What `vitascope serve` does: serve a model until a signal, then answer what was accepted, and end.

    Raises:
        UserError: the address cannot be used, the model cannot be loaded, the token cannot be read.
    """
    from vitascope.deploy.server import supervisor

    os.environ.setdefault(*YIELDING_THREADS)
    connection_limit(settings)
    token = read_token(settings)
    with listen(settings) as port:
        announce(ref, settings, port, token)
        threads = settings.threads or max(1, cores() // settings.workers)
        opening = functools.partial(open_for_serving, ref, precision, device, threads)
        if settings.workers == 1:
            run(opening, settings, token, port)
        else:
            supervisor.supervise(opening, settings, token, port)


def listen(settings: Settings) -> socket.socket:
    """A listening socket; on `::`, every address of this machine, for IPv4 as well where the system can.

    Raises:
        UserError: the address is in use, or none of this machine's.
    """
    address = settings.host, settings.port
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        both = settings.host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        reason = (error.strerror or str(error)).partition(" (")[0]  # in brackets: the address once more
        raise UserError(f"cannot listen on {where}: {reason}; try another --port or --host") from error


def announce(ref: str, settings: Settings, port: socket.socket, token: str | None) -> None:
    """Print where the server is and who may use it.

    On a terminal the link carries the token, in the fragment, which browsers send to no server. Elsewhere it
    does not, since output that is redirected is kept in logs.
    """
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{name}:{port.getsockname()[1]}"
    if token is not None and sys.stdout.isatty():
        address += f"/#token={quote(token, safe='')}"
    print(f"{ref} at {address} (/docs for its API; Ctrl-C stops it)", flush=True)
    if token is None and not settings.is_loopback:
        print(
            f"vitascope: anyone who reaches this address may use it; set a token by --token-file or {TOKEN}",
            file=sys.stderr,
            flush=True,
        )


def read_token(settings: Settings) -> str | None:
    """The bearer token that is asked for; None where none is set.

    Raises:
        UserError: a file that cannot be read, or an empty token.
    """
    token = os.environ.get(TOKEN)
    where = TOKEN
    if settings.token_file is not None:
        where = f"--token-file {settings.token_file}"
        try:
            token = settings.token_file.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{where} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    if token is not None and not token.strip():
        raise UserError(f"{where} is empty: give a token, or none at all")
    return None if token is None else token.strip()


def cores() -> int:
    """The processor's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
