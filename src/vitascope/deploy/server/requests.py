"""What a request brings: encoded pictures, read within limits. No address in it is ever fetched."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

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

BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {"schema": {"type": "object", "properties": {"image": {"type": "array", "items": BINARY["schema"]}}}}
PICTURES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A picture's bytes, or files in a form.",
        "content": {"image/*": BINARY, "application/octet-stream": BINARY, "multipart/form-data": FORM},
    }
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "No bearer token, or not the right one."},
    408: {"description": "The request did not arrive in time."},
    413: {"description": "The body, or the picture's pixels, are over the limit."},
    415: {"description": "Not a picture's media type; addresses are not fetched."},
    422: {"description": "The picture cannot be read, or an option makes no sense."},
    429: {"description": "No room, or no time before the deadline; Retry-After says when to try again."},
    503: {"description": "Loading, or stopping."},
    504: {"description": "The deadline passed."},
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


@dataclasses.dataclass(frozen=True)
class Upload:
    """An encoded picture."""

    name: str
    """As the client calls it; empty for a raw body."""
    content: bytes

    def told(self, reason: object) -> str:
        """What is wrong with it, by the name that the client knows."""
        return f"{self.name or 'the body'}: {reason}"


async def read_uploads(request: Request, settings: Settings) -> list[Upload]:
    """The encoded pictures of a request: one of a raw body, or all files of a form.

    Raises:
        Refusal: 408, too slow; 413, too large or too many; 415, not of a media type that holds pictures; 422,
            nothing in it, or a broken form.
    """
    kind = request.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _files(request, await read_body(request, settings), settings)
    if not kind.startswith("image/") and kind != "application/octet-stream":
        raise Refusal(415, f"Content-Type {kind} holds no picture; {HOW}; addresses are not fetched")
    body = await read_body(request, settings)
    if not body:
        raise Refusal(422, f"the body is empty; {HOW}")
    return [Upload("", body)]


async def read_body(request: Request, settings: Settings) -> bytes:
    """A request's body.

    Raises:
        Refusal: 413, over the limit, as declared or read; 408, not whole in time; 499, the client has gone.
    """
    limit = int(settings.max_body_mb * 1e6)
    too_large = Refusal(413, f"the body is over the limit of {settings.max_body_mb:g} MB", close=True)
    declared = int(request.headers.get("content-length", "0"))
    if declared > LINGER * limit or (declared > limit and "expect" in request.headers):
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.read_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                    if size > LINGER * limit:
                        break
    except TimeoutError as error:
        slow = f"the body was not whole after {settings.read_timeout_s:g} s"
        raise Refusal(408, slow, close=True) from error
    except ClientDisconnect as gone:
        raise Refusal(499, "the client has gone") from gone
    if size > limit:
        raise too_large
    return b"".join(chunks)


async def _files(request: Request, body: bytes, settings: Settings) -> list[Upload]:
    """The files of a form."""

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        request.headers, whole(), max_files=settings.max_files, max_fields=settings.max_files
    )
    parser.spool_max_size = len(body) + 1  # it is in memory already: no file of the system's
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:  # KeyError: no boundary
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


def deadline_seconds(request: Request) -> float | None:
    """What X-Deadline-Ms asks for; None without it.

    Raises:
        Refusal: 422, it is no number above 0.
    """
    text = request.headers.get("x-deadline-ms")
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise Refusal(422, f"X-Deadline-Ms is a whole number of milliseconds, at least 1, not {text[:40]!r}")
    return int(text) / 1000
