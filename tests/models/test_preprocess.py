"""The one preprocessing: expected pixels of every kind of file, geometry, errors."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data import Stored, bomb, encoded, exif_of, noise, write_picture
from tests.models import law
from vitascope.errors import UserError
from vitascope.models.decoding import ImageError, greatest_integer, header_size, read_image
from vitascope.models.preprocess import Preprocess

# The inverse of each orientation: it turns the upright picture into the pixels that a camera stores.
STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: upright[::-1, ::-1].swapaxes(0, 1),
    8: lambda upright: np.rot90(upright, -1),
}


def identity(height: int, width: int, **options: object) -> Preprocess:
    """A preprocessing that keeps a picture of this size unchanged."""
    if options.get("channels") == 1:
        options |= {"mean": (0.5,), "std": (0.5,)}
    return Preprocess(image_size=(height, width), **options)


def rgb(source: object) -> np.ndarray:
    """The pixels of `read_image` for a source, (H, W, 3)."""
    return np.asarray(read_image(source).convert("RGB"))


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


@pytest.mark.parametrize("orientation", STORED)
def test_every_exif_orientation_yields_the_same_upright_pixels(tmp_path: Path, orientation: int) -> None:
    upright = noise(6, 9)
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright)))
    path = saved(stored, tmp_path / "photo.png", exif=exif_of(orientation))
    fit = identity(6, 9)
    for pixels in (fit.pixels(path), fit.whole_pixels(path)):
        np.testing.assert_array_equal(pixels, upright.transpose(2, 0, 1))


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("form", ["path", "bytes"])
def test_heic_is_read_and_turned_upright_once(tmp_path: Path, orientation: int, form: str) -> None:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed (vitascope[heif])")
    upright = np.zeros((48, 64, 3), dtype=np.uint8)
    upright[:24, :, 0], upright[24:, :32, 1] = 250, 250
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright)))
    path = tmp_path / "photo.heic"
    pillow_heif.from_pillow(stored).save(path, exif=exif_of(orientation).tobytes(), quality=100)
    found = read_image(path if form == "path" else path.read_bytes())
    assert found.size == (64, 48)
    np.testing.assert_allclose(np.asarray(found)[8:-8:8, 4::8], upright[8:-8:8, 4::8], atol=40)
    assert header_size(path) in ((48, 64), (64, 48))
    cropped = identity(48, 64).cropped(path, lambda width, height: (0, 0, width, height))
    np.testing.assert_allclose(cropped[:, 8:-8:8, 4::8].transpose(1, 2, 0), upright[8:-8:8, 4::8], atol=40)
    assert "HEIF" not in Image.OPEN  # nothing has changed for the rest of the process


def test_heic_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed (vitascope[heif])")
    path = tmp_path / "photo.HEIC"
    pillow_heif.from_pillow(Image.new("RGB", (16, 16))).save(path)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ImageError, match=r'photo\.HEIC: .*pip install "vitascope\[heif\]"'):
        read_image(path)


def test_broken_heic_and_bombs_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed (vitascope[heif])")
    path = tmp_path / "photo.heic"
    pillow_heif.from_pillow(Image.new("RGB", (64, 64))).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match=r"photo\.heic: cannot be read"):
        read_image(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    path.write_bytes(whole)
    with pytest.raises(ImageError, match="cannot be read: 64 x 64 pixels, more than"):
        read_image(path)


def test_exif_orientation_can_be_ignored(tmp_path: Path) -> None:
    stored = noise(6, 6)
    path = saved(Image.fromarray(stored), tmp_path / "photo.png", exif=exif_of(3))
    fit = identity(6, 6, exif_orientation=False)
    for pixels in (fit.pixels(path), fit.whole_pixels(path)):
        np.testing.assert_array_equal(pixels, stored.transpose(2, 0, 1))


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    inks = np.array(
        [[[0, 0, 0, 0], [255, 0, 0, 0], [0, 255, 0, 0], [0, 0, 255, 0], [0, 0, 0, 255], [0, 0, 0, 128]]],
        dtype=np.uint8,
    )
    path = saved(Image.fromarray(inks, mode="CMYK"), tmp_path / "print.tif")
    lights = (255 - inks[..., :3].astype(float)) * (255 - inks[..., 3:]) / 255
    np.testing.assert_allclose(rgb(path), lights, atol=0.5)


def test_transparent_greys_colours_and_palette_entries_are_blended_with_white(tmp_path: Path) -> None:
    pixels = np.array([[[40, 255], [40, 0], [40, 51]]], dtype=np.uint8)  # grey, alpha
    path = saved(Image.fromarray(pixels, mode="LA"), tmp_path / "grey.png")
    over = 40 * 51 / 255 + 255 * (1 - 51 / 255)
    found = rgb(path)
    np.testing.assert_allclose(found[0, :, 0], [40, 255, over], atol=1)
    np.testing.assert_array_equal(found[0, 1], [255, 255, 255])
    pixels = np.array([[[1, 2, 3], [9, 9, 9]]], dtype=np.uint8)
    path = saved(Image.fromarray(pixels), tmp_path / "key.png", transparency=(1, 2, 3))
    np.testing.assert_array_equal(rgb(path), [[[255, 255, 255], [9, 9, 9]]])
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), mode="P")
    image.putpalette([10, 20, 30, 200, 100, 50])
    path = saved(image, tmp_path / "palette.png", transparency=0)
    np.testing.assert_array_equal(rgb(path), [[[255, 255, 255], [200, 100, 50]]])


def test_floating_point_grey_is_multiplied_by_255(tmp_path: Path) -> None:
    values = np.array([[0, 0.25, 0.5, 1]], dtype=np.float32)
    path = saved(Image.fromarray(values), tmp_path / "depth.tif")
    assert Image.open(path).mode == "F"
    np.testing.assert_array_equal(identity(1, 4, channels=1).pixels(path)[0], np.rint(values * 255))


def test_floating_point_grey_outside_zero_to_one_is_rejected(tmp_path: Path) -> None:
    for value in (-0.01, 1.01, 255, np.nan, np.inf):
        path = saved(Image.fromarray(np.array([[0, value]], dtype=np.float32)), tmp_path / "depth.tif")
        with pytest.raises(ImageError, match=r"depth\.tif.*\[0, 1\]"):
            read_image(path)


KINDS_OF_DEPTH = {
    "16-bit PNG": (np.uint16, "scan.png"),
    "16-bit TIFF": (np.uint16, "scan.tif"),
    "16-bit TIFF of the other byte order": (">u2", "scan.tif"),
    "signed 32-bit TIFF": (np.int32, "scan.tif"),
    "float TIFF": (np.float32, "scan.tif"),
}


def deep_picture(kind: str, values: np.ndarray, folder: Path) -> Path:
    """A file of values of more than 8 bits, (H, W)."""
    dtype, name = KINDS_OF_DEPTH[kind]
    image = Image.fromarray(values.astype(dtype))
    assert image.mode == {"float TIFF": "F", "signed 32-bit TIFF": "I"}.get(
        kind, "I;16B" if dtype == ">u2" else "I;16"
    )
    return saved(image, folder / name)


@pytest.mark.parametrize("kind", KINDS_OF_DEPTH)
def test_levels_spread_the_values_between_them_over_8_bits(tmp_path: Path, kind: str) -> None:
    values = np.array([[0, 99, 100, 101], [2000, 4094, 4095, 9000]])
    path = deep_picture(kind, values, tmp_path)
    fit = identity(2, 4, channels=1, levels=(100, 4095))
    wanted = np.rint(np.clip((values - 100) / 3995, 0, 1) * 255)
    assert wanted.tolist() == [[0, 0, 0, 0], [121, 255, 255, 255]]
    whole = (0, 0, 4, 2)
    for found in (
        fit.pixels(path),
        fit.whole_pixels(path),
        fit.framed(path).pixels,
        fit.cropped(path, lambda width, height: whole),
        fit.pixels(path.read_bytes()),
    ):
        np.testing.assert_array_equal(found, wanted[None])


def test_every_16_bit_value_without_levels_is_divided_by_257() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    found = np.asarray(read_image(Image.fromarray(values)))
    np.testing.assert_array_equal(found, (values.astype(int) + 128) // 257)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "1", "CMYK"])
def test_levels_do_not_change_pictures_of_8_bits(mode: str) -> None:
    picture = Image.fromarray(noise(6, 9)).convert(mode)
    with_levels = identity(6, 9, levels=(0, 40)).pixels(picture)
    np.testing.assert_array_equal(with_levels, identity(6, 9).pixels(picture))


def test_floats_with_levels_may_be_infinite_but_must_be_numbers(tmp_path: Path) -> None:
    fit = identity(1, 3, channels=1, levels=(-1000, 1000))
    values = np.array([[-np.inf, 0, np.inf]], dtype=np.float32)
    path = saved(Image.fromarray(values), tmp_path / "tomogram.tif")
    np.testing.assert_array_equal(fit.pixels(path), [[[0, 128, 255]]])
    saved(Image.fromarray(np.array([[0, np.nan, 1]], dtype=np.float32)), path)
    with pytest.raises(ImageError, match=r"tomogram\.tif: some of its pixels are not numbers"):
        fit.pixels(path)


def test_greatest_integer_is_that_of_deep_pictures_and_reads_only_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.array([[3, 70], [4000, 2]])
    for kind in KINDS_OF_DEPTH:
        path = deep_picture(kind, values, tmp_path)
        assert greatest_integer(path) == (None if kind == "float TIFF" else 4000)
    image = Image.fromarray(values.astype(np.uint16))
    assert greatest_integer(image) == 4000
    assert image.getpixel((0, 1)) == 4000  # the caller's stays open
    photo = write_picture(tmp_path / "photo.png")
    monkeypatch.delattr(Image.Image, "load")
    assert greatest_integer(photo) is None
    assert greatest_integer(noise(4, 4)) is None


def test_the_first_frame_of_an_animation_is_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "lime")]
    path = saved(frames[0], tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert Image.open(path).n_frames == 3
    assert (rgb(path) == [255, 0, 0]).all()


def test_grey_becomes_three_equal_channels_and_colour_luma() -> None:
    grey = noise(5, 5, 1)
    np.testing.assert_array_equal(identity(5, 5).pixels(Image.fromarray(grey)), np.stack([grey] * 3))
    colours = noise(9, 9)
    luma = colours @ np.array([0.299, 0.587, 0.114])  # ITU-R 601
    fit = identity(9, 9, channels=1)
    for (pixels,) in (fit.pixels(colours), fit.whole_pixels(colours)):
        np.testing.assert_allclose(pixels, luma, atol=0.51)


def test_every_kind_of_source_yields_the_same_pixels(tmp_path: Path) -> None:
    path = write_picture(tmp_path / "a.png", size=(11, 7))
    fit = Preprocess(image_size=(8, 8))
    expected = fit.pixels(path)
    for source in (str(path), path.read_bytes(), Image.open(path), np.asarray(Image.open(path))):
        np.testing.assert_array_equal(fit.pixels(source), expected)
    stored = Stored(path.read_bytes())
    np.testing.assert_array_equal(rgb(stored), rgb(path))
    assert header_size(stored) == header_size(path) == (11, 7)


@pytest.mark.parametrize("content", [b"text", OSError("the disk is gone"), EOFError("it ends too early")])
def test_an_unreadable_picture_outside_the_file_system_is_named(content: bytes | Exception) -> None:
    for read in (read_image, header_size):
        with pytest.raises(ImageError, match=r"^table:7: "):
            read(Stored(content))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_from_0_to_1_are_the_pixels_times_255(dtype: type) -> None:
    pixels = noise(5, 6)
    np.testing.assert_array_equal(read_image((pixels / 255).astype(dtype)), pixels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("layout", [(2, 0, 1), (0, 1, 2)])
def test_tensor_has_its_channels_first_or_last(dtype: torch.dtype, layout: tuple[int, ...]) -> None:
    pixels = noise(5, 6)
    tensor = torch.from_numpy(pixels).permute(*layout)
    tensor = tensor if dtype == torch.uint8 else (tensor / 255).to(dtype).requires_grad_()
    np.testing.assert_array_equal(read_image(tensor), pixels)
    np.testing.assert_array_equal(read_image(tensor.detach().numpy()), pixels)


UNCLEAR: list[tuple[object, str]] = [
    (torch.zeros(3, 8, 3), "give an array"),
    (torch.zeros(2, 3, 8, 8), "give several pictures as a list"),
    (torch.full((3, 8, 8), -2.0), r"in \[0, 1\], not \[-2, -2\]: .*undo a normalization, pixels \* std"),
    (np.full((8, 8, 3), 200.0), r"in \[0, 1\], not \[200, 200\]: divide pixels up to 255 by 255"),
    (np.full((8, 8, 3), np.nan), "not .nan, nan.: divide"),
    (torch.zeros(3, 8, 8, dtype=torch.int64), "a tensor must be uint8, from 0 to 255, or floats, from 0"),
    (torch.zeros(4, 8, 8), r"not float32 \(4, 8, 8\)"),
    *((np.zeros((4, 4, 3), dtype), f"not {np.dtype(dtype)}") for dtype in (np.int64, np.uint16, bool)),
]


def test_pixels_that_are_not_clear_are_rejected_with_the_way_to_convert_them() -> None:
    for pixels, complaint in UNCLEAR:
        with pytest.raises(ImageError, match=complaint):
            read_image(pixels)  # type: ignore[arg-type]


def test_reading_does_not_modify_the_given_image() -> None:
    image = Image.fromarray(np.dstack([noise(4, 4), noise(4, 4, 1)]), mode="RGBA")
    before = image.copy()
    Preprocess(image_size=(2, 2)).pixels(image)
    assert image.mode == "RGBA"
    np.testing.assert_array_equal(image, before)


@law
@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    crop_pct=st.floats(0.05, 1),
    resize=st.sampled_from(["crop", "squash"]),
)
def test_any_picture_gets_the_model_size_and_keeps_a_uniform_colour(
    height: int, width: int, size: tuple[int, int], crop_pct: float, resize: str
) -> None:
    fit = Preprocess(image_size=size, crop_pct=crop_pct, resize=resize)
    pixels = fit.pixels(np.full((height, width, 3), (10, 150, 220), dtype=np.uint8))
    assert pixels.shape == (3, *size)
    assert pixels.dtype == np.uint8
    assert (pixels == np.array([10, 150, 220])[:, None, None]).all()


# --- pictures to look at

RULES: list[dict[str, Any]] = [
    {},
    {"crop_pct": 0.8},
    {"resize": "squash"},
    {"resize_to": (37, 37), "crop_rounding": "down"},
    {"resize_to": (36, 40), "side_rounding": "nearest"},
    {"resize": "border", "resize_to": (32, 32), "side_rounding": "nearest"},
    {"resize_to": (20, 20)},  # smaller than the crop: a black border
]


def smooth(height: int, width: int) -> np.ndarray:
    """A picture whose reductions hardly depend on the filter."""
    y, x = np.mgrid[:height, :width]
    return np.dstack([255 * y / height, 255 * x / width, 128 + 0 * x]).round().astype(np.uint8)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size", [(90, 150), (150, 90), (128, 128), (300, 200)], ids=str)
def test_the_box_of_a_framed_picture_contains_the_models_input(
    rule: dict[str, Any], size: tuple[int, int]
) -> None:
    fit = Preprocess(image_size=(32, 32), **rule)
    picture = smooth(*size)
    framed = fit.framed(picture, longest=200)
    np.testing.assert_array_equal(framed.pixels, fit.pixels(picture))
    assert max(framed.picture.shape[1:]) <= 200
    whole = Image.fromarray(framed.picture.transpose(1, 2, 0))
    again = np.asarray(whole.resize((32, 32), Image.Resampling.BOX, box=framed.box), dtype=int)
    assert np.abs(again.transpose(2, 0, 1) - framed.pixels).mean() <= 2


@pytest.mark.parametrize("resize", ["crop", "squash"])
@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (60, 600)])
def test_long_strip_is_framed_as_the_model_sees_it(size: tuple[int, int], resize: str) -> None:
    framed = Preprocess(image_size=(16, 16), resize=resize).framed(noise(*size))
    side = framed.picture.shape[1]
    assert framed.picture.shape == (3, side, side)
    assert side == (48 if size == (60, 600) else 16)  # the whole multiple that the picture's pixels allow
    assert framed.box == (0, 0, side, side)


def test_normalize_scales_bytes_by_255_subtracts_mean_and_divides_by_std() -> None:
    mean, std = (0.1, 0.5, 0.8), (0.2, 0.25, 1.5)
    pixels = noise(4, 5).transpose(2, 0, 1)[None]
    found = Preprocess(image_size=(4, 5), mean=mean, std=std).normalize(torch.from_numpy(pixels))
    expected = (pixels / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6, rtol=1e-6)
    fit, images = Preprocess(image_size=(4, 5), std=(0.2, 0.3, 0.4)), torch.rand(2, 3, 4, 5)
    before = images.clone()
    expected = fit.normalize(images)
    assert torch.equal(images, before)
    assert torch.equal(fit.normalize_(images), expected)
    assert torch.equal(images, expected)
    fit = Preprocess(image_size=(4, 5))
    pixels = torch.from_numpy(noise(4, 5).transpose(2, 0, 1)[None].copy())
    assert torch.equal(fit.normalize(pixels.float() / 255), fit.normalize(pixels))


def test_dictionaries_survive_json_and_are_those_that_older_versions_read() -> None:
    grey = {"channels": 1, "mean": (0.25,), "std": (0.75,), "exif_orientation": False}
    fit = Preprocess(image_size=(24, 40), resize="squash", crop_pct=0.875, interpolation="lanczos", **grey)
    assert Preprocess.from_dict(json.loads(json.dumps(fit.to_dict()))) == fit
    fit = Preprocess(image_size=(224, 224), resize_to=(256, 256), crop_rounding="down")
    assert Preprocess.from_dict(json.loads(json.dumps(fit.to_dict()))) == fit
    assert fit.at_size((224, 224)) == fit
    assert fit.at_size((384, 192)).resize_to == (439, 219)
    fit = Preprocess(image_size=(16, 16), levels=(0, 4095))
    assert Preprocess.from_dict(json.loads(json.dumps(fit.to_dict()))) == fit
    assert fit.at_size((8, 8)).levels == (0, 4095)
    assert "levels" not in Preprocess(image_size=(16, 16)).to_dict()  # which older versions read
    assert set(Preprocess(image_size=(8, 8)).to_dict()) == {
        *("image_size", "channels", "resize", "crop_pct", "interpolation", "mean", "std", "exif_orientation")
    }


@pytest.mark.parametrize(("crop_rounding", "first"), [("down", 2), ("even", 1)])
def test_a_border_has_the_mean_colour_and_crop_rounding_places_the_odd_pixel(
    crop_rounding: str, first: int
) -> None:
    rule = {"resize": "border", "resize_to": (7, 7), "crop_rounding": crop_rounding}
    fit = Preprocess(image_size=(7, 7), mean=(0.2, 0.4, 0.6), **rule)
    pixels = fit.pixels(np.full((40, 70, 3), 9, np.uint8))  # 4x7 of 7x7: three rows of border
    assert fit.border == (51, 102, 153)
    is_border = (pixels == np.reshape(fit.border, (3, 1, 1))).all(axis=(0, 2))
    assert is_border.nonzero()[0].tolist() == [*range(first), *range(first + 4, 7)]


def test_a_strip_that_a_resize_would_make_huge_is_rejected_by_name(tmp_path: Path) -> None:
    Image.fromarray(noise(1, 2000)).save(tmp_path / "strip.png")
    fit = Preprocess(image_size=(224, 224), resize_to=(256, 256))
    with pytest.raises(ImageError, match=r"strip\.png: 1x2000 pixels would be resized to 256x512000"):
        fit.pixels(tmp_path / "strip.png")
    assert Preprocess(image_size=(224, 224)).pixels(tmp_path / "strip.png").shape == (3, 224, 224)


INVALID: dict[str, tuple[object, ...]] = {
    "resize": ("crpo", "border"),  # without resize_to
    "interpolation": ("bicubik",),
    "channels": (0, "3", None, 1),  # with three means
    "image_size": ([32], [32.5, 32], [0, 32]),
    "std": ((0.5, 0.0, 0.5),),
    "crop_pct": (0.0, 1.2, "most"),
    "mean": (0.5,),
    "resize_to": (9, (9, 0), (True, 9)),
    "crop_rounding": ("down",),
    "levels": ((5, 5), [9, 5], 4095, (0, float("nan"))),
}


def test_invalid_options_are_rejected() -> None:
    for option, values in INVALID.items():
        for value in values:
            with pytest.raises(UserError, match=option):
                Preprocess(**{"image_size": (8, 8), option: value})
    for option, value in {"crop_pct": 0.9, "side_rounding": "up"}.items():
        with pytest.raises(UserError, match=option):
            Preprocess(image_size=(8, 8), resize_to=(9, 9), **{option: value})


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path, picture = tmp_path / "broken.jpg", noise(32, 32)
    truncated = (encoded(picture, "JPEG")[:400], encoded(picture)[:400], encoded(picture, "GIF")[:60])
    for content in (b"this is a text, not a picture", b"", *truncated):
        path.write_bytes(content)
        with pytest.raises(ImageError, match=r"broken\.jpg"):
            read_image(path)
        with pytest.raises(ImageError, match="bytes"):
            read_image(content)


def test_bomb_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb(13_500))
    assert path.stat().st_size < 30_000
    with pytest.raises(ImageError, match=r"bomb\.png.*limit"):
        read_image(path)
    with pytest.raises(ImageError, match=r"nowhere\.png: no such file"):
        read_image(tmp_path / "nowhere.png")
    with pytest.raises(ImageError, match=tmp_path.name):
        read_image(tmp_path)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP", "PPM", "AVIF"])
@settings(law, max_examples=10)
@given(data=st.data())
def test_damaged_file_is_read_or_rejected(format: str, data: st.DataObject) -> None:
    try:
        content = bytearray(encoded(noise(16, 16), format))
    except (KeyError, OSError):
        pytest.skip(f"this Pillow cannot write {format}")
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        pixels = identity(4, 4).pixels(bytes(content[:cut]))
    except ImageError:
        return
    assert pixels.shape == (3, 4, 4)
