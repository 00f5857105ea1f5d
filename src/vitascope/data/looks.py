"""One reading of every picture: sizes, light, sharpness, colours and a thumbnail."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image
from scipy.ndimage import laplace
from tqdm import tqdm

from vitascope.data.listing import suffix_of
from vitascope.data.reading import Faults, readable
from vitascope.models import decoding

LONGEST = 256
"""Pixels of the longest side of a picture on which light, sharpness and colours are measured."""
SIDE = 32
"""Pixels of the side of a thumbnail."""
Looks: TypeAlias = npt.NDArray[np.void]
"""Measurements of N pictures, (N,), in the columns of `LOOK`; 120 MB for 100,000 pictures."""
LOOK = np.dtype(
    [
        ("reason", object),  # why the picture cannot be read, or ""; then all other columns are 0
        ("width", np.int64),  # of the upright picture
        ("height", np.int64),
        ("pages", np.int64),  # or frames, of which the first counts
        ("file_bytes", np.int64),  # 0 for pixels in memory
        ("format", object),  # as Pillow names it, such as "JPEG"
        ("misnamed", object),  # the suffix if it belongs to another format, else ""
        ("camera", object),  # EXIF make and model
        ("day", object),  # EXIF date, "YYYY-MM-DD"
        ("plain", np.bool_),  # of one shade, as far as `LONGEST` pixels show
        ("brightness", np.float64),  # mean luminance in [0, 1]
        ("darkest", np.float64),  # 1% and 99% quantiles of luminance
        ("brightest", np.float64),
        # Root mean square of the Laplacian over that of the differences between neighbouring pixels: 3.2 of
        # noise, 0.7 of a strong blur, whatever the contrast.
        ("sharpness", np.float64),
        ("saturation", np.float64),  # mean difference between the largest and the smallest channel, in [0, 1]
        ("colour", np.float64, (3,)),  # mean RGB in [0, 1]
        ("border", np.float64, (3,)),  # mean RGB of the outermost pixels
        ("thumbnail", np.uint8, (SIDE, SIDE)),  # grey
    ]
)
_UPRIGHT, _TRANSPOSED = 1, 5  # EXIF orientations: the first, and the first that swaps width and height
_FAINTEST = 0.5  # levels of luminance, of 255: below it, sharpness would be that of rounding
_CHUNK = 32  # pictures per task of a thread: a task for each small picture would take as long as it


def look_at(sources: Sequence[decoding.ImageSource]) -> Looks:
    """Read each of N pictures once, by threads, with a bar if that takes long."""
    formats = {**Image.registered_extensions(), ".heic": "HEIF", ".heif": "HEIF"}
    faults, looks = Faults(len(sources)), np.zeros(len(sources), LOOK)
    rows = readable(lambda source: _measured(source, formats), sources, faults, _CHUNK)
    for number, look in tqdm(rows, "images looked at", len(sources), delay=3, leave=False, disable=None):
        for name, value in look.items():
            looks[name][number] = value
    for number, reason in faults.reasons.items():
        looks["reason"][number] = reason.removeprefix(f"{decoding.source_name(sources[number])}: ")
    return looks


def _measured(source: decoding.ImageSource, formats: Mapping[str, str]) -> dict[str, Any]:
    with decoding.image_errors(source):
        return _look(source, formats)


def _look(source: decoding.ImageSource, formats: Mapping[str, str]) -> dict[str, Any]:
    image = decoding.open_image(source)
    file_bytes, pages, exif = _file_bytes(image), decoding.page_count(image), image.getexif()
    orientation = exif.get(ExifTags.Base.Orientation, _UPRIGHT)
    width, height = image.size if orientation < _TRANSPOSED else image.size[::-1]
    if not isinstance(source, Image.Image):  # a draft would change the caller's
        image.draft(None, (LONGEST, LONGEST))  # libjpeg decodes large JPEGs at 1/2, 1/4 or 1/8
    picture = decoding.decode(image, source, True)
    if (shrink := LONGEST / max(picture.size)) < 1:
        small = [max(1, round(side * shrink)) for side in picture.size]
        picture = picture.resize((small[0], small[1]), Image.Resampling.BILINEAR)
    image_format = "JPEG" if image.format == decoding.PHONES else image.format or ""
    has_name = isinstance(source, str | os.PathLike | decoding.Encoded)
    suffix = suffix_of(decoding.source_name(source)) if has_name else ""
    grey, pixels = picture.convert("L"), np.asarray(picture.convert("RGB"))
    luminance = np.asarray(grey, dtype=np.float32)
    darkest, brightest = np.searchsorted(np.cumsum(grey.histogram()), np.array([0.01, 0.99]) * luminance.size)
    differences = np.concatenate([np.diff(luminance, axis=axis).ravel() for axis in (0, 1)])
    sides = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
    return {
        "reason": "",
        "height": height,
        "width": width,
        "pages": pages,
        "file_bytes": file_bytes,
        "format": image_format,
        "misnamed": suffix if image_format and formats.get(suffix, image_format) != image_format else "",
        "camera": " ".join(_text(exif.get(tag)) for tag in (ExifTags.Base.Make, ExifTags.Base.Model)).strip(),
        "day": _day(exif),
        "plain": np.ptp(pixels, axis=(0, 1)).max() <= 1,
        "brightness": luminance.mean() / 255,
        "darkest": darkest / 255,
        "brightest": brightest / 255,
        "sharpness": _rms(laplace(luminance)) / max(_rms(differences), _FAINTEST),
        "saturation": np.ptp(pixels, axis=2).mean() / 255,
        "colour": pixels.reshape(-1, 3).mean(axis=0) / 255,
        "border": sides.mean(axis=0) / 255,
        "thumbnail": np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.LANCZOS)),
    }


def _file_bytes(image: Image.Image) -> int:
    """The bytes of an encoded picture that is not decoded yet."""
    if (file := getattr(image, "fp", None)) is None:
        return 0
    place, size = file.tell(), file.seek(0, os.SEEK_END)
    file.seek(place)
    return int(size)


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
