"""JPEG files: their segments, and a form in which a decoder notices that compressed data are missing."""

from __future__ import annotations

import re
from collections.abc import Iterator

START_OF_SCAN, END = 0xDA, 0xD9
SEQUENTIAL, PROGRESSIVE = (0xC0, 0xC1), 0xC2
"""Markers of frames with Huffman codes; arithmetic codes have no least size."""
PADDING = bytes(16)
"""More than a decoder reads ahead of the picture's last bits, and too little for a large part of it."""
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # also after or inside compressed data


def segments(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, begin and end of each segment, as libjpeg finds them, up to the end marker."""
    at = 2
    while (found := _MARKER.search(content, at)) and (marker := content[found.end() - 1]) != END:
        at = found.end()
        if marker not in (0x01, 0xD8):  # which have no length
            at += int.from_bytes(content[at : at + 2], "big")
        yield marker, found.start(), at


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
