"""The server's life: a socket, one process or several, signals, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from vitascope.deploy.server.service import Service
from vitascope.deploy.server.settings import Settings
from vitascope.deploy.server.shedding import SheddingProtocol
from vitascope.errors import UserError

if TYPE_CHECKING:
    from vitascope.deploy.engine import Engine

TOKEN = "VITASCOPE_TOKEN"
"""The environment variable that may hold the bearer token."""
FAREWELL = 1.0
"""Seconds that open connections have, once the port is closed, to send a last request and get its 503."""
MAX_HEAD = 65536
"""Bytes of a request's first line and headers, and as many as one read brings."""
SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that runs Python gives way to the model's, which asks for it between any two
operations: with Python's own 5 ms a small model mostly waits."""

YIELDING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
"""For OpenMP, which reads it when torch is first imported: threads that wait for each other sleep. By default
they spin, on the core that the event loop, another worker or another program needs."""

OpenEngine = Callable[[], "Engine"]


class Connection(SheddingProtocol):
    """uvicorn's fast HTTP, with a bound on what it has none for: a client that never ends its headers."""

    _in_head = False
    _head_size = 0

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
        self._ports: list[socket.socket] = []
        self._taking: set[asyncio.Task[object]] = set()

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
        """Listen; the sockets are kept for the end."""
        self._ports = sockets or []
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end now."""
        if self._parent is not None and os.getppid() != self._parent and not self._service.draining:
            self._begin_to_stop()
        now = time.monotonic()
        if now > self._give_up:
            self._service.give_up()
        done = now > self._give_up or self._service.fault is not None
        if self._closed_at:
            done = done or not self.server_state.connections or now > self._closed_at + FAREWELL
        elif self._service.draining and not self._service.in_flight:
            self._close_port()
            self._closed_at = now
        return await super().on_tick(counter) or done

    def _close_port(self) -> None:
        """Take whoever has connected, for closing would break their connections; then close."""
        loop = asyncio.get_running_loop()
        for port in self._ports:
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection, _ = port.accept()
                    taking = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
                    self._taking.add(taking)
        for server in self.servers:
            server.close()

    def _protocol(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)


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
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,  # `gate` writes a shorter one
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=1,  # what is in flight has been waited for
    )
    GracefulServer(config, service, parent).run(sockets=[port])
    if service.fault is not None:
        raise service.fault
    if service.unanswered:
        print(f"vitascope: stopped with {service.unanswered} requests unanswered", file=sys.stderr)
    if service.is_computing:  # a thread in the middle of its work cannot be ended in any other way
        sys.stdout.flush()
        os._exit(1 if service.unanswered else 0)


def open_for_serving(ref: str, precision: str, device: str, threads: int) -> Engine:
    """The engine of a MODEL argument or an exported file, with a number of threads to compute with."""
    import torch

    from vitascope.deploy.engine import open_engine
    from vitascope.model.hardware import reuse_freed_memory

    reuse_freed_memory()
    torch.set_num_threads(threads)
    return open_engine(ref, precision=precision, device=device)


def serve(ref: str, settings: Settings, *, precision: str = "auto", device: str = "auto") -> None:
    """What `vitascope serve` does: serve a model until a signal, then answer what was accepted, and end.

    Raises:
        UserError: the address cannot be used, the model cannot be loaded, the token cannot be read.
    """
    from vitascope.deploy.server import workers

    os.environ.setdefault(*YIELDING_THREADS)
    token = read_token(settings)
    with listen(settings) as port:
        announce(ref, settings, port, token)
        threads = settings.threads or max(1, cores() // settings.workers)
        opening = functools.partial(open_for_serving, ref, precision, device, threads)
        if settings.workers == 1:
            run(opening, settings, token, port)
        else:
            workers.supervise(opening, settings, token, port)


def listen(settings: Settings) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: the address is in use, or none of this machine's.
    """
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        reason = (error.strerror or str(error)).partition(" (")[0]  # in brackets: the address once more
        raise UserError(f"cannot listen on {where}: {reason}; try another --port or --host") from error


def announce(ref: str, settings: Settings, port: socket.socket, token: str | None) -> None:
    """Say where the server is, and who may use it."""
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"{ref} at http://{name}:{port.getsockname()[1]} (/docs for its API; Ctrl-C stops it)", flush=True)
    if token is None and not settings.is_loopback:
        print(
            f"vitascope: anyone who reaches this address may use it; set {TOKEN}", file=sys.stderr, flush=True
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
    if token is not None and not token.strip():
        raise UserError(f"{where} is empty: give a token, or none at all")
    return None if token is None else token.strip()


def cores() -> int:
    """The processor's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
