"""What every request passes before a route: who may ask, whether there is room, what every answer carries.

Refusing is cheap here, which is what keeps a server alive that is asked for more than it can do: nothing of a
body is read, nothing is decoded.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Collection, Mapping
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import parse_qsl

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitascope.deploy.server.service import Service
from vitascope.deploy.server.uploads import Refusal
from vitascope.errors import nearest

ALWAYS_OPEN = ("/", "/livez", "/readyz", "/docs", "/docs.css", "/openapi.json")
"""What needs no token: whether the server is well, and pages that are the same for every model ..."""
OPEN_FOLDER = "/web/"
"""... with their files."""
SAFE_METHODS = ("GET", "HEAD")
READ_HERE = frozenset((b"host", b"origin", b"sec-fetch-site", b"authorization", b"x-request-id"))
"""The headers that are read for every request."""
REQUEST_ID_KEY = "vitascope.request_id"
"""Where a request's scope has its X-Request-ID."""
DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
MAX_PARAMETERS = 100
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
        parameters: the names of query parameters by method and path, where others are refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        token: str | None,
        routes: Collection[str | None],
        parameters: Mapping[tuple[str, str], Collection[str]],
    ) -> None:
        self.app = app
        self._service = service
        self._tokens = () if token is None else encodings(token)
        self._hosts = service.settings.hosts
        self._root = service.settings.root_path
        self._routes = routes
        self._parameters = parameters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, clock = self._service, asyncio.get_running_loop().time
        begun, status = clock(), 500
        headers = {name: value for name, value in reversed(scope["headers"]) if name in READ_HERE}
        request_id = service.request_ids.of(headers.get(b"x-request-id"))
        scope[REQUEST_ID_KEY] = request_id
        asked, method = scope, scope["method"]
        is_head = method == "HEAD"
        if is_head or self._root:
            scope = {
                **scope,
                "method": "GET" if is_head else method,
                "path": self._without_root(scope["path"]),
            }

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].extend(IN_EVERY_ANSWER)
                message["headers"].append((b"x-request-id", request_id))
                if service.draining:
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        counted = _computes(scope)
        try:
            self._check(scope, headers)
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
                self._log(asked, status, seconds)

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what may not come in.

        Raises:
            Refusal: 421, 403, 401, 422, 503 or 429.
        """
        path, host = scope["path"], headers.get(b"host", b"")
        if self._hosts and host_name(host) not in self._hosts:
            name = host.decode("latin-1")[:80]
            raise Refusal(421, f"this server is not called {name!r}; see --allowed-hosts")
        if scope["method"] not in SAFE_METHODS:
            self._check_origin(headers, host)
        if self._tokens and path not in ALWAYS_OPEN and not path.startswith(OPEN_FOLDER):
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            given = given.strip()
            is_right = [hmac.compare_digest(given, token) for token in self._tokens]
            if kind.lower() != b"bearer" or not any(is_right):
                raise Refusal(401, "a bearer token is needed: Authorization: Bearer ...")
        known = self._parameters.get((scope["method"], path))
        if known is not None and scope["query_string"]:
            check_parameters(scope["query_string"], known)
        if _computes(scope):
            self._service.check_room(at_once=path == "/v1/predict")

    def _check_origin(self, headers: Mapping[bytes, bytes], host: bytes) -> None:
        """Refuse requests of other sites' pages; browsers name the origin of all but GET and HEAD.

        Raises:
            Refusal: 403.
        """
        if headers.get(b"sec-fetch-site") == b"cross-site":
            raise Refusal(403, "pages of other sites may not send pictures here")
        origin = headers.get(b"origin")
        if origin is None or is_same_origin(origin, host):
            return
        if host_name(origin.partition(b"://")[2]) not in self._service.settings.allowed_hosts:
            shown = origin.decode("latin-1")[:80]
            raise Refusal(
                403,
                f"pages of other sites may not send pictures here: Origin {shown!r} is not this Host; "
                "where a proxy changes the Host, --allowed-hosts names the site",
            )

    def _without_root(self, path: str) -> str:
        """A path as the routes know it: a proxy may leave its prefix in or take it out."""
        inside = path.removeprefix(self._root)
        return (inside or "/") if path.startswith(self._root) and inside[:1] in ("", "/") else path

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = scope.get("client") or ("-",)
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace").partition("?")[0][:200]
        log_access(client[0], scope["method"], path, status, seconds, scope[REQUEST_ID_KEY])


def log_access(client: str, method: str, path: str, status: int, seconds: float, request_id: bytes) -> None:
    """Log a request in one line, without its query: that may hold what is nobody's business."""
    spent, named = 1000 * seconds, request_id.decode("ascii")
    access_log.info("%s %s %s %d %.1f ms %s", client, method, path, status, spent, named)


def _computes(scope: Scope) -> bool:
    """Whether a request needs the model."""
    return bool(scope["method"] == "POST" and scope["path"].startswith("/v1/"))


def encodings(token: str) -> tuple[bytes, ...]:
    """A token as clients may send it: in UTF-8, or in Latin-1 where it can be."""
    encoded = {token.encode("utf-8", "surrogateescape")}
    if all(ord(character) < 256 for character in token):
        encoded.add(token.encode("latin-1"))
    return tuple(encoded)


def refusal_parts(refusal: Refusal) -> tuple[bytes, bytes]:
    """The answer that says why, as it goes over a connection of HTTP/1.1 that stays open: head and body.

    The head lacks only the request's name and the empty line.
    """
    answer = refused(refusal)
    fields = [*answer.raw_headers, *IN_EVERY_ANSWER, (b"date", formatdate(usegmt=True).encode())]
    line = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n".encode()
    return line + b"".join(b"%s: %s\r\n" % field for field in fields), bytes(answer.body)


def host_name(header: bytes) -> str:
    """The name in a Host header, without the port, in small letters."""
    name = header.decode("latin-1").lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def is_same_origin(origin: bytes, host: bytes) -> bool:
    """Whether an Origin header names the host and port of the Host header; a proxy may change the scheme."""
    scheme, _, place = origin.lower().partition(b"://")
    default = DEFAULT_PORTS.get(scheme, b"")
    return place != b"" and place.removesuffix(default) == host.lower().removesuffix(default)


def check_parameters(query: bytes, known: Collection[str]) -> None:
    """Refuse query parameters that a route does not know.

    Raises:
        Refusal: 422, naming the nearest that it knows.
    """
    try:
        given = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
    except ValueError as error:
        raise Refusal(422, f"more than {MAX_PARAMETERS} query parameters") from error
    for name, _ in given:
        if name not in known:
            short = name[:80]
            takes = ", ".join(sorted(known)) or "none"
            raise Refusal(
                422, f"unknown query parameter {short!r}{nearest(short, known)}; this path takes {takes}"
            )


def refused(refusal: Refusal) -> Response:
    """The answer that says why."""
    return problem(refusal.status, str(refusal), refusal.headers)


def problem(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    """An error: `{"error": reason}`, in ASCII, since names of classes need not be valid Unicode."""
    content = json.dumps({"error": reason})
    return Response(content, status_code=status, headers=headers, media_type="application/json")
