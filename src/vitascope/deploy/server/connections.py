"""Refusals below ASGI: while the server has no room for predictions, they get 429 from the protocol itself.

At three times its load a server refuses two of three requests, on the cores that the model needs. Through a
task and the routes a refusal takes as long as a prediction of a small model. Here it is one write of bytes,
which are made once for many.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from vitascope.deploy.server.service import Service

PREDICT = b"/v1/predict"


class _Answered:
    """In place of uvicorn's cycle of a request: one that is answered, so that its body is thrown away."""

    response_complete = True
    disconnected = False

    def __init__(self) -> None:
        self.message_event = asyncio.Event()


class SheddingProtocol(HttpToolsProtocol):
    """uvicorn's fast HTTP, which refuses predictions while there is no room for any."""

    def on_headers_complete(self) -> None:
        """The parser's: a request's headers are whole; its body may come."""
        answer = self._shed()
        if answer is None:
            super().on_headers_complete()
            return
        if self.cycle is None:
            self.cycle = cast("Any", _Answered())
        self.transport.write(answer)
        self.on_shed()

    def on_shed(self) -> None:
        """A request is refused here: what uvicorn does after an answer, without its timer."""
        self.server_state.total_requests += 1

    def _shed(self) -> bytes | None:
        """The refusal of a request, if it is a prediction, alone on a connection that stays open."""
        service: Service = cast("Any", self.config.app).state.service
        if self.url.partition(b"?")[0] != PREDICT:
            return None
        answers_before = self.cycle is None or self.cycle.response_complete
        if not answers_before or self.pipeline or self.expect_100_continue:
            return None
        if self.parser.get_method() != b"POST" or not self.parser.should_keep_alive():
            return None
        given_id = next((value for name, value in self.headers if name == b"x-request-id"), None)
        return service.shed(self.client[0] if self.client else "-", given_id)
