"""Generated pictures, files and folders of them, and tars."""

import io
import struct
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitascope.data.datasets import read_data
from vitascope.data.formats.format import DataFormat
from vitascope.data.listing import is_image, visible_files
from vitascope.data.splits import ImageSet, Splits, complete_splits
from vitascope.models.decoding import Encoded


def noise(height: int, width: int, channels: int = 3, *, seed: int = 0) -> np.ndarray:
    """uint8 pixels (H, W, C), or (H, W) for one channel."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def encoded(picture: np.ndarray | Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """A picture in a file's bytes."""
    file = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.save(file, kind, **options)
    return file.getvalue()


def exif_of(orientation: int) -> Image.Exif:
    """The EXIF data of a photograph that lies as a camera stores it; 6 is turned by a quarter."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png(
    size: tuple[int, int], bits: int, colours: int, rows: bytes, before: Sequence[tuple[bytes, bytes]] = ()
) -> bytes:
    """A PNG of width and height, bits per channel and colour type, with chunks before its pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, colours, 0, 0, 0))
    end = chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunk(*one) for one in before) + end


def bomb(side: int) -> bytes:
    """A black PNG of side * side pixels in a few kilobytes."""
    return png((side, side), 1, 0, bytes((1 + (side + 7) // 8) * side))


class Stored(Encoded):
    """A picture that is in no file, or that cannot be read."""

    def __init__(self, content: bytes | Exception) -> None:
        self.content = content

    def __str__(self) -> str:
        return "table:7"

    def read_bytes(self) -> bytes:
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


def write_tar(path: Path, members: Mapping[str, bytes], mode: str = "w", **options: object) -> Path:
    """Write a tar of files, with the options of `tarfile.open`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, **options) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_picture(path: Path, *, size: tuple[int, int] = (8, 8), seed: int = 0) -> Path:
    """Write a picture of noise in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(*size, seed=seed)).save(path)
    return path


def write_tree(root: Path, counts: Mapping[str, int], *, size: tuple[int, int] = (8, 8)) -> Path:
    """`root/<class>/<number>.png`, all pictures different."""
    seed = 0
    for name, count in counts.items():
        for number in range(count):
            seed += 1
            write_picture(root / name / f"{number:03}.png", size=size, seed=seed)
    return root


def read_tree(root: Path) -> ImageSet:
    """The images in the class folders of a folder without splits."""
    return read_data(str(root)).by_name["all"]


def splits_of(format: DataFormat, data: str, *, seed: int) -> Splits:
    """The splits of data in a known format."""
    return complete_splits(format.read(data), data, seed=seed)


def sets_of(format: DataFormat, data: str | Path) -> dict[str, ImageSet]:
    """The sets of images that a known format reads, by name."""
    return format.read(str(data)).by_name


def image_files(root: Path) -> list[Path]:
    """The images that are listed below a folder, sorted."""
    return sorted(Path(entry.path) for entry in visible_files(root) if is_image(entry))
