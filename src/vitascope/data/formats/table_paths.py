"""The image files that the cells of a table name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from vitascope.data.listing import IMAGE_SUFFIXES, suffix_of
from vitascope.errors import UserError
from vitascope.formatting import canonical, counted, listed

_DRIVE = re.compile(r"[A-Za-z]:/")


def located(cells: Sequence[str], table: Path, images: str | None) -> tuple[list[str], Path]:
    """The path of each image, and the folder of the images: `images` or the table's folder, or, if the paths
    lead out of the latter, the one that contains all.

    A missing suffix is found if it is unique.

    Raises:
        UserError: files that are missing or unclear, or outside of `images`, with their number.
    """
    base = os.path.expanduser(images) if images is not None else str(table.parent)
    if not os.path.isdir(base):
        raise UserError(f"{table}: images {images}: no such folder")
    folders = _Folders(base)
    found = [folders.find(cell) for cell in cells]
    outside = folders.outside
    if outside and images is not None:
        raise UserError(
            f"{table}: {_share(outside, cells)} lead out of {images}: {listed(outside)}; write them relative "
            "to it, or give the folder that contains all as images"
        )
    if empty := [number for number, cell in enumerate(cells, 1) if not cell.strip()]:
        raise UserError(
            f"{table}: {counted(len(empty), 'row')} without an image; the first is row {empty[0]:,}"
        )
    unclear = [cell for cell in cells if cell in folders.unclear]
    if unclear:
        cell = unclear[0]
        raise UserError(
            f"{table}: {_share(unclear, cells)} have several files: {cell} may be "
            f"{' or '.join(folders.unclear[cell][:3])}; write the suffixes"
        )
    missing = [cell for cell in cells if cell in folders.missing]
    if missing:
        absolute = all(os.path.isabs(cell) or _DRIVE.match(cell.replace("\\", "/")) for cell in missing)
        advice = (
            "they are absolute, perhaps of another machine: write them relative to the table (of a "
            "DataFrame, to the working directory), or to the folder images"
            if absolute
            else f"searched in {base}; give another folder as images, or leave the rows out"
        )
        raise UserError(f"{table}: {_share(missing, cells)} do not exist: {listed(missing)}; {advice}")
    if not outside:
        return found, Path(base)
    found = [os.path.abspath(path) for path in found]
    return found, Path(os.path.commonpath({os.path.dirname(path) for path in found}))


class _Folders:
    """Finds files by their paths; each folder is listed once, which is faster than a look at each file."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.outside: list[str] = []
        self.missing: set[str] = set()
        self.unclear: dict[str, list[str]] = {}
        self._absolute = os.path.abspath(base)
        self._listed: dict[str, tuple[str, set[str], bool]] = {}  # by the path before the name
        self._stems: dict[str, dict[str, list[str]]] = {}

    def find(self, cell: str) -> str:
        """The path of an image; one that lies outside, or is missing or unclear, is recorded."""
        head, slash, name = cell.strip().replace("\\", "/").rpartition("/")
        place, names, inside = self._folder(head + slash)
        if not inside:
            self.outside.append(cell)
        if name not in names:
            fitting = self._alike(place, names).get(canonical(name), [])
            if len(fitting) == 1:
                name = fitting[0]
            elif fitting:
                self.unclear[cell] = fitting
            else:
                self.missing.add(cell)
        return os.path.join(place, name)

    def _folder(self, head: str) -> tuple[str, set[str], bool]:
        """A folder's path, the names of the files in it, and whether it lies in the base."""
        if head not in self._listed:
            place = os.path.normpath(os.path.join(self.base, head))
            absolute = os.path.abspath(place)
            inside = absolute == self._absolute or absolute.startswith(os.path.join(self._absolute, ""))
            if os.path.isabs(head) and inside:
                place = os.path.normpath(os.path.join(self.base, os.path.relpath(absolute, self._absolute)))
            place = _in_any_form(place)
            try:
                with os.scandir(place) as entries:
                    names = {entry.name for entry in entries if entry.is_file()}
            except (OSError, ValueError):  # its images are reported as missing
                names = set()
            self._listed[head] = place, names, inside
        return self._listed[head]

    def _alike(self, place: str, names: set[str]) -> dict[str, list[str]]:
        """The files in a folder by their names in one Unicode form, those of images also without suffix."""
        if place not in self._stems:
            stems: dict[str, list[str]] = {}
            for name in sorted(names):
                whole = canonical(name)
                stems.setdefault(whole, []).append(name)
                if suffix_of(name) in IMAGE_SUFFIXES:
                    stems.setdefault(os.path.splitext(whole)[0], []).append(name)
            self._stems[place] = stems
        return self._stems[place]


def _in_any_form(path: str) -> str:
    """The path, or the only one there is that differs from it in the Unicode forms of its names."""
    if path.isascii() or os.path.lexists(path):
        return path
    folder, name = os.path.split(path)
    folder = _in_any_form(folder)
    try:
        alike = [each for each in os.listdir(folder or ".") if canonical(each) == canonical(name)]
    except OSError:  # its images are reported as missing
        alike = []
    return os.path.join(folder, alike[0] if len(alike) == 1 else name)


def _share(some: Sequence[str], cells: Sequence[str]) -> str:
    return f"{len(some):,} of {len(cells):,} images"
