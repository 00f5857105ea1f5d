"""The program of a decoder process: pictures on standard input, pixels of the model's size back.

Strangers reach the decoders of picture formats, and neither their time nor their memory can be bounded from
inside. So they run in a process that limits its own memory and that `decoder_pool` can kill. It imports no
torch, so it starts in a fraction of a second and takes 40 MB.
"""

import contextlib
import dataclasses
import functools
import io
import os
import pickle
import resource
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import BinaryIO, TypeAlias

from PIL import Image, UnidentifiedImageError

from vitascope.models.decoding import ImageError, ImageSource, image_errors, source_name
from vitascope.models.file_checks import START_OF_SCAN, check_channels, segments
from vitascope.models.preprocess import Pixels

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""The accepted formats: of cameras, phones, browsers and scanners. Pillow reads more, some of them in Python
(PPM as text) or by starting other programs (EPS)."""
MAX_SCANS = 100
"""Scans of a JPEG. Encoders write about ten; each scan passes over the whole picture, even if it is empty."""
MAX_SEGMENTS = 1000
"""Segments of a JPEG, and chunks of a PNG beyond one per KiB: Pillow handles each of them in Python."""
OWN_MEMORY = 64 * 2**20  # bytes that the process takes before it decodes, with some to spare

Content: TypeAlias = "bytes | Pixels"
"""An encoded picture, or pixels, uint8 (H, W, 1 or 3)."""
HEADER = struct.Struct("<HIIIQ")
"""Before each message from the process: status, shape of the pixels, bytes. Pickles would let a broken
decoder run code in the server; messages to the process are pickles."""
DONE, FAULT = 200, 500
"""HTTP statuses: ready to decode, or pixels; a traceback. Others are of rejections, with their reason."""


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """The first message to a decoder process."""

    reader: Callable[[ImageSource], Pixels]  # raises `ImageError`
    max_megapixels: float
    max_memory_mb: float  # memory for decoding one picture, in MB, where the platform can limit it
    max_seconds: float  # the process ends itself after so long with one picture, in case the server has died


class DecodeError(Exception):
    """A picture that is not decoded: an HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def decode_picture(content: Content, options: DecodeOptions) -> Pixels:
    """Return a picture's pixels as the model takes them, uint8 (C, H, W).

    `DecodeError`: 413, over a limit; 422, broken, of another format, or in more parts than encoders write.
    """
    limit = options.max_megapixels
    source: ImageSource = content
    try:
        pixels = _num_pixels(content)
        if pixels > limit * 1e6:
            raise DecodeError(413, f"{pixels / 1e6:.1f} million pixels, over the limit of {limit:g}")
        if not isinstance(content, bytes):
            source = Image.fromarray(content[..., 0] if content.shape[2] == 1 else content)
        return options.reader(source)
    except ImageError as error:
        reason = str(error).removeprefix(f"{source_name(source)}: ")
        if isinstance(error.__cause__, UnidentifiedImageError):
            accepted = ", ".join(_formats())
            raise DecodeError(422, f"not a picture of an accepted format: {accepted}") from error
        if isinstance(error.__cause__, Image.DecompressionBombError):
            raise DecodeError(413, f"{reason}; the limit is {limit:g} million pixels") from error
        raise DecodeError(422, reason) from error
    except MemoryError as error:
        reason = f"decoding takes more than {options.max_memory_mb:g} MB of memory; send a smaller picture"
        raise DecodeError(413, reason) from error


def _num_pixels(content: Content) -> int:
    """Width times height, by the header of an encoded picture, which has an accepted format."""
    if not isinstance(content, bytes):
        return content.shape[0] * content.shape[1]
    _check_parts(content)
    with image_errors(content):
        check_channels(content)
    with image_errors(content), Image.open(io.BytesIO(content), formats=_formats()) as image:
        if any(tile[0] == "bmp_rle" for tile in image.tile):
            raise DecodeError(422, "run-length encoded BMP is not supported; send it as PNG")
        return image.width * image.height


def _check_parts(content: bytes) -> None:
    """Reject a JPEG with very many scans or segments, and a PNG with very many chunks."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        most = MAX_SEGMENTS + len(content) // 1024
        chunks, at = 0, 8
        while at < len(content):
            at += 12 + int.from_bytes(content[at : at + 4], "big")
            chunks += 1
            if chunks > most:
                raise DecodeError(422, f"a PNG of {len(content)} bytes may have {most} chunks at most")
    if not content.startswith(b"\xff\xd8"):
        return
    scans = 0
    for count, (marker, _, _) in enumerate(segments(content), 1):
        scans += marker == START_OF_SCAN
        if scans > MAX_SCANS or count > MAX_SEGMENTS:
            raise DecodeError(422, f"a JPEG may have {MAX_SCANS} scans and {MAX_SEGMENTS} segments at most")


@functools.cache
def _formats() -> tuple[str, ...]:
    """The members of `FORMATS` that this Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def limit_memory(megabytes: float) -> None:
    """Let allocations beyond this fail, where the platform can: Linux can, macOS may not know this limit."""
    most = OWN_MEMORY + int(megabytes * 1e6)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main() -> None:
    """Decode pictures until standard input ends."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for all processes; the server decides
        signal.signal(signum, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # Pillow's, about the pictures of strangers
    requests, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the results
    with contextlib.suppress(BrokenPipeError, EOFError, pickle.UnpicklingError):  # the server has ended
        options: DecodeOptions = pickle.load(requests)  # noqa: S301 - of the server, which started this process
        _formats()
        limit_memory(options.max_memory_mb)
        _send(results, DONE)
        while True:
            content = pickle.load(requests)  # noqa: S301 - as above
            signal.setitimer(signal.ITIMER_REAL, options.max_seconds)  # ends even C code
            _send(results, *_result(content, options))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _result(content: Content, options: DecodeOptions) -> tuple[int, tuple[int, ...], bytes | memoryview]:
    try:
        pixels = decode_picture(content, options)
    except DecodeError as error:
        return error.status, (0, 0, 0), str(error).encode()
    except Exception:  # noqa: BLE001 - the server raises it
        return FAULT, (0, 0, 0), traceback.format_exc().encode()
    return DONE, pixels.shape, pixels.data


def _send(
    results: BinaryIO, status: int, shape: tuple[int, ...] = (0, 0, 0), content: bytes | memoryview = b""
) -> None:
    results.write(HEADER.pack(status, *shape, memoryview(content).nbytes))
    results.write(content)
    results.flush()


if __name__ == "__main__":
    main()
