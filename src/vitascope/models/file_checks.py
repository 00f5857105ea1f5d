"""What Pillow does not report of a file: compressed data that a JPEG lacks, and the channels of a TIFF."""

import io
import os
import re
from collections.abc import Iterator
from typing import IO, Literal

START_OF_SCAN, END = 0xDA, 0xD9
SEQUENTIAL, PROGRESSIVE = (0xC0, 0xC1), 0xC2
"""Markers of frames with Huffman codes; arithmetic codes have no least size."""
PADDING = bytes(16)
"""More than a decoder reads ahead of the picture's last bits, and too little for a large part of it."""
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # also after or inside compressed data


def segments(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, begin and end of each segment, as libjpeg finds them, up to the end marker."""
    at = 2
    while (match := _MARKER.search(content, at)) and (marker := content[match.end() - 1]) != END:
        at = match.end()
        if marker not in (0x01, 0xD8):  # which have no length
            at += int.from_bytes(content[at : at + 2], "big")
        yield marker, match.start(), at


def without_end(content: bytes) -> bytes:
    """A JPEG that decodes to the same pixels, and that a decoder finds truncated if pixels are missing.

    libjpeg takes any marker for the end of a scan and fills the missing pixels with grey, which Pillow does
    not report. Here, some zeros stand in the place of the marker: the picture is complete before them, or a
    decoder asks for more than there is. With several scans the markers are needed, and only a first scan of
    less than one bit per block loses what follows it.
    """
    frame = b""
    for marker, begin, end in segments(content):
        if marker in (*SEQUENTIAL, PROGRESSIVE):
            frame = content[begin:end]
        if marker == START_OF_SCAN:
            break
    else:
        return content
    last = _MARKER.search(content, end)
    if len(frame) < 13 or last is None:
        return content
    if frame[1] in SEQUENTIAL and content[begin + 4] == frame[9]:  # a scan of all components
        return content[: last.start()] + PADDING
    missing = 8 * (last.start() - end) < _fewest_blocks(frame)
    return content[: last.start()] if missing else content


def _fewest_blocks(frame: bytes) -> int:
    """The least number of 8x8 blocks in a scan of a frame: those of a component that is sampled least."""
    height, width = int.from_bytes(frame[5:7], "big"), int.from_bytes(frame[7:9], "big")
    samplings = [divmod(sampling, 16) for sampling in frame[11::3]]
    across, down = (8 * max(1, *counts) for counts in zip((1, 1), *samplings, strict=True))
    return -(-width // across) * -(-height // down)


_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
_CHANNELS, _PHOTOMETRIC = 277, 262  # numbers of fields, TIFF 6.0
_GREYS, _CMYK = (0, 1), 5  # photometric interpretations


def check_channels(source: str | os.PathLike[str] | bytes) -> None:
    """Raise ValueError for a TIFF with more channels than grey or colours, and transparency.

    Pillow logs what it cannot read of these, and takes the first three channels of others. A path is opened
    only if it ends in `.tif` or `.tiff`.
    """
    if isinstance(source, bytes):
        channels = _surplus(io.BytesIO(source))
    elif os.fspath(source).lower().endswith((".tif", ".tiff")):
        with open(source, "rb") as file:
            channels = _surplus(file)
    else:
        return
    if channels:
        raise ValueError(
            f"has {channels} channels; vitascope reads grey and colour images, of at most three channels"
        )


def _surplus(file: IO[bytes]) -> int:
    """The number of channels if it is too large, else 0, as for a damaged file, whose fault Pillow names."""
    start = file.read(8)
    order = _ORDERS.get(start[:4])
    if order is None:
        return 0
    file.seek(int.from_bytes(start[4:], order))
    fields = file.read(12 * int.from_bytes(file.read(2), order))  # tag, type, count, value: 2, 2, 4, 4 bytes
    values = {
        int.from_bytes(fields[at : at + 2], order): int.from_bytes(fields[at + 8 : at + 10], order)
        for at in range(0, len(fields), 12)
    }
    channels, kind = values.get(_CHANNELS, 1), values.get(_PHOTOMETRIC)
    if kind == _CMYK:  # more are spot colours
        return 0
    return channels if channels > (2 if kind in _GREYS else 4) else 0
