"""TIFFs with more channels than a picture has."""

import logging
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import noise
from vitascope.data.decoding import ImageError, header_size, read_image
from vitascope.data.tiff import check_channels

GREY, RGB, CMYK = 1, 2, 5
"""Photometric interpretations."""


def tiff(channels: int, photometric: int, order: str = "<", side: int = 4) -> bytes:
    """An uncompressed TIFF of 8-bit channels, of which those beyond the colours have no meaning."""
    extra = channels - {GREY: 1, RGB: 3, CMYK: 4}[photometric]
    fields = {256: [side], 257: [side], 258: [8] * channels, 259: [1], 262: [photometric], 277: [channels]}
    fields |= {278: [side]} | ({338: [0] * extra} if extra > 0 else {})
    start = 8 + 2 + 12 * (len(fields) + 2) + 4  # of the values that do not fit into their field
    longer = b"".join(struct.pack(f"{order}{len(v)}H", *v) for v in fields.values() if len(v) > 2)
    size = channels * side * side
    entries = []
    for tag, values in fields.items():
        packed = struct.pack(f"{order}{len(values)}H", *values)
        if len(values) > 2:
            packed, start = struct.pack(f"{order}I", start), start + len(packed)
        entries.append((tag, struct.pack(f"{order}HHI", tag, 3, len(values)) + packed.ljust(4, b"\0")))
    entries += [
        (tag, struct.pack(f"{order}HHII", tag, 4, 1, value)) for tag, value in ((273, start), (279, size))
    ]
    directory = struct.pack(f"{order}H", len(entries)) + b"".join(entry for _, entry in sorted(entries))
    mark = {"<": b"II", ">": b"MM"}[order]
    return mark + struct.pack(f"{order}HI", 42, 8) + directory + bytes(4) + longer + bytes(range(size))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("channels", "photometric"), [(3, GREY), (4, GREY), (5, GREY), (8, GREY), (5, RGB), (8, RGB)]
)
def test_more_channels_are_rejected_in_one_line_that_names_the_file(
    tmp_path: Path, channels: int, photometric: int, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bands.TIF"
    path.write_bytes(tiff(channels, photometric, order))
    message = (
        rf"bands\.TIF: cannot be read: has {channels} channels; vitascope reads grey and colour images, "
        "of at most three channels$"
    )
    for read in (read_image, header_size):
        with caplog.at_level(logging.DEBUG), pytest.raises(ImageError, match=message):
            read(path)
        assert not caplog.records  # Pillow's
        with pytest.raises(ImageError, match=f"has {channels} channels"):
            read(path.read_bytes())


def test_pictures_with_transparency_are_read(tmp_path: Path) -> None:
    for mode in ("LA", "RGBA"):
        path = tmp_path / f"{mode}.tif"
        Image.fromarray(noise(4, 4, 2 if mode == "LA" else 4), mode=mode).save(path)
        assert read_image(path).size == (4, 4)


def test_every_damaged_file_is_left_to_pillow() -> None:
    whole = tiff(5, GREY)
    for length in range(0, len(whole) - 80):
        check_channels(whole[:length].ljust(8, b"\xff")[: 8 + length // 12])
    generator = np.random.default_rng(0)
    for _ in range(200):
        check_channels(b"II*\0" + generator.bytes(60))
