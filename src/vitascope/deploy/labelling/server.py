"""The local server of `vitascope label`: Python's own, for one person on this machine."""

import hmac
import io
import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vitascope.deploy.labelling.session import Session
from vitascope.deploy.server.page_content import web_files
from vitascope.deploy.server.server import listen
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.models.decoding import ImageSource, decode, image_errors, open_image
from vitascope.serialization import check_record, parse_json

LOCAL = ("127.0.0.1", "localhost")
"""The names of this machine in a Host header; others are those of pages that a foreign name server sends."""
MOST_BYTES = 16 * 2**20
"""Of a request: decisions on 100,000 pictures."""
PATIENCE = 20.0
"""Seconds that a request for a changed state waits."""
SIDES = (32, 2048)
"""Pixels that a picture's longest side may have."""
CHANGES: dict[str, dict[str, Any]] = {
    "/api/decide": {"decisions": list},
    "/api/skip": {"ids": tuple[int, ...]},
    "/api/undo": {},
    "/api/classes": {"name": str},
    "/api/accept": {"label": str, "fit": int},
}
"""The requests that change labels, with the types of their values."""
DECISION = {"id": int, "labels": tuple[str, ...] | None}
FIELDS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class LabelServer(ThreadingHTTPServer):
    """A session behind a free or named port of this machine, with a token in its address.

    Raises:
        UserError: the port is not free.
    """

    daemon_threads = True

    def __init__(self, session: Session, port: int = 0) -> None:
        self.session, self.token = session, secrets.token_urlsafe(16)
        self.page = web_files("vitascope.deploy.server") | web_files("vitascope.deploy.labelling")
        self.decoding = threading.Semaphore(2)  # a huge picture takes memory
        super().__init__((LOCAL[0], port), _Requests, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(Settings(host=LOCAL[0], port=port))
        self.server_address, self.server_port = self.socket.getsockname(), self.socket.getsockname()[1]
        self.name = f"vitascope label at {LOCAL[0]}:{self.server_port}"  # which others may read: no token

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, but for pages that have gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"


class _Requests(BaseHTTPRequestHandler):
    """The requests of one connection."""

    server: "LabelServer"
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """A file of the page, a picture, or JSON."""
        self._answered(self._get)

    def do_POST(self) -> None:
        """A change, in JSON."""
        self._answered(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: errors are shown on the page."""

    def _answered(self, answer: Callable[[str, dict[str, str]], None]) -> None:
        name = f"vitascope-label-{self.server.server_port}"
        # Other servers of this machine have cookies here too, of forms for which SimpleCookie reads none.
        cookies = dict(
            text.strip().split("=", 1) for text in self.headers.get("Cookie", "").split(";") if "=" in text
        )
        try:
            url = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
            token = query.get("token", cookies.get(name, ""))
            if reason := self._rejection(token):
                self._send_json({"error": reason}, HTTPStatus.FORBIDDEN)
            elif "token" in query:  # once; then it is a cookie that no script and no other site sees
                fields = {"Location": "/", "Set-Cookie": f"{name}={token}; HttpOnly; SameSite=Strict; Path=/"}
                self._send(b"", "text/plain", HTTPStatus.SEE_OTHER, fields)
            else:
                answer(url.path, query)
        except KeyError:
            self._send_json({"error": f"no such path: {self.path[:80]}"}, HTTPStatus.NOT_FOUND)
        except ValueError as error:  # of JSON, or a UserError
            self._send_json({"error": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY)

    def _rejection(self, token: str) -> str:
        """Why the request is not one of the page's reader; empty if it is."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", f"http://{host}")
        if host.rpartition(":")[0] not in LOCAL or origin != f"http://{host}":
            return "only pages of this server may ask it"
        is_known = hmac.compare_digest(token.encode(), self.server.token.encode())
        return "" if is_known else "open the address that the command has printed, with its token"

    def _get(self, path: str, query: dict[str, str]) -> None:
        session = self.server.session
        match path.split("/")[1:]:
            case ["api", "state"]:
                if "after" in query:
                    session.wait(int(query["after"]), PATIENCE)
                self._send_json(session.state())
            case ["api", "pictures"]:
                count = min(max(0, int(query.get("count", "12"))), 1000)  # of a page
                self._send_json(session.pictures(query.get("view", "next"), count, query.get("label", "")))
            case ["picture", number] if number.isdecimal() and int(number) < len(session.sources):
                side = min(max(SIDES[0], int(query.get("side", "320"))), SIDES[1])
                with self.server.decoding:
                    content = thumbnail(session.sources[int(number)], side)
                self._send(content, "image/jpeg", fields={"Cache-Control": "private, max-age=600"})
            case [""] | ["web", _]:
                name = path.removeprefix("/web/").strip("/") or "index.html"
                media_type, content = self.server.page[name]
                self._send(content, media_type)
            case _:
                raise KeyError(path)

    def _post(self, path: str, query: dict[str, str]) -> None:
        session, more = self.server.session, {}
        values = self._values(CHANGES[path])
        match path.removeprefix("/api/"):
            case "decide":
                decisions = [check_record(one, DECISION, DECISION) for one in values["decisions"]]
                session.decide({one["id"]: one["labels"] for one in decisions})
            case "skip":
                session.skip(values["ids"])
            case "undo":
                more = {"ids": session.undo()}
            case "classes":
                session.add_class(values["name"])
            case "accept":
                session.accept(values["label"], values["fit"])
        self._send_json(session.state() | more)

    def _values(self, types: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object of a request; other sites' pages cannot send this type without asking."""
        size = self.headers.get("Content-Length", "")
        json_type = self.headers.get_content_type() == "application/json"
        if not json_type or not size.isdecimal() or int(size) > MOST_BYTES:
            raise UserError(f"a change is JSON of at most {MOST_BYTES:,} bytes, with a Content-Length")
        return check_record(parse_json(self.rfile.read(int(size)).decode()), types, types)

    def _send_json(self, values: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        content = json.dumps(values).encode("utf-8", "replace")
        self._send(content, "application/json", status)

    def _send(
        self,
        content: bytes,
        media_type: str,
        status: HTTPStatus = HTTPStatus.OK,
        fields: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        if status >= HTTPStatus.BAD_REQUEST:  # a body that was not read would be taken for the next request
            self.send_header("Connection", "close")
        length = {"Content-Type": media_type, "Content-Length": str(len(content))}
        for name, value in {"Cache-Control": "no-store", **FIELDS, **length, **(fields or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def thumbnail(source: ImageSource, side: int) -> bytes:
    """A picture as JPEG, upright, its longest side at most `side`; a UserError if it cannot be read."""
    with image_errors(source):
        image = open_image(source)
        image.draft(None, (side, side))  # libjpeg decodes large JPEGs at 1/2, 1/4 or 1/8
        picture = decode(image, source, exif_orientation=True).convert("RGB")
        picture.thumbnail((side, side))
        written = io.BytesIO()
        picture.save(written, "JPEG", quality=85)
    return written.getvalue()
