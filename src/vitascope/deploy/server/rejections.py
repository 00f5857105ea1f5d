"""Requests that are answered with an error: status, reason and headers, in one place."""

from __future__ import annotations

import json
import math
import re
from email.utils import formatdate
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response: pages load from this server alone, and run no inline scripts."""
SECURITY_FIELDS = [(name.lower().encode(), value.encode()) for name, value in SECURITY.items()]


class Rejection(HTTPException):
    """Answers a request with an error status and reason; `close` ends the connection after the response."""

    def __init__(self, status: int, reason: str, *, retry_after: int = 1, close: bool = False) -> None:
        headers = {"Connection": "close"} if close else {}
        if status in (429, 503):
            headers["Retry-After"] = str(retry_after)
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, reason, headers)

    def __str__(self) -> str:
        return self.detail


class Overloaded(Rejection):
    """There is no place for a request, or not enough time before its deadline."""

    def __init__(self, reason: str, seconds_ahead: float) -> None:
        self.seconds_ahead = seconds_ahead
        self.retry_after = max(1, math.ceil(seconds_ahead))
        super().__init__(429, reason, retry_after=self.retry_after)


class Expired(Rejection):
    """A request's deadline passed in a stage: `queued`, `computing` or `decoding`."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        doing = "waiting in the queue" if stage == "queued" else stage
        super().__init__(504, f"the deadline passed while {doing}")


OPENAI = re.compile(r"/v1/(embeddings|models(/[^:]*)?)")
"""Paths whose errors are objects."""


def response_to(error: HTTPException, path: str = "") -> Response:
    """`{"error": reason}`, in ASCII, because class names need not be valid Unicode; an object at the paths of
    OpenAI."""
    reason: object = str(error.detail)
    if OPENAI.fullmatch(path):
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        reason = {"message": reason, "type": kind, "param": None, "code": None}
    content = json.dumps({"error": reason})
    return Response(content, error.status_code, error.headers, media_type="application/json")


def raw_response(rejection: Rejection) -> tuple[bytes, bytes]:
    """Head (without its empty line) and body in HTTP/1.1, for what never reaches the application."""
    response = response_to(rejection)
    fields = [*response.raw_headers, *SECURITY_FIELDS, (b"date", formatdate(usegmt=True).encode())]
    line = f"HTTP/1.1 {rejection.status_code} {HTTPStatus(rejection.status_code).phrase}\r\n".encode()
    return line + b"".join(b"%s: %s\r\n" % field for field in fields), bytes(response.body)
