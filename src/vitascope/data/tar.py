"""Where the files in a tar lie, from its headers alone: one seek a member, nothing extracted, links refused.

Read are the formats that are written today: POSIX ustar and pax (IEEE 1003.1-2001) and GNU's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vitascope.errors import UserError

BLOCK = 512
MAX_EXTENDED_HEADER = 2**16
"""Bytes of a pax or long-name header; a name or a time needs some hundred."""
_FILES = (b"0", b"\0", b"7")
_FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"5", b"L", b"K", b"x", b"g"
_EXTENDED = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL)


class Entry(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int
    """Of its first byte in the tar."""
    size: int
    """Bytes."""


def entries(file: BinaryIO, path: Path) -> Iterator[Entry]:
    """The files in an open tar, in their order; folders are passed over.

    After each, the file stands at the entry's first byte; the caller may read on and need not seek back.

    Raises:
        UserError: no tar, a damaged or truncated one, or one with a link or a device in it.
    """
    end = os.fstat(file.fileno()).st_size
    position = 0
    said: dict[str, str] = {}  # what extended headers say of the next file
    while True:
        file.seek(position)
        header = file.read(BLOCK)
        if len(header) < BLOCK:
            raise _truncated(path, end)
        if not header.strip(b"\0"):
            return
        kind, size = header[156:157], _checked_size(header, path, position)
        size = int(said.get("size", size)) if kind in _FILES else size
        offset = position + BLOCK
        if offset + size > end:
            raise _truncated(path, end)
        position = offset + -(-size // BLOCK) * BLOCK
        if kind in _EXTENDED:
            said |= _extended(file, path, kind, size)
            continue
        name = said.get("path") or _name(header)
        said = {}
        if kind in _FILES:
            yield Entry(name.removeprefix("./"), offset, size)
        elif kind != _FOLDER:
            raise UserError(f"{path}: {name!r} is a link or a device; pack the files themselves")


def _truncated(path: Path, end: int) -> UserError:
    return UserError(f"{path}: truncated, it breaks off at byte {end:,}; copy it again")


def _checked_size(header: bytes, path: Path, position: int) -> int:
    """The size field, in octal or GNU's base 256, of a header whose checksum is right."""
    field = header[124:136]
    try:
        expected = _octal(header[148:156])
        size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)
    except ValueError:
        expected, size = -1, 0
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != expected or size < 0:
        what = "not a tar; a compressed one must be unpacked" if position == 0 else "damaged"
        raise UserError(f"{path}: {what} (no valid header at byte {position:,})")
    return size


def _octal(field: bytes) -> int:
    return int(field.strip(b" \0") or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _name(header: bytes) -> str:
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""  # GNU keeps times there
    return f"{prefix}/{_text(header[:100])}" if prefix else _text(header[:100])


def _extended(file: BinaryIO, path: Path, kind: bytes, size: int) -> dict[str, str]:
    """Name and size of the next file, as far as this header says them."""
    if size > MAX_EXTENDED_HEADER:
        raise UserError(f"{path}: damaged (an extended header of {size:,} bytes)")
    if kind in (_LONG_LINK, _PAX_GLOBAL):
        return {}
    content = file.read(size)
    if kind == _LONG_NAME:
        return {"path": _text(content)}
    said = {}
    while content.strip(b"\0"):  # records: "<length> <key>=<value>\n", the length that of all of it
        digits = content.partition(b" ")[0][:6]
        length = int(digits) if digits.isdigit() else 0
        record = content[:length] if length <= len(content) else b""
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        if not key or record[-1:] != b"\n" or (key == b"size" and not (value.isdigit() and len(value) < 20)):
            raise UserError(f"{path}: damaged (an extended header that cannot be read)")
        said[key] = value.decode("utf-8", "replace")
        content = content[len(record) :]
    return {key.decode(): said[key] for key in (b"path", b"size") if key in said}
