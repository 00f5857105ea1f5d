"""What every request passes before a route: who may ask, whether there is room, what every answer carries.

Refusing is cheap here, which is what keeps a server alive that is asked for more than it can do: nothing of a
body is read, nothing is decoded.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitascope.deploy.server.requests import Refusal
from vitascope.deploy.server.service import Service

ALWAYS_OPEN = ("/", "/livez", "/readyz")
"""What needs no token: whether the server is well, and its page, which holds nothing but itself ..."""
OPEN_FOLDER = "/web/"
"""... with its files."""
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""In every answer: pages load from this server alone, and run no scripts that stand in them."""
IN_EVERY_ANSWER = [(name.lower().encode(), value.encode()) for name, value in SECURITY.items()]

access_log = logging.getLogger("vitascope.access")


class Gate:
    """Wraps the routes.

    Args:
        app: the routes.
        service: knows whether there is room.
        token: what clients have to send; None asks for none.
        routes: the paths that metrics may name.
    """

    def __init__(
        self, app: ASGIApp, service: Service, token: str | None, routes: Collection[str | None]
    ) -> None:
        self.app = app
        self._service = service
        self._token = None if token is None else token.encode()
        self._hosts = service.settings.hosts
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, clock = self._service, asyncio.get_running_loop().time
        begun, status = clock(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].extend(IN_EVERY_ANSWER)
                if service.draining:
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        counted = _computes(scope)
        try:
            self._check(scope)
        except Refusal as refusal:
            counted = False
            await refused(refusal)(scope, receive, answer)
        else:
            service.enter(counted)
            try:
                await self.app(scope, receive, answer)
            finally:
                service.leave(counted)
        finally:
            seconds = clock() - begun
            path = scope["path"]
            service.metrics.answered(path if path in self._routes else "other", status, seconds)
            if service.settings.access_log:
                self._log(scope, status, seconds)

    def _check(self, scope: Scope) -> None:
        """Refuse what may not come in.

        Raises:
            Refusal: 421, 403, 401, 503 or 429.
        """
        headers, path = Headers(scope=scope), scope["path"]
        if self._hosts and host_name(headers.get("host", "")) not in self._hosts:
            raise Refusal(
                421, f"this server is not called {headers.get('host', '')[:80]!r}; see --allowed-hosts"
            )
        if headers.get("sec-fetch-site") == "cross-site" and scope["method"] not in ("GET", "HEAD"):
            raise Refusal(403, "pages of other sites may not send pictures here")
        if self._token is not None and path not in ALWAYS_OPEN and not path.startswith(OPEN_FOLDER):
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
                raise Refusal(401, "a bearer token is needed: Authorization: Bearer ...")
        if _computes(scope):
            self._service.check_room(at_once=path == "/v1/predict")

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        """A line, without what follows the path: it may hold what is nobody's business."""
        client = scope.get("client") or ("-",)
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace").partition("?")[0][:200]
        access_log.info("%s %s %s %d %.1f ms", client[0], scope["method"], path, status, 1000 * seconds)


def _computes(scope: Scope) -> bool:
    """Whether a request needs the model."""
    return bool(scope["method"] == "POST" and scope["path"].startswith("/v1/"))


def refusal_bytes(refusal: Refusal) -> bytes:
    """The answer that says why, as it goes over a connection of HTTP/1.1 that stays open."""
    answer = refused(refusal)
    fields = [*answer.raw_headers, *IN_EVERY_ANSWER, (b"date", formatdate(usegmt=True).encode())]
    line = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n".encode()
    head = b"".join(b"%s: %s\r\n" % field for field in fields)
    return line + head + b"\r\n" + bytes(answer.body)


def host_name(header: str) -> str:
    """The name in a Host header, without the port, in small letters."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def refused(refusal: Refusal) -> JSONResponse:
    """The answer that says why."""
    return problem(refusal.status, str(refusal), refusal.headers)


def problem(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer that is an error: `{"error": reason}`."""
    content: dict[str, Any] = {"error": reason}
    return JSONResponse(content, status_code=status, headers=headers)
