"""Writing to the disk: locks, files and folders that are whole or absent, and clear errors when it fails."""

import dataclasses
import errno
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from vitascope.errors import UserError

_LOCK, _ASIDE = ".writing.lock", ".writing-"
_URL = re.compile(r"[A-Za-z][\w+.-]+:/")
READ_BYTES = os.O_RDONLY | getattr(os, "O_BINARY", 0)
"""The mode of `os.open` for bytes as they are; without the second flag, Windows translates line ends."""
_MANY = 100  # files; from there on, flushing everything on the disk at once is faster
WINDOWS = os.name == "nt"
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # some network file systems


class WriteError(UserError):
    """A file or folder cannot be written."""


def check_local(path: Path) -> None:
    """Reject a URL that has become a path, which would be a folder called `s3:`."""
    if _URL.match(str(path)):
        url = str(path).replace(":/", "://", 1)  # as it was before it became a path
        raise WriteError(
            f"{url}: this is written to local files only: name one, and copy it to the store afterwards"
        )


def check_new_folder(folder: Path) -> None:
    """Reject a folder to write that has files, or is one; an empty folder is as good as a new one."""
    if folder.exists() and (not folder.is_dir() or any(path.name != _LOCK for path in folder.iterdir())):
        raise UserError(f"{folder}: is not an empty folder and is not overwritten; choose a new one")


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Write a new or empty folder as the only process; a UserError if another process is, or was faster."""
    make_folder(folder)
    lock = folder / _LOCK
    with locked(lock):
        try:
            if any(path.name != _LOCK for path in folder.iterdir()):
                raise UserError(f"{folder}: another process has written it meanwhile; choose a new one")
            yield
        finally:
            with suppress(OSError):  # the folder is not empty; Windows keeps an open file
                lock.unlink()
                folder.rmdir()


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, unless it exists; a WriteError explains a failure."""
    check_local(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file, not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise WriteError(f"{folder}: cannot write there: {reason}; name a new folder") from error


def free_mb(path: Path) -> float:
    """Free space, in MB, on the disk that holds `path`, which need not exist yet."""
    # Not `Path.is_dir`, which raises below a folder that this user may not enter.
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.isdir(parent))
    return shutil.disk_usage(existing).free / 1e6


def check_room(path: Path, size: int) -> None:
    """Reject a file of `size` bytes that the disk has no room for, because libraries report a full disk in
    many ways, some of them by ending the process."""
    if free_mb(path) < size / 1e6:
        raise WriteError(
            f"{path} takes about {size / 1e6:,.1f} MB, and the disk has {free_mb(path):,.1f} MB free; "
            "free some, or name a file on another disk"
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or a folder to; it is renamed to `path` when whole, and removed otherwise.
    A file is replaced; a folder must be empty or absent."""
    check_local(path)
    # Each process has a path of its own, because two may write the same file: the last one to end stays.
    aside = path.with_name(f".{os.getpid()}.{path.name}")
    _remove(aside)  # of a process of the same number that was killed
    try:
        yield aside
        settle(aside, path)
    except OSError as error:
        if error.filename == str(aside):
            error.filename = str(path)
        raise
    finally:
        _remove(aside)


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """Yield a new folder in a folder, and remove it at the end; those that killed processes have left there
    are removed first."""
    for left in place.glob(f"{_ASIDE}*/{_LOCK}"):
        with suppress(OSError), open(left, "a") as file:  # another process has removed it; no locks here
            if lock_descriptor(file.fileno(), blocking=False):
                shutil.rmtree(left.parent, ignore_errors=True)
    temporary = tempfile.TemporaryDirectory(prefix=_ASIDE, dir=place)
    with temporary as folder, _lock_file(Path(folder) / _LOCK) as descriptor:
        with suppress(OSError):  # no locks here: nothing is ever removed by others
            lock_descriptor(descriptor, blocking=True)
        files = Path(folder) / "files"
        files.mkdir(parents=True)  # another process may have been faster to lock, and to remove
        yield files


def settle(aside: Path, path: Path) -> Path:
    """Flush a file or a folder of files to the disk, then rename it, so that even after a power cut the name
    stands for the whole content; returns `path`. The files get the mode of any new file: some libraries write
    theirs for the owner alone."""
    files = [aside, *aside.rglob("*")] if aside.is_dir() else [aside]
    mask = _umask()
    for below in files:
        with suppress(OSError):  # some network and USB file systems have no modes
            below.chmod((0o777 if below.is_dir() else 0o666) & ~mask)
    if len(files) > _MANY and not WINDOWS:
        os.sync()
    else:
        for below in files:
            flush(below)
    if WINDOWS and aside.is_dir() and path.is_dir():
        path.rmdir()  # a rename there replaces no folder, not even an empty one
    os.replace(aside, path)
    flush(path.parent)
    return path


def _umask() -> int:
    """The permissions that new files lack. Asking means setting it, for a moment to the strictest."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if WINDOWS and path.is_dir():  # which it cannot open; it writes the names with the files
        return
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, values: Mapping[str, Any]) -> Path:
    """Write a JSON object; the file is the old one or whole."""
    with replacing(path) as aside:
        aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return path


@contextmanager
def locked(path: Path, *, wait: bool = False, holder: str = "") -> Iterator[None]:
    """Hold the lock file `path`, made if absent, as the only process; the system releases it at the end.
    Where another process holds it, `wait`, or raise a UserError that names the holder (not on Windows), by
    default as a process. Without locks in the file system, warn."""
    with _lock_file(path) as descriptor:
        try:
            if not lock_descriptor(descriptor, blocking=wait):
                raise UserError(
                    f"{path.parent} is in use by {_holder(path)}; wait until it is done, or stop it"
                )
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            reason = f"cannot be locked ({error.strerror}): start no second process there"
            print(f"vitascope: {path.parent} {reason}", file=sys.stderr)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{holder or f'process {os.getpid()} on {socket.gethostname()}'}\n".encode())
        yield


_OPENING = threading.RLock()
"""Held while a file is opened and its end in forked processes is registered: a process that another thread
forks in between, such as one that reads images, would keep the lock of the file as long as it lives."""
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(
        before=_OPENING.acquire, after_in_parent=_OPENING.release, after_in_child=_OPENING.release
    )


@dataclasses.dataclass(eq=False)
class _Descriptor:
    """An open file without a buffer, whose lock another thread may hold when a process is forked."""

    number: int
    """-1 once it is closed: the number may be that of another file then."""

    def close(self) -> None:
        """Close it, also in a forked process."""
        if self.number >= 0:
            os.close(self.number)
        self.number = -1


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    """The descriptor of a file, made if absent, that forked processes close."""
    try:
        with _OPENING:
            file = _Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666))
            register_after_fork(file, _Descriptor.close)
    except OSError as error:
        raise WriteError(f"{path.parent}: cannot be written: {error.strerror}") from error
    try:
        yield file.number
    finally:
        with _OPENING:
            file.close()


def _holder(path: Path) -> str:
    """The process that holds a lock file; Windows lets no other process read a locked part."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8")[:200].strip() or "another process"
    return "another process"


@contextmanager
def explaining_failure(path: Path, what: str, advice: str) -> Iterator[None]:
    """Turn a failure to write into one line: what and where, why, the free space, and what to do.

    A missing permission has nothing to do with the free space: the line leaves it out, and advises to make
    the place writable where the advice is to make room.
    """
    try:
        yield
    except BrokenPipeError:  # of standard output
        raise
    except WriteError as error:
        raise UserError(f"{error}; {advice}") from error
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        if error.errno in _NO_RIGHT:
            advice = advice.replace("make room", "make it writable")
        else:
            reason += f" ({free_mb(path):,.1f} MB are free there)"
        raise UserError(f"{path}: {what} cannot be written: {reason}; {advice}") from error
