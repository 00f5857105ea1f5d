"""One reading of every picture."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import ExifTags, Image, ImageFilter
from scipy.ndimage import gaussian_filter

from vitascope.auditing.looks import Looks, look_at, orientations, perceptual_hashes


@functools.cache
def scene(seed: int, height: int = 96, width: int = 128) -> Image.Image:
    """A picture with shapes of all sizes, as photographs have."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for scale in (1, 2, 4, 8, 16):
        noise = gaussian_filter(random.normal(size=pixels.shape), (scale, scale, 0))
        pixels += scale**0.5 * noise / noise.std()
    return Image.fromarray((128 + 28 * pixels).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **{"quality": 90, **options})
    return file.getvalue()


def test_size_format_and_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    scene(0).save(tmp_path / "a.png")
    looks = look_at([tmp_path / "a.png", encoded(scene(1)), np.zeros((5, 7), np.uint8)])
    assert (looks.height.tolist(), looks.width.tolist()) == ([96, 96, 5], [128, 128, 7])
    assert looks.format.tolist() == ["PNG", "JPEG", ""]
    assert looks.file_bytes.tolist() == [(tmp_path / "a.png").stat().st_size, len(encoded(scene(1))), 0]
    assert not looks.misnamed.any()


def test_a_suffix_of_another_format_is_misnamed(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.PNG", "c"):
        scene(0).save(tmp_path / name, "PNG")
    assert look_at([tmp_path / name for name in ("a.jpg", "b.PNG", "c")]).misnamed.tolist() == [1, 0, 0]


def test_exif_turns_a_picture_and_tells_camera_and_day() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make], exif[ExifTags.Base.Model] = 6, "Maker", "One"
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = "2024:05:06 07:08:09"
    looks = look_at([encoded(scene(0), exif=exif), encoded(scene(0))])
    assert (looks.height[0], looks.width[0]) == (128, 96)
    assert looks.turned.tolist() == [True, False]
    assert (looks.camera[0], looks.day[0]) == ("Maker One", "2024-05-06")
    assert (looks.camera[1], looks.day[1]) == ("", "")


def test_an_unreadable_picture_has_a_reason_and_no_numbers(tmp_path: Path) -> None:
    content = encoded(scene(0))
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    looks = look_at([content, tmp_path / "cut.jpg", tmp_path / "none.jpg"])
    assert looks.readable.tolist() == [True, False, False]
    assert "cut.jpg" in looks.reasons[1]
    assert "no such file" in looks.reasons[2]
    assert np.isnan(looks.brightness[1:]).all()
    assert np.isnan(looks.colour[1:]).all()
    assert looks.width[1] == 0
    assert looks.format[1] == ""


def test_light_and_colours_are_shares_of_white() -> None:
    pixels = np.zeros((10, 10, 3), np.uint8)
    pixels[1:-1, 1:-1] = 255, 0, 0
    looks = look_at([pixels, np.full((4, 4), 255, np.uint8)])
    assert looks.border[0].tolist() == [0, 0, 0]
    assert looks.colour[0] == pytest.approx([0.64, 0, 0])
    assert looks.saturation == pytest.approx([0.64, 0])
    assert looks.brightness == pytest.approx([0.64 * 76 / 255, 1])
    assert (looks.darkest[0], looks.brightest[0], looks.darkest[1]) == pytest.approx((0, 76 / 255, 1))
    assert looks.detail[1] == 0


@pytest.mark.parametrize("side", [32, 256, 1500])
def test_blur_lowers_sharpness_at_every_size_and_contrast_does_not(side: int) -> None:
    image = scene(0, 256, 256).resize((side, side), Image.Resampling.LANCZOS)
    blurred = image.filter(ImageFilter.GaussianBlur(0.03 * side))
    faint = image.point(lambda value: 100 + value / 4)
    sharp, blurry, low = look_at([encoded(some) for some in (image, blurred, faint)]).sharpness
    assert blurry < 0.75 * sharp
    assert low == pytest.approx(sharp, rel=0.1)


def test_a_large_jpeg_measures_like_its_small_copy() -> None:
    large = scene(0, 110, 160).resize((1600, 1100), Image.Resampling.BICUBIC)
    small = large.resize((256, 176), Image.Resampling.BILINEAR)
    looks = look_at([encoded(large, subsampling=0), encoded(small, subsampling=0)])
    for name in ("brightness", "darkest", "brightest", "detail", "saturation", "sharpness"):
        first, second = getattr(looks, name)
        assert first == pytest.approx(second, rel=0.1), name
    assert looks.width.tolist() == [1600, 256]


def test_hashes_follow_the_eight_orientations() -> None:
    thumbnails = look_at([scene(seed) for seed in range(4)]).thumbnails
    turned = orientations(thumbnails)  # (4, 8, 32, 32)
    hashes = perceptual_hashes(thumbnails)
    for number in range(8):
        differing = np.bitwise_xor(hashes[:, number], perceptual_hashes(turned[:, number])[:, 0])
        assert all(bin(bits).count("1") <= 2 for bits in differing.tolist())


def test_the_hash_is_that_of_imagehash() -> None:
    """`imagehash.phash` 4.3.2 of two pictures."""
    rows, columns = np.indices((32, 32))
    first = (rows * rows * 7 + columns * rows * 13 + columns * 5) % 251
    squares = np.stack([first, (rows * columns**2 + rows * 31) // 5 % 256])
    own = [f"{hashed:016x}" for hashed in perceptual_hashes(squares.astype(np.uint8))[:, 0].tolist()]
    assert own == ["a6b19f26329b2c36", "86031f3c79727173"]


def test_looks_are_taken_and_joined() -> None:
    sources: list[bytes | npt.NDArray[np.uint8]] = [encoded(scene(0)), b"none", encoded(scene(1))]
    looks = look_at(sources)
    assert look_at([]).joined(looks).reasons == looks.reasons
    both: Looks = looks.take([2, 1]).joined(looks)
    assert list(both.reasons) == [1, 3]
    assert both.hashes[0, 0] == looks.hashes[2, 0]
    assert both.thumbnails.shape == (5, 32, 32)
    assert both.format.tolist() == ["JPEG", "", "JPEG", "", "JPEG"]
