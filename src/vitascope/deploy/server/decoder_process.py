"""The program of a decoding process: encoded pictures on standard input, their pixels on standard output.

Decoders of picture formats are the part of a server that strangers reach, and their time and memory cannot be
bounded from inside. So they run here, in a process that `decoding` can kill and that limits its own memory.
It imports no torch: it starts in a fraction of a second, in 40 MB.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import pickle
import re
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from vitascope.data.decoding import ImageError, naming_faults
from vitascope.data.preprocess import Pixels

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""The formats that are decoded: those of cameras, phones, browsers and scanners. Pillow reads more, some in
Python (PPM as text), some by starting other programs (EPS)."""
MAX_SCANS = 100
"""Scans of a JPEG. Encoders write about ten; each goes over all of the picture, even one without content."""
MAX_SEGMENTS = 1000
"""Segments of a JPEG, and chunks of a PNG beyond one per KiB: Pillow handles each of them in Python."""
OWN_MEMORY = 64 * 2**20
"""Bytes that the process has before it decodes anything, and some to spare."""

LENGTH = struct.Struct("<Q")
"""Before every message to this process: its bytes."""
HEADER = struct.Struct("<BIIIQ")
"""Before every message from it: its kind, three numbers and its bytes."""
READY, PIXELS, REFUSED, FAULT = range(4)
"""Kinds: ready to decode; pixels, the numbers are their shape; a refusal, the first number is its status and
the bytes say why; an error of ours, the bytes are its traceback."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A JPEG's marker, also after or inside compressed data."""


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a decoding process has to know; its first message, pickled."""

    reader: Callable[[bytes], Pixels]
    """From an encoded picture to pixels; raises `ImageError`."""
    max_megapixels: float
    max_memory_mb: float
    """Megabytes that decoding one picture may take, where the platform can limit it."""
    max_seconds: float
    """Seconds after which the process ends itself, in case nobody is left to kill it."""


class Refused(Exception):  # noqa: N818 - an answer
    """A picture that is not decoded: a status of HTTP, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def decode(content: bytes, orders: Orders) -> Pixels:
    """An encoded picture as pixels, uint8 (C, H, W).

    Raises:
        Refused: 413, too many pixels or too much memory; 422, not a picture of `FORMATS`, a broken one, or
            one in more parts than encoders write.
    """
    limit = orders.max_megapixels
    try:
        check_parts(content)
        with naming_faults(content), Image.open(io.BytesIO(content), formats=_formats()) as image:
            pixels = image.width * image.height
            if any(tile[0] == "bmp_rle" for tile in image.tile):
                raise Refused(422, "BMP with run lengths is not read; send it as PNG")
        if pixels > limit * 1e6:
            raise Refused(413, f"{pixels / 1e6:.1f} million pixels, over the limit of {limit:g}")
        return orders.reader(content)
    except ImageError as error:
        reason = str(error).removeprefix("<bytes>: ")
        if isinstance(error.__cause__, UnidentifiedImageError):
            raise Refused(
                422, f"not a picture of a format that is read here: {', '.join(_formats())}"
            ) from error
        if isinstance(error.__cause__, Image.DecompressionBombError):
            raise Refused(413, f"{reason}; the limit is {limit:g} million pixels") from error
        raise Refused(422, reason) from error
    except MemoryError as error:
        most = f"{orders.max_memory_mb:g} MB"
        raise Refused(413, f"decoding takes more than {most} of memory; send it smaller") from error


def check_parts(content: bytes) -> None:
    """Refuse a JPEG of very many scans or segments, and a PNG of very many chunks.

    Raises:
        Refused: 422.
    """
    if content.startswith(b"\xff\xd8"):
        _check_jpeg(content)
    elif content.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_png(content)


def _check_jpeg(content: bytes) -> None:
    scans = segments = 0
    at = 2
    while (found := _MARKER.search(content, at)) and content[found.end() - 1] != 0xD9:  # the picture's end
        marker, at = content[found.end() - 1], found.end()
        segments += 1
        scans += marker == 0xDA
        if scans > MAX_SCANS or segments > MAX_SEGMENTS:
            raise Refused(
                422, f"a JPEG of more than {MAX_SCANS} scans or {MAX_SEGMENTS} segments is not read"
            )
        if marker not in (0x01, 0xD8):  # which have no length
            at += int.from_bytes(content[at : at + 2], "big")


def _check_png(content: bytes) -> None:
    most = MAX_SEGMENTS + len(content) // 1024
    chunks, at = 0, 8
    while at < len(content):
        at += 12 + int.from_bytes(content[at : at + 4], "big")
        chunks += 1
        if chunks > most:
            raise Refused(422, f"a PNG of {len(content)} bytes in more than {most} chunks is not read")


@functools.cache
def _formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow has."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def limit_memory(megabytes: float) -> None:
    """Let allocations fail beyond so many megabytes, where the platform can: Linux does, Windows does not."""
    try:
        import resource
    except ImportError:
        return
    most = OWN_MEMORY + int(megabytes * 1e6)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS may not know this limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main() -> None:
    """Decode what comes until standard input ends."""
    for name in ("SIGINT", "SIGTERM"):  # also sent to all processes of a service: the server decides here
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    warnings.simplefilter("ignore")  # Pillow's, about the pictures of strangers
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    first = _message(requests)
    if first is None:
        return
    orders: Orders = pickle.loads(first)  # noqa: S301 - of the server, which started this process
    _formats()
    limit_memory(orders.max_memory_mb)
    with contextlib.suppress(BrokenPipeError):  # the server has gone
        _send(answers, READY)
        while (content := _message(requests)) is not None:
            with _ending_after(orders.max_seconds):
                _answer(content, orders, answers)


def _answer(content: bytes, orders: Orders, answers: BinaryIO) -> None:
    try:
        pixels = decode(content, orders)
    except Refused as refused:
        _send(answers, REFUSED, (refused.status, 0, 0), str(refused).encode())
    except Exception:  # noqa: BLE001 - told to the server, which raises it
        _send(answers, FAULT, content=traceback.format_exc().encode())
    else:
        channels, height, width = pixels.shape
        _send(answers, PIXELS, (channels, height, width), pixels.data)


def _message(requests: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = requests.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    content = requests.read(length)
    return content if len(content) == length else None


def _send(
    answers: BinaryIO, kind: int, numbers: tuple[int, int, int] = (0, 0, 0), content: bytes | memoryview = b""
) -> None:
    answers.write(HEADER.pack(kind, *numbers, memoryview(content).nbytes))
    answers.write(content)
    answers.flush()


@contextlib.contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    """End this process where what is inside takes longer, also in the middle of a library's C."""
    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
