"""Decoding: from any picture to 8-bit RGB or grey. It also decides, for all functions, what one picture is.

- The orientation in the EXIF data is applied.
- Of an animation, the first frame counts.
- Grey of more than 8 bits becomes 8-bit by the levels of the preprocessing, (low, high): low and all below it
  is 0, high and all above it 255. Without levels, integers have (0, 65535), and floats must lie in [0, 1].
- Pictures of 8 bits ignore levels. Of 16-bit colours, the higher 8 bits count.
- A TIFF with more channels than grey or colours, and transparency, is rejected.
- An array of three dimensions is (H, W, C) or, if its last dimension is no number of channels, (C, H, W).
- Transparency is laid over white: colours hidden under it never show.
- CMYK, YCbCr, Lab, palette and black-and-white become RGB.
"""

import io
import math
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from vitascope.errors import SourceError, UserError
from vitascope.models.file_checks import check_channels, without_end

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Encoded(Protocol):
    """An encoded picture without a file of its own, in a shard or in a store; its `str` is its name."""

    def read_bytes(self) -> bytes:
        """The encoded picture; an OSError or EOFError becomes an `ImageError` that names the picture."""


if TYPE_CHECKING:
    ImageSource: TypeAlias = (
        str | os.PathLike[str] | bytes | Encoded | Image.Image | np.ndarray[Any, Any] | torch.Tensor
    )
    """A path, an encoded file's bytes or their place, a Pillow image, or the pixels of one picture: uint8, or
    floats in [0, 1]; (H, W), (H, W, C) or (C, H, W)."""
else:  # the decoder processes import no torch
    ImageSource = str | os.PathLike[str] | bytes | Encoded | Image.Image | np.ndarray

Levels: TypeAlias = tuple[float, float]
"""The values in a picture of more than 8 bits that become 0 and 255."""

PHONES = "MPO"
"""Pillow's name of a JPEG with a second picture, which phones add."""
_OF_PAGES = (".tif", ".tiff", ".gif", ".webp")
_SIXTEEN_BITS: Levels = (0, 65535)
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, struct.error)
"""Pillow's errors for a damaged picture."""
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


class ImageError(UserError):
    """A picture cannot be read; the message names it."""


def read_image(
    source: ImageSource, *, exif_orientation: bool = True, levels: Levels | None = None
) -> Image.Image:
    """A picture as 8-bit "RGB" or "L", upright, by the rules at the top of this file.

    An ImageError names a source that is missing, not a picture, truncated, of more channels than grey or
    colour, or larger than Pillow's limit of 178 million pixels.
    """
    with image_errors(source):
        return decode(open_image(source), source, exif_orientation, levels)


def greatest_integer(source: ImageSource) -> int | None:
    """The greatest value in a picture of integers of more than 8 bits; None of other pictures, of which only
    the header is read. Raises as `read_image`."""
    if isinstance(source, np.ndarray):
        return None
    with image_errors(source), _opened(source) as image:
        return int(np.asarray(image).max()) if _has_integers(image) else None


def header_size(source: ImageSource) -> tuple[int, int]:
    """Height and width in the file's header, before EXIF rotation."""
    with image_errors(source):
        if isinstance(source, np.ndarray):
            return source.shape[0], source.shape[1]
        with _opened(source) as image:
            return image.height, image.width


def page_count(image: Image.Image) -> int:
    """The pages or frames of an opened picture, of which the first counts; 1 if the others are damaged."""
    if image.format == PHONES:
        return 1
    try:
        return int(getattr(image, "n_frames", 1))
    except _BROKEN:
        return 1


def has_pages(source: ImageSource) -> bool:
    """Whether a file by whose name that may be has several pages or frames."""
    if os.path.splitext(source_name(source))[1].lower() not in _OF_PAGES:
        return False
    try:
        with image_errors(source), _opened(source) as image:
            return page_count(image) > 1
    except ImageError:
        return False  # its reader reports it


@contextmanager
def _opened(source: ImageSource) -> Iterator[Image.Image]:
    """An opened picture, whose file is closed at the end; the caller's own stays open."""
    if isinstance(source, Image.Image):
        yield source
        return
    with open_image(source) as image:
        yield image


@contextmanager
def image_errors(source: ImageSource) -> Iterator[None]:
    """Turn Pillow's errors for a bad picture into an `ImageError` that names it."""
    name = source_name(source)
    try:
        yield
    except (ImageError, SourceError):
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{name}: no such file") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: not a picture that Pillow can read") from error
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise ImageError(f"{name}: cannot be read: {error}") from error


def source_name(source: ImageSource) -> str:
    """The name of a source in messages: its path or name, or its type."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, Encoded):
        return str(source)
    return f"<{type(source).__name__}>"


def encoded_bytes(source: ImageSource) -> bytes | None:
    """The bytes of an encoded picture; None of other sources, which have pixels or are open files."""
    if isinstance(source, bytes):
        return source
    place = Path(source) if isinstance(source, str | os.PathLike) else source
    return place.read_bytes() if isinstance(place, Encoded) else None


def is_one_picture(images: ImageSource | Iterable[ImageSource]) -> bool:
    """Whether an argument is one picture: a path, bytes, an open file, a Pillow image, or an array of any
    shape (`read_image` rejects one of four dimensions)."""
    one = (str, os.PathLike, bytes, bytearray, Encoded, Image.Image, np.ndarray)
    return isinstance(images, one) or _is_tensor(images) or hasattr(images, "read")


def not_a_picture(source: object) -> ImageError:
    """The error for an argument of a type that is not a picture."""
    expected = "an image is a path, bytes, a Pillow image, an array or a tensor"
    return ImageError(f"{expected}, not a value of type {type(source).__name__}")


def open_image(source: ImageSource) -> Image.Image:
    """An opened picture, not decoded yet; `decode` does that."""
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray) or _is_tensor(source):
        return Image.fromarray(_eight_bit_pixels(source))
    if not isinstance(source, str | os.PathLike | bytes) and isinstance(source, Encoded):
        source = source.read_bytes()
    if not isinstance(source, str | os.PathLike | bytes):
        if hasattr(source, "read"):
            return Image.open(cast("IO[bytes]", source))
        raise not_a_picture(source)
    check_channels(source)
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except UnidentifiedImageError:
        if isinstance(source, bytes):
            start = source
        else:
            with open(source, "rb") as file:
                start = file.read(12)
        if start[4:8] != b"ftyp" or start[8:12] not in _HEIF_BRANDS:  # ISO/IEC 23008-12
            raise
    return _open_heif(source)


def _is_tensor(source: object) -> "TypeGuard[torch.Tensor]":
    """Whether a source is a tensor; imports no torch, which processes that only decode do without."""
    imported = sys.modules.get("torch")
    return imported is not None and isinstance(source, imported.Tensor)


def _eight_bit_pixels(source: "np.ndarray[Any, Any] | torch.Tensor") -> npt.NDArray[np.uint8]:
    """An array or a tensor as uint8 (H, W) or (H, W, 3 or 4)."""
    if isinstance(source, np.ndarray):
        pixels, name = source, "an array"
    else:  # numpy lacks some types of floats
        floats = source.float() if source.is_floating_point() else source
        pixels, name = floats.detach().cpu().numpy(), "a tensor"
    kind = f"{pixels.dtype} {pixels.shape}"
    if pixels.ndim == 3:
        channels_last, channels_first = pixels.shape[-1] in (1, 3, 4), pixels.shape[0] in (1, 3)
        if channels_first and channels_last and name == "a tensor":
            raise ImageError(
                f"{name} {kind} is (C, H, W) or (H, W, C): give an array, which is (H, W, C), by "
                "tensor.permute(1, 2, 0).numpy() or tensor.numpy()"
            )
        if channels_first and not channels_last:
            pixels = pixels.transpose(1, 2, 0)
    if pixels.size == 0 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in (1, 3, 4))):
        several = "; give several pictures as a list, list(pixels)" if pixels.ndim == 4 else ""
        raise ImageError(f"{name} is (H, W), (H, W, 1, 3 or 4) or (1 or 3, H, W), not {kind}{several}")
    if np.issubdtype(pixels.dtype, np.floating):
        advice = "divide pixels up to 255 by 255, or undo a normalization, pixels * std + mean"
        pixels = _scaled(pixels, name, advice)
    elif pixels.dtype != np.uint8:
        how = "convert it by " + ("astype(numpy.uint8)" if name == "an array" else "tensor.byte()")
        if pixels.dtype == np.uint16 and pixels.ndim == 2:
            how = "16-bit grey is a Pillow image, Image.fromarray(array)"
        raise ImageError(f"{name} must be uint8, from 0 to 255, or floats, from 0 to 1, not {kind}: {how}")
    return pixels[..., 0] if pixels.shape[2:] == (1,) else pixels


def _scaled(floats: npt.NDArray[Any], name: str, advice: str) -> npt.NDArray[np.uint8]:
    """Floats in [0, 1] as 0 to 255."""
    low, high = float(floats.min()), float(floats.max())
    if not (low >= 0 and high <= 1):  # so that NaN fails too
        raise ImageError(
            f"{name}: floating-point pixels must lie in [0, 1], not [{low:g}, {high:g}]: {advice}"
        )
    return np.rint(floats * 255).astype(np.uint8)


def _by_levels(values: npt.NDArray[Any], levels: Levels, name: str) -> npt.NDArray[np.uint8]:
    """Values (H, W) of more than 8 bits as 0 to 255, evenly between the levels."""
    low, high = levels
    shares = (values.astype(np.float64) - low) / (high - low)
    if np.isnan(shares).any():
        raise ImageError(f"{name}: some of its pixels are not numbers (NaN)")
    return np.rint(shares.clip(0, 1) * 255).astype(np.uint8)


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


def decode(
    image: Image.Image, source: ImageSource, exif_orientation: bool, levels: Levels | None = None
) -> Image.Image:
    """An opened picture as 8-bit "RGB" or "L", upright; the caller's Pillow image is not changed."""
    if not (image.width and image.height):
        raise ImageError(f"{source_name(source)}: has no pixels")
    _load(image)
    if exif_orientation and image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return _eight_bit(image, source_name(source), levels)


def _load(image: Image.Image) -> None:
    """Decode the pixels; missing ones of a JPEG are an OSError, as in other formats."""
    if isinstance(image, JpegImageFile) and image.tile and image.fp is not None:  # not yet decoded
        image.fp.seek(0)
        content = io.BytesIO(without_end(image.fp.read()))
        image.load_read = content.read  # type: ignore[method-assign, assignment] # from which Pillow decodes
    image.load()


def has_more_bits(image: Image.Image) -> bool:
    """Whether a picture's values are more than 8 bits each, integers or floats, which levels are for."""
    return _has_integers(image) or image.mode == "F"


def _has_integers(image: Image.Image) -> bool:
    return image.mode.startswith("I")  # "I" and the byte orders of "I;16"


def _eight_bit(image: Image.Image, name: str, levels: Levels | None) -> Image.Image:
    """A picture of any of Pillow's modes as "RGB" or "L"."""
    if image.mode == "L" and "transparency" not in image.info:
        return image
    if _has_integers(image) or (image.mode == "F" and levels is not None):
        return Image.fromarray(_by_levels(np.asarray(image), levels or _SIXTEEN_BITS, name))
    if image.mode == "F":
        advice = "give their range as levels, an option of training and of the preprocessing"
        return Image.fromarray(_scaled(np.asarray(image), name, advice))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
