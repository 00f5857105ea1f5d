"""Request bodies: encoded pictures, read within limits. No URL in a body is ever fetched."""

import asyncio
import dataclasses
import re
import zlib
from collections.abc import AsyncGenerator

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from vitascope.deploy.server.admission import Admission, Rejection, Room
from vitascope.deploy.server.decoder_process import Content

LINGER = 4
"""A body over the limit is read on, and dropped, up to this many times the limit: a client that writes before
it reads then sees the error instead of a broken connection."""
HOW = (
    "send a picture's bytes as Content-Type: image/jpeg, image/png, ... or application/octet-stream, or "
    "files in a multipart/form-data form; URLs are not fetched"
)
UNDECLARED = ("", "application/x-www-form-urlencoded")
"""Content types that do not describe the body: none, and the default of `curl --data-binary`."""
SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF.{4}WEBP|BM|II\*\0|MM\0\*|.{4}ftyp(?:avif|avis|mif1|msf1)",
    re.DOTALL,
)
"""The first bytes of a JPEG, PNG, GIF, WebP, BMP, TIFF or AVIF picture."""
BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{1,70}")  # A form's boundary (RFC 2046, section 5.1.1)
CODINGS = {"identity": 0, "gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Values of Content-Encoding, with zlib's number of each."""
MAX_DIGITS = 18  # digits of a number in a header: int() fails on very long ones


@dataclasses.dataclass(frozen=True)
class Upload:
    """A picture with its file name, which is empty for a raw body."""

    name: str
    content: Content


def type_of(request: Request) -> str:
    """The declared type of a request's body."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_uploads(request: Request, admission: Admission) -> list[Upload]:
    """The encoded pictures of a request: one of a raw body, which may have no declared type, or a form's."""
    kind = type_of(request)
    undeclared = kind in UNDECLARED
    if kind == "multipart/form-data":
        return await _files(request, await read_body(request, admission), admission.settings.max_files)
    if not (undeclared or kind.startswith("image/") or kind == "application/octet-stream"):
        raise Rejection(415, f"Content-Type {kind[:80]} is not a picture's; {HOW}")
    body = await read_body(request, admission)
    if not body:
        raise Rejection(422, f"the body is empty; {HOW}")
    if undeclared and not SIGNATURE.match(body):
        declared = f"of Content-Type {kind}" if kind else "without a Content-Type"
        raise Rejection(415, f"a body {declared} that is not a picture; {HOW}")
    return [Upload("", body)]


async def read_body(request: Request, admission: Admission) -> bytes:
    """The bytes of a request's body, decompressed, within the limits; after that the request has a place."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in CODINGS:
        raise Rejection(415, f"Content-Encoding {coding[:80]!r}; accepted are {', '.join(CODINGS)}")
    declared = whole_number(request.headers.get("content-length", "0"))
    if declared is None:
        raise Rejection(413, "Content-Length is not a readable number of bytes", close=True)
    claim, limit = request.state.claim, admission.most_bytes
    if declared > LINGER * limit or "expect" in request.headers:
        admission.admit(claim, body=declared)
    chunks: list[bytes] = []
    size, settings = 0, admission.settings
    now = asyncio.get_running_loop().time
    end = now() + settings.read_timeout_s
    try:
        async with asyncio.timeout_at(min(end, now() + settings.read_stall_s)) as timer:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    admission.admit(claim, Room(size=len(chunk)))
                    chunks.append(chunk)
                else:
                    chunks.clear()
                    if size > LINGER * limit:
                        break
                timer.reschedule(min(end, now() + settings.read_stall_s))
    except TimeoutError as error:
        reason = f"the body was incomplete after {settings.read_timeout_s:g} s"
        if now() < end:
            reason = f"the body paused for {settings.read_stall_s:g} s"
        raise Rejection(408, reason, close=True) from error
    except ClientDisconnect as error:
        raise Rejection(499, "the client left") from error
    admission.admit(claim, body=size)
    content = b"".join(chunks)
    if coding != "identity":
        content = await asyncio.to_thread(_decompressed, content, coding, limit + 1)
        admission.admit(claim, Room(size=len(content)), body=len(content))
    admission.admit(claim, Room(places=1))
    return content


def _decompressed(body: bytes, coding: str, most: int) -> bytes:
    """At most so many bytes of a body; 422 if it is not one whole stream of its coding."""
    stream = zlib.decompressobj(CODINGS[coding])
    try:
        content = stream.decompress(body, most)
    except zlib.error as error:
        raise Rejection(422, f"the body is not in Content-Encoding {coding}: {error}") from error
    if len(content) < most and (not stream.eof or stream.unused_data):
        raise Rejection(422, f"the body is not one whole stream of Content-Encoding {coding}")
    return content


async def _files(request: Request, body: bytes, max_files: int) -> list[Upload]:
    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    boundary = parse_options_header(request.headers["content-type"])[1].get(b"boundary", b"")
    if not BOUNDARY.fullmatch(boundary):
        raise Rejection(422, "a broken form: its Content-Type needs a boundary of 1 to 70 usual characters")
    # The parser gets the boundary alone: with a charset it would decode names by any of Python's codecs.
    headers = Headers(raw=[(b"content-type", b'multipart/form-data; boundary="%s"' % boundary)])
    parser = MultiPartParser(headers, whole(), max_files=max_files, max_fields=max_files)
    parser.spool_max_size = len(body) + 1  # it is in memory already, so no temporary file
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Rejection(422, f"a broken form, or one of more than {max_files} files: {error}") from error
    files = [file for _, file in form.multi_items() if not isinstance(file, str)]
    uploads = [Upload(file.filename or "a file", await file.read()) for file in files]
    await form.close()
    if not uploads:
        raise Rejection(422, f"no file in the form; {HOW}")
    return uploads


def whole_number(text: str) -> int | None:
    """A number of at most `MAX_DIGITS` decimal digits; None for any other text."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return int(text) if is_number else None


def deadline_seconds(request: Request) -> float | None:
    """The seconds in X-Deadline-Ms; None without it."""
    text = request.headers.get("x-deadline-ms")
    if text is None:
        return None
    milliseconds = whole_number(text)
    if not milliseconds:
        form = f"a whole number of milliseconds, at least 1 and of at most {MAX_DIGITS} digits"
        raise Rejection(422, f"X-Deadline-Ms is {form}, not {text[:40]!r}")
    return milliseconds / 1000
