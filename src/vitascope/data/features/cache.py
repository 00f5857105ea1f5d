"""A cache of features on the disk, by everything that they depend on and by the content of each image.

`$VITASCOPE_CACHE/features/<key>/` has the features of one body, representation, preprocessing and precision,
in files of safetensors that are never changed: `contents` uint8 (n, 16), a hash of all bytes of each image,
and `features` float32 (n, D); the metadata name the key, so that a file from elsewhere is not read, and have
a checksum of both, which is compared before the file is first used (7 GB/s). Each is
written aside under a name of its own and renamed, so that several processes can write and none reads a part
of a file. `made.json` says what the key stands for; the time of its last change is that of the last use. When
all keys together have more than `VITASCOPE_FEATURES_GB`, those go first that were used longest ago.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vitascope.cache import cache_folder, gigabytes, writing_to_cache
from vitascope.data.contents import DIGEST
from vitascope.errors import UserError
from vitascope.storage import check_room, replacing, write_json

FORMAT = 2
"""Of the key and the files; to be raised when the same options lead to other pixels or features."""
LIMIT_GB = 20.0
"""Size of all features where `VITASCOPE_FEATURES_GB` sets no other."""
MADE = "made.json"
SUFFIX = ".safetensors"
CHUNK_BYTES = 2**24
CHUNK_SECONDS = 60.0
"""A file is written when it has so many bytes, or so long after its first image: that much a kill costs."""
_TOUCH_SECONDS = 60.0
_ABANDONED_SECONDS = 3600.0
"""Age at which a file that a process has left aside is removed."""

Contents = npt.NDArray[np.bytes_]
"""(n,), from `digests_of`; empty for an image that is not kept."""
Features = npt.NDArray[np.float32]
"""(n, D)."""

_NOTHING: Contents = np.zeros(0, f"S{DIGEST}")

log = logging.getLogger(__name__)


class FeatureCache:
    """The features of one body, representation, preprocessing and precision.

    Args:
        made: everything that the features depend on beside the images, as values of JSON.

    A failure to write, such as a full disk, costs one warning, and no features are kept from then on.

    Raises:
        UserError: `VITASCOPE_FEATURES_GB` is not a number from 0 on.
    """

    def __init__(self, made: Mapping[str, Any]) -> None:
        self.made = {**made, "pillow": PIL.__version__, "format": FORMAT}
        key = hashlib.sha256(json.dumps(self.made, sort_keys=True).encode()).hexdigest()[:32]
        self.root = cache_folder() / "features"
        self.folder = self.root / key
        self.limit = gigabytes("VITASCOPE_FEATURES_GB", LIMIT_GB, 0, "0 for no cache")
        self._keeps = self.limit > 0
        self._waiting: list[tuple[Contents, Features]] = []
        self._since = 0.0
        self._touched = 0.0
        self._verified: set[int] = set()
        is_there = os.path.isdir(self.folder)  # and may be entered
        names = sorted(self.folder.glob(f"[!.]*{SUFFIX}")) if is_there else []
        found = [_open_chunk(path) for path in names]
        self._chunks = [chunk for chunk in found if chunk is not None]
        self._broken = np.zeros(len(self._chunks), np.bool_)
        sizes = [len(chunk.contents) for chunk in self._chunks]
        everything = np.concatenate([_NOTHING, *(chunk.contents for chunk in self._chunks)])
        self._contents, first = np.unique(everything, return_index=True)  # sorted
        self._chunk_of = np.repeat(np.arange(len(sizes)), sizes)[first]
        self._row_of = np.concatenate([np.arange(0), *map(np.arange, sizes)])[first]
        self._touch()

    def __len__(self) -> int:
        """The number of images whose features are there, as of the opening."""
        return len(self._contents)

    def find(self, contents: Contents) -> npt.NDArray[np.int64]:
        """The place of each image in the cache, (n,), for `take`; -1 for one that is not there."""
        if not len(self):
            return np.full(len(contents), -1)
        places = np.searchsorted(self._contents, contents).clip(max=len(self) - 1)
        known = self._contents[places] == contents  # none is empty, see `add`
        self._verify(set(self._chunk_of[places[known]].tolist()) - self._verified)
        return np.where(known & ~self._broken[self._chunk_of[places]], places, -1)

    def _verify(self, numbers: set[int]) -> None:
        """Compare the checksums of files; a damaged one is removed, and its images are not there any more."""
        self._verified |= numbers
        for number in numbers:
            chunk = self._chunks[number]
            if chunk.is_whole():
                continue
            self._broken[number] = True
            log.warning("%s is damaged or gone; its features are computed again", chunk.path)
            with contextlib.suppress(OSError):  # a cache that this user may only read
                chunk.path.unlink(missing_ok=True)

    def take(self, places: npt.NDArray[np.int64]) -> Features:
        """The features at places that `find` returned, none of them -1: (n, D), n at least 1.

        Raises:
            UserError: their file was removed or damaged since the cache was opened.
        """
        self._touch()
        chunks, rows = self._chunk_of[places], self._row_of[places]
        parts: dict[int, Features] = {}
        for number in np.unique(chunks).tolist():
            try:
                parts[number] = self._chunks[number].features()[rows[chunks == number]]
            except (OSError, ValueError) as error:  # ValueError: a shorter file
                raise UserError(
                    f"{self.folder}: features were removed or damaged while they were read: repeat this; if "
                    f"the cache has reached its limit of {self.limit / 1e9:g} GB, raise VITASCOPE_FEATURES_GB"
                ) from error
        found = np.empty((len(places), next(iter(parts.values())).shape[1]), np.float32)
        for number, part in parts.items():
            found[chunks == number] = part
        return found

    def add(self, contents: Contents, features: Features) -> None:
        """Keep the features of images, which a later `FeatureCache` finds; some wait in memory, see `flush`.

        Images without a digest are left out.
        """
        known = contents != b""
        if not self._keeps or not known.any():
            return
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append((contents[known], features[known].astype(np.float32, copy=False)))
        size = sum(part.nbytes for _, part in self._waiting)
        if size >= CHUNK_BYTES or time.monotonic() - self._since >= CHUNK_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what waits in memory."""
        if not self._waiting:
            return
        contents = np.concatenate([part for part, _ in self._waiting])
        features = np.concatenate([part for _, part in self._waiting])
        self._waiting = []
        rows = np.frombuffer(contents.tobytes(), np.uint8).reshape(-1, DIGEST)
        made = {"key": self.folder.name, "crc32": str(_checksum(contents, features))}
        data = save({"contents": rows, "features": features}, made)
        try:
            with writing_to_cache(self.root):
                self._make_room(len(data))
                self.folder.mkdir(exist_ok=True)
                if not (self.folder / MADE).exists():
                    write_json(self.folder / MADE, self.made)
                path = self.folder / f"{time.time_ns()}-{secrets.token_hex(4)}{SUFFIX}"
                check_room(path, len(data))
                with replacing(path) as aside:
                    aside.write_bytes(data)
                os.utime(self.folder / MADE)
        except UserError as error:
            self._keeps = False
            log.warning("%s; the features are computed, but not cached from here on", error)

    def _make_room(self, size: int) -> None:
        """Remove what was used longest ago until `size` bytes more are within the limit."""
        sizes = {folder: _size(folder) for folder in self.root.iterdir() if folder.is_dir()}
        own, total = sizes.pop(self.folder, 0), sum(sizes.values())
        if own + size > self.limit:
            raise UserError(
                f"{self.folder} has {own / 1e9:,.2f} GB of features, and the limit is "
                f"{self.limit / 1e9:g} GB (VITASCOPE_FEATURES_GB)"
            )
        for folder in sorted(sizes, key=_last_used):
            if own + total + size <= self.limit:
                return
            shutil.rmtree(folder)
            total -= sizes[folder]

    def _touch(self) -> None:
        """Note the use, now and then."""
        if len(self) and time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touched = time.monotonic()
            with contextlib.suppress(OSError):  # a cache that this user may only read
                os.utime(self.folder / MADE)


def _last_used(folder: Path) -> float:
    """When a key was used last, in seconds; one without its file is the first to go."""
    try:
        return (folder / MADE).stat().st_mtime
    except OSError:
        return 0.0


def _size(folder: Path) -> int:
    """The bytes of a key's files, of which those that a killed process left aside are removed."""
    total = 0
    for path in list(folder.iterdir()):
        status = path.stat()
        if path.name.startswith(".") and time.time() - status.st_mtime > _ABANDONED_SECONDS:
            path.unlink()
        else:
            total += status.st_size
    return total


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A file of a key."""

    path: Path
    contents: Contents
    start: int  # of the features, in bytes
    width: int  # of the features, D
    checksum: int

    def is_whole(self) -> bool:
        """Whether the file is there, with the content that was written."""
        try:
            return _checksum(self.contents, self.features()) == self.checksum
        except (OSError, ValueError):  # ValueError: a shorter file
            return False

    def features(self) -> Features:
        """The features in the file, (n, D), each read when it is used."""
        return np.memmap(self.path, np.float32, "r", self.start, (len(self.contents), self.width))


def _checksum(contents: Contents, features: Features) -> int:
    return zlib.crc32(np.ascontiguousarray(features).data, zlib.crc32(contents.tobytes()))


def _open_chunk(path: Path) -> _Chunk | None:
    """A file of this folder's key with its contents; None for another key's, a damaged or a missing one."""
    try:
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(
                file.read(8), "little"
            )  # of the first tensor, that of the largest dtype
        with safe_open(path, framework="np") as tensors:
            made, contents = tensors.metadata(), tensors.get_tensor("contents")
            features = tensors.get_slice("features")
            (n, width), dtype = features.get_shape(), features.get_dtype()
        if made["key"] != path.parent.name or contents.shape != (n, DIGEST) or dtype != "F32":
            return None
        return _Chunk(path, np.frombuffer(contents, f"S{DIGEST}"), start, width, int(made["crc32"]))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None
