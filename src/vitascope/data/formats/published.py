"""Data sets that are downloaded by name: resumed, retried, from several addresses, checked, then renamed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from vitascope.cache import cache_folder, writing_to_cache
from vitascope.data.formats.format import DataPackage
from vitascope.errors import UserError
from vitascope.network import StalledError, chunks, within
from vitascope.storage import settle

RETRIES = 4
"""Connections in a row that may drop without a new byte, before the next address is tried."""
PAUSE = 1.0
"""Seconds before the second connection; the pause doubles with each connection without a new byte."""
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as dropped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A file as its authors publish it."""

    name: str
    size: int  # bytes
    md5: str  # hexadecimal, from the authors: it detects damage, not forgery
    urls: tuple[str, ...]  # addresses, in the order in which they are tried


class _DroppedError(Exception):
    """A connection that broke; another may bring the rest."""


class _MirrorError(Exception):
    """An address that does not have the file."""


def fetch(file: Published, folder: Path) -> Path:
    """The path of a published file in the cache, checked; if it is not there, it is downloaded to
    `.<name>.part` (which a later call resumes), checked and renamed."""
    path = folder / file.name
    if not os.path.exists(path):  # nor in a cache that this user may not enter
        with writing_to_cache(folder):
            if not path.exists():
                return _download(file, path)
    if not _is_right(path, file):
        raise UserError(f"{path} is not {file.name} as published (its MD5 is not {file.md5}); remove it")
    return path


def _download(file: Published, path: Path) -> Path:
    part = path.with_name(f".{path.name}.part")
    faults = []
    for url in file.urls:
        try:
            _fetch_from(url, file, part)
        except _MirrorError as error:
            faults.append(f"{url}: {error}")
            continue
        if _is_right(part, file):
            return settle(part, path)
        part.unlink()
        faults.append(f"{url}: the file does not have the MD5 {file.md5}, and was removed")
    raise UserError(
        f"{file.name} cannot be downloaded ({'; '.join(faults)}); "
        f"try again, or put the file into {path.parent} by hand"
    )


def _fetch_from(url: str, file: Published, part: Path) -> None:
    """Complete a part from one address, over as many connections as that takes."""
    if _size(part) > file.size:
        part.unlink()
    in_vain = 0
    while (before := _size(part)) < file.size:
        try:
            _resume(url, file, part)
        except _DroppedError as error:
            in_vain = 0 if _size(part) > before else in_vain + 1
            if in_vain > RETRIES:
                raise _MirrorError(str(error)) from error
            time.sleep(PAUSE * 2**in_vain)


def _resume(url: str, file: Published, part: Path) -> None:
    """Append the rest of a part over one connection, or start again if the server knows no ranges."""
    have = _size(part)
    headers = {"User-Agent": "vitascope", **({"Range": f"bytes={have}-"} if have else {})}
    with _connection_errors():
        request = urllib.request.Request(url, headers=headers)
        opened = within(lambda: urllib.request.urlopen(request, timeout=TIMEOUT), 2 * TIMEOUT)  # with headers
    with opened as response:
        if have and not (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            have = 0
        announced = response.headers.get("Content-Length")
        if announced is not None and announced != str(file.size - have):
            raise _MirrorError(f"it has {announced} bytes, not {file.size - have}")
        shown = sys.stderr.isatty()
        if not shown:
            line = f"downloading {url} ({file.size / 1e6:,.1f} MB, {have / file.size:.0%} there)"
            print(line, file=sys.stderr)
        bar = tqdm(
            total=file.size, initial=have, desc=file.name, unit="B", unit_scale=True, disable=not shown
        )
        with open(part, "ab" if have else "wb") as output, bar:
            content = chunks(response, file.size - have)
            while have < file.size:
                with _connection_errors():
                    chunk = next(content, b"")
                if not chunk:
                    raise _DroppedError(f"the connection ended after {have:,} of {file.size:,} bytes")
                output.write(chunk)
                output.flush()  # so that a killed download loses nothing
                have += len(chunk)
                bar.update(len(chunk))


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Tell a connection that broke from an address that does not have the file."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500 or error.code in (408, 429):
            raise _DroppedError(f"HTTP status {error.code}") from error
        raise _MirrorError(f"HTTP status {error.code}") from error
    except urllib.error.URLError as error:  # no name, no route, no server, no certificate
        raise _MirrorError(f"no connection: {error.reason}") from error
    except StalledError as error:
        raise _MirrorError(str(error)) from error
    except (http.client.HTTPException, OSError) as error:
        raise _DroppedError(str(error) or type(error).__name__) from error


def _is_right(path: Path, file: Published) -> bool:
    with open(path, "rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest() == file.md5


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _files(parts: tuple[tuple[str, int, str], ...], *folders: str) -> tuple[Published, ...]:
    return tuple(
        Published(name=name, size=size, md5=md5, urls=tuple(folder + name for folder in folders))
        for name, size, md5 in parts
    )


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
KNOWN_SETS: dict[str, tuple[Published, ...]] = {
    "cifar10": _files((("cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a"),), _CIFAR),
    "cifar100": _files(
        (("cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),), _CIFAR
    ),
    "mnist": _files(
        (
            ("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            ("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    "fashion-mnist": _files(
        (
            ("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
}
"""The files of each (torchvision 0.28, `datasets/cifar.py` and `mnist.py`)."""


class PublishedSet(DataPackage):
    """A name in `KNOWN_SETS`, unless a file or folder has it."""

    def matches(self, data: str) -> bool:
        return data in KNOWN_SETS and not os.path.exists(data)

    def contents(self, data: str) -> Path:
        """The only file, or the folder of the files, downloaded unless they are there."""
        folder = cache_folder() / data
        paths = [fetch(file, folder) for file in KNOWN_SETS[data]]
        return paths[0] if len(paths) == 1 else folder
