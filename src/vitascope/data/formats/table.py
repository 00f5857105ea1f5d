"""Tables of images and their labels: CSV, TSV, JSON lines, Parquet."""

import dataclasses
import hashlib
import json
import os
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitascope.data.formats import table_labels
from vitascope.data.formats.folder import OUTSIDE, SPLIT_FOLDERS, split_of
from vitascope.data.formats.format import DataFormat
from vitascope.data.formats.table_file import TableFile, read_table
from vitascope.data.formats.table_labels import Labels
from vitascope.data.listing import IMAGE_SUFFIXES, suffix_of
from vitascope.data.splits import ImageSet, Inventory, divided_groups
from vitascope.data.stored import TableImage
from vitascope.data.table_options import (
    AS_RECOGNIZED,
    LISTED,
    Roles,
    TableOptions,
    image_column,
    is_table,
    roles_of,
)
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError, nearest_path
from vitascope.formatting import counted, listed
from vitascope.remote.paths import AnyPath, StorePath, folder_at


@dataclasses.dataclass(frozen=True)
class Table(DataFormat):
    """A file with one row per image: a column of paths, one of labels or several of 0 and 1, and perhaps one
    of splits and one of groups.

    The images of a set are in the order of a folder's: of their classes, then of their paths; with several
    classes per image, of their paths.
    """

    options: TableOptions = AS_RECOGNIZED

    def matches(self, data: str) -> bool:
        return is_table(data) and os.path.isfile(data)

    def read(self, data: str) -> Inventory:
        place, options = Path(data), self.options
        file = read_table(place, lambda names: _used(roles_of(names, options, place), names))
        roles = _recognized(roles_of(file.names, options, place), file)
        if not file.columns[roles.image]:
            raise UserError(f"{place}: the table has no rows")
        labels = _labels({name: file.columns[name] for name in roles.label}, options, place)
        paths, root = located(file.columns[roles.image], place, options.images)
        every = _rows(paths, labels, file, roles, place)
        rows = _without_copies(every, place)
        unused = []
        if repeated := len(every) - len(rows):
            unused.append(f"{counted(repeated, 'row')} that repeat an image")
        if outside := sum(row.split == OUTSIDE for row in rows):
            unused.append(f"{counted(outside, 'image')} without a split")
        _check_groups(rows, f"{place}: the column {roles.group}")
        settled = rows if labels is None else _settled(rows)
        sets = _sets(settled, labels is not None and labels.several, root)
        note = _note(file, roles, labels)
        no_labels = f"{note}; name the column of labels: columns label=COLUMN" if labels is None else note
        return Inventory(tuple(sets), 3, root.as_posix(), tuple(unused), notes=(note,), unlabelled=no_labels)


def images_of_table(place: Path, options: TableOptions = AS_RECOGNIZED, *, keep: bool = False) -> list[str]:
    """The paths of the images in a table, one for each row, in their order; labels are not needed.

    With `keep`, they are `TableImage`s with the cells of all columns, in the order of `column_digests`.
    """
    file = read_table(place, lambda names: names if keep else [image_column(names, options, place)])
    paths, _ = located(file.columns[image_column(file.names, options, place)], place, options.images)
    if not keep:
        return paths
    return list(map(TableImage.of, paths, zip(*file.columns.values(), strict=True)))


def column_digests(place: Path) -> dict[str, str]:
    """The columns of a table by name, with a digest of their cells each."""
    columns = read_table(place).columns
    return {name: hashlib.sha256(json.dumps(cells).encode()).hexdigest() for name, cells in columns.items()}


def _used(roles: Roles, names: tuple[str, ...]) -> Iterable[str]:
    """The columns to read: without one of labels, all, because those of 0 and 1 are."""
    if roles.guess_label and not roles.label:
        return names
    return filter(None, (roles.image, roles.split, roles.group, roles.fold, *roles.label))


def _recognized(roles: Roles, file: TableFile) -> Roles:
    """The roles after a look at the cells: the columns of 0 and 1 are labels, and a column of folds that
    names splits is that of splits, if there are no others."""
    if roles.guess_label and not roles.label:
        others = set(file.names) - {roles.image, roles.split, roles.group, roles.fold}
        names = [name for name in file.names if name in others]
        label = tuple(name for name in names if table_labels.is_indicator(file.columns[name]))
        # A single one is more likely something else.
        roles = dataclasses.replace(roles, label=label if len(label) > 1 else ())
    if roles.split is None and roles.fold is not None:
        cells = {cell.strip() for cell in file.columns[roles.fold]} - {""}
        if cells and all(map(split_of, cells)):
            return dataclasses.replace(roles, split=roles.fold, fold=None)
    return roles


def _labels(columns: dict[str, list[str]], options: TableOptions, place: Path) -> Labels | None:
    """The labels in the columns of labels; None without any."""
    if len(columns) > 1:
        return table_labels.of_columns(columns, options, place)
    for name, cells in columns.items():
        labels = table_labels.of_cells(cells, name, options, place)
        return labels if any(labels.rows) else None
    return None


def _splits(cells: Sequence[str], column: str, place: Path) -> list[str]:
    meant = {cell: split_of(cell.strip()) for cell in set(cells) if cell.strip()}
    if others := sorted(cell.strip() for cell, split in meant.items() if split is None):
        raise UserError(
            f"{place}: the column {column} has {listed(others, LISTED)}; a split is "
            f"{', '.join(name for names in SPLIT_FOLDERS.values() for name in names)}; correct it, or leave "
            "the column out with columns split="
        )
    return [meant.get(cell) or OUTSIDE if meant else "all" for cell in cells]


def _note(file: TableFile, roles: Roles, labels: Labels | None) -> str:
    """What was recognized, in one line."""
    form = "no labels" if labels is None else f"label {listed(roles.label, LISTED)} ({labels.form})"
    others = {"split": roles.split, "group": roles.group, "fold": roles.fold}
    used = [f"image {roles.image}", form, *(f"{role} {name}" for role, name in others.items() if name)]
    named = {roles.image, *roles.label, *others.values()}
    unused = [name for name in file.names if name not in named]
    return f"columns: {', '.join(used)}" + (f"; unused: {listed(unused, LISTED)}" if unused else "")


class LabelledRow(NamedTuple):
    """One image of a table."""

    path: str
    classes: tuple[str, ...] | None
    """None for an image without a label."""
    split: str
    group: str | None
    """None in a table without groups; empty for an image without one."""
    fold: str | None
    unknown: tuple[str, ...]
    """The classes of which it is not known whether the image has them."""


def _rows(
    paths: list[str], labels: Labels | None, file: TableFile, roles: Roles, place: Path
) -> list[LabelledRow]:
    group, fold = (
        repeat(None) if name is None else table_labels.numbered(file.columns[name])
        for name in (roles.group, roles.fold)
    )
    split = repeat("all") if roles.split is None else _splits(file.columns[roles.split], roles.split, place)
    classes = repeat(None) if labels is None else labels.rows
    unknown = labels.unknown if labels is not None and labels.unknown else repeat(())
    return list(map(LabelledRow, paths, classes, split, group, fold, unknown))


def _without_copies(rows: list[LabelledRow], place: Path) -> list[LabelledRow]:
    """One row of those that repeat an image; a UserError if they differ."""
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        before = first.setdefault(row.path, number)
        for field in ("classes", "split", "group"):
            values = [getattr(rows[n], field) for n in (before, number)]
            if values[0] != values[1]:
                shown = (", ".join(value or ()) if field == "classes" else value for value in values)
                raise UserError(
                    f"{place}: {row.path} is in several rows, with different {field}: "
                    f"{' and '.join(map(repr, shown))} in rows {before + 1:,} and {number + 1:,}; give each "
                    "image one row with all that it has"
                )
    return [rows[number] for number in first.values()]


def _check_groups(rows: list[LabelledRow], column: str) -> None:
    """Reject groups that the splits divide, with the numbers."""
    inside = [row for row in rows if row.split != OUTSIDE and row.group]
    if divided := divided_groups(
        [row.group or "" for row in inside], [row.split for row in inside], "splits"
    ):
        raise UserError(
            f"{column}: {divided}; correct the splits, or leave them out, so that they are drawn by group, "
            "with columns split="
        )


def _settled(rows: list[LabelledRow]) -> list[LabelledRow]:
    """The same rows, but those of a split without any label are in no split, because the labels of a
    competition's test images are secret; in no split, an image without a class is unlabelled."""
    labelled = {row.split for row in rows if row.classes} - {OUTSIDE}
    return [
        row if row.split in labelled else row._replace(split=OUTSIDE, classes=row.classes or None)
        for row in rows
    ]


def _sets(rows: list[LabelledRow], several: bool, root: AnyPath) -> Iterator[ImageSet]:
    """The images of each split: the labelled ones, and those without a label."""
    by_set: dict[tuple[str, bool], list[LabelledRow]] = defaultdict(list)
    for row in rows:
        by_set[row.split, row.classes is not None].append(row)
    for split in dict.fromkeys(row.split for row in rows):
        for labelled in (True, False):
            if chosen := by_set.get((split, labelled)):
                yield _image_set(split, chosen, several, root)


def _image_set(split: str, rows: list[LabelledRow], several: bool, root: AnyPath) -> ImageSet:
    """The images of some rows, in the order of their classes and paths."""
    # The order of `Path`, which is that of its parts.
    rows = sorted(rows, key=lambda row: (() if several else row.classes or (), row.path.split("/")))
    targets: ClassSets | ClassIndices | None = None
    if rows[0].classes is not None:
        classes = [row.classes or () for row in rows]
        names = tuple(sorted({name for row in set(classes) for name in row}))
        targets = ClassSets.of_names(classes, names) if several else ClassIndices.of_names(classes, names)
        if isinstance(targets, ClassSets) and any(row.unknown for row in rows):
            known = set(names)
            unknown = [tuple(name for name in row.unknown if name in known) for row in rows]
            labels = ClassSets.of_names(unknown, names).labels
            targets = dataclasses.replace(targets, unknown=labels if labels.any() else None)
    return ImageSet(
        split,
        [root / row.path.removeprefix(f"{root}/") for row in rows],
        targets,
        groups=np.array([row.group or row.path for row in rows if row.group is not None], dtype=np.str_),
        folds=np.array([row.fold for row in rows if row.fold is not None], dtype=np.str_),
    )


def located(cells: Sequence[str], table: Path, images: str | None) -> tuple[list[str], AnyPath]:
    """The path of each image, and the folder of the images: `images` or the table's folder, or, if the paths
    lead out of the latter, the one that contains all.

    A missing suffix is found if it is unique.

    Raises:
        UserError: files that are missing or unclear, or outside of `images`, with their number.
    """
    base = table.parent if images is None else folder_at(images)
    if not base.is_dir():
        raise UserError(f"{table}: images {images}: no such folder")
    folders = _Folders(base)
    files = {cell: folders.find(cell) for cell in dict.fromkeys(cells)}
    if images is not None and (outside := [cell for cell in cells if cell in folders.outside]):
        raise UserError(
            f"{table}: {_share(outside, cells)} lead out of {images}: {listed(outside)}; write them relative "
            "to it, or give the folder that contains all as images"
        )
    if unclear := [cell for cell in cells if len(files[cell]) > 1]:
        names = " or ".join(os.path.basename(path) for path in files[unclear[0]][:3])
        raise UserError(
            f"{table}: {_share(unclear, cells)} have several files: {unclear[0]} may be {names}; write the "
            "suffixes"
        )
    if missing := [cell.strip() for cell in cells if not files[cell]]:
        names = listed([cell or "a blank cell" for cell in missing])
        known = isinstance(base, StorePath) or os.path.lexists(base / missing[0])
        nearest = "" if known else nearest_path(str(base / missing[0]))
        raise UserError(
            f"{table}: {_share(missing, cells)} do not exist: {names}{nearest}; searched in {base}; give "
            "another folder as images, or leave the rows out"
        )
    paths = [files[cell][0] for cell in cells]
    if not folders.outside:
        return paths, base
    paths = [os.path.abspath(path) for path in paths]
    return paths, Path(os.path.commonpath({os.path.dirname(path) for path in paths}))


def _share(some: Sequence[str], cells: Sequence[str]) -> str:
    return f"{len(some):,} of {len(cells):,} images"


class _Folders:
    """Finds files by their paths; each folder is listed once, which is faster than a look at each file."""

    def __init__(self, base: AnyPath) -> None:
        self.base = base
        self.outside: set[str] = set()
        self._listed: dict[str, tuple[str, set[str], bool]] = {}  # by the path before the name
        self._stems: dict[str, dict[str, list[str]]] = {}

    def find(self, cell: str) -> list[str]:
        """The paths of the files that a cell may mean: one, or none, or several without their suffixes."""
        path = cell.strip().replace("\\", "/")
        name = path.rpartition("/")[2]
        head = path.removesuffix(name)
        if head not in self._listed:
            self._listed[head] = self._listing(head)
        place, names, inside = self._listed[head]
        if not inside:
            self.outside.add(cell)
        fitting = [name] if name in names else self._of_stem(place, names).get(name, [])
        return [os.path.join(place, name) for name in fitting]

    def _listing(self, head: str) -> tuple[str, set[str], bool]:
        """A folder's path, the names of the files in it, and whether it lies in the base."""
        if isinstance(self.base, StorePath):
            folder = self.base / posixpath.normpath(head)
            entries = folder.iterdir() if folder.is_dir() else ()  # of others, the images are missing
            names = {file.name for file in entries if file.is_file()}
            return str(folder), names, not {"/", ".."} & {*folder.below}
        top = os.path.abspath(self.base)
        below = os.path.relpath(os.path.join(top, head), top)
        place = os.path.normpath(os.path.join(self.base, below))
        try:
            with os.scandir(place) as files:
                names = {file.name for file in files if file.is_file()}
        except (OSError, ValueError):  # its images are reported as missing
            names = set()
        return place, names, below.split(os.sep)[0] != ".."

    def _of_stem(self, place: str, names: set[str]) -> dict[str, list[str]]:
        """The images in a folder by their names without suffix."""
        if place not in self._stems:
            stems: dict[str, list[str]] = {}
            for name in sorted(names):
                if suffix_of(name) in IMAGE_SUFFIXES:
                    stems.setdefault(os.path.splitext(name)[0], []).append(name)
            self._stems[place] = stems
        return self._stems[place]
