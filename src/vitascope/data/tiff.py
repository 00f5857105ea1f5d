"""The number of channels of a TIFF, from its first directory."""

from __future__ import annotations

import io
import os
from typing import IO, Literal

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
