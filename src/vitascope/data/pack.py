"""Packing: from any data set to tar shards in the WebDataset format, in an order that mixes the classes."""

import contextlib
import dataclasses
import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from PIL import Image
from tqdm import tqdm

from vitascope.data.datasets import open_data
from vitascope.data.formats.shard_index import Index, SamplePlaces, Shard
from vitascope.data.listing import IMAGE_SUFFIXES
from vitascope.data.randomness import epoch_order
from vitascope.data.reading import Faults, readable
from vitascope.data.splits import ImageSet
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError
from vitascope.models import decoding
from vitascope.storage import explaining_failure, make_folder, replacing

JPEG_QUALITY = 95
"""The quality of reduced pictures; the others keep their bytes."""
MB = 10**6
_END = bytes(10_240)  # two empty blocks end a tar; tar programs write records of 20 blocks
_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}  # where a format has another name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """The result of `pack`."""

    folder: Path
    index: Index
    unreadable: tuple[str, ...]  # the pictures that were left out, with the reason


def pack(
    data: str,
    out: Path,
    *,
    shard_mb: int = 256,
    image_size: int | None = None,
    seed: int = 0,
    table: TableOptions = AS_RECOGNIZED,
) -> Packed:
    """Write the splits of a data set as tar shards: `train-00000.tar`, ..., `index.json` and `samples.npz`.

    Each image is a sample of `<number>.cls` and `<number>.jpg` (or the file's suffix), in an order by seed.
    Files keep their bytes; arrays become PNG. Pictures whose shorter side is longer than `image_size` are
    reduced to it (upright, Lanczos, JPEG), which makes them faster to read. A shard has at most `shard_mb`
    megabytes, unless one image has more. The same input gives the same bytes.
    """
    for name, value in (("shard_mb", shard_mb), ("image_size", image_size)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: exists already; give a new folder")
    place = Path(data).expanduser()
    if place.is_dir() and out.resolve().is_relative_to(place.resolve()):
        raise UserError(f"{out}: inside of {data}, where it would be taken for images; give another folder")
    splits = open_data(data, seed=seed, table=table)
    if splits.train.truth.strata is None:
        raise UserError(f"{data}: several classes per image; shards have one, so these data are not packed")
    packer = _Packer(shard_mb * MB, image_size, seed)
    make_folder(out.parent)
    with (
        explaining_failure(out, "the shards", "free some space, or give a folder on another disk"),
        replacing(out) as folder,
    ):
        folder.mkdir()
        shards = {name: packer.write_split(folder, name, images) for name, images in splits.parts.items()}
        index = Index(
            class_names=splits.train.class_names,
            channels=splits.channels,
            splits=shards,
            samples=packer.places().write(folder),
        )
        index.write(folder)
    return Packed(folder=out, index=index, unreadable=tuple(packer.unreadable))


class _Packer:
    """Writes the shards of splits, and collects unreadable pictures."""

    def __init__(self, limit: int, image_size: int | None, seed: int) -> None:
        self.limit = limit
        self.image_size = image_size
        self.seed = seed
        self.unreadable: list[str] = []
        self._shards: list[_Tar] = []

    def places(self) -> SamplePlaces:
        """The places of all pictures so far."""
        shards = self._shards
        rows = [row for shard in shards for row in shard.samples]
        names, offsets, sizes, labels = zip(*rows, strict=True)
        return SamplePlaces(
            files=np.array([shard.path.name for shard in shards], np.bytes_),
            shards=np.repeat(
                np.arange(len(shards), dtype=np.int32), [len(shard.samples) for shard in shards]
            ),
            offsets=np.array(offsets, np.int64),
            sizes=np.array(sizes, np.int64),
            names=np.array(names, np.bytes_),
            labels=np.array(labels, np.int64),
        )

    def write_split(self, folder: Path, name: str, images: ImageSet) -> tuple[Shard, ...]:
        """Write one split to `<name>-00000.tar` and so on."""
        shards: list[_Tar] = []
        faults = Faults(len(images), name)
        with contextlib.ExitStack() as open_files:
            for key, suffix, content, label in self._samples(images, faults):
                picture, own = f"{key}.{suffix}", _member(f"{key}.cls", b"%d" % label)
                sample = own + _member(picture, content)
                if not shards or shards[-1].size + len(sample) > self.limit:
                    open_files.close()
                    shards.append(_Tar(folder / f"{name}-{len(shards):05}.tar"))
                    open_files.enter_context(shards[-1])
                shards[-1].add(sample, (picture, len(own) + tarfile.BLOCKSIZE, len(content), label))
        faults.check_some()
        self.unreadable += faults.reasons.values()
        self._shards += shards
        return tuple(shard.line() for shard in shards)

    def _samples(self, images: ImageSet, faults: Faults) -> Iterator[tuple[str, str, bytes, int]]:
        """Key, suffix, encoded picture and label of each readable image, in an order by seed."""
        order = epoch_order(self.seed, 0, len(images)).tolist()
        sources = (images.sources[index] for index in order)
        samples = readable(lambda source: _encoded(source, self.image_size), sources, faults)
        for number, sample in tqdm(samples, images.name, len(order), unit=" images", disable=None):
            yield f"{number:08}", *sample, int(images.labels[order[number]])


def _encoded(source: decoding.ImageSource, image_size: int | None) -> tuple[str, bytes]:
    """Suffix and bytes of an encoded picture, reduced to `image_size`; raises ImageError."""
    with decoding.image_errors(source):
        content = decoding.encoded_bytes(source)
    if content is None or image_size is not None:
        with decoding.image_errors(source):
            image = decoding.open_image(source if content is None else content)
            keeps_range = decoding.has_more_bits(image)  # whoever reads it has the levels
            if not keeps_range:
                image = decoding.decode(image, source, True)
            elif content is None:
                return "tif", _saved(image, "TIFF")
        if image_size is not None and min(image.size) > image_size and not keeps_range:
            scale = image_size / min(image.size)
            width, height = (max(image_size, round(side * scale)) for side in image.size)
            smaller = image.resize((width, height), Image.Resampling.LANCZOS)
            return "jpg", _saved(smaller, "JPEG", quality=JPEG_QUALITY)
    if content is None:
        return "png", _saved(image, "PNG")
    suffix = Path(decoding.source_name(source)).suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return suffix[1:], content
    with decoding.image_errors(source), Image.open(io.BytesIO(content)) as image:
        format = image.format or ""
    return _SUFFIXES.get(format, format.lower()), content


def _saved(image: Image.Image, format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def _member(name: str, content: bytes) -> bytes:
    """A file as it stands in a tar; its header depends neither on the user nor on the time."""
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


class _Tar:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = len(_END)
        self.samples: list[tuple[str, int, int, int]] = []
        """Name, offset, size and label of each picture."""
        self._sha256 = hashlib.sha256()
        self._file = open(path, "xb")  # noqa: SIM115 - closed by `__exit__`

    def __enter__(self) -> Self:
        return self

    def add(self, sample: bytes, picture: tuple[str, int, int, int]) -> None:
        """Append the members of a sample: its picture's name, offset in them, size, and label."""
        name, offset, size, label = picture
        self.samples.append((name, self.size - len(_END) + offset, size, label))
        self._file.write(sample)
        self._sha256.update(sample)
        self.size += len(sample)

    def __exit__(self, *failure: object) -> None:
        with self._file:
            self._file.write(_END)
            self._sha256.update(_END)

    def line(self) -> Shard:
        """The finished shard in the index."""
        return Shard(
            file=self.path.name, count=len(self.samples), bytes=self.size, sha256=self._sha256.hexdigest()
        )
