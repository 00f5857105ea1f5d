"""One reading of every picture: sizes, light, sharpness, colours, perceptual hash and thumbnail."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image
from scipy.fft import dctn
from scipy.ndimage import laplace
from tqdm import tqdm

from vitascope.data.decoding import (
    Encoded,
    ImageError,
    ImageSource,
    Levels,
    decode,
    image_errors,
    open_image,
    source_name,
)
from vitascope.data.listing import suffix_of
from vitascope.data.stored import fetched_ahead
from vitascope.network import in_threads
from vitascope.remote import cache
from vitascope.remote.stores import is_url

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

LONGEST = 256
"""Pixels of the longest side of a picture on which light, sharpness and colours are measured."""
SIDE = 32
"""Pixels of the side of a thumbnail."""
_UPRIGHT, _TRANSPOSED = 1, 5  # EXIF orientations: the first, and the first that swaps width and height
_LOW = 8  # side of the square of lowest DCT coefficients that the hash keeps
_FAINTEST = 0.5  # levels of luminance, of 255: below it, sharpness would be that of rounding
_CHUNK = 32  # pictures per task of a thread: a task for each small picture would take as long as it
_HASHED = 4096  # thumbnails per DCT, 16 MB of floats


@dataclasses.dataclass(frozen=True, eq=False)
class Looks:
    """Measurements of N pictures, about 1.3 KB per picture: 130 MB for 100,000 of them.

    Those of a picture that cannot be read are NaN, 0 or empty.

    Attributes:
        reasons: why a picture cannot be read, by its index.
        height, width: pixels of the upright picture, int64 (N,).
        file_bytes: bytes of the encoded picture, int64 (N,); 0 for pixels in memory.
        format: as Pillow names it, such as "JPEG", str (N,).
        misnamed: the suffix belongs to another format, bool (N,).
        turned: its EXIF data turn or mirror it, bool (N,).
        camera: EXIF make and model, str (N,).
        day: EXIF date, "YYYY-MM-DD", str (N,).
        brightness: mean luminance in [0, 1], float64 (N,).
        darkest, brightest: 1% and 99% quantiles of luminance, float64 (N,).
        sharpness: root mean square of the Laplacian over that of the differences between neighbouring pixels,
            float64 (N,): 3.2 of noise, 0.7 of a strong blur, whatever the contrast.
        detail: mean difference of luminance between neighbouring pixels, in [0, 1], float64 (N,).
        saturation: mean difference between the largest and the smallest channel, in [0, 1], float64 (N,).
        colour: mean RGB in [0, 1], float64 (N, 3).
        border: mean RGB of the outermost pixels, float64 (N, 3).
        hashes: perceptual hashes in the order of `orientations`, uint64 (N, 8); the first is upright.
        thumbnails: grey squares, uint8 (N, 32, 32).
    """

    reasons: Mapping[int, str]
    height: Integers
    width: Integers
    file_bytes: Integers
    format: npt.NDArray[np.str_]
    misnamed: npt.NDArray[np.bool_]
    turned: npt.NDArray[np.bool_]
    camera: npt.NDArray[np.str_]
    day: npt.NDArray[np.str_]
    brightness: Floats
    darkest: Floats
    brightest: Floats
    sharpness: Floats
    detail: Floats
    saturation: Floats
    colour: Floats
    border: Floats
    hashes: npt.NDArray[np.uint64]
    thumbnails: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.width)

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """The pictures that can be read, (N,)."""
        return self.width > 0

    def take(self, indices: npt.ArrayLike) -> Self:
        """Measurements of some of the pictures, in the order of the indices."""
        kept = np.asarray(indices, dtype=np.int64)
        reasons = {new: self.reasons[old] for new, old in enumerate(kept.tolist()) if old in self.reasons}
        return type(self)(reasons, **{name: values[kept] for name, values in self._arrays().items()})

    def joined(self, other: Self) -> Self:
        """Measurements of these pictures and, after them, of others."""
        reasons = {**self.reasons, **{len(self) + index: text for index, text in other.reasons.items()}}
        theirs = other._arrays()
        arrays = {name: np.concatenate([own, theirs[name]]) for name, own in self._arrays().items()}
        return type(self)(reasons, **arrays)

    def _arrays(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}


_KINDS: dict[str, type] = {
    **dict.fromkeys(("height", "width", "file_bytes"), np.int64),
    **dict.fromkeys(("format", "camera", "day"), np.str_),
    **dict.fromkeys(("misnamed", "turned"), np.bool_),
    "thumbnails": np.uint8,
}
_SHAPES = {"colour": (3,), "border": (3,), "thumbnails": (SIDE, SIDE)}


def look_at(sources: Sequence[ImageSource], *, levels: Levels | None = None) -> Looks:
    """Read every picture once, by threads, with a bar if that takes long.

    Args:
        sources: N pictures: files, encoded pictures, arrays, ...
        levels: the values in pictures of more than 8 bits that become 0 and 255; see `data.decoding`.
    """
    formats = {**Image.registered_extensions(), ".heic": "HEIF", ".heif": "HEIF"}
    ahead = fetched_ahead(sources)
    chunks = iter(lambda: list(itertools.islice(ahead, _CHUNK)), [])
    rows: list[dict[str, Any] | str] = []
    with tqdm(desc="images looked at", total=len(sources), delay=3, leave=False, disable=None) as bar:
        for chunk in in_threads(lambda some: [_look(source, formats, levels) for source in some], chunks):
            rows += chunk
            bar.update(len(chunk))
    reasons = {index: row for index, row in enumerate(rows) if isinstance(row, str)}
    arrays: dict[str, Any] = {}
    for name in (
        field.name for field in dataclasses.fields(Looks) if field.name not in ("reasons", "hashes")
    ):
        kind, shape = np.dtype(_KINDS.get(name, np.float64)), _SHAPES.get(name, ())
        nothing = np.full(shape, np.nan if kind.kind == "f" else "" if kind.kind == "U" else 0, kind)
        values = [nothing if isinstance(row, str) else row[name] for row in rows]
        arrays[name] = np.array(values, dtype=kind).reshape(-1, *shape)
    return Looks(reasons=reasons, hashes=perceptual_hashes(arrays["thumbnails"]), **arrays)


def orientations(squares: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Squares (..., S, S) in eight orientations, (..., 8, S, S): as it is, mirrored, upside down, turned
    by 180 degrees, and the transposes of these four."""
    four = [squares, squares[..., ::-1], squares[..., ::-1, :], squares[..., ::-1, ::-1]]
    return np.stack([*four, *(square.swapaxes(-1, -2) for square in four)], axis=-3)


def perceptual_hashes(thumbnails: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """pHash of grey squares (N, 32, 32) in eight orientations, (N, 8).

    A bit says whether one of the 8x8 lowest coefficients of the DCT is above their median (Zauner,
    "Implementation and benchmarking of perceptual image hash functions", 2010), most significant bit first as
    in imagehash. A mirrored picture has the coefficients of odd frequencies negated, a transposed one the
    transposed coefficients.
    """
    hashes = np.empty((len(thumbnails), 8), dtype=np.uint64)
    odd = (-1.0) ** np.arange(_LOW)
    for start in range(0, len(thumbnails), _HASHED):
        squares = thumbnails[start : start + _HASHED].astype(np.float64)
        low = dctn(squares, axes=(1, 2))[:, :_LOW, :_LOW]
        four = [low, low * odd, low * odd[:, None], low * odd * odd[:, None]]
        oriented = np.stack([*four, *(square.swapaxes(1, 2) for square in four)], axis=1)
        flat = oriented.reshape(len(squares), 8, _LOW**2)
        bits = np.packbits(flat > np.median(flat, axis=2, keepdims=True), axis=2)
        hashes[start : start + _HASHED] = bits.view(">u8")[..., 0]
    return hashes


def _look(source: ImageSource, formats: Mapping[str, str], levels: Levels | None) -> dict[str, Any] | str:
    """The measurements of a picture, named as in `Looks`, or why it cannot be read."""
    try:
        with image_errors(source):
            return _measured(source, formats, levels)
    except ImageError as error:
        return str(error)


def _measured(source: ImageSource, formats: Mapping[str, str], levels: Levels | None) -> dict[str, Any]:
    content = _encoded(source)
    image = open_image(content)
    exif = image.getexif()
    orientation = exif.get(ExifTags.Base.Orientation, _UPRIGHT)
    width, height = image.size if orientation < _TRANSPOSED else image.size[::-1]
    if not isinstance(source, Image.Image):  # a draft would change the caller's
        image.draft(None, (LONGEST, LONGEST))  # libjpeg decodes large JPEGs at 1/2, 1/4 or 1/8
    picture = decode(image, source, True, levels)
    if max(picture.size) > LONGEST:
        shrink = LONGEST / max(picture.size)
        small = [max(1, round(side * shrink)) for side in picture.size]
        picture = picture.resize((small[0], small[1]), Image.Resampling.BILINEAR)
    image_format = "JPEG" if image.format == "MPO" else image.format or ""  # phones add a second picture
    suffix = suffix_of(source_name(source)) if isinstance(source, str | os.PathLike | Encoded) else ""
    grey, pixels = picture.convert("L"), np.asarray(picture.convert("RGB"))
    luminance = np.asarray(grey, dtype=np.float32)
    counts = np.cumsum(grey.histogram())
    differences = np.concatenate([np.diff(luminance, axis=axis).ravel() for axis in (0, 1)])
    sides = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
    return {
        "height": height,
        "width": width,
        "file_bytes": len(content) if isinstance(content, bytes) else 0,
        "format": image_format,
        "misnamed": bool(image_format) and formats.get(suffix, image_format) != image_format,
        "turned": orientation != _UPRIGHT,
        "camera": " ".join(_text(exif.get(tag)) for tag in (ExifTags.Base.Make, ExifTags.Base.Model)).strip(),
        "day": _day(exif),
        "brightness": luminance.mean() / 255,
        "darkest": np.searchsorted(counts, 0.01 * luminance.size) / 255,
        "brightest": np.searchsorted(counts, 0.99 * luminance.size) / 255,
        "sharpness": _rms(laplace(luminance)) / max(_rms(differences), _FAINTEST),
        "detail": np.abs(differences).mean() / 255 if differences.size else 0,
        "saturation": np.ptp(pixels, axis=2).mean() / 255,
        "colour": pixels.reshape(-1, 3).mean(axis=0) / 255,
        "border": sides.mean(axis=0) / 255,
        "thumbnails": np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.LANCZOS)),
    }


def _encoded(source: ImageSource) -> ImageSource:
    """The bytes of an encoded picture; pixels as they are."""
    if isinstance(source, Encoded):
        return source.read_bytes()
    if isinstance(source, str) and is_url(source):
        source = cache.fetched(source)
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            return file.read()
    return source


def _rms(values: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0


def _text(value: object) -> str:
    """A text of EXIF data, without the zeros that end it."""
    return str(value or "").strip("\0 ")


def _day(exif: Image.Exif) -> str:
    """When a picture was taken, or else the date of the file, "YYYY-MM-DD"; empty if unknown."""
    taken = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal) if exif else None
    date = re.match(r"(\d{4})[:-](\d\d)[:-](\d\d)", _text(taken or exif.get(ExifTags.Base.DateTime)))
    return "-".join(date.groups()) if date else ""
