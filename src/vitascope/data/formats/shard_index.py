"""`index.json` and `samples.npz`, which `vitascope pack` writes beside its shards: what is where."""

import dataclasses
import hashlib
import io
import itertools
import json
import tarfile
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vitascope.data.formats.archive import BROKEN
from vitascope.data.formats.folder import SPLIT_FOLDERS
from vitascope.errors import UserError
from vitascope.remote.paths import AnyPath
from vitascope.serialization import parse_json

INDEX, SAMPLES, CLASSES = "index.json", "samples.npz", "classes.txt"
INDEX_VERSION = 1
MAX_BYTES = {INDEX: 2**25, SAMPLES: 2**30, CLASSES: 2**24}
"""Limits of the files beside shards, for about 170,000 shards, 10^8 pictures and 100,000 classes."""
SAMPLE_HEAD = 3 * tarfile.BLOCKSIZE
"""Bytes of a packed sample before its picture: header of the label, label, header of the picture."""
_SIZE_FIELD = 124
"""The place of a file's size in its header."""
_PLACE, _HEADERS = 128, 2**16
"""Limit of bytes in `samples.npz`, unpacked: of a picture or shard, whose name has 100, and of the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A line of the index."""

    file: str
    count: int  # images
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """Classes and shards of a folder."""

    version: int = INDEX_VERSION
    class_names: tuple[str, ...]
    channels: int  # 1 where all pictures are grey, else 3
    splits: Mapping[str, tuple[Shard, ...]]
    samples: str  # the SHA-256 of `samples.npz`

    def images(self, split: str) -> int:
        """The number of images in a split."""
        return sum(shard.count for shard in self.splits[split])

    def checked_files(self, folder: AnyPath) -> dict[str, list[AnyPath]]:
        """The shards of each split, after a check of their sizes."""
        for shard in itertools.chain.from_iterable(self.splits.values()):
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                state = "missing" if size is None else f"{size:,} bytes"
                raise UserError(f"{path}: {state}, {INDEX} has {shard.bytes:,} bytes; copy it again")
        return {split: [folder / shard.file for shard in shards] for split, shards in self.splits.items()}

    def write(self, folder: Path) -> None:
        """Write the index beside its shards."""
        (folder / INDEX).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", "utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SamplePlaces:
    """The places of all pictures in the shards of a folder, in order, and their labels.

    Attributes:
        files: (S,), the names of the shards.
        shards: (N,), which of them each picture is in.
        offsets, sizes: (N,), bytes.
        names: (N,), of the pictures, UTF-8.
        labels: (N,)
    """

    files: npt.NDArray[np.bytes_]
    shards: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    names: npt.NDArray[np.bytes_]
    labels: npt.NDArray[np.int64]

    def write(self, folder: Path) -> str:
        """Write `samples.npz`; returns its SHA-256. The same places give the same bytes."""
        content = io.BytesIO()
        np.savez_compressed(content, **vars(self))
        (folder / SAMPLES).write_bytes(content.getvalue())
        return hashlib.sha256(content.getvalue()).hexdigest()

    @classmethod
    def read(cls, folder: AnyPath, index: Index) -> Self:
        """The places that belong to an index; a UserError if they are damaged, or of other shards."""
        path = folder / SAMPLES
        content = member_content(path) if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != index.samples:
            raise UserError(f"{path}: missing, or not that of {INDEX}; copy it again")
        lines = {line.file.encode(): line for line in itertools.chain.from_iterable(index.splits.values())}
        try:
            found = cls(**_arrays(content, lines.values()))
            whole = found._is_whole({name: line.bytes for name, line in lines.items()})
        except (*BROKEN, TypeError, KeyError, AttributeError, MemoryError):
            whole = False
        if not whole:
            raise UserError(f"{path}: not the places in the shards of {INDEX}; pack them again")
        return found

    def _is_whole(self, bytes_of: Mapping[bytes, int]) -> bool:
        """Whether the arrays have one row per picture, and all pictures lie in these shards."""
        rows = (self.shards, self.offsets, self.sizes, self.labels)
        if (
            self.files.shape != (len(bytes_of),)  # first: billions of empty names take no bytes in a file
            or set(files := self.files.tolist()) != set(bytes_of)
            or [row.dtype for row in rows] != [np.int32, np.int64, np.int64, np.int64]
            or self.names.dtype.kind != "S"
            or {row.shape for row in (*rows, self.names)} != {(len(self.shards),)}
            or self.offsets.min(initial=SAMPLE_HEAD) < SAMPLE_HEAD
            or min(row.min(initial=0) for row in rows) < 0
        ):
            return False
        ends = np.array([bytes_of[name] for name in files])[self.shards]
        return bool((self.offsets <= ends - self.sizes).all())  # a sum could overflow


def _arrays(content: bytes, shards: Collection[Shard]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an `.npz` of unknown origin, which takes no more memory than places in these shards."""
    images = min(sum(line.bytes for line in shards) // SAMPLE_HEAD, sum(line.count for line in shards))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
    if sum(member.file_size for member in members) > _PLACE * (images + len(shards)) + _HEADERS:
        raise ValueError("a bomb")
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise ValueError("of a compression whose reader has no limit")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


def is_packed(head: bytes, name: str, size: int, label: int) -> bool:
    """Whether bytes begin as a sample of `vitascope pack` with this picture and label."""
    return (
        head.startswith(b"%d\0" % label, tarfile.BLOCKSIZE)
        and head.startswith(name.encode() + b"\0", 2 * tarfile.BLOCKSIZE)
        and head.startswith(b"%011o\0" % size, 2 * tarfile.BLOCKSIZE + _SIZE_FIELD)
    )


def member_content(path: AnyPath) -> bytes:
    """The content of a file beside shards; a UserError for one that is too large to be what its name says."""
    name, size = path.name, path.stat().st_size
    if size > MAX_BYTES[name]:
        raise UserError(
            f"{path}: {size:,} bytes, and {name} beside shards has at most {MAX_BYTES[name]:,}: it is "
            "damaged, or these are too many shards; pack larger ones, or into several folders"
        )
    return path.read_bytes()


def read_index(folder: AnyPath) -> Index | None:
    """The index of a folder, or None."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        values = parse_json(member_content(path).decode())
        version = values["version"]
        if version != INDEX_VERSION:
            raise UserError(f"{path}: version {version!r}, this vitascope reads {INDEX_VERSION}; update it")
        splits = {
            split: tuple(Shard(**line) for line in values["splits"][split])
            for split in SPLIT_FOLDERS
            if split in values["splits"]
        }
        index = Index(
            class_names=tuple(values["class_names"]),
            channels=values["channels"],
            splits=splits,
            samples=values["samples"],
        )
        lines = list(itertools.chain.from_iterable(splits.values()))
        whole = len(index.class_names) > 1 and index.channels in (1, 3) and bool(lines)
        named = all(isinstance(name, str) for name in (*index.class_names, index.samples))
        plain = all(line.file == Path(line.file).name and line.count + line.bytes > 0 for line in lines)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError):
        whole = named = plain = False
    if not (whole and named and plain):
        raise UserError(
            f"{path}: not an index of vitascope's; without it, the shards are read by their names"
        )
    return index
