"""Tables of images and their labels: CSV, TSV, JSON lines, Parquet."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from vitascope.data.formats import table_labels
from vitascope.data.formats.folder import OUTSIDE, SPLIT_FOLDERS, split_of
from vitascope.data.formats.format import DataFormat
from vitascope.data.formats.table_columns import LISTED, Roles, image_column, roles_of
from vitascope.data.formats.table_file import TableFile, open_table
from vitascope.data.formats.table_labels import Labels
from vitascope.data.formats.table_paths import located
from vitascope.data.formats.table_rows import LabelledRows
from vitascope.data.splits import Inventory
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions, is_table
from vitascope.errors import UserError
from vitascope.formatting import canonical, counted, listed


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
        file = open_table(place)
        roles, columns = _columns(file, roles_of(file.names, options, place), place)
        labels = _labels({name: columns[name] for name in roles.label}, options, place)
        splits, ignored = _splits(columns, roles, options, place)
        paths, root = located(columns[roles.image], place, options.images)
        groups = [] if roles.group is None else [canonical(cell.strip()) for cell in columns[roles.group]]
        rows = LabelledRows(
            paths,
            None if labels is None else labels.rows,
            labels is not None and labels.several,
            splits,
            groups,
        )
        different = rows.without_copies(place)
        different.check_groups(f"{place}: the column {roles.group}")
        unused = [*ignored]
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
    file = open_table(place)
    image = image_column(file.names, options, place)
    columns = file.columns(file.names if keep else [image])
    paths, _ = located(columns[image], place, options.images)
    if not keep:
        return paths
    return list(map(TableImage.of, paths, zip(*columns.values(), strict=True)))


def column_digests(place: Path) -> dict[str, str]:
    """The columns of a table by name, with a digest of their cells each."""
    file = open_table(place)
    columns = file.columns(file.names)
    return {name: hashlib.sha256(json.dumps(columns[name]).encode()).hexdigest() for name in file.names}


def _columns(file: TableFile, roles: Roles, place: Path) -> tuple[Roles, dict[str, list[str]]]:
    """The cells of the columns that are used; without a column of labels, those of 0 and 1 are."""
    own = [name for name in (roles.image, roles.split, roles.group) if name is not None]
    if roles.label or not roles.guess_label:
        columns = file.columns(list(dict.fromkeys([*own, *roles.label])))
    else:
        columns = file.columns(file.names)
        found = [name for name in file.names if name not in own and table_labels.is_indicator(columns[name])]
        if len(found) > 1:  # a single one is more likely something else
            roles = dataclasses.replace(roles, label=tuple(found))
    if not columns[roles.image]:
        raise UserError(f"{place}: the table has no rows")
    return roles, columns


def _labels(columns: dict[str, list[str]], options: TableOptions, place: Path) -> Labels | None:
    """The labels in the columns of labels; None without any."""
    if len(columns) > 1:
        return table_labels.of_columns(columns, options, place)
    for name, cells in columns.items():
        labels = table_labels.of_cells(cells, name, options, place)
        return labels if any(labels.rows) else None
    return None


def _splits(
    columns: dict[str, list[str]], roles: Roles, options: TableOptions, place: Path
) -> tuple[list[str], list[str]]:
    """The split of each row, and what is unused: folds, which are numbers, unless the column is named."""
    count = len(columns[roles.image])
    if roles.split is None:
        return ["all"] * count, []
    cells = [cell.strip() for cell in columns[roles.split]]
    meant = {cell: split_of(cell) for cell in set(cells) - {""}}
    if not meant:
        return ["all"] * count, []
    others = sorted(cell for cell, split in meant.items() if split is None)
    if others and "split" not in options.named and all(cell.replace(".", "").isdigit() for cell in meant):
        return ["all"] * count, [f"the column {roles.split}, whose numbers name no split"]
    if others:
        raise UserError(
            f"{place}: the column {roles.split} has {listed(others, LISTED)}; a split is "
            f"{', '.join(name for names in SPLIT_FOLDERS.values() for name in names)}; correct it, or leave "
            "the column out with columns split="
        )
    return [meant.get(cell) or OUTSIDE for cell in cells], []


def _note(file: TableFile, roles: Roles, labels: Labels | None) -> str:
    """What was recognized, in one line."""
    used = [f"image {roles.image}"]
    if labels is None:
        used.append("no labels")
    elif len(roles.label) == 1:
        used.append(f"label {roles.label[0]} ({labels.form})")
    else:
        used.append(f"label {listed(roles.label, LISTED)} ({labels.form})")
    used += [f"{role} {name}" for role, name in (("split", roles.split), ("group", roles.group)) if name]
    named = {roles.image, *roles.label, roles.split, roles.group}
    others: Sequence[str] = [name for name in file.names if name not in named]
    return f"columns: {', '.join(used)}" + (f"; unused: {listed(others, LISTED)}" if others else "")
