"""Connections: uvicorn's HTTP with load shedding and with bounds on headers, idleness and unread responses.

At three times its capacity a server rejects two of three predictions, on the cores that the model needs.
Through a task and the routes, a rejection takes as long as a prediction of a small model. Below ASGI, it is
one write of bytes that are made once for many.
"""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vitascope.deploy.server.rejections import Rejection, raw_response

if TYPE_CHECKING:
    from vitascope.deploy.server.service import Service

MAX_HEAD = 65536
"""Bytes of a request's first line and headers, and as many as one read may bring."""
PREDICT = b"/v1/predict"


class Connection(HttpToolsProtocol):
    """An HTTP connection; it is among the open ones, `held`, until it is lost."""

    def __init__(self, service: Service, held: set[Connection], **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._service = service
        self._header_timeout = service.settings.header_timeout_s
        self._keep_alive = service.settings.keep_alive_s
        self._held = held
        self._in_head = False
        self._head_size = 0
        self._unsent: float = math.inf
        self.due = math.inf
        """When an idle connection is ended, on the event loop's clock."""
        held.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Await the first headers."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.due = self.loop.time() + self._header_timeout

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._held.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse some bytes, within the limit of the headers."""
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self.send_400_response(f"the headers are over the limit of {MAX_HEAD} bytes")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._in_head, self._head_size = True, 0
        self.due = self.loop.time() + self._header_timeout
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin to handle a request, unless it is shed."""
        self._in_head = False
        response = self._shed()
        if response is None:
            super().on_headers_complete()
            return
        if self.cycle is None:  # stands for a request that is answered, so that its body is dropped
            answered = SimpleNamespace(
                response_complete=True, disconnected=False, message_event=asyncio.Event()
            )
            self.cycle = cast("Any", answered)
        self.transport.write(response)
        self.server_state.total_requests += 1
        self._await_request()

    def on_response_complete(self) -> None:
        """Await the next request."""
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        self.due, self._unsent = self.loop.time() + self._keep_alive, math.inf

    def _shed(self) -> bytes | None:
        """The raw 429 of a prediction without room; only for one alone on a connection that stays open."""
        if self.url.partition(b"?")[0] != PREDICT or self.parser.get_method() != b"POST":
            return None
        others_answered = self.cycle is None or self.cycle.response_complete
        if not others_answered or self.pipeline or self.expect_100_continue:
            return None
        if not self.parser.should_keep_alive():
            return None
        given_id = next((value for name, value in self.headers if name == b"x-request-id"), None)
        return self._service.shed(self.client[0] if self.client else "-", given_id)

    @property
    def is_idle(self) -> bool:
        """Whether the server waits for the client to send a request or to read a response."""
        if self.transport is None:
            return False
        return self.cycle is None or self.cycle.response_complete or self.flow.write_paused

    def end_if_overdue(self, now: float) -> None:
        """End the connection if its client let the server wait too long."""
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
