"""What a request brings: encoded pictures, read within limits. No address in it is ever fetched."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from vitascope.deploy.server.settings import Settings

LINGER = 4
"""A body that is too large is read on, and thrown away, up to so many times the limit: a client that writes
before it reads learns why it is refused, and not that the connection broke."""
HOW = (
    "send a picture's bytes as Content-Type: image/jpeg, image/png, ... or application/octet-stream, or "
    "files in a multipart/form-data form"
)
UNDECLARED = ("", "application/x-www-form-urlencoded")
"""Content types that say nothing about the body: none, and the one that `curl --data-binary` sends."""
SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF.{4}WEBP|BM|II\*\0|MM\0\*|.{4}ftyp(?:avif|avis|mif1|msf1)",
    re.DOTALL,
)
"""The first bytes of a picture: JPEG, PNG, GIF, WebP, BMP, TIFF and AVIF."""
REQUEST_ID = re.compile(rb"[0-9A-Za-z._~:/+=@-]{1,128}")
"""What a client may call its request: nothing that would break a line of a log."""
MAX_DIGITS = 18
"""Digits of a number in a header or query: int() and float() fail on numbers that are long enough."""
BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{1,70}")
"""A form's boundary (RFC 2046, section 5.1.1)."""

BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {
    "schema": {
        "type": "object",
        "properties": {"image": {"type": "array", "items": BINARY["schema"], "minItems": 1}},
        "required": ["image"],
    }
}
PICTURES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A picture's bytes, or files in a form.",
        "content": {"image/*": BINARY, "application/octet-stream": BINARY, "multipart/form-data": FORM},
    }
}
NOT_LOADED: dict[int | str, dict[str, Any]] = {503: {"description": "Loading, or stopping."}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    408: {"description": "The request did not arrive in time."},
    413: {"description": "The body, or the picture's pixels, are over the limit."},
    415: {"description": "Not a picture's media type; addresses are not fetched."},
    422: {"description": "The picture cannot be read, or an option makes no sense."},
    429: {"description": "No room, or no time before the deadline; Retry-After says when to try again."},
    504: {"description": "The deadline passed: the server's, or the header X-Deadline-Ms, in milliseconds."},
    **NOT_LOADED,
}
NEEDS_HEAD: dict[int | str, dict[str, Any]] = {
    **REFUSALS,
    501: {"description": "The model has no head, so it names no classes."},
}
LOOKING_INSIDE: dict[int | str, dict[str, Any]] = {
    **REFUSALS,
    501: {"description": "An exported file is served, which only predicts."},
}


class Refusal(Exception):  # noqa: N818 - an answer
    """A request that is answered with a status of 4xx or 5xx, and why."""

    def __init__(
        self, status: int, reason: str, *, retry_after: int | None = None, close: bool = False
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if close:
            self.headers["Connection"] = "close"
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"


@dataclasses.dataclass
class Arriving:
    """The bodies that are being read: they are bounded by their bytes, and take no place in the queue."""

    requests: int = 0
    bytes: int = 0


class RequestIds:
    """The X-Request-ID of every answer."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4).encode()
        self._numbers = itertools.count(1)

    def of(self, given: bytes | None) -> bytes:
        """The request's name: the client's, or else one of ours."""
        if given is not None and REQUEST_ID.fullmatch(given):
            return given
        return b"%s-%x" % (self._prefix, next(self._numbers))


@dataclasses.dataclass(frozen=True)
class Upload:
    """An encoded picture."""

    name: str
    """As the client calls it; empty for a raw body."""
    content: bytes

    def told(self, reason: object) -> str:
        """What is wrong with it, by the name that the client knows."""
        return f"{self.name or 'the body'}: {reason}"


async def read_uploads(request: Request, settings: Settings, arriving: Arriving) -> list[Upload]:
    """The encoded pictures of a request: one of a raw body, or all files of a form.

    A body of no type, or of the type that curl sends by default, is recognized by its first bytes.

    Raises:
        Refusal: 408, too slow; 413, too large or too many; 415, not of a media type that holds pictures; 422,
            nothing in it, or a broken form; 429, the bodies being read take too much memory.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    undeclared = kind in UNDECLARED
    if kind == "multipart/form-data":
        return await _files(request, await read_body(request, settings, arriving), settings)
    if not (undeclared or kind.startswith("image/") or kind == "application/octet-stream"):
        raise Refusal(415, f"Content-Type {kind[:80]} holds no picture; {HOW}; addresses are not fetched")
    body = await read_body(request, settings, arriving)
    if not body:
        raise Refusal(422, f"the body is empty; {HOW}")
    if undeclared and not SIGNATURE.match(body):
        sent = f"of Content-Type {kind}" if kind else "without a Content-Type"
        raise Refusal(415, f"a body {sent} that is no picture; {HOW}; addresses are not fetched")
    return [Upload("", body)]


async def read_body(request: Request, settings: Settings, arriving: Arriving) -> bytes:
    """A request's body.

    Raises:
        Refusal: 413, over the limit, as declared or read; 408, not whole in time, or stalled; 429, the bodies
            being read take too much memory; 499, the client has gone.
    """
    limit = int(settings.max_body_mb * 1e6)
    too_large = Refusal(413, f"the body is over the limit of {settings.max_body_mb:g} MB", close=True)
    declared = whole_number(request.headers.get("content-length", "0"))
    if declared is None:
        raise Refusal(413, "Content-Length is no number of bytes that could be read", close=True)
    if declared > LINGER * limit or (declared > limit and "expect" in request.headers):
        raise too_large
    chunks: list[bytes] = []
    size = held = 0
    now = asyncio.get_running_loop().time
    end = now() + settings.read_timeout_s
    arriving.requests += 1
    try:
        async with asyncio.timeout_at(min(end, now() + settings.read_stall_s)) as timer:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                    arriving.bytes += len(chunk)
                    held += len(chunk)
                    if arriving.bytes > settings.queue * limit:
                        busy = "the bodies being read take all the memory that they may"
                        raise Refusal(429, busy, retry_after=1, close=True)
                else:
                    chunks.clear()
                    if size > LINGER * limit:
                        break
                timer.reschedule(min(end, now() + settings.read_stall_s))
    except TimeoutError as error:
        slow = (
            f"the body was not whole after {settings.read_timeout_s:g} s"
            if now() >= end
            else f"nothing of the body came for {settings.read_stall_s:g} s"
        )
        raise Refusal(408, slow, close=True) from error
    except ClientDisconnect as gone:
        raise Refusal(499, "the client has gone") from gone
    finally:
        arriving.requests -= 1
        arriving.bytes -= held
    if size > limit:
        raise too_large
    return b"".join(chunks)


async def _files(request: Request, body: bytes, settings: Settings) -> list[Upload]:
    """The files of a form."""

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    boundary = parse_options_header(request.headers["content-type"])[1].get(b"boundary", b"")
    if not BOUNDARY.fullmatch(boundary):
        raise Refusal(422, "a broken form: its Content-Type has no boundary of 1 to 70 usual characters")
    # The parser gets the boundary alone: with a charset it would decode names by any of Python's codecs.
    headers = Headers(raw=[(b"content-type", b'multipart/form-data; boundary="%s"' % boundary)])
    parser = MultiPartParser(headers, whole(), max_files=settings.max_files, max_fields=settings.max_files)
    parser.spool_max_size = len(body) + 1  # it is in memory already: no file of the system's
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refusal(
            422, f"a broken form, or one of more than {settings.max_files} files: {error}"
        ) from error
    uploads = [
        Upload(file.filename or "a file", await file.read())
        for _, file in form.multi_items()
        if not isinstance(file, str)
    ]
    await form.close()
    if not uploads:
        raise Refusal(422, f"no file in the form; {HOW}; addresses are not fetched")
    return uploads


def whole_number(text: str) -> int | None:
    """A number of decimal digits, `MAX_DIGITS` at most; None for any other text."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return int(text) if is_number else None


def deadline_seconds(request: Request) -> float | None:
    """The seconds that X-Deadline-Ms asks for; None without it.

    Raises:
        Refusal: 422, it is no number above 0, or one of too many digits.
    """
    text = request.headers.get("x-deadline-ms")
    if text is None:
        return None
    milliseconds = whole_number(text)
    if not milliseconds:
        raise Refusal(
            422,
            f"X-Deadline-Ms is a whole number of milliseconds, at least 1 and of at most {MAX_DIGITS} "
            f"digits, not {text[:40]!r}",
        )
    return milliseconds / 1000
