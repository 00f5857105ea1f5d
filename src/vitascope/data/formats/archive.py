"""Archives of images, unpacked once into the cache.

An archive is rejected if a member lies outside the folder (`..`, absolute paths, drive letters, backslashes),
is not a plain file (links, devices, sparse files) or has a duplicate name, or if the archive unpacks to far
more than its size or the room on the disk. A rejected archive leaves no files.
"""

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

from vitascope.cache import cache_folder, writing_to_cache
from vitascope.data.formats.folder import inner_folder
from vitascope.data.formats.format import DataPackage
from vitascope.errors import UserError
from vitascope.storage import WriteError, free_mb, replacing


class Archive(DataPackage):
    """A `.zip`, or a tar, compressed or not."""

    def matches(self, data: str) -> bool:
        path = Path(data)
        return is_tar(path) or (path.name.lower().endswith(".zip") and path.is_file())

    def contents(self, data: str) -> Path:
        """The folder with the archive's images or splits."""
        return inner_folder(unpack(Path(data)))


def unpack(path: Path) -> Path:
    """The folder of an archive's files in the cache, unpacked if it is not there: named by the archive and a
    hash of its path, size, times and inode, and always complete. Copying can keep the time of the content."""
    status = path.stat()
    version = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    identity = "\0".join(map(str, (path.resolve(), *version)))
    key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
    target = cache_folder() / "unpacked" / f"{path.name.partition('.')[0]}-{key}"
    if not os.path.isdir(target):  # nor in a cache that this user may not enter
        with writing_to_cache(target.parent):
            if target.is_dir():  # by another process
                return target
            for left_over in target.parent.glob(f".*.{target.name}"):  # of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            unpack_all = _unpack_zip if path.name.lower().endswith(".zip") else _unpack_tar
            with replacing(target) as aside, archive_errors(path):
                aside.mkdir()
                with tqdm(desc=f"unpacking {path.name}", unit=" files", disable=None) as bar:
                    unpack_all(path, _Writer(path, aside, bar))
    return target


def _unpack_tar(path: Path, writer: "_Writer") -> None:
    with open_tar(path) as tar:
        for member in tar_members(tar, path):
            writer.admit(member.name, member.size, tar_fault(member))
            if not member.isdir():
                writer.write(member.name, tar_content(tar, member))


def _unpack_zip(path: Path, writer: "_Writer") -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        for member in members:  # all are checked before one is written
            writer.admit(member.orig_filename, member.file_size, _zip_fault(member))
        for member in members:
            if not member.is_dir():
                with archive.open(member) as content:
                    writer.write(member.filename, content)


class _Writer:
    """Writes an archive's members below a folder, after checking name, kind and size."""

    def __init__(self, archive: Path, folder: Path, bar: "tqdm[NoReturn]") -> None:
        self.archive = archive
        self.folder = folder
        self.bar = bar
        self.room = free_mb(folder) * 1e6
        self.limit = bomb_limit(archive)
        self.total = 0

    def admit(self, name: str, size: int, fault: str | None) -> None:
        """Check a member before anything of it is written."""
        if fault := _name_fault(name) or fault:
            reject_member(self.archive, name, fault)
        self.total += size
        if self.total > self.limit:
            reject_member(
                self.archive, name, f"part of a bomb: it unpacks to more than {MAX_RATIO} times its size"
            )
        if self.total > self.room:
            raise UserError(
                f"{self.archive}: unpacks to {self.total / 1e9:,.1f} GB or more, {self.folder.parent} has "
                f"room for {self.room / 1e9:,.1f} GB; make room, or set VITASCOPE_CACHE to another folder"
            )

    def write(self, name: str, content: IO[bytes]) -> None:
        """Write an admitted file; no existing file is opened, so no member can change another."""
        target = self.folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "xb") as file:
                shutil.copyfileobj(content, file, PIECE)
        except (FileExistsError, NotADirectoryError):
            reject_member(self.archive, name, "a duplicate")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # the archive's fault, not the disk's
                raise
            raise WriteError(f"{self.archive}: cannot be unpacked: {error.strerror}") from error
        self.bar.update()


def _name_fault(name: str) -> str | None:
    """The reason to reject a member's name, or None."""
    if name.startswith(("/", "\\")):
        return "an absolute path"
    if re.match(r"[A-Za-z]:", name):
        return "a path with a drive letter"
    if ".." in re.split(r"[/\\]", name):
        return "a path that leads outside"
    if "\\" in name or any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        return "a name with a backslash or a control character"
    return None


def _zip_fault(member: zipfile.ZipInfo) -> str | None:
    if member.flag_bits & 1:
        return "encrypted"
    kind = stat.S_IFMT(member.external_attr >> 16)  # 0 where the archive was not made on Unix
    if kind == stat.S_IFLNK:
        return "a link"
    return None if kind in (0, stat.S_IFREG, stat.S_IFDIR) else "neither a file nor a folder"


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
            with open_plain_tar(file, path) as tar:
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
def open_plain_tar(file: IO[bytes], name: str | Path) -> Iterator[tarfile.TarFile]:
    """A tar in an open file, which is not compressed; its name stands in messages."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
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
            reject_member(path, member.name, "of a negative size")
        extended = member.offset_data - member.offset > tarfile.BLOCKSIZE
        unused = not member.pax_headers and max(map(len, (member.name, member.linkname))) < 100
        if extended and (unused or "\0" in member.name):
            reject_member(path, member.name, "behind a damaged header")  # which `tarfile` ignores
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


def reject_member(archive: str | Path, member: str, fault: str) -> NoReturn:
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
