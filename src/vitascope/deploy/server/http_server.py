"""A server process: it accepts connections, bounds their number, and stops without losing a request.

Connections are uvicorn's, with bounds on headers, idleness and unread responses, which it lacks, and with
load shedding: at three times its capacity a server rejects two of three predictions, on the cores that the
model needs. In the routes, a rejection takes as long as a prediction of a small model; below ASGI, it is one
write of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vitascope.deploy.server.admission import FULL, STOPPING, Rejection, raw_response
from vitascope.deploy.server.service import Service
from vitascope.deploy.server.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vitascope.models.engines.engine import Engine

FAREWELL = 1.0
"""Seconds that open connections have, once the port is closed, to send a last request and get its 503."""
ACCEPTED_AT_ONCE = 32  # connections that are accepted before the event loop does anything else
ACCEPT_PAUSE = 0.1  # seconds until the next attempt after a connection could not be accepted
WARNING_INTERVAL = 10.0  # seconds between two warnings of the same text: an attack must not fill the disk
SWITCH_INTERVAL = 0.0005
"""Seconds after which a Python thread yields to the model's, which asks between any two operations; with
Python's own 5 ms a small model mostly waits."""
MAX_HEAD = 65536  # bytes of a request's first line and headers, of its trailers, and before a chunk
PARSED_AT_ONCE = 2**14  # bytes after which these are counted, by which they may exceed the limit
RESET = socket.SOL_SOCKET, socket.SO_ERROR

OpenEngine = Callable[[], "Engine"]


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What a server process serves, and how; a process that is started gets it as a pickle."""

    models: OpenEngine | Mapping[str, OpenEngine]
    settings: Settings
    token: str | None = None
    beside: OpenEngine | None = None


log = logging.getLogger("vitascope.server")


class Connection(HttpToolsProtocol):
    """An HTTP connection; it is among the open ones from now on, and uvicorn removes it when it is lost."""

    def __init__(self, service: Service, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._service = service
        self._header_timeout = service.settings.header_timeout_s
        self._keep_alive = service.settings.keep_alive_s
        self._in_head, self._head_size, self._is_shed = False, 0, False
        self.unparsed = memoryview(b"")
        self._ended = False  # whether the client has ended its side
        self._unsent: float = math.inf
        self.due = math.inf  # when an idle connection is ended, on the event loop's clock
        self.connections.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Await the first headers."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = Flow(self)
        self.due = self.loop.time() + self._header_timeout

    def data_received(self, data: bytes) -> None:
        """Parse some bytes, however they arrive."""
        self.unparsed = memoryview(bytes(self.unparsed) + data)
        self._parse()

    def _parse(self) -> None:
        """Parse what has arrived, but while requests wait no further ones: each takes 50 times its bytes.

        Bytes that are no body are within the limit of a head.
        """
        while self.unparsed and not self.pipeline and not self.transport.is_closing():
            part, self.unparsed = self.unparsed[:PARSED_AT_ONCE], self.unparsed[PARSED_AT_ONCE:]
            self._head_size += len(part)
            super().data_received(part)  # type: ignore[arg-type]
            if self._head_size > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response(f"the headers are over the limit of {MAX_HEAD} bytes")

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._head_size = 0
        if not self._is_shed:
            super().on_body(body)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a complete request although its client sends no more.

        A client that has left ends its side in the same way. It answers bytes with a reset, which
        `end_if_overdue` sees: so it gets some that every client of HTTP/1.1 skips.
        """
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive, self._ended = False, True
        if self.cycle.scope["http_version"] == "1.1" and not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._in_head, self._head_size = True, 0
        self.due = self.loop.time() + self._header_timeout
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin to handle a request, unless it is shed."""
        self._in_head = False
        response = self._shed()
        self._is_shed = response is not None
        if response is None:
            super().on_headers_complete()
            self.headers = []  # of trailers, which are dropped
            return
        self.transport.write(response)
        self.server_state.total_requests += 1
        self._await_request()

    def on_message_complete(self) -> None:
        """End a request."""
        if not self._is_shed:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Await the next request."""
        self._await_request()
        super().on_response_complete()
        self._parse()
        self.flow.resume_reading()

    def _await_request(self) -> None:
        self.due, self._unsent = self.loop.time() + self._keep_alive, math.inf

    def _shed(self) -> bytes | None:
        """The raw 429 of a prediction without room; only for one alone on a connection that stays open."""
        is_alone = (self.cycle is None or self.cycle.response_complete) and not self.pipeline
        if self.parser.get_method() != b"POST" or not is_alone:
            return None
        if self.expect_100_continue or not self.parser.should_keep_alive():
            return None
        client_id = next((value for name, value in self.headers if name == b"x-request-id"), None)
        path = self.url.partition(b"?")[0].decode("latin-1")  # if it has escapes, it is checked later
        return self._service.shed(path, self.client[0] if self.client else "-", client_id)

    @property
    def is_idle(self) -> bool:
        """Whether the server waits for the client to send a request or to read a response."""
        if self.transport is None:
            return False
        return self.cycle is None or self.cycle.response_complete or self.flow.write_paused

    def end_if_overdue(self, now: float) -> None:
        """End the connection if its client lets the server wait too long, or has left."""
        if self._ended and self.transport.get_extra_info("socket").getsockopt(*RESET):
            self.transport.abort()
        if now < self.due or not self.is_idle:
            return
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:  # a large response is read slowly, but it is read
            self._unsent, self.due = unsent, now + self._keep_alive
        else:
            reason = f"the headers were incomplete after {self._header_timeout:g} s"
            self.end(Rejection(408, reason, close=True))

    def end(self, rejection: Rejection) -> None:
        """End an idle connection; a client in the middle of its headers gets the reason."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        if self._in_head:
            self.transport.write(b"%s\r\n%s" % raw_response(rejection))
        self.transport.close()


class Flow(FlowControl):
    """uvicorn's pauses of a connection, which reads nothing while requests wait that have arrived."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        """Read on, if nothing waits."""
        if not (self._connection.pipeline or self._connection.unparsed):
            super().resume_reading()


class HTTPServer(uvicorn.Server):
    """uvicorn with bounded connections, and a stop that rejects new requests and finishes the others.

    While it stops it still listens, so that new clients get a 503 instead of a broken connection. It also
    stops when the process `parent` has ended.
    """

    def __init__(self, config: uvicorn.Config, service: Service, parent: int | None = None) -> None:
        super().__init__(config)
        self.connections = cast("set[Connection]", self.server_state.connections)
        self._service, self._parent = service, parent
        self._admission = service.admission
        self._give_up_at, self._closed_at = math.inf, 0.0
        self._next_warning: dict[str, float] = {}
        self._connecting: set[asyncio.Task[Any]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM, SIGHUP or Ctrl-C: begin to stop; the second time, end the grace period."""
        if self._parent is not None and sig != signal.SIGTERM:
            return  # a terminal sends it to all processes; the parent forwards a SIGTERM
        if self._admission.closed == STOPPING:
            self._give_up_at = 0.0
        else:
            self._begin_to_stop()

    def _begin_to_stop(self) -> None:
        self._admission.closed = STOPPING
        self._give_up_at = time.monotonic() + self._service.settings.grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections; uvicorn would accept without a limit."""
        assert sockets is not None
        (self._port,) = sockets
        await super().startup([])
        self._port.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and end."""
        await self._stop_accepting()
        await asyncio.gather(*self._connecting, return_exceptions=True)  # uvicorn closes their transports
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Ten times per second, end overdue connections; returns whether to end now."""
        clock, now = asyncio.get_running_loop().time(), time.monotonic()
        for connection in list(self.connections):
            connection.end_if_overdue(clock)
        is_orphan = self._parent is not None and os.getppid() != self._parent
        if is_orphan and self._admission.closed != STOPPING:
            self._begin_to_stop()
        if now > self._give_up_at:
            self._service.give_up()
        done = now > self._give_up_at or self._service.fault is not None
        if self._closed_at:
            done = done or not self.connections or now > self._closed_at + FAREWELL
        elif self._admission.closed == STOPPING and not self._admission.taken.requests:
            await self._stop_accepting()
            with contextlib.suppress(OSError):  # BlockingIOError: that was the last
                while True:  # take the clients that have connected: closing would break these
                    self._take(self._port.accept()[0])
            self._port.close()
            self._closed_at = now
        return await super().on_tick(counter) or done

    async def _stop_accepting(self) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            try:
                connection, _ = await loop.sock_accept(self._port)
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
        try:
            self._admission.admit_connection(len(self.connections))
        except Rejection as full:
            most = self._admission.most_connections
            self._warn(f"{most} connections are open, which is the limit (--max-connections)")
            if not self._end_idle():  # answer as far as that is possible without waiting
                with contextlib.closing(connection), contextlib.suppress(OSError):
                    connection.setblocking(False)
                    connection.send(b"%s\r\n%s" % raw_response(full))
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(MAX_HEAD)  # closing with unread bytes would discard the response
                return
        # asyncio sets it only where it knows the protocol; without it, a body waits 40 ms for its head's ACK.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        of_uvicorn = {"server_state": self.server_state, "app_state": self.lifespan.state}
        protocol = Connection(self._service, config=self.config, **of_uvicorn)
        connecting = loop.create_task(loop.connect_accepted_socket(lambda: protocol, connection))
        self._connecting.add(connecting)
        connecting.add_done_callback(functools.partial(self._connected, protocol))

    def _connected(self, protocol: Connection, connecting: asyncio.Task[Any]) -> None:
        self._connecting.discard(connecting)
        if connecting.cancelled() or connecting.exception() is not None:
            self.connections.discard(protocol)
            if not connecting.cancelled():
                self._warn(f"a connection failed: {connecting.exception()}")

    def _end_idle(self) -> bool:
        """End the sixteenth of all connections that has been idle longest; returns whether any is idle."""
        idle = [one for one in self.connections if one.is_idle and not one.transport.is_closing()]
        for one in heapq.nsmallest(
            max(1, self._admission.most_connections // 16), idle, key=lambda one: one.due
        ):
            one.end(FULL)
        return bool(idle)

    def _warn(self, text: str) -> None:
        """Log a warning, but the same one rarely."""
        now = time.monotonic()
        if now >= self._next_warning.get(text, 0.0):
            self._next_warning[text] = now + WARNING_INTERVAL
            log.warning(text)


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


def heeds_hangup() -> bool:
    """Whether SIGHUP stops this process; under nohup it is ignored."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def serve_until_signal(
    deployment: Deployment, port: socket.socket, parent: int | None = None, *, wait_for_model: bool = False
) -> None:
    """Serve on a listening socket until a signal; raises the error of a model that cannot be loaded."""
    from vitascope.deploy.server.app import create_app  # heavy: not for the process that supervises workers

    sys.setswitchinterval(SWITCH_INTERVAL)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("vitascope.access").setLevel(logging.INFO)
    app = create_app(**vars(deployment), wait_for_model=wait_for_model)
    service: Service = app.state.service
    server = server_of(app, parent)
    if heeds_hangup():
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run(sockets=[port])
    if service.fault is not None:
        raise service.fault
    if service.unanswered:
        print(f"vitascope: stopped; requests unanswered: {service.unanswered}", file=sys.stderr)
    if service.batcher.is_computing:  # there is no other way to end a thread in the middle of its work
        sys.stdout.flush()
        os._exit(1 if service.unanswered else 0)
