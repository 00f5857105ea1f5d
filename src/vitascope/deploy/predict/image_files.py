"""Image files below folders, found as they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from vitascope.data.formats.folder import IMAGE_SUFFIXES
from vitascope.errors import UserError


def find_images(places: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Yield image files, and those below folders: files with an image's suffix that are not hidden.

    A folder's own files come first, then its folders, each sorted by name. Only the names in one folder and
    in its parents are in memory. Links to folders are not followed.
    """
    several = [places] if isinstance(places, str | os.PathLike) else places
    for place in (os.fspath(place) for place in several):
        if os.path.isdir(place):
            yield from _below(place)
        elif os.path.exists(place):
            yield place
        else:
            raise UserError(f"{place}: no such file")


def _below(folder: str) -> Iterator[str]:
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES and entry.is_file():
                    files.append(entry.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed: {error.strerror}") from error
    for name in sorted(files):
        yield os.path.join(folder, name)
    del files
    for name in sorted(folders):
        yield from _below(os.path.join(folder, name))
