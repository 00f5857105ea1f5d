"""The checks that every request passes before its route: host, origin, token, room; and common headers.

A rejection is cheap here, which keeps an overloaded server alive: nothing of the body is read or decoded.
"""

import asyncio
import hmac
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitascope.deploy.server.admission import SECURITY_FIELDS, STOPPING, Rejection, Room, response_to
from vitascope.deploy.server.service import Service

PUBLIC_PATHS = ("/", "/livez", "/readyz")
"""Paths that need no token, beside those in `/web/`: health, and a page that is the same for every model."""
CHECKED_HEADERS = frozenset((b"host", b"origin", b"sec-fetch-site", b"authorization", b"x-request-id"))
FOREIGN = "pages of other sites may not send pictures here"
VARY = (b"vary", b"origin")
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "authorization, content-type, x-deadline-ms",
    "Access-Control-Max-Age": "600",
}
"""The answer to a browser that asks before it sends a request of a page of another site."""
DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}


class RequestMiddleware:
    """Checks, counts and logs each request.

    Starlette's `TrustedHostMiddleware` would answer 400 in plain text; here the status is 421, in JSON.
    """

    def __init__(self, app: ASGIApp, service: Service, token: str | None) -> None:
        self.app = app
        self._service = service
        self._tokens: set[bytes] = set()
        if token is not None:  # as clients may send it: in UTF-8, or in Latin-1 where that can write it
            self._tokens.add(token.encode("utf-8", "surrogateescape"))
            if all(ord(character) < 256 for character in token):
                self._tokens.add(token.encode("latin-1"))
        self._hosts = service.settings.hosts
        self._root = service.settings.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, clock = self._service, asyncio.get_running_loop().time
        begun, status = clock(), 500
        headers = {name: value for name, value in reversed(scope["headers"]) if name in CHECKED_HEADERS}
        request_id = service.request_id(headers.get(b"x-request-id"))
        state = scope.setdefault("state", {})  # `request.state`
        claim = Room()
        state |= {"request_id": request_id.decode("ascii"), "claim": claim}
        origin = headers.get(b"origin", b"").decode("latin-1")
        given, is_head = scope, scope["method"] == "HEAD"
        method = "GET" if is_head else scope["method"]
        path = scope["path"]
        inside = path.removeprefix(self._root)  # a proxy may keep or remove its prefix
        if path.startswith(self._root) and inside[:1] in ("", "/"):
            path = inside or "/"
        scope = {**scope, "method": method, "path": path}

        async def respond(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].extend([*SECURITY_FIELDS, (b"x-request-id", request_id)])
                if origin in service.settings.allow_origin:
                    message["headers"].extend([(b"access-control-allow-origin", origin.encode()), VARY])
                if service.admission.closed == STOPPING:
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        model, inside = service.model_of(path)
        try:
            hosts = [name for name, _ in scope["headers"] if name == b"host"]
            if len(hosts) > 1 or not (hosts or scope["http_version"] == "1.0"):  # RFC 9112, section 3.2
                raise Rejection(400, f"a request has one Host header, not {len(hosts)}", close=True)
            self._check(method, inside, headers)
            if method == "OPTIONS" and origin in service.settings.allow_origin:
                await Response(status_code=204, headers=PREFLIGHT)(scope, receive, respond)
                return
            if service.computes(method, inside):
                work, deadline = model.work_of(inside), model.deadline()
                service.admission.admit(claim, Room(requests=1), work=work, deadline=deadline)
        except Rejection as rejection:
            await response_to(rejection, path)(scope, receive, respond)
        else:
            await self.app(scope, receive, respond)
        finally:
            service.admission.release(claim)
            seconds = clock() - begun
            service.metrics.observe_request(path, status, seconds)
            client = (scope.get("client") or ("-",))[0]
            raw = scope.get("raw_path", b"").decode("ascii", "backslashreplace").partition("?")[0][:200]
            service.log_request(client, given["method"], raw, status, seconds, request_id)

    def _check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Reject requests for another host, of another site's page, or without the token: 421, 403, 401."""
        host = headers.get(b"host", b"")
        if self._hosts and host_name(host) not in self._hosts:
            name = host.decode("latin-1")[:80]
            raise Rejection(421, f"this server's name is not {name!r}; see --allowed-hosts")
        if method != "GET":  # which HEAD is here
            self._check_origin(headers, host)
        public = method == "OPTIONS" or (
            method == "GET" and (path in PUBLIC_PATHS or path.startswith("/web/"))
        )
        if self._tokens and not public:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            matches = [hmac.compare_digest(given.strip(), token) for token in self._tokens]
            if kind.lower() != b"bearer" or not any(matches):
                raise Rejection(401, "a bearer token is needed: Authorization: Bearer ...")

    def _check_origin(self, headers: Mapping[bytes, bytes], host: bytes) -> None:
        """Reject requests of other sites' pages; browsers name the origin of all but GET and HEAD: 403."""
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1") in self._service.settings.allow_origin:
            return
        if headers.get(b"sec-fetch-site") == b"cross-site":
            raise Rejection(403, FOREIGN)
        if origin is None:
            return
        scheme, _, place = origin.lower().partition(b"://")
        default = DEFAULT_PORTS.get(scheme, b"")  # by the origin's scheme: a proxy may change it
        if place and place.removesuffix(default) == host.lower().removesuffix(default):
            return
        if host_name(place) not in self._service.settings.allowed_hosts:
            foreign = f"{FOREIGN}: Origin {origin.decode('latin-1')[:80]!r} is not this Host"
            raise Rejection(403, f"{foreign}; if a proxy changes the Host, name the site in --allowed-hosts")


def host_name(header: bytes) -> str:
    """The lowercase name in a Host header, without the port."""
    name = header.decode("latin-1").lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
