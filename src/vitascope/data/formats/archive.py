"""Archives of images: read member by member, or unpacked once into the cache, and trusted in nothing.

Refused are members that would lie outside the folder (`..`, absolute paths, drive letters, backslashes),
that are no plain files (links, devices, sparse files), that come twice, or that unpack to far more than the
archive holds or the disk has room for. What is refused leaves nothing behind.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn, cast

from tqdm import tqdm

from vitascope.data.download import cache_folder, locked
from vitascope.errors import UserError

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MAX_MEMBERS = 5_000_000
MAX_RATIO = 1000
"""Bytes unpacked a byte of archive; pictures, packed already, have 1, and a bomb of gzip has 1030."""
RATIO_COUNTS_FROM = 2**24
"""Bytes unpacked below which the ratio says nothing: a tar of one empty file has a ratio of 100."""
_PIECE = 2**20
_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, struct.error),
    *(NotImplementedError, RuntimeError, RecursionError, ValueError, OverflowError, IndexError),
)
"""What the archive modules raise for archives that are damaged, encrypted or of an unknown kind."""


def is_tar(path: Path) -> bool:
    """Whether a file is named like a tar, packed or not."""
    return path.name.lower().endswith(TAR_SUFFIXES) and path.is_file()


def is_archive(path: Path) -> bool:
    """Whether a file is named like an archive that can be unpacked: `TAR_SUFFIXES`, or .zip."""
    return is_tar(path) or (path.name.lower().endswith(".zip") and path.is_file())


def unpack(path: Path) -> Path:
    """The folder of an archive's files, unpacked if it was not.

    It lies in the cache, under the archive's name and a hash of its path, size and time. It is written
    aside, flushed, and renamed: a name means a whole archive.

    Raises:
        UserError: a damaged or hostile archive, too little room, or a cache that cannot be written.
    """
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
    target = cache_folder() / "unpacked" / f"{path.name.partition('.')[0]}-{key}"
    if not target.is_dir():
        with locked(target.parent):
            if not target.is_dir():
                _unpack_aside(path, target)
    return target


def _unpack_aside(path: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir()
    try:
        with naming_faults(path), tqdm(desc=f"unpacking {path.name}", unit=" files", disable=None) as bar:
            writer = _Writer(path, aside, bar)
            if path.name.lower().endswith(".zip"):
                _unpack_zip(path, writer)
            else:
                _unpack_tar(path, writer)
        os.sync()  # every file's content, before the name says that all is there
        os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _unpack_tar(path: Path, writer: _Writer) -> None:
    with open_tar(path) as tar:
        for member in tar_members(tar, path):
            what = "a folder" if member.isdir() else _kind_of_tar_member(member)
            writer.admit(member.name, member.size, what)
            try:
                tarfile.data_filter(member, str(writer.folder))  # a second opinion
            except tarfile.FilterError as error:
                refuse(path, member.name, str(error))
            if not member.isdir():
                writer.write(member.name, tar_content(tar, member))


def _unpack_zip(path: Path, writer: _Writer) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        for member in members:  # all are admitted before one is written
            writer.admit(member.orig_filename, member.file_size, _kind_of_zip_member(member))
        for member in members:
            if not member.is_dir():
                with archive.open(member) as content:
                    writer.write(member.filename, content)


class _Writer:
    """Writes an archive's members below a folder, after judging name, kind and size."""

    def __init__(self, archive: Path, folder: Path, bar: tqdm[NoReturn]) -> None:
        self.archive = archive
        self.folder = folder
        self.bar = bar
        self.room = shutil.disk_usage(folder).free
        self.limit = bomb_limit(archive)
        self.members = 0
        self.total = 0

    def admit(self, name: str, size: int, kind: str) -> None:
        """Judge a member before anything of it is written."""
        if fault := _fault_of(name) or (kind if kind not in ("a file", "a folder") else None):
            refuse(self.archive, name, fault)
        self.members += 1
        self.total += size
        if self.members > MAX_MEMBERS:
            refuse(self.archive, name, f"one of more than {MAX_MEMBERS:,}")
        if self.total > self.limit:
            refuse(self.archive, name, f"part of a bomb: more than {MAX_RATIO} bytes for one of the archive")
        if self.total > self.room:
            raise UserError(
                f"{self.archive}: unpacks to {self.total / 1e9:,.1f} GB or more, {self.folder.parent} has "
                f"room for {self.room / 1e9:,.1f} GB; make room, or set VITASCOPE_CACHE to another folder"
            )

    def write(self, name: str, content: IO[bytes]) -> None:
        """Write an admitted file; nothing that is there is opened, so no member can change another."""
        target = self.folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = open(target, "xb")  # noqa: SIM115 - closed below
        except (FileExistsError, NotADirectoryError):
            refuse(self.archive, name, "there twice")
        with file:
            shutil.copyfileobj(content, file, _PIECE)
        self.bar.update()


def _fault_of(name: str) -> str | None:
    """What is wrong with a member's name, or None."""
    if name.startswith(("/", "\\")):
        return "an absolute path"
    if re.match(r"[A-Za-z]:", name):
        return "a path with a drive letter"
    if ".." in re.split(r"[/\\]", name):
        return "a path that leads outside"
    if "\\" in name or any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        return "a name with a backslash or a control character"
    return None


def _kind_of_tar_member(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "a link"
    return "a file" if member.isreg() and not member.issparse() else "neither a file nor a folder"


def _kind_of_zip_member(member: zipfile.ZipInfo) -> str:
    if member.flag_bits & 1:
        return "encrypted"
    kind = stat.S_IFMT(member.external_attr >> 16)  # 0 where the archive was not made on Unix
    if kind == stat.S_IFLNK:
        return "a link"
    return "a file" if kind in (0, stat.S_IFREG, stat.S_IFDIR) else "neither a file nor a folder"


# --- tars, member by member


class _Metered:
    """A stream that refuses to give more than a bomb's worth, or one header larger than a piece."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream = stream
        self._path = path
        self._limit = bomb_limit(path)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _PIECE:  # contents come in pieces, so this is a name
            raise UserError(f"{self._path}: refused: a header of {size:,} bytes")
        self._check(self._stream.tell() + size)
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        self._check(position)
        return self._stream.seek(position)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self, position: int) -> None:
        if position > self._limit:
            raise UserError(
                f"{self._path}: refused: a bomb, it unpacks to more than {MAX_RATIO} bytes for one of its own"
            )


@contextmanager
def open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """A tar, packed with gzip, bzip2, xz or not at all, as its first bytes say; metered against bombs."""
    with open(path, "rb") as file:
        start = file.read(6)
        file.seek(0)
        stream: IO[bytes] = file
        if start.startswith(b"\x1f\x8b"):
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=file))
        elif start.startswith(b"BZh"):
            stream = bz2.BZ2File(file)
        elif start == b"\xfd7zXZ\x00":
            stream = lzma.LZMAFile(file)  # noqa: SIM115 - closed below
        with stream, tarfile.open(fileobj=cast(IO[bytes], _Metered(stream, path)), mode="r:") as tar:
            yield tar


def tar_members(tar: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    """The members of a tar of `open_tar`, in their order, in little memory; and that it is whole to the end.

    Raises:
        UserError: what ends it is not the mark that ends a tar. (Python's `tarfile` takes any header that it
            cannot read for the end, and so a damaged tar for a shorter one.)
    """
    count = 0
    while (member := tar.next()) is not None:
        yield member
        count += 1
        tar.members.clear()  # type: ignore[attr-defined] # each is a kilobyte, of millions
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise UserError(f"{path}: damaged or cut short after {count:,} members; copy it again")
    while tar.fileobj.read(_PIECE):  # gzip and xz have a checksum at their end
        pass


def tar_content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """The content of a plain file in a tar."""
    content = tar.extractfile(member)
    assert content is not None, "a plain file"
    return content


def bomb_limit(path: Path) -> int:
    """Bytes that an archive may unpack to."""
    return max(RATIO_COUNTS_FROM, MAX_RATIO * path.stat().st_size)


def refuse(archive: Path, member: str, fault: str) -> NoReturn:
    """Name the member for which a whole archive is refused."""
    raise UserError(f"{archive}: refused, nothing of it is used: member {member[:200]!r} is {fault}")


@contextmanager
def naming_faults(path: Path) -> Iterator[None]:
    """Turn what the archive modules raise into a UserError that names the archive."""
    try:
        yield
    except UserError:
        raise
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{path}: cannot be unpacked: {error.strerror} in {cache_folder()}; make room, or set "
                f"VITASCOPE_CACHE to another folder"
            ) from error
        raise UserError(f"{path}: cannot be read as an archive: {error or type(error).__name__}") from error
