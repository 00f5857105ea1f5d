from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFilter
from scipy.ndimage import gaussian_filter

from vitascope.data.looks import look_at


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
    assert (looks["height"].tolist(), looks["width"].tolist()) == ([96, 96, 5], [128, 128, 7])
    assert looks["format"].tolist() == ["PNG", "JPEG", ""]
    assert looks["file_bytes"].tolist() == [(tmp_path / "a.png").stat().st_size, len(encoded(scene(1))), 0]
    assert looks["misnamed"].tolist() == [""] * 3


def test_pages_and_frames_are_counted_and_the_first_is_looked_at(tmp_path: Path) -> None:
    pages = [scene(seed).copy() for seed in range(3)]
    names = ("a.tif", "b.gif", "c.webp", "d.png")
    for name in names:
        pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:])
    scene(0).save(tmp_path / "one.tif")
    whole = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "cut.tif").write_bytes(whole[: -len(whole) // 4])  # in the last page
    looks = look_at([*(tmp_path / name for name in names), tmp_path / "one.tif", tmp_path / "cut.tif"])
    assert looks["reason"].tolist() == [""] * 6
    assert looks["pages"].tolist()[:5] == [3, 3, 3, 3, 1]
    assert looks["pages"][5] >= 1
    differences = looks["thumbnail"].astype(float) - looks["thumbnail"][4]
    assert (np.abs(differences).mean(axis=(1, 2)) < 8).all()  # of GIF's palette, and of WebP


def test_a_suffix_of_another_format_is_misnamed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jpg", "b.PNG", "c")]
    for path in paths:
        scene(0).save(path, "PNG")
    assert look_at(paths)["misnamed"].tolist() == [".jpg", "", ""]


def test_exif_turns_a_picture_and_tells_camera_and_day() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make], exif[ExifTags.Base.Model] = 6, "Maker", "One"
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = "2024:05:06 07:08:09"
    looks = look_at([encoded(scene(0), exif=exif), encoded(scene(0))])
    assert (looks["height"][0], looks["width"][0]) == (128, 96)
    assert (looks["camera"][0], looks["day"][0]) == ("Maker One", "2024-05-06")
    assert (looks["camera"][1], looks["day"][1]) == ("", "")


def test_an_unreadable_picture_has_a_reason_and_no_numbers(tmp_path: Path) -> None:
    content = encoded(scene(0))
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    looks = look_at([content, tmp_path / "cut.jpg", tmp_path / "none.jpg"])
    assert (looks["width"] > 0).tolist() == [True, False, False]
    assert looks["reason"][0] == ""
    assert looks["reason"][1].startswith("cannot be read: ")
    assert looks["reason"][2] == "no such file"
    assert not looks["brightness"][1:].any()


def test_light_and_colours_are_shares_of_white() -> None:
    pixels = np.zeros((10, 10, 3), np.uint8)
    pixels[1:-1, 1:-1] = 255, 0, 0
    looks = look_at([pixels, np.full((4, 4), 255, np.uint8)])
    assert looks["border"][0].tolist() == [0, 0, 0]
    assert looks["colour"][0] == pytest.approx([0.64, 0, 0])
    assert looks["saturation"] == pytest.approx([0.64, 0])
    assert looks["brightness"] == pytest.approx([0.64 * 76 / 255, 1])
    assert (looks["darkest"][0], looks["brightest"][0], looks["darkest"][1]) == pytest.approx(
        (0, 76 / 255, 1)
    )


@pytest.mark.parametrize("side", [32, 256, 1500])
def test_blur_lowers_sharpness_at_every_size_and_contrast_does_not(side: int) -> None:
    image = scene(0, 256, 256).resize((side, side), Image.Resampling.LANCZOS)
    blurred = image.filter(ImageFilter.GaussianBlur(0.03 * side))
    faint = image.point(lambda value: 100 + value / 4)
    sharp, blurry, low = look_at([encoded(some) for some in (image, blurred, faint)])["sharpness"]
    assert blurry < 0.75 * sharp
    assert low == pytest.approx(sharp, rel=0.1)


def test_a_large_jpeg_measures_like_its_small_copy() -> None:
    large = scene(0, 110, 160).resize((1600, 1100), Image.Resampling.BICUBIC)
    small = large.resize((256, 176), Image.Resampling.BILINEAR)
    looks = look_at([encoded(large, subsampling=0), encoded(small, subsampling=0)])
    for name in ("brightness", "darkest", "brightest", "saturation", "sharpness"):
        first, second = looks[name]
        assert first == pytest.approx(second, rel=0.1), name
    assert looks["width"].tolist() == [1600, 256]
