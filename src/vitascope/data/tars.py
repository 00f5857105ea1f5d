"""Tars of unknown origin, read member by member in bounded time and memory; all damage is detected."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn, cast

from vitascope.errors import UserError

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MAX_RATIO = 1000
"""Limit of bytes unpacked per byte of archive: pictures have about 1, and a bomb of gzip 1030."""
RATIO_COUNTS_FROM = 2**24
"""Bytes unpacked that are always accepted: a tar of one empty file has a ratio of 100."""
PIECE = 2**20
BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, struct.error),
    *(NotImplementedError, RuntimeError, RecursionError, ValueError, OverflowError, IndexError),
)
"""Errors of the archive modules for archives that are damaged, encrypted or of an unknown kind."""


def is_tar(path: Path) -> bool:
    """Whether a file is named like a tar, compressed or not."""
    return path.name.lower().endswith(TAR_SUFFIXES) and path.is_file()


class _Metered:
    """A stream that raises an error at a bomb, or at a header larger than `PIECE`."""

    def __init__(self, stream: IO[bytes], path: str | Path, limit: int, excess: str) -> None:
        self._stream = stream
        self._path = path
        self._limit = limit
        self._excess = excess
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= PIECE:  # contents come in pieces, so this is a name
            raise UserError(f"{self._path}: rejected: a header of {size:,} bytes")
        self._check(self._stream.tell() + size)
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        self._check(position)
        return self._stream.seek(position)

    def _check(self, position: int) -> None:
        if position > self._limit:
            raise UserError(f"{self._path}: {self._excess}")


_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")  # the first bytes of gzip, bzip2 and xz


@contextmanager
def open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """A tar, plain or compressed with gzip, bzip2 or xz, metered against bombs."""
    with open(path, "rb") as file:
        start = file.read(6)
        file.seek(0)
        if not start.startswith(_COMPRESSED):
            with open_plain_tar(file, path.stat().st_size, path) as tar:
                yield tar
            return
        if start.startswith(b"\x1f\x8b"):
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=file))
        elif start.startswith(b"BZh"):
            stream = bz2.BZ2File(file)
        else:
            stream = lzma.LZMAFile(file)  # noqa: SIM115 - closed below
        excess = f"rejected: a bomb, it unpacks to more than {MAX_RATIO} times its size"
        with stream, _opened(stream, path, bomb_limit(path), excess) as tar:
            yield tar


@contextmanager
def open_plain_tar(file: IO[bytes], size: int, name: str | Path) -> Iterator[tarfile.TarFile]:
    """A tar of this size in an open file, which is not compressed; its name stands in messages."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(_COMPRESSED):
        raise UserError(f"{name}: not a tar; a compressed one must be unpacked")
    with _opened(file, name, size + PIECE, "damaged or cut short: a member ends behind it") as tar:
        yield tar


def _opened(stream: IO[bytes], name: str | Path, limit: int, excess: str) -> tarfile.TarFile:
    return tarfile.open(fileobj=cast(IO[bytes], _Metered(stream, name, limit, excess)), mode="r:")


def tar_members(tar: tarfile.TarFile, path: str | Path) -> Iterator[tarfile.TarInfo]:
    """The members of a tar of `open_tar`, in their order, in little memory."""
    count = 0
    while (member := tar.next()) is not None:
        if member.size < 0:
            reject(path, member.name, "of a negative size")
        extended = member.offset_data - member.offset > tarfile.BLOCKSIZE
        unused = not member.pax_headers and max(map(len, (member.name, member.linkname))) < 100
        if extended and (unused or "\0" in member.name):
            reject(path, member.name, "behind a damaged header")  # which `tarfile` ignores
        yield member
        count += 1
        tar.members.clear()  # type: ignore[attr-defined] # each is a kilobyte, of millions
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise UserError(f"{path}: damaged or cut short after {count:,} members; copy it again")
    while tar.fileobj.read(PIECE):  # gzip and xz have a checksum at their end
        pass


def tar_content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """The content of a plain file in a tar."""
    content = tar.extractfile(member)
    assert content is not None, "a plain file"
    return content


def tar_fault(member: tarfile.TarInfo) -> str | None:
    """The kind of a member that is neither a file nor a folder; None for files and folders."""
    if member.issym() or member.islnk():
        return "a link"
    plain = member.isdir() or (member.isreg() and not member.issparse())
    return None if plain else "neither a file nor a folder"


def bomb_limit(path: Path) -> int:
    """Limit of bytes that an archive may unpack to."""
    return max(RATIO_COUNTS_FROM, MAX_RATIO * path.stat().st_size)


def reject(archive: str | Path, member: str, fault: str) -> NoReturn:
    """Raise the error that names the member for which a whole archive is rejected."""
    raise UserError(f"{archive}: rejected, nothing of it is used: member {member[:200]!r} is {fault}")


@contextmanager
def archive_errors(path: str | Path) -> Iterator[None]:
    """Turn the errors of the archive modules into a UserError that names the archive."""
    try:
        yield
    except UserError:
        raise
    except BROKEN as error:
        raise UserError(f"{path}: cannot be read as an archive: {error or type(error).__name__}") from error
