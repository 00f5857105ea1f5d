"""The files below a folder: the one way in which training, evaluation and prediction find images."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vitascope.formatting import counted

if TYPE_CHECKING:
    from vitascope.remote.paths import StorePath  # the help of commands needs no stores

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".avif", ".jp2", ".heic", ".heif"),
}
"""Suffixes of image files, in any case."""


SYSTEM_FOLDERS = frozenset(
    {
        *("@eadir", "@recycle", "@recently-snapshot", "@sharebin", "@tmp", "#recycle", "#snapshot"),
        *("$recycle.bin", "$extend", "system volume information", "__macosx", "lost+found"),
        *("__pycache__", "_thumbs", "_thumbnails"),
    }
)
"""Folders that Synology, QNAP, Windows, macOS, Linux and programs leave among pictures, in lower case: of
thumbnails or deleted files. Hidden folders are left out too."""


def is_system_folder(name: str) -> bool:
    """Whether a folder of this name is one of `SYSTEM_FOLDERS`."""
    return name.lower() in SYSTEM_FOLDERS


def is_image(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a file, or a link to one, with a suffix of images."""
    return suffix_of(entry.name) in IMAGE_SUFFIXES and _leads_to(entry.is_file)


def images_below(
    folder: "str | os.PathLike[str] | StorePath",
    failed: Callable[[str, OSError], None],
    others: Callable[[os.DirEntry[str]], None] = lambda entry: None,
    skipped: Callable[[str], None] = lambda folder: None,
) -> Iterator[os.DirEntry[str]]:
    """The images below a folder, as `visible_files` has them. `others` is called with each other file; at the
    end, a warning counts what has an image's suffix and is no file."""
    left_out: Counter[str] = Counter()
    for entry in visible_files(folder, failed, skipped=skipped):
        if is_image(entry):
            yield entry
        elif suffix_of(entry.name) not in IMAGE_SUFFIXES:
            others(entry)
        elif entry.is_symlink():
            left_out["broken link"] += 1
        else:
            left_out["empty folder" if entry.is_dir() else "pipe or device"] += 1
    if left_out:
        counts = ", ".join(counted(count, kind) for kind, count in left_out.items())
        log.warning("%s: left out, with names of images: %s", folder, counts)


def suffix_of(name: str) -> str:
    """The suffix of a file's name, in lower case."""
    return os.path.splitext(name)[1].lower()


def visible_files(
    folder: "str | os.PathLike[str] | StorePath",
    failed: Callable[[str, OSError], None] = lambda folder, error: None,
    *,
    as_paths: bool = False,
    skipped: Callable[[str], None] = lambda folder: None,
) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder but folders, hidden entries and what is in `SYSTEM_FOLDERS`: a folder's files
    first, then its folders, each by name; or `as_paths`, in the order of their paths. An empty folder with an
    image's suffix is not left out.

    Links to folders are entered, except those that lead to a folder in which they lie themselves.

    Args:
        folder: where to begin.
        failed: called with each folder that cannot be listed, because it has vanished for example.
        skipped: called with each system folder.
    """
    if not isinstance(folder, str | os.PathLike):
        return cast("Iterator[os.DirEntry[str]]", _listed_below(folder))
    place = Path(folder).absolute()
    try:
        above = frozenset(_identity(os.stat(path)) for path in (place, *place.parents))
    except OSError as error:
        failed(os.fspath(folder), error)
        return iter(())
    return _below(os.fspath(folder), above, failed, skipped, as_paths)


def _listed_below(folder: "StorePath") -> "Iterator[StorePath]":
    """The files below a folder in a store, in the order of `visible_files`."""
    entries = sorted(folder.iterdir())
    yield from (entry for entry in entries if entry.is_file())
    for entry in entries:
        if entry.is_dir() and not is_system_folder(entry.name):
            yield from _listed_below(entry)


def _below(
    folder: str,
    entered: frozenset[tuple[int, int]],
    failed: Callable[[str, OSError], None],
    skipped: Callable[[str], None],
    as_paths: bool,
) -> Iterator[os.DirEntry[str]]:  # only the names in one folder and in its parents are in memory
    files: list[os.DirEntry[str]] = []
    folders: list[os.DirEntry[str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if _leads_to(entry.is_dir) else files).append(entry)
    except OSError as error:
        failed(folder, error)
    first, second = ([], [*files, *folders]) if as_paths else (files, folders)
    is_folder = {entry.name for entry in folders}
    yield from sorted(first, key=lambda entry: entry.name)
    del files, folders, first
    for entry in sorted(second, key=lambda entry: entry.name):
        if entry.name not in is_folder:
            yield entry
            continue
        if is_system_folder(entry.name):
            skipped(entry.path)
            continue
        try:
            found = _identity(entry.stat())
        except OSError as error:
            failed(entry.path, error)
            continue
        if found not in entered:
            yield from _below(entry.path, entered | {found}, failed, skipped, as_paths)
            with suppress(OSError):  # `failed` has been called with it
                if suffix_of(entry.name) in IMAGE_SUFFIXES and not os.listdir(entry.path):
                    yield entry


def _leads_to(is_kind: Callable[[], bool]) -> bool:
    """Whether an entry is of a kind; a link that leads nowhere is of none."""
    try:
        return is_kind()
    except OSError:  # a link to itself, for example
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    """What the paths of one folder have in common."""
    return status.st_dev, status.st_ino
