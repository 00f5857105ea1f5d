"""Archives of images, unpacked once into the cache.

An archive is rejected if a member lies outside the folder (`..`, absolute paths, drive letters, backslashes),
is not a plain file (links, devices, sparse files) or has a duplicate name, or if the archive unpacks to far
more than its size or the room on the disk. A rejected archive leaves no files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path, PureWindowsPath
from typing import IO, NoReturn

from tqdm import tqdm

from vitascope.cache import cache_folder, writing_to_cache
from vitascope.data.formats.folder import inner_folder
from vitascope.data.formats.format import DataPackage
from vitascope.data.tars import (
    MAX_RATIO,
    PIECE,
    archive_errors,
    bomb_limit,
    is_tar,
    open_tar,
    reject,
    tar_content,
    tar_fault,
    tar_members,
)
from vitascope.errors import UserError
from vitascope.storage import WINDOWS, WriteError, free_mb, replacing

MAX_MEMBERS = 5_000_000


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
    hash of its path, size and time, and always complete."""
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
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


def _unpack_tar(path: Path, writer: _Writer) -> None:
    with open_tar(path) as tar:
        for member in tar_members(tar, path):
            writer.admit(member.name, member.size, tar_fault(member))
            try:
                tarfile.data_filter(member, str(writer.folder))  # a second check
            except tarfile.FilterError as error:
                reject(path, member.name, str(error))
            if not member.isdir():
                writer.write(member.name, tar_content(tar, member))


def _unpack_zip(path: Path, writer: _Writer) -> None:
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

    def __init__(self, archive: Path, folder: Path, bar: tqdm[NoReturn]) -> None:
        self.archive = archive
        self.folder = folder
        self.bar = bar
        self.room = free_mb(folder) * 1e6
        self.limit = bomb_limit(archive)
        self.members = 0
        self.total = 0

    def admit(self, name: str, size: int, fault: str | None) -> None:
        """Check a member before anything of it is written."""
        if fault := _name_fault(name) or fault:
            reject(self.archive, name, fault)
        self.members += 1
        self.total += size
        if self.members > MAX_MEMBERS:
            reject(self.archive, name, f"one of more than {MAX_MEMBERS:,}")
        if self.total > self.limit:
            reject(self.archive, name, f"part of a bomb: it unpacks to more than {MAX_RATIO} times its size")
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
            reject(self.archive, name, "a duplicate")
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
    if WINDOWS and any(
        PureWindowsPath(part).is_reserved() or re.search(r'[<>:"|?*]|[ .]\Z', part)
        for part in name.rstrip("/").split("/")
        if part != "."
    ):
        return "a name that Windows does not allow; rename it, or unpack the archive by hand"
    return None


def _zip_fault(member: zipfile.ZipInfo) -> str | None:
    if member.flag_bits & 1:
        return "encrypted"
    kind = stat.S_IFMT(member.external_attr >> 16)  # 0 where the archive was not made on Unix
    if kind == stat.S_IFLNK:
        return "a link"
    return None if kind in (0, stat.S_IFREG, stat.S_IFDIR) else "neither a file nor a folder"
