"""The one preprocessing: from any picture to the pixels that a model was trained on.

It is saved with the model and used by training, evaluation, prediction and explanation alike. The rule:

- the orientation in the EXIF data is applied;
- of an animation, the first frame counts;
- 16-bit grey becomes 8-bit by value / 257 (65535 -> 255); 32-bit integer grey likewise, cut to that range;
- floating-point grey must lie in [0, 1] and is multiplied by 255;
- transparency is laid over white: colours hidden under it never show;
- CMYK, YCbCr, Lab, palette and black-and-white become RGB; a model of one channel gets its luma (ITU-R 601).
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vitascope.errors import UserError, check_choice, nearest

if TYPE_CHECKING:
    import torch  # at run time where a method needs it: processes that only decode start without it


class Encoded(ABC):
    """An encoded picture that lies somewhere else than in a file of its own; its `str` is its name."""

    @abstractmethod
    def read_bytes(self) -> bytes:
        """What the file would hold; an OSError or EOFError becomes an `ImageError` that names the picture."""


ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Encoded | Image.Image | np.ndarray[Any, Any]"
"""A path, an encoded file's bytes or where they lie, a Pillow image, or uint8 pixels (H, W) or (H, W, C)."""

Pixels: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""uint8 (C, H, W)."""
Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""

MAX_RESIZED = 1 << 26
"""Most pixels of a picture between resize and crop, 200 MB: a strip of 1x1000 pixels at a height of 256."""

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


class ImageError(UserError):
    """A picture that cannot be read; the message names it."""


def read_image(source: ImageSource, *, exif_orientation: bool = True) -> Image.Image:
    """A picture as 8-bit "RGB" or "L", upright, by the rule above.

    Raises:
        ImageError: no such file, no picture, a truncated one, or more than Pillow's limit of 178 million
            pixels; it names the source.
    """
    with naming_faults(source):
        return _decode(_open(source), source, exif_orientation)


def header_size(source: ImageSource) -> tuple[int, int]:
    """Height and width as the file's header says, before any turning.

    Raises:
        ImageError: as `read_image`.
    """
    with naming_faults(source):
        if isinstance(source, np.ndarray):
            return source.shape[0], source.shape[1]
        if isinstance(source, Image.Image):
            return source.height, source.width
        with _open(source) as image:
            return image.height, image.width


@contextmanager
def naming_faults(source: ImageSource) -> Iterator[None]:
    """Turn everything that Pillow raises for a bad picture into an `ImageError` that names it."""
    name = source_name(source)
    try:
        yield
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{name}: no such file") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: not a picture that Pillow can read") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: a decompression bomb, {error}") from error
    except (OSError, ValueError, SyntaxError, EOFError, RuntimeError, struct.error) as error:
        raise ImageError(f"{name}: cannot be read: {error}") from error


def source_name(source: ImageSource) -> str:
    """How messages call a source: its path or name, or what kind of thing it is."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, Encoded):
        return str(source)
    return f"<{type(source).__name__}>"


def is_one_picture(images: ImageSource | Iterable[ImageSource]) -> bool:
    """Whether an argument is one picture: a path, bytes, an open file, a Pillow image, or an array.

    An array is one picture whatever its dimensions are: `read_image` rejects one of four.
    """
    import torch

    one = (str, os.PathLike, bytes, bytearray, Encoded, Image.Image, np.ndarray, torch.Tensor)
    return isinstance(images, one) or hasattr(images, "read")


def as_pictures(images: ImageSource | Iterable[ImageSource]) -> Sequence[ImageSource]:
    """A list of one picture, or the pictures themselves as a sequence.

    Raises:
        ImageError: neither a picture nor an iterable.
    """
    if is_one_picture(images):
        return [cast("ImageSource", images)]
    if isinstance(images, Sequence):
        return cast("Sequence[ImageSource]", images)
    if isinstance(images, Iterable):
        return list(images)
    raise not_a_picture(images)


def not_a_picture(source: object) -> ImageError:
    """The error for an argument of a type that is no picture."""
    kind = type(source).__name__
    return ImageError(
        f"an image is a path, bytes, a Pillow image or a uint8 array, not a value of type {kind}"
    )


def _open(source: ImageSource) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        shape = source.shape
        has_colours = source.ndim == 3 and shape[-1] in (1, 3, 4)
        if source.dtype != np.uint8 or source.size == 0 or not (source.ndim == 2 or has_colours):
            many = "; for several images, give a list of arrays" if source.ndim == 4 else ""
            raise ImageError(
                f"an array must be uint8 (H, W) or (H, W, 1, 3 or 4), not {source.dtype} {shape}{many}"
            )
        return Image.fromarray(source[..., 0] if source.ndim == 3 and shape[-1] == 1 else source)
    if isinstance(source, Encoded):
        source = source.read_bytes()
    if not isinstance(source, str | os.PathLike | bytes):
        if hasattr(source, "read"):
            return Image.open(source)
        raise not_a_picture(source)
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except UnidentifiedImageError:
        if not _is_heif(source):
            raise
    return _open_heif(source)


def _is_heif(source: str | os.PathLike[str] | bytes) -> bool:
    """Whether a file begins as HEIF does (ISO/IEC 23008-12), which phones write photographs in."""
    if not isinstance(source, bytes):
        with open(source, "rb") as file:
            source = file.read(12)
    return source[4:8] == b"ftyp" and source[8:12] in _HEIF_BRANDS


def _open_heif(source: str | os.PathLike[str] | bytes) -> Image.Image:
    """A HEIF picture. libheif turns it upright, so the EXIF data that it gives ask for no further turn.

    Nothing is registered with Pillow, where it would hold for the whole process.

    Raises:
        RuntimeError: the library is not installed.
        DecompressionBombError: as `Image.open`, for more pixels than Pillow's limit.
    """
    try:
        from pillow_heif import HeifImageFile
    except ModuleNotFoundError as error:
        raise RuntimeError('HEIC pictures need an extra: pip install "vitascope[heif]"') from error
    encoded = io.BytesIO(source) if isinstance(source, bytes) else source
    image: Image.Image = HeifImageFile(encoded)  # type: ignore[no-untyped-call,unused-ignore]
    limit = 2 * (Image.MAX_IMAGE_PIXELS or math.inf)
    if image.width * image.height > limit:
        raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels, more than {limit:,.0f}")
    return image


def _decode(image: Image.Image, source: ImageSource, exif_orientation: bool) -> Image.Image:
    """An opened picture as 8-bit "RGB" or "L", upright; one that was given as it is stays as it is."""
    image.load()
    if exif_orientation and image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return _eight_bit(image, source_name(source))


def _eight_bit(image: Image.Image, name: str) -> Image.Image:
    """Any of Pillow's modes as "RGB" or "L"."""
    if image.mode == "L" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        values = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        floats = np.asarray(image)
        low, high = float(floats.min()), float(floats.max())
        if not (low >= 0 and high <= 1):  # so that NaN fails too
            raise ImageError(f"{name}: floating-point pixels must lie in [0, 1], not [{low:g}, {high:g}]")
        return Image.fromarray(np.rint(floats * 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _whole(start: float, end: float, size: int) -> tuple[int, int]:
    """A part of a side in whole pixels, one at least."""
    first = min(round(start), size - 1)
    return first, min(max(round(end), first + 1), size)


def _planes(image: Image.Image) -> Pixels:
    """A picture in "L" or "RGB" as a contiguous array (C, H, W) of its own."""
    array = np.asarray(image)  # (H, W) or (H, W, C)
    return np.array(array[None] if array.ndim == 2 else array.transpose(2, 0, 1), order="C")


@functools.lru_cache(maxsize=64)
def by_channel(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """A number a channel, float32 (C, 1, 1), kept on the device: a step would wait for a copy of it."""
    import torch

    with torch.inference_mode(False):  # it may serve training next
        return torch.tensor(numbers, device=device).view(-1, 1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Resize, crop and normalize: everything between a picture and a model's input.

    There are two rules. Models trained here see a centred box, in fractions of a pixel, whose size `crop_pct`
    sets. Other libraries resize to whole pixels, then crop whole pixels: `resize_to`.

    Raises:
        UserError: a size, a share or a name that makes no sense.
    """

    image_size: tuple[int, int]
    """Height and width of the result, pixels."""
    channels: int = 3
    """3 for RGB, 1 for grey; a model of any other number takes tensors, no pictures."""
    resize: Literal["crop", "squash", "border"] = "crop"
    """`crop` keeps the proportions and crops the centre, `squash` gives the picture the model's proportions,
    `border` (with `resize_to` only) keeps the proportions and fills what is left with `mean`."""
    crop_pct: float = 1.0
    """The share of the resized picture that the crop keeps: of its shorter side, or of both with `squash`.
    1 with `resize_to`, which says the same in pixels."""
    resize_to: tuple[int, int] | None = None
    """Height and width, in whole pixels, to which a picture is resized before its centre is cropped. With
    `crop` the resized picture keeps its proportions and covers them, with `border` it fits into them. Where
    it is smaller than the crop, black is added, with `border` the colour `mean`."""
    side_rounding: Literal["down", "nearest"] = "down"
    """With `resize_to`: how the side is rounded that follows from the proportions."""
    crop_rounding: Literal["down", "even"] = "even"
    """With `resize_to`: how half a pixel in the crop's offset is rounded, to the lower or the even number."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    """Pillow's filter, antialiased."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Per channel, of pixels in [0, 1]."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Per channel, of pixels in [0, 1]."""
    exif_orientation: bool = True
    """Turn a photograph upright as its EXIF data says."""

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        for name in ("image_size", "mean", "std"):
            values = getattr(self, name)
            is_list = isinstance(values, list | tuple)
            if not (is_list and all(isinstance(value, int | float) for value in values)):
                raise UserError(f"{name} is a list of numbers, not {values!r}")
            object.__setattr__(self, name, tuple(values))
        check_choice("resize", self.resize, ("crop", "squash", "border"))
        check_choice("side_rounding", self.side_rounding, ("down", "nearest"))
        check_choice("crop_rounding", self.crop_rounding, ("down", "even"))
        check_choice("interpolation", self.interpolation, _RESAMPLING)
        if self.channels < 1:
            raise UserError(f"channels must be at least 1, not {self.channels}")
        if len(self.mean) != self.channels or len(self.std) != self.channels or min(self.std) <= 0:
            raise UserError(f"mean {self.mean} and std {self.std} do not fit {self.channels} channels")
        if not (isinstance(self.crop_pct, int | float) and 0 < self.crop_pct <= 1):
            raise UserError(f"crop_pct is a share in (0, 1], not {self.crop_pct!r}")
        self._check_resize_to()

    def _check_resize_to(self) -> None:
        """Refuse a rule of whole pixels that is incomplete or contradicts itself."""
        if self.resize_to is None:
            if self.resize == "border":
                raise UserError('resize "border" needs resize_to, a height and a width in pixels')
            if (self.side_rounding, self.crop_rounding) != ("down", "even"):
                raise UserError("side_rounding and crop_rounding need resize_to, whose pixels they are about")
            return
        sides = self.resize_to
        is_pair = isinstance(sides, list | tuple) and len(sides) == 2
        if not (is_pair and all(type(side) is int and side > 0 for side in sides)):
            raise UserError(f"resize_to is a height and a width in whole pixels, not {sides!r}")
        if self.crop_pct != 1:
            raise UserError(f"crop_pct {self.crop_pct} and resize_to {list(sides)} exclude each other")
        object.__setattr__(self, "resize_to", tuple(sides))

    @property
    def keeps_own_size(self) -> bool:
        """Whether a picture of the model's size stays as it is."""
        return self.crop_pct == 1 and self.resize_to in (None, self.image_size)

    @property
    def border(self) -> tuple[int, ...]:
        """The colour beside a picture that is smaller than the crop, in [0, 255] per channel."""
        is_mean = self.resize == "border"
        return tuple(round(255 * value) for value in self.mean) if is_mean else (0,) * self.channels

    def pixels(self, source: ImageSource) -> Pixels:
        """A picture as uint8 (C, H, W), resized and cropped.

        Raises:
            ImageError: as `read_image`.
            UserError: a model that takes no pictures.
        """
        image = self._in_colours(read_image(source, exif_orientation=self.exif_orientation))
        if self.resize_to is not None:
            height, width = self.resized_hw(image.height, image.width)
            if height * width > MAX_RESIZED:
                raise ImageError(
                    f"{source_name(source)}: {image.height}x{image.width} pixels would be resized to "
                    f"{height}x{width}, more than {MAX_RESIZED:,} pixels"
                )
        return _planes(self.fit(image))

    def whole_pixels(self, source: ImageSource) -> Pixels:
        """All of a picture as uint8 (C, H, W), neither resized nor cropped.

        Raises:
            ImageError: as `read_image`.
            UserError: a model that takes no pictures.
        """
        return _planes(self._in_colours(read_image(source, exif_orientation=self.exif_orientation)))

    def cropped(self, source: ImageSource, choose: Callable[[int, int], Box]) -> Pixels:
        """A part of a picture as uint8 (C, H, W), squashed to the model's size: what training is shown.

        The part is rounded to whole pixels. A JPEG is decoded at a half, a quarter or an eighth of its size
        as long as the part keeps twice the pixels that the model's size has in each direction. On photographs
        of 12 million pixels that is two to four times as fast, and changes values by 0.2 of 255 on average.

        Args:
            source: the picture.
            choose: from the upright picture's width and height to the part: left, top, right and bottom.

        Raises:
            ImageError: as `read_image`.
            UserError: a model that takes no pictures.
        """
        with naming_faults(source):
            encoded = Path(source).read_bytes() if isinstance(source, str | os.PathLike) else source
            image = _open(encoded)  # read at once, which is quicker than in Pillow's steps
            lying = self.exif_orientation and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
            width, height = image.size[::-1] if lying else image.size
            box = choose(width, height)
            smaller = min((box[2] - box[0]) / self.image_size[1], (box[3] - box[1]) / self.image_size[0]) / 2
            if smaller >= 2 and image is not source:
                image.draft(image.mode, (math.ceil(image.width / smaller), math.ceil(image.height / smaller)))
            image = _decode(image, source, self.exif_orientation)
        image = self._in_colours(image)
        x, y = image.width / width, image.height / height  # 1 unless decoded smaller
        left, right = _whole(box[0] * x, box[2] * x, image.width)
        top, bottom = _whole(box[1] * y, box[3] * y, image.height)
        return self._squashed(image.crop((left, top, right, bottom)))

    def _squashed(self, image: Image.Image) -> Pixels:
        """All of a picture at the model's size, as uint8 (C, H, W).

        torch's filters for bytes are Pillow's, to a rounding, in a third of the time or less.
        """
        if self.interpolation not in ("bilinear", "bicubic"):
            return _planes(self._resized(image, (0, 0, image.width, image.height)))
        import torch
        import torch.nn.functional as F

        pixels = torch.from_numpy(np.array(image)).view(1, image.height, image.width, -1)
        resized = F.interpolate(
            pixels.permute(0, 3, 1, 2), self.image_size, mode=self.interpolation, antialias=True
        )
        return resized[0].contiguous().numpy()

    def _in_colours(self, image: Image.Image) -> Image.Image:
        """As many channels as the model has."""
        if self.channels not in (1, 3):
            raise UserError(f"pictures have 1 or 3 channels, the model has {self.channels}")
        mode = "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)

    def fit(self, image: Image.Image) -> Image.Image:
        """The part of a picture that the model sees, at the model's size, by one of the two rules."""
        if self.resize_to is not None:
            return self._cut(image)
        height, width = self.image_size
        left, top = image.width * (1 - self.crop_pct) / 2, image.height * (1 - self.crop_pct) / 2
        box = (left, top, image.width - left, image.height - top)
        if self.resize == "crop":
            scale = max(width / image.width, height / image.height) / self.crop_pct
            seen_width, seen_height = width / scale, height / scale
            left, top = (image.width - seen_width) / 2, (image.height - seen_height) / 2
            box = (max(0.0, left), max(0.0, top), left + seen_width, top + seen_height)
            box = (box[0], box[1], min(box[2], image.width), min(box[3], image.height))
        return self._resized(image, box)

    def _cut(self, image: Image.Image) -> Image.Image:
        """A picture resized to whole pixels, of which whole pixels are cropped."""
        height, width = self.resized_hw(image.height, image.width)
        top, left = self.crop_offset(height, width)
        resized = image.resize((width, height), _RESAMPLING[self.interpolation])
        if height >= self.image_size[0] and width >= self.image_size[1]:
            return resized.crop((left, top, left + self.image_size[1], top + self.image_size[0]))
        fill = self.border if self.channels > 1 else self.border[0]
        canvas = Image.new(image.mode, self.image_size[::-1], fill)
        canvas.paste(resized, (-left, -top))
        return canvas

    def resized_hw(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture after the resize to `resize_to` and before the crop."""
        assert self.resize_to is not None, "this rule knows no picture between resize and crop"
        rows, columns = self.resize_to
        if self.resize == "squash":
            return rows, columns
        if self.side_rounding == "nearest":
            # In floats, as timm computes it: integers would decide some ties otherwise.
            closest = max if self.resize == "border" else min
            ratio = closest(height / rows, width / columns)
            return max(1, round(height / ratio)), max(1, round(width / ratio))
        is_tall = height * columns > width * rows
        if is_tall != (self.resize == "border"):
            return max(1, height * columns // width), columns
        return rows, max(1, width * rows // height)

    def crop_offset(self, height: int, width: int) -> tuple[int, int]:
        """Top and left of the crop in a resized picture; negative where that is smaller than the crop."""
        return self._offset(height - self.image_size[0]), self._offset(width - self.image_size[1])

    def _offset(self, spare: int) -> int:
        """Where a crop begins on a side with so many pixels more than it needs.

        Torchvision rounds half a pixel to the even number and puts the odd pixel of a border last;
        transformers rounds down, which puts the odd pixel of a border first.
        """
        if self.crop_rounding == "down":
            return spare // 2
        return round(spare / 2) if spare >= 0 else -(-spare // 2)

    def _resized(self, image: Image.Image, box: Box) -> Image.Image:
        return image.resize(self.image_size[::-1], _RESAMPLING[self.interpolation], box=box)

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 (B, C, H, W), or floats in [0, 1], to normalized float32, on the pixels' device."""
        import torch

        if pixels.dtype == torch.uint8:
            return self.normalize_(pixels / 255)
        mean, std = (by_channel(numbers, pixels.device) for numbers in (self.mean, self.std))
        return (pixels - mean).div_(std)

    def normalize_(self, images: torch.Tensor) -> torch.Tensor:
        """`normalize` in place, of floats that nobody needs as they were: half the time on a CPU."""
        mean, std = (by_channel(numbers, images.device) for numbers in (self.mean, self.std))
        return images.sub_(mean).div_(std)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `preprocessor_config.json`."""
        values = dataclasses.asdict(self)
        if self.resize_to is None:  # then as every version writes it
            for name in ("resize_to", "side_rounding", "crop_rounding"):
                del values[name]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """The inverse of `to_dict`; an unknown key raises UserError and names the nearest."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise UserError(f"unknown preprocessing option {name!r}{nearest(name, known)}")
        return cls(**values)

    def at_size(self, image_size: tuple[int, int]) -> Preprocess:
        """The same for another size of model; `resize_to` grows or shrinks with it, to the nearest pixel."""
        resize_to = self.resize_to
        if resize_to is not None:
            rows, columns = (
                max(1, round(side * new / old))
                for side, new, old in zip(resize_to, image_size, self.image_size, strict=True)
            )
            resize_to = (rows, columns)
        return dataclasses.replace(self, image_size=image_size, resize_to=resize_to)
