"""IDX files, the format of MNIST (LeCun, Cortes and Burges) and its successors: a header and raw pixels."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from vitascope.data.formats.format import DataFormat
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError

FASHION_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
"""Classes of Fashion-MNIST (Xiao, Rasul and Vollgraf 2017)."""
MAX_BYTES = 2**30
"""Limit of one file's content; the largest that is published, of EMNIST, has half of it."""
_UNSIGNED_BYTE = 0x08
_DEFLATE_AT_BEST = 1032  # bytes out of one byte in, the limit of the format


class Idx(DataFormat):
    """A folder of four IDX files, each plain or `.gz`, spelled `-idx3-` or `.idx3-`.

    `t10k` is the test set. Class names are the numbers from 0 to the largest in `train`, or the names of
    Fashion-MNIST, which is recognized by the name of the folder or its parent. Images are uint8 (H, W), one
    channel.
    """

    def matches(self, data: str) -> bool:
        return _find(Path(data), "train-images", 3) is not None

    def read(self, data: str) -> Inventory:
        folder = Path(data)
        images, labels = _images_and_labels(folder, "train")
        class_names = tuple(map(str, range(int(labels.max()) + 1)))
        if any("fashion" in part.lower() for part in folder.absolute().parts[-2:]):
            class_names = FASHION_NAMES
        test_images, test_labels = _images_and_labels(folder, "t10k")
        for split, found in (("train", labels), ("t10k", test_labels)):
            if found.max() >= len(class_names):
                raise UserError(
                    f"{folder}: a label of {split} is {found.max()}, but there are {len(class_names)} classes"
                )
        train = ImageSet("train", list(images), ClassIndices(labels, class_names))
        test = ImageSet("test", list(test_images), ClassIndices(test_labels, class_names))
        return Inventory((train, test), channels=1, root=folder)


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The unsigned bytes of an IDX file, read-only; no more is read than its header declares."""
    try:
        with open(path, "rb") as raw:
            packed = path.suffix == ".gz"
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            shape = _shape(file, path, dimensions)
            size = math.prod(shape)
            most = min(path.stat().st_size * (_DEFLATE_AT_BEST if packed else 1), MAX_BYTES)
            content = file.read(size + 1) if size <= most else b""
            if len(content) != size:
                amount = (
                    f"at most {most:,}"
                    if size > most
                    else f"{len(content):,}" + " or more" * (len(content) > size)
                )
                raise UserError(f"{path}: declares {size:,} bytes {shape}, and has {amount}")
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return np.frombuffer(content, np.uint8).reshape(shape)


def _shape(file: IO[bytes], path: Path, dimensions: int) -> tuple[int, ...]:
    """The header: two zeros, type, number of dimensions; then each dimension in 4 bytes, big-endian."""
    header = file.read(4 + 4 * dimensions)
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if header[:4] != expected:
        raise UserError(
            f"{path}: begins with {header[:4].hex(' ') or 'nothing'}, not with {expected.hex(' ')}: "
            f"no IDX file of {dimensions}-dimensional unsigned bytes"
        )
    return struct.unpack(f">{dimensions}I", header[4:])


def _images_and_labels(folder: Path, split: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    images_path, labels_path = _find(folder, f"{split}-images", 3), _find(folder, f"{split}-labels", 1)
    if images_path is None or labels_path is None:
        lacks = f"{split}-images-idx3-ubyte" if images_path is None else f"{split}-labels-idx1-ubyte"
        raise UserError(f"{folder}: lacks {lacks}, plain or .gz")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)  # (N, H, W) and (N,)
    if len(images) != len(labels) or not images.size:
        raise UserError(f"{folder}: {split} has {len(images):,} images and {len(labels):,} labels")
    return images, labels.astype(np.int64)


def _find(folder: Path, start: str, dimensions: int) -> Path | None:
    ends = (f"{middle}idx{dimensions}-ubyte{packed}" for middle in "-." for packed in ("", ".gz"))
    return next((path for end in ends if (path := folder / f"{start}{end}").is_file()), None)
