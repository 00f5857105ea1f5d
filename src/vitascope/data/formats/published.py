"""Data sets that are downloaded by name: resumed, retried, from several addresses, checked, then renamed."""

import dataclasses
import hashlib
import io
import os
import sys
from pathlib import Path
from typing import Any

from vitascope.cache import cache_folder, local_failure, writing_to_cache
from vitascope.data.formats.format import DataPackage
from vitascope.errors import UserError
from vitascope.network import client_errors
from vitascope.storage import settle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A file as its authors publish it."""

    name: str
    size: int  # bytes
    md5: str  # hexadecimal, from the authors: it detects damage, not forgery
    urls: tuple[str, ...]  # addresses, in the order in which they are tried


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


class _BoundedFile(io.BufferedWriter):
    """A file to append to, which stops an answer that is longer than it should be: the size is else
    compared at the end of the answer, and a server may never end."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(io.FileIO(path, "a"))
        self.size = size

    def write(self, chunk: Any) -> int:
        count = super().write(chunk)
        if self.tell() > self.size:
            raise OSError(f"the server sends more than the {self.size:,} bytes of the file")
        return count


def _download(file: Published, path: Path) -> Path:
    from huggingface_hub.file_download import http_get

    part = path.with_name(f".{path.name}.part")
    faults = []
    for url in file.urls:
        if _size(part) > file.size:
            part.unlink()
        have = _size(part) / file.size
        print(f"downloading {url} ({file.size / 1e6:,.1f} MB, {have:.0%} there)", file=sys.stderr)
        try:
            with _BoundedFile(part, file.size) as output:
                http_get(url, output, resume_size=output.tell(), expected_size=file.size)
        except client_errors() as error:
            if local_failure(error) is not None:  # of the disk
                raise
            faults.append(f"{url}: {str(error).partition(chr(10))[0] or type(error).__name__}")
            continue
        if _is_right(part, file):
            return settle(part, path)
        part.unlink()
        faults.append(f"{url}: the file does not have the MD5 {file.md5}, and was removed")
    raise UserError(
        f"{file.name} cannot be downloaded ({'; '.join(faults)}); "
        f"try again, or put the file into {path.parent} by hand"
    )


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
