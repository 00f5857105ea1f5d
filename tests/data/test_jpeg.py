"""JPEG files whose compressed data end early, and complete ones of every kind."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.data import noise
from tests.model import law
from vitascope.data.decoding import ImageError, read_image
from vitascope.data.jpeg import segments
from vitascope.data.preprocess import Preprocess

END = b"\xff\xd9"
COMMENT = b"\xff\xfe\x00\x03!" + END
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full colours": {"subsampling": 0, "quality": 95},
    "restarts": {"restart_marker_blocks": 3},
    "optimized": {"optimize": True},
    "progressive": {"progressive": True},
}


def jpeg(picture: np.ndarray | Image.Image, **options: Any) -> bytes:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    file = io.BytesIO()
    image.save(file, options.pop("format", "JPEG"), **options)
    return file.getvalue()


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
    content = jpeg(Image.fromarray(pixels.astype(np.uint8), mode=mode), **KINDS[kind]) + after
    expected = Image.open(io.BytesIO(content)).convert("L" if mode == "L" else "RGB")
    assert np.array_equal(read_image(content), expected)


@pytest.mark.parametrize("progressive", [False, True])
def test_picture_of_few_bits_per_block_is_complete(progressive: bool) -> None:
    content = jpeg(np.full((1024, 1024), 128, dtype=np.uint8), optimize=True, progressive=progressive)
    assert len(content) < 1024**2 / 64
    assert np.asarray(read_image(content)).min() == 128


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"progressive"}))
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("end", [END, COMMENT])
def test_picture_whose_data_end_early_is_truncated(
    tmp_path: Path, kind: str, share: float, end: bytes
) -> None:
    content = jpeg(noise(320, 320), **KINDS[kind])
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
    content = of_size(jpeg(noise(64, 64), **KINDS[kind]), 2000)
    with pytest.raises(ImageError, match="truncated"):
        read_image(content[: body(content) + 1000] + END)


def test_first_of_several_pictures_is_read_upright(tmp_path: Path) -> None:
    first = Image.fromarray(noise(40, 24))
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "several.jpg"
    path.write_bytes(
        jpeg(first, format="MPO", save_all=True, append_images=[Image.fromarray(noise(8, 8))], exif=exif)
    )
    assert Image.open(path).format == "MPO"
    assert read_image(path).size == (40, 24)
