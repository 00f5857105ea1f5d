"""Known data sets, brought once into the cache folder: resumed, retried, checked, then named."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from tqdm import tqdm

from vitascope.errors import UserError

RETRIES = 4
"""Connections in a row that may drop without bringing anything, before the next address is tried."""
PAUSE = 1.0
"""Seconds before the second connection; the pause doubles with each that brings nothing."""
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as dropped."""
_CHUNK = 2**18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A file as its authors publish it."""

    name: str
    size: int
    """Bytes."""
    md5: str
    """What the authors give, in hexadecimal: it finds damage; no one is kept from forging it."""
    urls: tuple[str, ...]
    """Where it is, the first to be tried first."""


def _idx(parts: tuple[tuple[str, int, str], ...], *folders: str) -> tuple[Published, ...]:
    return tuple(
        Published(name=name, size=size, md5=md5, urls=tuple(folder + name for folder in folders))
        for name, size, md5 in parts
    )


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
KNOWN_SETS: dict[str, tuple[Published, ...]] = {
    "cifar10": (
        Published(
            name="cifar-10-python.tar.gz",
            size=170_498_071,
            md5="c58f30108f718f92721af3b95e74349a",
            urls=(f"{_CIFAR}cifar-10-python.tar.gz",),
        ),
    ),
    "cifar100": (
        Published(
            name="cifar-100-python.tar.gz",
            size=169_001_437,
            md5="eb9058c3a382ffc7106e4002c42a8d85",
            urls=(f"{_CIFAR}cifar-100-python.tar.gz",),
        ),
    ),
    "mnist": _idx(
        (
            ("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            ("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    "fashion-mnist": _idx(
        (
            ("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
}
"""Names that DATA may be, and their files (torchvision 0.28, `datasets/cifar.py` and `mnist.py`)."""


class _DroppedError(Exception):
    """A connection that broke; another may bring the rest."""


class _MirrorError(Exception):
    """An address that does not have the file."""


def cache_folder() -> Path:
    """Where downloads and unpacked archives are kept.

    `$VITASCOPE_CACHE`, else `$XDG_CACHE_HOME/vitascope`, else `~/.cache/vitascope`.
    """
    if own := os.environ.get("VITASCOPE_CACHE"):
        return Path(own).expanduser().absolute()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(general).expanduser().absolute() / "vitascope"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder of the cache, and be the only process that writes in it.

    Raises:
        UserError: it cannot be made or written in.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 - closed below, after the caller's work
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written in: {error.strerror}; set VITASCOPE_CACHE to a folder that can"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process's download is waited for, then used
        yield


def fetch_set(name: str) -> Path:
    """Where a known set lies, downloaded if it was not: its only file, or the folder of its files.

    Args:
        name: a key of `KNOWN_SETS`.

    Raises:
        UserError: as `fetch`.
    """
    folder = cache_folder() / name
    paths = [fetch(file, folder) for file in KNOWN_SETS[name]]
    return paths[0] if len(paths) == 1 else folder


def fetch(file: Published, folder: Path) -> Path:
    """The path of a published file in a folder of the cache, downloaded if it is not there.

    It is written beside its place as `.<name>.part`, which a later call goes on with, and is given its
    name when size and checksum are right and it is on the disk. A file that is there is checked too.

    Raises:
        UserError: no address has it, or has it right; the disk is full; what is there is another file.
    """
    path = folder / file.name
    if not path.exists():
        with locked(folder):
            if not path.exists():
                _download(file, path)
                return path
    if not _is_right(path, file):
        raise UserError(f"{path} is not {file.name} as published (its MD5 is not {file.md5}); remove it")
    return path


def _download(file: Published, path: Path) -> None:
    """Bring a file from the first address that has it."""
    part = path.with_name(f".{path.name}.part")
    faults = []
    for url in file.urls:
        try:
            _fetch_from(url, file, part)
        except _MirrorError as error:
            faults.append(f"{url}: {error}")
            continue
        if _is_right(part, file):
            _settle(part, path)
            return
        part.unlink()
        faults.append(f"{url}: what came does not have the MD5 {file.md5}, and was removed")
    raise UserError(
        f"{file.name} cannot be downloaded ({'; '.join(faults)}); "
        f"try again, or put the file into {path.parent} by hand"
    )


def _fetch_from(url: str, file: Published, part: Path) -> None:
    """Bring a part to its full size from one address, over as many connections as that takes."""
    if _size(part) > file.size:
        part.unlink()
    in_vain = 0
    while (before := _size(part)) < file.size:
        try:
            _go_on(url, file, part)
        except _DroppedError as error:
            in_vain = 0 if _size(part) > before else in_vain + 1
            if in_vain > RETRIES:
                raise _MirrorError(str(error)) from error
            time.sleep(PAUSE * 2**in_vain)


def _go_on(url: str, file: Published, part: Path) -> None:
    """One connection: append what is missing of a part, or start it again if the server knows no ranges."""
    have = _size(part)
    headers = {"User-Agent": "vitascope", **({"Range": f"bytes={have}-"} if have else {})}
    with _answer(urllib.request.Request(url, headers=headers)) as answer:
        if have and not (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            have = 0
        announced = answer.headers.get("Content-Length")
        if announced is not None and announced != str(file.size - have):
            raise _MirrorError(f"it has {announced} bytes, not {file.size - have}")
        with _opened(part, "ab" if have else "wb") as output, _progress(file, have, url) as bar:
            while have < file.size:
                chunk = _read(answer, min(_CHUNK, file.size - have))
                if not chunk:
                    raise _DroppedError(f"the connection ended after {have:,} of {file.size:,} bytes")
                _write(output, chunk, part)
                have += len(chunk)
                bar.update(len(chunk))


def _answer(request: urllib.request.Request) -> http.client.HTTPResponse:
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500 or error.code in (408, 429):
            raise _DroppedError(f"HTTP status {error.code}") from error
        raise _MirrorError(f"HTTP status {error.code}") from error
    except urllib.error.URLError as error:  # no name, no route, nobody there, no certificate
        raise _MirrorError(f"no connection: {error.reason}") from error
    except (http.client.HTTPException, OSError) as error:
        raise _DroppedError(str(error) or type(error).__name__) from error


def _read(answer: http.client.HTTPResponse, size: int) -> bytes:
    try:
        return answer.read(size)
    except (http.client.HTTPException, OSError) as error:
        raise _DroppedError(str(error) or type(error).__name__) from error


def _opened(part: Path, mode: str) -> IO[bytes]:
    try:
        return open(part, mode, buffering=0)  # so that a write fails where it is made
    except OSError as error:
        _cannot_write(part, error)


def _write(output: IO[bytes], chunk: bytes, part: Path) -> None:
    left = memoryview(chunk)
    try:
        while left:
            left = left[output.write(left) :]  # a disk may fill in the middle of a chunk
    except OSError as error:
        _cannot_write(part, error)


def _cannot_write(part: Path, error: OSError) -> NoReturn:
    way_out = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    raise UserError(
        f"{part}: cannot be written: {error.strerror}; {way_out}, or set VITASCOPE_CACHE to another folder"
    ) from error


def _progress(file: Published, have: int, url: str) -> tqdm[NoReturn]:
    """A bar on a terminal; elsewhere a line, and a bar that does not show."""
    terminal = sys.stderr.isatty()
    if not terminal:
        print(f"downloading {url} ({file.size / 1e6:,.1f} MB, {have / file.size:.0%} there)", file=sys.stderr)
    return tqdm(
        total=file.size, initial=have, desc=file.name, unit="B", unit_scale=True, disable=not terminal
    )


def _is_right(path: Path, file: Published) -> bool:
    with open(path, "rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest() == file.md5


def _settle(part: Path, path: Path) -> None:
    """Flush to the disk, rename, flush the folder: after a power cut the name means the whole file."""
    with open(part, "rb") as content:
        os.fsync(content.fileno())
    os.replace(part, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
