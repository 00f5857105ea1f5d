"""Admission: whether there is room for a connection, a request, its body and its work; and rejections.

`Admission.admit` alone decides it, and `release` returns the room. A request asks when its headers are here,
with each part of its body, when its body is complete, and before its pictures are queued.
"""

import asyncio
import dataclasses
import json
import math
import re
import resource
from email.utils import formatdate
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response

from vitascope.deploy.server.batcher import Batcher, Work
from vitascope.deploy.server.metrics import Metrics
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.models.hardware import return_freed_memory

MARGIN, LAST_MARGIN = 0.5, 0.9
"""The share of the time until its deadline that work may take: before its picture is read, and after."""
SHED_LEAST, SHED_MOST, SHED_SHARE = 0.005, 0.02, 0.25
"""Time for which predictions are rejected without another check: bounds in seconds, and the share of the
pending work's time, so that the model does not run out of work."""
RECENT = 1.0  # seconds for which the server reports itself as saturated after a rejection
MOST_CONNECTIONS, OTHER_FILES = 8192, 128
"""Open connections of a process, where the limit of open files allows more, and its other open files."""
STOPPING = "the server is stopping"
RETURNED = 2**26
"""Bytes of bodies after which freed memory is returned: 5 ms for so many."""

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
        super().__init__(429, reason, retry_after=max(1, math.ceil(seconds_ahead)))


OPENAI = re.compile(r"/v1/(embeddings|models(/[^:]*)?)")
"""Paths whose errors are objects."""


def response_to(error: HTTPException, path: str = "") -> Response:
    """`{"error": reason}`, in ASCII, as class names may be no valid Unicode; an object at OpenAI's paths."""
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


@dataclasses.dataclass
class Room:
    """What a request takes of a server until it is answered, or asks for; or what all requests take."""

    requests: int = 0
    """1 from its headers on."""
    places: int = 0
    """1 once its body is complete: until then it takes no place in the queue."""
    size: int = 0
    """Bytes of its body in memory."""


FULL = Rejection(503, "too many connections are open", close=True)


class Admission:
    """The room of a server process, for all of its models."""

    def __init__(self, settings: Settings, queue: Batcher, metrics: Metrics) -> None:
        self.settings = settings
        self.most_connections = connection_limit(settings)
        self.most_bytes = int(settings.max_body_mb * 1e6)
        self.taken = Room()
        self.closed = "the model is still loading"  # why no request is admitted; empty if some are
        self.lag = 0.0  # seconds by which the event loop is late, which a request waits before it is seen
        self._queue, self._metrics = queue, metrics
        self._most_together = max(self.most_bytes, int(settings.max_bodies_mb * 1e6))
        self._returnable = 0
        self._last_overload = self._shed_until = -math.inf
        self._shed_response = (b"", b"")

    def admit(
        self,
        claim: Room,
        more: Room | None = None,
        *,
        body: int = 0,
        work: Work | None = None,
        deadline: float = math.inf,
    ) -> None:
        """Add room to a request's claim, or reject the request: 413, 429 or 503.

        `body` is the body's length so far. `work` must be done by the deadline, on the event loop's clock.
        """
        more, settings = more or Room(), self.settings
        if more.requests and self.closed:
            raise Rejection(503, self.closed)
        if self.taken.size + more.size > self._most_together:
            reason = f"all bodies take more than {self._most_together / 1e6:g} MB"
            raise Rejection(503, reason, close=True)
        if body > self.most_bytes:
            raise Rejection(413, f"the body is over the limit of {settings.max_body_mb:g} MB", close=True)
        if (more.requests or more.places) and self.taken.places >= settings.queue:
            reason = f"{settings.queue} requests are in progress, which is the limit"
            raise self._overloaded(reason, self._queue.seconds_ahead())
        if work is not None:
            self._check_time(work, deadline, early=more.requests > 0)
        for room in (claim, self.taken):
            room.requests += more.requests
            room.places += more.places
            room.size += more.size
        self._metrics.in_flight.inc(more.requests)

    def release(self, claim: Room) -> None:
        """Return the room of an answered request. Now and then, freed memory goes back to the system, which
        glibc does not do by itself, least of all after `reuse_freed_memory`."""
        self.taken.requests -= claim.requests
        self.taken.places -= claim.places
        self.taken.size -= claim.size
        self._metrics.in_flight.dec(claim.requests)
        self._returnable += claim.size
        if self._returnable >= RETURNED:
            self._returnable = 0
            return_freed_memory()

    def shed(self, work: Work, deadline: float) -> tuple[bytes, bytes] | None:
        """The raw 429 of a prediction without room, for some milliseconds without another check."""
        now = asyncio.get_running_loop().time()
        if now >= self._shed_until:
            claim = Room()
            try:
                self.admit(claim, Room(requests=1), work=work, deadline=deadline)
                self.release(claim)
                return None
            except Overloaded as overload:
                self._shed_response = raw_response(overload)
                seconds = SHED_SHARE * overload.seconds_ahead
                self._shed_until = now + min(max(seconds, SHED_LEAST), SHED_MOST)
        self._last_overload = now
        return self._shed_response

    def admit_connection(self, count: int) -> None:
        """Reject a connection (503) beside so many open ones."""
        if count >= self.most_connections:
            raise Rejection(503, FULL.detail, close=True)

    def why_not_ready(self) -> str:
        """The reason to send requests elsewhere; empty if the server is ready."""
        if self.closed:
            return self.closed
        stalled = self._queue.seconds_computing()
        if stalled > self.settings.stalled_s:
            return f"the model has not answered for {stalled:.0f} s"
        recent = asyncio.get_running_loop().time() - self._last_overload < RECENT
        return "saturated: requests are being rejected" if recent else ""

    def _overloaded(self, reason: str, seconds_ahead: float) -> Overloaded:
        self._last_overload = asyncio.get_running_loop().time()
        return Overloaded(reason, seconds_ahead)

    def _check_time(self, work: Work, deadline: float, *, early: bool) -> None:
        """Reject work that has no place, or would not be done in time after what comes before it.

        Before its body is read, requests that are admitted and not queued count too.
        """
        queue, left = self._queue, deadline - asyncio.get_running_loop().time()
        if early and left <= 0:
            raise self._overloaded(f"requests wait for {self.lag:.1f} s before they are seen", self.lag)
        ahead = queue.seconds_ahead(work)
        if len(queue.jobs) >= self.settings.queue:
            reason = f"the queue is full: {len(queue.jobs)} of {self.settings.queue} wait"
            raise self._overloaded(reason, ahead)
        if early:
            ahead += max(0, self.taken.places - queue.pending) * work.seconds_each
        if ahead > 0 and ahead + work.seconds_each > (MARGIN if early else LAST_MARGIN) * left:
            raise self._overloaded(f"{ahead:.2f} s of work are ahead, and {left:.2f} s are left", ahead)


def connection_limit(settings: Settings) -> int:
    """The connections that a process may have open; `UserError` if the limit of open files is less."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        files = MOST_CONNECTIONS + OTHER_FILES
    allowed = max(files // 2, files - OTHER_FILES)
    if settings.max_connections > allowed:
        raise UserError(
            f"--max-connections {settings.max_connections} is too many: this process may open {files} "
            f"files, which leaves {allowed} connections; give fewer, or raise `ulimit -n`"
        )
    return settings.max_connections or min(allowed, MOST_CONNECTIONS)
