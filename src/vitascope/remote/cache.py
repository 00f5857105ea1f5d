"""Objects on the local disk: blocks of those that are read in parts, and whole copies; of bounded size.

`$VITASCOPE_CACHE/remote/blocks/` has a file for each block and a folder for each copy, named by URL, size and
version, so that another version has other names. Each is written aside and renamed. Its time of change is its
last use, up to a minute; those used longest ago go first when all have more than `VITASCOPE_REMOTE_GB`. The
file `used` has the size of all, which processes change under a lock. What is removed while it is read is
fetched again.
"""

import contextlib
import functools
import hashlib
import io
import os
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from vitascope import cache
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
_KEPT = 3 / 4
"""Share of the limit that is kept when it is reached, so that it is not reached again at once."""
_FEWEST = 16
"""Blocks that the cache has room for at least."""
_USE_SECONDS = 60.0
_ABANDONED_SECONDS = 3600.0
"""Age at which a file that a process has left aside is removed like others."""


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
            number, offset = divmod(start, BLOCK)
            parts.append(_part(object, number, offset, min(stop - start, BLOCK - offset)))
            start += len(parts[-1])
    except ChangedError:
        raise
    except UserError as error:  # it is about all objects, and none of them is to be left out
        raise StoreError(error) from error
    except OSError as error:
        raise StoreError(f"{object.url}: {cache.fault_in_words(error)}") from error
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
    try:
        content = path.read_bytes()
    except OSError:  # a cache that cannot be used is reported by the attempt to write to it
        content = make()
        _write(path, content)
    else:
        with contextlib.suppress(OSError):  # a cache that this user may only read
            os.utime(path)
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
        self._place = offset + (0, self._place, self._object.size)[whence]
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
            object = object_of(source)
            waiting.append((source, None if object is None else pool.submit(_fetch, object)))
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
    target = _path_in(
        _root(), "\0".join(f"{object.url}\0{object.size}\0{object.version}" for object in objects)
    )
    total, limit = sum(object.size for object in objects), limit_bytes()
    if total > limit:
        raise UserError(
            f"{folder}: {total / 1e9:,.2f} GB, and the cache of remote data is limited to {limit / 1e9:g} GB"
            ": raise VITASCOPE_REMOTE_GB"
        )
    with _lock(target, "copy"), explaining_failure(target.parent, "the cache", cache.ADVICE):
        if not target.is_dir():
            check_room(target, total)
            _take_room(total)
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
    least = _FEWEST * BLOCK / 1e9
    return cache.gigabytes("VITASCOPE_REMOTE_GB", LIMIT_GB, least, f"{least:.2g} or more")


def size_on_disk() -> int:
    """The bytes of all blocks and copies."""
    return sum(size for _, size, _ in _entries())


def _root() -> Path:
    return cache.cache_folder() / "remote"


@contextlib.contextmanager
def _lock(path: Path, kind: str) -> Iterator[None]:
    """Hold the lock of a block or copy, one of 256 of a kind; the folders are made if absent."""
    folder = _root() / "locks"
    with explaining_failure(path.parent, "the cache", cache.ADVICE):
        for each in (folder, path.parent):
            each.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{kind}-{path.name[:2]}", wait=True):
        yield


def _part(object: RemoteObject, number: int, start: int, size: int) -> bytes:
    path = _path_of(object, str(number))
    whole = min(BLOCK, object.size - number * BLOCK)
    if (content := _read_block(path, whole, start, size)) is not None:
        return content
    with _lock(path, "block"):  # one process fetches, the others wait for it
        if (content := _read_block(path, whole, start, size)) is not None:
            return content
        content = read_range(object, number * BLOCK, number * BLOCK + whole)
        _write(path, content)
    return content[start : start + size]


def _path_of(object: RemoteObject, part: str) -> Path:
    """The file of a block, or of what is kept of an object."""
    own = os.environ.get(cache.OWN_VARIABLE)
    # Looking for a variable that is not set takes as long as finding three.
    return _block_path(own, None if own else os.environ.get(cache.GENERAL_VARIABLE), object, part)


@functools.lru_cache(maxsize=2**12)  # naming a block takes longer than reading a small picture from it
def _block_path(own: str | None, general: str | None, object: RemoteObject, part: str) -> Path:
    return _path_in(_root(), f"{object.url}\0{object.size}\0{object.version}\0{part}")


def _path_in(root: Path, identity: str) -> Path:
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return root / "blocks" / key[:2] / key


def _write(path: Path, content: bytes) -> None:
    with explaining_failure(path.parent, "the cache", cache.ADVICE):
        path.parent.mkdir(parents=True, exist_ok=True)
        _take_room(len(content))
        with replacing(path) as aside:
            aside.write_bytes(content)


def _read_block(path: Path, whole: int, start: int, size: int) -> bytes | None:
    """Some bytes of a block on the disk; None where it has not as many as its `whole`."""
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


def _take_room(size: int) -> None:
    """Count a file that is about to be written; what was used longest ago may be removed."""
    limit, root = limit_bytes(), _root()
    with cache.writing_to_cache(root):
        note = root / "used"
        try:
            used = int(note.read_text())
        except (OSError, ValueError):  # absent, or cut: count
            used = int(limit)
        if used + size > limit:
            used = _removed_down_to(min(limit * _KEPT, limit - size))
        note.write_text(str(used + size))


def _removed_down_to(size: float) -> int:
    """Remove what was used longest ago until the rest has at most this size, in bytes, which is returned.

    What is being written stays.
    """
    entries = sorted(_entries())
    total = sum(each for _, each, _ in entries)
    for used, each, path in entries:
        if total <= size:
            break
        if path.name.startswith(".") and time.time() - used < _ABANDONED_SECONDS:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        total -= each
    return total


def _entries() -> Iterator[tuple[float, int, Path]]:
    """Time of the last use, size and place of each block and copy, those that are being written too."""
    for path in _root().glob("blocks/*/*"):
        with contextlib.suppress(FileNotFoundError):  # removed or renamed by another process
            inside = [each.stat() for each in (path, *path.rglob("*"))]
            yield (
                max(each.st_mtime for each in inside),
                sum(each.st_size for each in inside if stat.S_ISREG(each.st_mode)),
                path,
            )
