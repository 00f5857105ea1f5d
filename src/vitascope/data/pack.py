"""From any DATA to tar shards in the WebDataset format: few large files, whose order mixes the classes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import hashlib
import io
import itertools
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from tqdm import tqdm

from vitascope.data.datasets import open_data
from vitascope.data.decoding import Encoded, ImageError, ImageSource, naming_faults, read_image, source_name
from vitascope.data.formats.folder import IMAGE_SUFFIXES
from vitascope.data.loading import MAX_UNREADABLE
from vitascope.data.randomness import epoch_order
from vitascope.data.shard_index import Index, Shard
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError

JPEG_QUALITY = 95
"""Of pictures that are made smaller; the others keep their bytes."""
MB = 10**6
_END = bytes(10_240)  # two empty blocks end a tar; whole records of 20 blocks are what tar programs write
_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}  # where a format has another name

T = TypeVar("T")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """What was written."""

    folder: Path
    index: Index
    unreadable: dict[str, str]
    """Pictures that were left out, name and reason."""


def pack(
    data: str, out: Path, *, shard_mb: int = 256, image_size: int | None = None, seed: int = 0
) -> Packed:
    """Write the splits of a DATA argument as tar shards: `train-00000.tar`, ..., and `index.json`.

    Each image is a sample of `<number>.cls` and `<number>.jpg` (or what the file is), in an order by seed.
    Files keep their bytes; arrays become PNG. The same input gives the same bytes. All is written aside, and
    gets its name when it is whole.

    Args:
        data: what `open_data` takes.
        out: the new folder.
        shard_mb: megabytes of a shard, at most, unless one image has more.
        image_size: pictures whose shorter side is longer are made that small (Lanczos, JPEG), upright as
            `read_image` makes them; it takes a fraction of the time to read them. None changes none.
        seed: of the order, and of the parts that `open_data` takes away for validation and testing.

    Raises:
        UserError: as `open_data`; `out` is there already or inside of `data`; more than `MAX_UNREADABLE` of a
            split's images cannot be read; the disk is full.
    """
    for name, value in (("shard_mb", shard_mb), ("image_size", image_size)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    _refuse_place(out, data)
    splits = open_data(data, seed=seed)
    given = {"train": splits.train, "val": splits.val, "test": splits.test}
    unreadable: dict[str, str] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as aside:
            folder = Path(aside) / "shards"
            folder.mkdir()
            shards = {
                name: _write_split(
                    folder,
                    dataclasses.replace(images, name=name),
                    shard_mb * MB,
                    image_size,
                    seed,
                    unreadable,
                )
                for name, images in given.items()
                if images is not None
            }
            index = Index(class_names=splits.train.class_names, channels=splits.channels, splits=shards)
            index.write(folder)
            os.replace(folder, out)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(out.parent).free / MB
        raise UserError(
            f"the disk is full: {free:,.0f} MB free at {out.parent}, nothing was left there; free some, or "
            "give a folder on another disk"
        ) from error
    return Packed(folder=out, index=index, unreadable=unreadable)


def _refuse_place(out: Path, data: str) -> None:
    """Refuse a folder that has something in it, or that is among the images."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: exists already; give a new folder")
    place = Path(data).expanduser()
    if place.is_dir() and out.resolve().is_relative_to(place.resolve()):
        raise UserError(f"{out}: inside of {data}, where it would be taken for images; give another folder")


def _write_split(
    folder: Path,
    images: ImageSet,
    limit: int,
    image_size: int | None,
    seed: int,
    unreadable: dict[str, str],
) -> tuple[Shard, ...]:
    """Write the shards of a split, and name what cannot be read."""
    shards: list[_Tar] = []
    samples = _samples(images, image_size, seed, unreadable)
    with contextlib.ExitStack() as open_files:
        for key, suffix, content, label in samples:
            sample = _member(f"{key}.cls", b"%d" % label) + _member(f"{key}.{suffix}", content)
            if not shards or shards[-1].size + len(sample) > limit:
                open_files.close()
                shards.append(_Tar(folder / f"{images.name}-{len(shards):05}.tar"))
                open_files.enter_context(shards[-1])
            shards[-1].add(sample)
    if not shards:
        raise UserError(f"no image of the {images.name} set can be read: {'; '.join(unreadable.values())}")
    return tuple(shard.line() for shard in shards)


def _samples(
    images: ImageSet, image_size: int | None, seed: int, unreadable: dict[str, str]
) -> Iterator[tuple[str, str, bytes, int]]:
    """Key, suffix, encoded picture and label of each image that can be read, in an order by seed."""
    order = epoch_order(seed, 0, len(images)).tolist()

    def encode(index: int) -> tuple[str, bytes] | ImageError:
        try:
            return _encoded(images.sources[index], image_size)
        except ImageError as error:
            return error

    results = tqdm(_in_threads(encode, order), images.name, len(order), unit=" images", disable=None)
    left_out = 0
    for number, (index, result) in enumerate(zip(order, results, strict=True)):
        if not isinstance(result, ImageError):
            yield f"{number:08}", *result, int(images.labels[index])
            continue
        unreadable[source_name(images.sources[index])] = str(result)
        left_out += 1
        if left_out > max(1, MAX_UNREADABLE * len(order)):
            raise UserError(
                f"more than {MAX_UNREADABLE:.0%} of the {len(order)} images of the {images.name} set cannot "
                f"be read: {result}; remove or repair them"
            )


def _in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in the order of the items, a few of them ahead; reading, decoding and resizing hold no lock."""
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        remaining = iter(items)
        ahead: collections.deque[Future[R]] = collections.deque(
            pool.submit(function, item) for item in itertools.islice(remaining, 4 * threads)
        )
        while ahead:
            result = ahead.popleft().result()
            ahead.extend(pool.submit(function, item) for item in itertools.islice(remaining, 1))
            yield result


def _encoded(source: ImageSource, image_size: int | None) -> tuple[str, bytes]:
    """A picture's suffix and encoded bytes, at the size wanted.

    Raises:
        ImageError: it cannot be read.
    """
    if isinstance(source, np.ndarray | Image.Image):
        image = read_image(source)
        if image_size is None or min(image.size) <= image_size:
            return "png", _saved(image, "PNG")
        return "jpg", _smaller(image, image_size)
    with naming_faults(source):
        content = source if isinstance(source, bytes) else _read_bytes(source)
    named = _Content(source_name(source), content)
    if image_size is not None:
        image = read_image(named)
        if min(image.size) > image_size:
            return "jpg", _smaller(image, image_size)
    return _suffix(named), content


@dataclasses.dataclass(frozen=True)
class _Content(Encoded):
    """What was read, with the name of what it was read from."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name

    def read_bytes(self) -> bytes:
        return self.content


def _read_bytes(source: str | os.PathLike[str] | Encoded) -> bytes:
    return source.read_bytes() if isinstance(source, Encoded) else Path(source).read_bytes()


def _suffix(picture: _Content) -> str:
    """What a sample's picture is called: as its file is, else by its first bytes."""
    suffix = Path(picture.name).suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return suffix[1:]
    with naming_faults(picture), Image.open(io.BytesIO(picture.content)) as image:
        return _SUFFIXES.get(image.format or "", (image.format or "").lower())


def _smaller(image: Image.Image, image_size: int) -> bytes:
    """A JPEG whose shorter side is `image_size` pixels."""
    scale = image_size / min(image.size)
    size = tuple(max(image_size, round(side * scale)) for side in image.size)
    return _saved(image.resize((size[0], size[1]), Image.Resampling.LANCZOS), "JPEG", quality=JPEG_QUALITY)


def _saved(image: Image.Image, format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def _member(name: str, content: bytes) -> bytes:
    """A file as it stands in a tar; nothing in its header depends on who packs it, or when."""
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


class _Tar:
    """A shard that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = len(_END)
        self._count = 0
        self._sha256 = hashlib.sha256()
        self._file = open(path, "xb")  # noqa: SIM115 - closed by `__exit__`

    def __enter__(self) -> _Tar:
        return self

    def add(self, sample: bytes) -> None:
        """Append the members of a sample."""
        self._write(sample)
        self.size += len(sample)
        self._count += 1

    def __exit__(self, *failure: object) -> None:
        """Write the end mark, and all of it to the disk."""
        with self._file:
            self._write(_END)
            self._file.flush()
            os.fsync(self._file.fileno())

    def line(self) -> Shard:
        """The finished shard in the index."""
        return Shard(file=self.path.name, count=self._count, bytes=self.size, sha256=self._sha256.hexdigest())

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)
