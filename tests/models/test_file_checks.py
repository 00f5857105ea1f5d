"""JPEG files whose compressed data end early, and complete ones of every kind."""

import io
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.data import encoded, exif_of, noise
from tests.models import law
from vitascope.models.decoding import ImageError, header_size, read_image
from vitascope.models.file_checks import check_channels, segments
from vitascope.models.preprocess import Preprocess

END = b"\xff\xd9"
COMMENT = b"\xff\xfe\x00\x03!" + END
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full colours": {"subsampling": 0, "quality": 95},
    "restarts": {"restart_marker_blocks": 3},
    "optimized": {"optimize": True},
    "progressive": {"progressive": True},
}


def body(content: bytes) -> int:
    """Where the compressed data of the first scan begin."""
    return next(end for marker, _, end in segments(content) if marker == 0xDA)


def of_size(content: bytes, side: int) -> bytes:
    """The same with another height and width in its header."""
    at = next(begin for marker, begin, _ in segments(content) if marker in (0xC0, 0xC2))
    return content[: at + 5] + 2 * side.to_bytes(2, "big") + content[at + 9 :]


@law
@given(
    width=st.integers(1, 70),
    height=st.integers(1, 70),
    mode=st.sampled_from(["L", "RGB", "CMYK"]),
    flat=st.booleans(),
    kind=st.sampled_from(list(KINDS)),
    after=st.sampled_from([b"", b"\x00", b"a video of a phone" + END]),
)
def test_complete_picture_of_any_kind_has_its_pixels(width, height, mode, flat, kind, after) -> None:
    shape = (height, width, len(mode)) if mode != "L" else (height, width)
    pixels = np.full(shape, 77, dtype=np.uint8) if flat else np.random.default_rng(0).integers(0, 256, shape)
    content = encoded(Image.fromarray(pixels.astype(np.uint8), mode=mode), "JPEG", **KINDS[kind]) + after
    expected = Image.open(io.BytesIO(content)).convert("L" if mode == "L" else "RGB")
    assert np.array_equal(read_image(content), expected)


@pytest.mark.parametrize("progressive", [False, True])
def test_picture_of_few_bits_per_block_is_complete(progressive: bool) -> None:
    content = encoded(
        np.full((1024, 1024), 128, dtype=np.uint8), "JPEG", optimize=True, progressive=progressive
    )
    assert len(content) < 1024**2 / 64
    assert np.asarray(read_image(content)).min() == 128


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"progressive"}))
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("end", [END, COMMENT])
def test_picture_whose_data_end_early_is_truncated(
    tmp_path: Path, kind: str, share: float, end: bytes
) -> None:
    content = encoded(noise(320, 320), "JPEG", **KINDS[kind])
    begin = body(content)
    path = tmp_path / "cut.jpg"
    path.write_bytes(content[: begin + int(share * (len(content) - begin))] + end)
    Image.open(path).load()  # Pillow alone fills it with grey
    with pytest.raises(ImageError, match=r"cut\.jpg: cannot be read: image file is truncated"):
        read_image(path)
    with pytest.raises(ImageError, match="truncated"):
        Preprocess(image_size=(8, 8)).cropped(path, lambda width, height: (0, 0, width, height))
    with Image.open(path) as opened, pytest.raises(ImageError, match="truncated"):
        read_image(opened)


@pytest.mark.parametrize("kind", list(KINDS))
def test_large_picture_of_one_kilobyte_is_truncated(kind: str) -> None:
    content = of_size(encoded(noise(64, 64), "JPEG", **KINDS[kind]), 2000)
    with pytest.raises(ImageError, match="truncated"):
        read_image(content[: body(content) + 1000] + END)


def test_first_of_several_pictures_is_read_upright(tmp_path: Path) -> None:
    path, second = tmp_path / "several.jpg", Image.fromarray(noise(8, 8))
    several = {"save_all": True, "append_images": [second], "exif": exif_of(6)}
    path.write_bytes(encoded(noise(40, 24), "MPO", **several))
    assert Image.open(path).format == "MPO"
    assert read_image(path).size == (40, 24)


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
