"""Tables of images and their labels: CSV, TSV, JSON lines, Parquet."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Self

import numpy as np

from vitascope.data.formats import table_labels
from vitascope.data.formats.folder import OUTSIDE, SPLIT_FOLDERS, split_of
from vitascope.data.formats.format import DataFormat
from vitascope.data.formats.table_file import TableFile, read_table
from vitascope.data.formats.table_labels import Labels
from vitascope.data.listing import IMAGE_SUFFIXES, suffix_of
from vitascope.data.splits import ImageSet, Inventory, divided_groups
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
from vitascope.errors import UserError
from vitascope.formatting import canonical, counted, listed
from vitascope.remote.paths import StorePath, folder_at


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
        roles, columns = _with_indicators(roles_of(file.names, options, place), file), file.columns
        roles = _with_splits_in_folds(roles, columns)
        if not columns[roles.image]:
            raise UserError(f"{place}: the table has no rows")
        labels = _labels({name: columns[name] for name in roles.label}, options, place)
        splits = _splits(columns, roles, place)
        paths, root = located(columns[roles.image], place, options.images)
        groups, folds = (
            [] if name is None else table_labels.numbered(columns[name]) for name in (roles.group, roles.fold)
        )
        rows = LabelledRows(
            paths,
            None if labels is None else labels.rows,
            labels is not None and labels.several,
            splits,
            groups,
            folds,
            [] if labels is None else labels.unknown,
            len(roles.label),
            root,
        )
        different = rows.without_copies(place)
        different.check_groups(f"{place}: the column {roles.group}")
        unused = []
        if repeated := len(rows) - len(different):
            unused.append(f"{counted(repeated, 'row')} that repeat an image")
        if outside := different.splits.count(OUTSIDE):
            unused.append(f"{counted(outside, 'image')} without a split")
        sets = different.with_secret_labels_outside().sets()
        note = _note(file, roles, labels)
        no_labels = f"{note}; name the column of labels: columns label=COLUMN" if labels is None else note
        return Inventory(tuple(sets), 3, root, tuple(unused), notes=(note,), unlabelled=no_labels)


class TableImage(str):
    """The path of an image, with the cells of its row."""

    __slots__ = ("cells",)
    cells: tuple[str, ...]

    @classmethod
    def of(cls, path: str, cells: Sequence[str]) -> Self:
        """The image of a path, with these cells."""
        image = cls(path)
        image.cells = tuple(cells)
        return image


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


def _with_indicators(roles: Roles, file: TableFile) -> Roles:
    """The roles with the columns of 0 and 1 as labels, if there is no other."""
    if roles.label or not roles.guess_label:
        return roles
    others = set(file.names) - {roles.image, roles.split, roles.group, roles.fold}
    found = [name for name in file.names if name in others and table_labels.is_indicator(file.columns[name])]
    # A single one is more likely something else.
    return dataclasses.replace(roles, label=tuple(found)) if len(found) > 1 else roles


def _labels(columns: dict[str, list[str]], options: TableOptions, place: Path) -> Labels | None:
    """The labels in the columns of labels; None without any."""
    if len(columns) > 1:
        return table_labels.of_columns(columns, options, place)
    for name, cells in columns.items():
        labels = table_labels.of_cells(cells, name, options, place)
        return labels if any(labels.rows) else None
    return None


def _with_splits_in_folds(roles: Roles, columns: dict[str, list[str]]) -> Roles:
    """The roles with the column of folds as that of splits, if there is no other and it names splits."""
    if roles.split is not None or roles.fold is None:
        return roles
    cells = {cell.strip() for cell in columns[roles.fold]} - {""}
    if cells and all(map(split_of, cells)):
        return dataclasses.replace(roles, split=roles.fold, fold=None)
    return roles


def _splits(columns: dict[str, list[str]], roles: Roles, place: Path) -> list[str]:
    """The split of each row."""
    count = len(columns[roles.image])
    if roles.split is None:
        return ["all"] * count
    cells = [cell.strip() for cell in columns[roles.split]]
    meant = {cell: split_of(cell) for cell in set(cells) - {""}}
    if not meant:
        return ["all"] * count
    others = sorted(cell for cell, split in meant.items() if split is None)
    if others:
        raise UserError(
            f"{place}: the column {roles.split} has {listed(others, LISTED)}; a split is "
            f"{', '.join(name for names in SPLIT_FOLDERS.values() for name in names)}; correct it, or leave "
            "the column out with columns split="
        )
    return [meant.get(cell) or OUTSIDE for cell in cells]


def _note(file: TableFile, roles: Roles, labels: Labels | None) -> str:
    """What was recognized, in one line."""
    used = [f"image {roles.image}"]
    if labels is None:
        used.append("no labels")
    elif len(roles.label) == 1:
        used.append(f"label {roles.label[0]} ({labels.form})")
    else:
        used.append(f"label {listed(roles.label, LISTED)} ({labels.form})")
    others_used = (("split", roles.split), ("group", roles.group), ("fold", roles.fold))
    used += [f"{role} {name}" for role, name in others_used if name]
    named = {roles.image, *roles.label, *(name for _, name in others_used)}
    others: Sequence[str] = [name for name in file.names if name not in named]
    return f"columns: {', '.join(used)}" + (f"; unused: {listed(others, LISTED)}" if others else "")


@dataclasses.dataclass(frozen=True)
class LabelledRows:
    """Paths, the names of their classes, splits, groups and folds, each (N,)."""

    paths: Sequence[str]
    classes: Sequence[tuple[str, ...]] | None
    """None for a table without labels."""
    several: bool
    """Whether an image may have any number of classes; else one without any is unlabelled."""
    splits: Sequence[str]
    groups: Sequence[str]
    """Empty without groups; an empty one is that of an image without a group."""
    folds: Sequence[str]
    """Empty without folds."""
    unknown: Sequence[tuple[str, ...]]
    """Classes of which it is not known whether an image has them; empty if all are known."""
    columns: int
    """Of labels: an image of as many unknown classes is unlabelled."""
    root: Path
    """The folder of the images."""

    def __len__(self) -> int:
        return len(self.paths)

    def without_copies(self, place: Path) -> LabelledRows:
        """One row of those that repeat an image; a UserError if they differ."""
        if len(set(self.paths)) == len(self):
            return self
        first: dict[str, int] = {}
        for row, path in enumerate(self.paths):
            before = first.setdefault(path, row)
            for what, values in (("labels", self.classes), ("splits", self.splits), ("groups", self.groups)):
                if values and values[before] != values[row]:
                    different = " and ".join(repr(_in_words(values[each])) for each in (before, row))
                    raise UserError(
                        f"{place}: {path} is in several rows, with different {what}: {different} in rows "
                        f"{before + 1:,} and {row + 1:,}; give each image one row with all that it has"
                    )
        return self._take(list(first.values()))

    def check_groups(self, column: str) -> None:
        """Reject groups that the splits divide, with the numbers."""
        inside = [split != OUTSIDE for split in self.splits] if self.groups else []
        groups, splits = (list(compress(values, inside)) for values in (self.groups, self.splits))
        if divided := divided_groups(groups, splits, "splits"):
            raise UserError(
                f"{column}: {divided}; correct the splits, or leave them out, so that they are drawn by "
                "group, with columns split="
            )

    def with_secret_labels_outside(self) -> LabelledRows:
        """The same rows, but those of a split without any label beside labelled ones are in no split: the
        labels of a competition's test images are secret."""
        if self.classes is None:
            return self
        labelled = {split for split, classes in zip(self.splits, self.classes, strict=True) if classes}
        return dataclasses.replace(
            self, splits=[split if split in labelled else OUTSIDE for split in self.splits]
        )

    def sets(self) -> Iterator[ImageSet]:
        """The images of each split: the labelled ones, and those without a label."""
        by_split: dict[str, list[int]] = defaultdict(list)
        for row, split in enumerate(self.splits):
            by_split[split].append(row)
        for split, rows in by_split.items():
            labelled = [row for row in rows if self._is_labelled(row, split)]
            if labelled:
                yield self._set(split, labelled)
            if len(labelled) < len(rows):
                some = set(labelled)
                without = [row for row in rows if row not in some]
                yield dataclasses.replace(self, classes=None)._set(split, without)

    def _is_labelled(self, row: int, split: str) -> bool:
        if self.classes is None or (self.unknown and len(self.unknown[row]) == self.columns):
            return False
        return bool(self.classes[row]) or (self.several and split != OUTSIDE)

    def _set(self, split: str, rows: Sequence[int]) -> ImageSet:
        """The images of some rows, in the order of their classes and paths."""
        chosen = self._take(rows)
        classes = chosen.classes
        names = () if classes is None else tuple(sorted(set().union(*set(classes))))
        # The order of `Path`, which is that of its parts.
        by_path = sorted(range(len(chosen)), key=lambda row: chosen.paths[row].split("/"))
        if classes is not None and not self.several:
            by_path.sort(key=classes.__getitem__)
        ordered = chosen._take(by_path)
        targets = None
        if ordered.classes is not None:
            kind: type[ClassSets | ClassIndices] = ClassSets if self.several else ClassIndices
            targets = kind.of_names(ordered.classes, names)
            if isinstance(targets, ClassSets) and ordered.unknown:
                rows_of_unknown = [[name for name in row if name in names] for row in ordered.unknown]
                unknown = ClassSets.of_names([tuple(row) for row in rows_of_unknown], names).labels
                targets = dataclasses.replace(targets, unknown=unknown if unknown.any() else None)
        groups = [group or path for group, path in zip(ordered.groups, ordered.paths, strict=False)]
        return ImageSet(
            split,
            [ordered._source(path) for path in ordered.paths],
            targets,
            groups=np.array(groups, dtype=np.str_),
            folds=np.array(ordered.folds, dtype=np.str_),
        )

    def _source(self, path: str) -> Path:
        store = isinstance(self.root, StorePath)
        return self.root / path.removeprefix(f"{self.root}/") if store else Path(path)

    def _take(self, rows: Sequence[int]) -> LabelledRows:
        """Some of the rows, in the order given."""
        return dataclasses.replace(
            self,
            paths=[self.paths[row] for row in rows],
            classes=None if self.classes is None else [self.classes[row] for row in rows],
            splits=[self.splits[row] for row in rows],
            groups=[self.groups[row] for row in rows] if self.groups else (),
            folds=[self.folds[row] for row in rows] if self.folds else (),
            unknown=[self.unknown[row] for row in rows] if self.unknown else (),
        )


def _in_words(value: str | tuple[str, ...]) -> str:
    """A label, a split or a group."""
    return value if isinstance(value, str) else ", ".join(value)


_DRIVE = re.compile(r"[A-Za-z]:/")


def located(cells: Sequence[str], table: Path, images: str | None) -> tuple[list[str], Path]:
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
    paths = [folders.find(cell) for cell in cells]
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
        return paths, base
    paths = [os.path.abspath(path) for path in paths]
    return paths, Path(os.path.commonpath({os.path.dirname(path) for path in paths}))


class _Folders:
    """Finds files by their paths; each folder is listed once, which is faster than a look at each file."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.outside: list[str] = []
        self.missing: set[str] = set()
        self.unclear: dict[str, list[str]] = {}
        self._absolute = "" if isinstance(base, StorePath) else os.path.abspath(base)
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
        if head not in self._listed and isinstance(self.base, StorePath):
            folder = self.base / posixpath.normpath(head)
            files = folder.iterdir() if folder.is_dir() else ()  # of others, the images are missing
            names = {file.name for file in files if file.is_file()}
            self._listed[head] = str(folder), names, not {"/", ".."} & {*folder.below}
        elif head not in self._listed:
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
