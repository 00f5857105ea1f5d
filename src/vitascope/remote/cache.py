"""Objects on the local disk: blocks of those that are read in parts, and whole copies; of bounded size.

`$VITASCOPE_CACHE/remote/blocks/` has a file for each block of an object, `copies/` a folder for each copy.
Both are named by URL, size and version, so that another version has other names. A block has a checksum per
piece, which is compared at each reading. Each is written aside and
renamed. A file's time of change is that of its last use, up to a minute; those used longest ago go first when
all have more than `VITASCOPE_REMOTE_GB`.

Processes reserve room in portions, under a lock, in the file `used`. The real size is counted only when the
portions reach the limit. What is removed while it is read is fetched again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
import os
import shutil
import stat
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from vitascope.cache import (
    ADVICE,
    GENERAL_VARIABLE,
    OWN_VARIABLE,
    cache_folder,
    fault_in_words,
    writing_to_cache,
)
from vitascope.errors import UserError
from vitascope.network import Threads
from vitascope.remote.stores import ChangedError, RemoteObject, StoreError, find_object, name_in, read_range
from vitascope.storage import READ_BYTES, check_room, explaining_failure, locked, replacing

T = TypeVar("T")

LIMIT_GB = 20.0
"""Size of the cache where `VITASCOPE_REMOTE_GB` sets no other."""
BLOCK = 2**22
"""Bytes of an object that are fetched and kept together."""
READERS = 16
"""Threads that fetch at once."""
AHEAD = 256
"""Objects that `prefetched` fetches before they are taken."""
PIECE = 2**14
"""Bytes of a block that have a checksum of their own, and are read together."""
_PORTION = 1 / 64
"""Share of the limit that a process reserves at a time."""
_KEPT = 3 / 4
"""Share of the limit that is kept when it is reached, so that it is not reached again at once."""
_CHECKSUM = 4  # bytes
_FEWEST = 16
"""Blocks that the cache has room for at least."""
_STRIPES = 256
"""Locks of the blocks."""
_USE_SECONDS = 60.0
_ABANDONED_SECONDS = 3600.0
"""Age at which a file that a process has left aside is removed."""


def read(object: RemoteObject, start: int = 0, size: int | None = None) -> bytes:
    """Bytes of an object, `size` from `start` on or all; blocks that are not on the disk are fetched.

    Raises:
        ChangedError: another object has its URL now, or none.
        EOFError: it ends earlier.
        StoreError: the store does not answer, or the cache cannot be read or written.
    """
    stop = object.size if size is None else start + size
    if stop > object.size:
        raise EOFError(f"it has {object.size:,} bytes, and {stop:,} are needed")
    parts = []
    try:
        while start < stop:
            number = start // BLOCK
            end = min(stop, (number + 1) * BLOCK)
            parts.append(_part(object, number, start - number * BLOCK, end - start))
            start = end
    except (StoreError, ChangedError):
        raise
    except UserError as error:  # it is about all objects, and none of them is to be left out
        raise StoreError(error) from error
    except OSError as error:
        raise StoreError(f"{object.url}: {fault_in_words(error)}") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def fetched(url: str) -> bytes:
    """The object of this URL as it is now; errors as `read` and `find_object`."""
    found = find_object(url)
    if found is None:
        raise StoreError(f"{url}: a folder, and no file")
    return read(found)


def kept(object: RemoteObject, kind: str, make: Callable[[], bytes]) -> bytes:
    """What `make` returns for an object, from the disk if it was kept there like a block; errors as `make`'s.

    `kind` names what it is, and the version of its form.
    """
    path = _path_of(object, kind)
    if (content := _kept(path)) is None:
        with _lock(path, "kept"):  # one process makes it, the others wait for it
            if (content := _kept(path)) is None:
                content = make()
                _write(path, content)
    return content


def _kept(path: Path) -> bytes | None:
    try:
        content = _checked(path.read_bytes())
        with contextlib.suppress(PermissionError):  # a cache that this user may only read
            os.utime(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(fault_in_words(error)) from error
    return content


class ObjectReader(io.RawIOBase):
    """An object as a file that is open for reading; errors as `read`."""

    def __init__(self, object: RemoteObject) -> None:
        self._object = object
        self._place = 0

    def readable(self) -> bool:  # noqa: D102 - of the base class
        return True

    def seekable(self) -> bool:  # noqa: D102
        return True

    def tell(self) -> int:  # noqa: D102
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:  # noqa: D102
        self._place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._object.size}[whence]
        )
        return self._place

    def readinto(self, buffer: Any) -> int:  # noqa: D102
        size = max(0, min(len(buffer), self._object.size - self._place))
        buffer[:size] = read(self._object, self._place, size)
        self._place += size
        return size


def prefetched(
    sources: Iterable[T], object_of: Callable[[T], RemoteObject | None]
) -> Generator[T, None, None]:
    """The sources, while the objects of the next ones are fetched into the cache; an object that has changed
    or is too large for the cache is left to its reader."""
    waiting: deque[tuple[T, Future[None] | None]] = deque()
    with Threads(READERS) as pool:
        for source in sources:
            found = object_of(source)
            waiting.append((source, None if found is None else pool.submit(_fetch, found)))
            while waiting and (waiting[0][1] is None or len(waiting) >= AHEAD):
                yield _arrived(*waiting.popleft())
        while waiting:
            yield _arrived(*waiting.popleft())


def _fetch(object: RemoteObject) -> None:
    with contextlib.suppress(ChangedError):  # which the reader reports
        read(object)


def _arrived(source: T, fetch: Future[None] | None) -> T:
    if fetch is not None:
        fetch.result()
    return source


def copied(objects: Sequence[RemoteObject], folder: str) -> Path:
    """A local folder with whole objects, each at its path below the folder of this URL.

    Raises:
        StoreError: an object changes meanwhile, or the store does not answer.
        UserError: more than the limit of the cache, or no room on the disk.
    """
    identity = "\0".join(f"{object.url}\0{object.size}\0{object.version}" for object in objects)
    target = _root() / "copies" / _key(identity)
    total, limit = sum(object.size for object in objects), limit_bytes()
    if total > limit:
        raise UserError(
            f"{folder}: {total / 1e9:,.2f} GB, and the cache of remote data is limited to {limit / 1e9:g} GB"
            ": raise VITASCOPE_REMOTE_GB"
        )
    with _lock(target, "copy"):
        if not target.is_dir():
            with _explaining(target.parent):
                check_room(target, total)
                _room().take(total)
                with replacing(target) as aside:
                    aside.mkdir()
                    for object in objects:
                        try:
                            download(object, aside / name_in(object.url, folder))
                        except ChangedError as error:
                            raise StoreError(f"{object.url}: {error}; repeat this") from error
        os.utime(target)
    return target


def download(object: RemoteObject, path: Path) -> None:
    """Write a whole object to a file, past the cache; a ChangedError if it changes meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    starts = range(0, object.size, BLOCK)

    def fetch(start: int) -> bytes:
        return read_range(object, start, min(start + BLOCK, object.size))

    with open(path, "wb") as file, Threads(READERS) as pool:
        for first in range(0, len(starts), READERS):  # so that few blocks are in memory
            for content in pool.map(fetch, starts[first : first + READERS]):
                file.write(content)
    os.utime(path, (0, 0))  # the same for every copy: what is unpacked from it is named by it


def limit_bytes() -> float:
    """The limit of the cache; a UserError if `VITASCOPE_REMOTE_GB` is not a number that is large enough."""
    text = os.environ.get("VITASCOPE_REMOTE_GB", "")
    try:
        limit = float(text or LIMIT_GB)
    except ValueError:
        limit = -1.0
    least = _FEWEST * BLOCK / 1e9
    if not limit >= least:  # so that NaN fails too
        raise UserError(f"VITASCOPE_REMOTE_GB is a number of gigabytes, {least:.2g} or more, not {text!r}")
    return limit * 1e9


def size_on_disk() -> int:
    """The bytes of all blocks and copies."""
    return sum(size for _, size, _ in _entries())


def _root() -> Path:
    return cache_folder() / "remote"


def _key(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]


@contextlib.contextmanager
def _lock(path: Path, kind: str) -> Iterator[None]:
    """Hold the lock of a block or copy, one of a few; its folder is made if absent."""
    folder = _root() / "locks"
    with _explaining(path.parent):
        for each in (folder, path.parent):
            each.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{kind}-{int(path.name[:8], 16) % _STRIPES}", wait=True):
        yield


def _explaining(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Explain a failure to write to the cache."""
    return explaining_failure(folder, "the cache", ADVICE)


def _part(object: RemoteObject, number: int, start: int, size: int) -> bytes:
    """Some bytes of a block."""
    path = _path_of(object, str(number))
    whole = min(BLOCK, object.size - number * BLOCK)
    found = _read_block(path, whole, start, size)
    if found is not None:
        return found
    with _lock(path, "block"):  # one process fetches, the others wait for it
        found = _read_block(path, whole, start, size)
        if found is not None:
            return found
        content = read_range(object, number * BLOCK, number * BLOCK + whole)
        _write(path, content)
    return content[start : start + size]


def _path_of(object: RemoteObject, part: str) -> Path:
    """The file of a block, or of what is kept of an object."""
    own = os.environ.get(OWN_VARIABLE)
    # Looking for a variable that is not set takes as long as finding three.
    return _path_in(own, None if own else os.environ.get(GENERAL_VARIABLE), object, part)


@functools.lru_cache(maxsize=2**12)  # naming a block takes longer than reading a small picture from it
def _path_in(own: str | None, general: str | None, object: RemoteObject, part: str) -> Path:
    key = _key(f"{object.url}\0{object.size}\0{object.version}\0{part}")
    return _root() / "blocks" / key[:2] / key


def _write(path: Path, content: bytes) -> None:
    stored = _with_checksums(content)
    with _explaining(path.parent):
        _room().take(len(stored))
        with replacing(path) as aside:
            aside.write_bytes(stored)


def _with_checksums(content: bytes) -> bytes:
    """Each piece of a content behind its checksum."""
    pieces = (content[start : start + PIECE] for start in range(0, len(content), PIECE))
    return b"".join(part for piece in pieces for part in (zlib.crc32(piece).to_bytes(_CHECKSUM), piece))


def _checked(stored: bytes) -> bytes | None:
    """The content of pieces that were written with checksums; None if it is damaged."""
    pieces = []
    for start in range(0, len(stored), _CHECKSUM + PIECE):
        piece = stored[start + _CHECKSUM : start + _CHECKSUM + PIECE]
        if zlib.crc32(piece) != int.from_bytes(stored[start : start + _CHECKSUM]):
            return None
        pieces.append(piece)
    return b"".join(pieces)


def _read_block(path: Path, whole: int, start: int, size: int) -> bytes | None:
    """Some bytes of a block on the disk; None where it is not there completely, or damaged."""
    first, last = start // PIECE, (start + size - 1) // PIECE
    begin, end = first * (_CHECKSUM + PIECE), min((last + 1) * PIECE, whole) + (last + 1) * _CHECKSUM
    stored = _read_file(path, whole + math.ceil(whole / PIECE) * _CHECKSUM, begin, end - begin)
    content = None if stored is None else _checked(stored)
    return None if content is None else content[start - first * PIECE :][:size]


def _read_file(path: Path, whole: int, start: int, size: int) -> bytes | None:
    """Some bytes of a file on the disk; None where it has not as many as its `whole`."""
    try:
        descriptor = os.open(path, READ_BYTES)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_size != whole:
            return None
        if time.time() - status.st_mtime > _USE_SECONDS:
            with contextlib.suppress(OSError):  # a cache that this user may only read
                os.utime(path)
        os.lseek(descriptor, start, os.SEEK_SET)
        content = os.read(descriptor, size)
        return content if len(content) == size else None
    finally:
        os.close(descriptor)


class _Room:
    """The room in the cache that this process has reserved."""

    def __init__(self) -> None:
        self._left = 0.0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Reserve room for a file; what was used longest ago may be removed."""
        with self._lock:
            if self._left < size:
                self._left += _reserve(max(size, limit_bytes() * _PORTION))
            self._left -= size


_ROOMS: dict[tuple[int, Path, float], _Room] = {}


def _room() -> _Room:
    """What this process has reserved in this cache; a fork has reserved nothing."""
    return _ROOMS.setdefault((os.getpid(), _root(), limit_bytes()), _Room())


def _reserve(size: float) -> float:
    """Reserve room among all processes; returns it."""
    limit, root = limit_bytes(), _root()
    with writing_to_cache(root):
        note = root / "used"
        try:
            used = float(note.read_text())
        except (OSError, ValueError):
            used = limit  # unknown: count
        if used + size > limit:
            used = _removed_down_to(max(0.0, min(limit * _KEPT, limit - size)))
        with replacing(note) as aside:
            aside.write_text(f"{used + size:.0f}\n")
    return size


def _removed_down_to(size: float) -> float:
    """Remove what was used longest ago until the rest has at most this size, in bytes, which is returned.

    What is being written stays.
    """
    entries = sorted(_entries())
    total = sum(each for _, each, _ in entries)
    for _, each, path in entries:
        if total <= size:
            break
        if path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        total -= each
    return float(total)


def _entries() -> Iterator[tuple[float, int, Path]]:
    """Time of the last use, size and place of each block and copy; abandoned files are removed."""
    for path in [*_root().glob("blocks/*/*"), *_root().glob("copies/*")]:
        with contextlib.suppress(FileNotFoundError):  # removed or renamed by another process
            inside = [each.stat() for each in (path, *path.rglob("*"))]
            used = inside[0].st_mtime
            if path.name.startswith("."):
                used = max(each.st_mtime for each in inside)  # of a copy's files, the last is being written
                if time.time() - used > _ABANDONED_SECONDS:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    continue
            yield used, sum(each.st_size for each in inside if stat.S_ISREG(each.st_mode)), path
