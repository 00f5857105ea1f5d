"""Decoding: from any picture to 8-bit RGB or grey. It also decides, for all functions, what one picture is.

- The orientation in the EXIF data is applied.
- Of an animation, the first frame counts.
- 16-bit grey becomes 8-bit by value / 257 (65535 -> 255); 32-bit integer grey likewise, cut to that range.
- Floating-point grey must lie in [0, 1] and is multiplied by 255.
- Transparency is laid over white: colours hidden under it never show.
- CMYK, YCbCr, Lab, palette and black-and-white become RGB.
"""

from __future__ import annotations

import io
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vitascope.errors import UserError


class Encoded(ABC):
    """An encoded picture without a file of its own; its `str` is its name."""

    @abstractmethod
    def read_bytes(self) -> bytes:
        """The encoded picture; an OSError or EOFError becomes an `ImageError` that names the picture."""


ImageSource: TypeAlias = str | os.PathLike[str] | bytes | Encoded | Image.Image | np.ndarray[Any, Any]
"""A path, an encoded file's bytes or their place, a Pillow image, or uint8 pixels (H, W) or (H, W, C)."""

_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


class ImageError(UserError):
    """A picture cannot be read; the message names it."""


def read_image(source: ImageSource, *, exif_orientation: bool = True) -> Image.Image:
    """A picture as 8-bit "RGB" or "L", upright, by the rules at the top of this file.

    An ImageError names a source that is missing, not a picture, truncated, or larger than Pillow's limit of
    178 million pixels.
    """
    with image_errors(source):
        return decode(open_image(source), source, exif_orientation)


def header_size(source: ImageSource) -> tuple[int, int]:
    """Height and width in the file's header, before EXIF rotation."""
    with image_errors(source):
        if isinstance(source, np.ndarray):
            return source.shape[0], source.shape[1]
        if isinstance(source, Image.Image):
            return source.height, source.width
        with open_image(source) as image:
            return image.height, image.width


@contextmanager
def image_errors(source: ImageSource) -> Iterator[None]:
    """Turn Pillow's errors for a bad picture into an `ImageError` that names it."""
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
    """The name of a source in messages: its path or name, or its type."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, Encoded):
        return str(source)
    return f"<{type(source).__name__}>"


def is_one_picture(images: ImageSource | Iterable[ImageSource]) -> bool:
    """Whether an argument is one picture: a path, bytes, an open file, a Pillow image, or an array of any
    shape (`read_image` rejects one of four dimensions)."""
    import torch

    one = (str, os.PathLike, bytes, bytearray, Encoded, Image.Image, np.ndarray, torch.Tensor)
    return isinstance(images, one) or hasattr(images, "read")


def as_pictures(images: ImageSource | Iterable[ImageSource]) -> Sequence[ImageSource]:
    """A list of one picture, or the pictures themselves as a sequence."""
    if is_one_picture(images):
        return [cast("ImageSource", images)]
    if isinstance(images, Sequence):
        return cast("Sequence[ImageSource]", images)
    if isinstance(images, Iterable):
        return list(images)
    raise not_a_picture(images)


def not_a_picture(source: object) -> ImageError:
    """The error for an argument of a type that is not a picture."""
    expected = "an image is a path, bytes, a Pillow image or a uint8 array"
    return ImageError(f"{expected}, not a value of type {type(source).__name__}")


def open_image(source: ImageSource) -> Image.Image:
    """An opened picture, not decoded yet; `decode` does that."""
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
        start = source if isinstance(source, bytes) else _first_bytes(source)
        if start[4:8] != b"ftyp" or start[8:12] not in _HEIF_BRANDS:  # ISO/IEC 23008-12
            raise
    return _open_heif(source)


def _first_bytes(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        return file.read(12)


def _open_heif(source: str | os.PathLike[str] | bytes) -> Image.Image:
    """A HEIF picture, which libheif turns upright; registering it with Pillow would be global."""
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


def decode(image: Image.Image, source: ImageSource, exif_orientation: bool) -> Image.Image:
    """An opened picture as 8-bit "RGB" or "L", upright; the caller's Pillow image is not changed."""
    if not (image.width and image.height):
        raise ImageError(f"{source_name(source)}: has no pixels")
    image.load()
    if exif_orientation and image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return _eight_bit(image, source_name(source))


def _eight_bit(image: Image.Image, name: str) -> Image.Image:
    """A picture of any of Pillow's modes as "RGB" or "L"."""
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
