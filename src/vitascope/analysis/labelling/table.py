"""`labels.csv`: the labels that a person gives pictures, saved one by one, as a table that `train` takes."""

import csv
import dataclasses
import datetime
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from vitascope.data.formats.table_file import read_table
from vitascope.data.formats.table_labels import of_cells
from vitascope.data.table_options import TableOptions
from vitascope.data.targets import ClassIndices, ClassSets, Targets
from vitascope.errors import UserError
from vitascope.formatting import SEPARATOR, canonical
from vitascope.storage import explaining_failure, replacing

COLUMNS = ("image", "label", "source", "time")
"""Others of an existing table are kept."""
LONGEST, LONGEST_CELL = 200, 100_000
"""Characters of the name of a class, and of all of a picture: Python's csv reads no cell above 131,072."""
Source = Literal["looked", "accepted", "given"]
"""By a person who has looked at the picture; by the classifier, for many at once; by the data."""


@dataclasses.dataclass(frozen=True)
class PictureLabel:
    """The classes of a picture, one or with several any number, and who says so."""

    names: tuple[str, ...]
    source: str


class LabelTable:
    """The labels of pictures by their paths, in a file that has every one of them at any time.

    A new label is a line that is appended and on the disk before `record` returns. Others replace the file.
    Cells of other columns stay. A line that was half written when the machine stopped is left out.

    Attributes:
        kind: of the labels: one class per picture, or any number as a JSON list, also if the file has such.
        labels: by the absolute path of the picture, the newest last.
    """

    def __init__(
        self, path: Path, kind: type[Targets] = ClassIndices, splits: Mapping[str, str] | None = None
    ) -> None:
        """Read the file if there is one.

        Args:
            path: ends in `.csv`.
            splits: by the absolute path of each picture, for a column of a new table; None for no column.

        Raises:
            UserError: another kind of file; one that cannot be read; labels of the other kind.
        """
        if path.suffix.lower() != ".csv":
            raise UserError(f"{path}: labels are written to FILE.csv")
        self.path, self.kind = path, kind
        self.labels: dict[str, PictureLabel] = {}
        self._rows: dict[str, dict[str, str]] = {}  # the cells by column, of each picture
        self._splits = {} if splits is None else splits
        self._columns: tuple[str, ...] = COLUMNS if splits is None else (*COLUMNS, "split")
        self._seen, self._whole = (0, 0), False  # of the file: its time and size; whether lines may follow
        self.refresh()

    def refresh(self) -> bool:
        """Read the file again if another program has changed it; returns whether it has labels, or lacks
        some, that this object did not know.

        Raises:
            UserError: it cannot be read; what is known stays.
        """
        if (seen := self._stat()) == self._seen:
            return False
        if not seen[1]:  # removed or emptied: the next change writes it anew
            self._seen, self._whole = seen, False
            return False
        self._whole = self._cut()
        table = read_table(self.path)
        if absent := [name for name in COLUMNS[:2] if name not in table.names]:
            raise UserError(f"{self.path}: no column {absent[0]!r}; a table of labels has image and label")
        before = self.labels
        columns = [*table.names, *(name for name in COLUMNS if name not in table.names)]
        cells = [table.columns.get(name) or [""] * len(table.columns["image"]) for name in columns]
        texts = table.columns["label"]
        if all(text.startswith("[") for text in texts) and texts:
            self.kind = ClassSets
        options = TableOptions(labels="several" if self.kind is ClassSets else "one")
        classes = of_cells(texts, "label", options, self.path).rows
        self._rows, self.labels = {}, {}
        for row, names in zip(zip(*cells, strict=True), classes, strict=True):
            by_column = dict(zip(columns, row, strict=True))
            place = self._place(by_column["image"])
            if names is not None:
                by_column["label"] = self._text(names)
                self.labels[place] = PictureLabel(names, by_column["source"] or "given")
            self._rows[place] = by_column
        self._whole &= columns == list(table.names) and len(self._rows) == len(classes)
        self._whole &= [row["label"] for row in self._rows.values()] == texts
        self._columns, self._seen = tuple(columns), self._stat()
        return self.labels != before

    def label(self, names: Sequence[str], classes: Sequence[str], source: Source) -> PictureLabel:
        """A label with these names in Unicode's composed form, beside the other classes.

        Raises:
            UserError: an empty name, or one that a table beside the others would not give back; not one name
                where a picture has one class.
        """
        names = tuple(dict.fromkeys(canonical(name.strip()) for name in names))
        if self.kind is ClassIndices and len(names) != 1:
            raise UserError(f"a picture has one class here, not {len(names)}; several allows any number")
        every = tuple(dict.fromkeys([*classes, *names]))
        for name in names:
            is_name = 0 < len(name) <= LONGEST and name.isprintable() and self._gives_back((name,))
            if not (is_name and self._gives_back(every) and len(self._text(names)) <= LONGEST_CELL):
                raise UserError(
                    f"{name[:50]!r} is no name: at most {LONGEST} characters, no separators such as ;"
                )
        return PictureLabel(names, source)

    def _gives_back(self, names: tuple[str, ...]) -> bool:
        """Whether a column of these names would be read as these classes."""
        if self.kind is ClassSets:
            return not any(SEPARATOR in name for name in names)
        try:
            return of_cells(names, "label", TableOptions(), self.path).rows == [(name,) for name in names]
        except UserError:
            return False

    def record(self, changes: Mapping[str, PictureLabel | None]) -> None:
        """Save the labels of pictures, by their absolute paths; None takes a label away.

        Raises:
            UserError: the file cannot be read or written, such as on a full disk; then nothing has changed.
        """
        self.refresh()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        rows = dict(self._rows)
        for place, label in changes.items():
            row = rows.pop(place, dict.fromkeys(self._columns, ""))
            if label is not None:
                cells = (row["image"] or self._cell(place), self._text(label.names), label.source, now)
                split = row.get("split") or self._splits.get(place, "")
                rows[place] = row | dict(zip((*COLUMNS, "split"), (*cells, split), strict=True))
        new = [place for place in changes if place not in self._rows and place in rows]
        with explaining_failure(self.path, "the label", "make room, then label the picture again"):
            if self._whole and len(new) == len(changes):
                self._append([rows[place] for place in new])
            else:
                self._replace(list(rows.values()))
        self._rows, self._seen = rows, self._stat()
        for place, label in changes.items():
            self.labels.pop(place, None)
            if label is not None:
                self.labels[place] = label

    def moved(self, pictures: Sequence[str]) -> int:
        """Give the labels of pictures that are at another place now to those of the same path below it;
        returns their number, and saves nothing by itself.

        Args:
            pictures: the absolute paths of the pictures.
        """
        if not pictures or not (lost := [place for place in self._rows if not os.path.exists(place)]):
            return 0
        top = os.path.commonpath({os.path.dirname(place) for place in pictures})
        tails = {os.path.relpath(place, top): place for place in pictures}
        tops = ((place, top) for place in lost for top in reversed(Path(place).parents))
        former = next((top for place, top in tops if os.path.relpath(place, top) in tails), None)
        places = {} if former is None else {old: tails.get(os.path.relpath(old, former)) for old in lost}
        moved = {old: new for old, new in places.items() if new is not None and new not in self._rows}
        for old, new in moved.items():
            self._rows[new] = self._rows.pop(old) | {"image": self._cell(new)}
            if old in self.labels:
                self.labels[new] = self.labels.pop(old)
        self._whole &= not moved
        return len(moved)

    def _stat(self) -> tuple[int, int]:
        """The time and the size of the file, of which one changes when a program writes it; zeros without."""
        if not self.path.exists():
            return 0, 0
        return self.path.stat().st_mtime_ns, self.path.stat().st_size

    def _cut(self) -> bool:
        """Whether this class wrote the file and its last line is whole; one that was half written is cut."""
        text = self.path.read_bytes()
        end = text.rfind(b"\r\n") + 2
        torn = text[end:].decode("utf-8", "replace")
        ours = text.startswith(",".join(COLUMNS).encode()) and b"\r\n" in text
        if ours and torn and len(next(csv.reader([torn]))) < len(COLUMNS):
            os.truncate(self.path, end)
            torn = ""
        return ours and not torn

    def _place(self, cell: str) -> str:
        """The absolute path of a picture."""
        return os.path.normpath(os.path.join(self.path.absolute().parent, cell.strip()))

    def _cell(self, place: str) -> str:
        """The path of a picture as the table has it: relative to its folder, and no formula of a
        spreadsheet."""
        cell = os.path.relpath(place, self.path.absolute().parent)
        return os.path.join(".", cell) if cell[0] in "=+-@ " else cell

    def _text(self, names: Sequence[str]) -> str:
        return json.dumps(names, ensure_ascii=False) if self.kind is ClassSets else names[0]

    def _lines(self, rows: Sequence[Mapping[str, str]]) -> str:
        text = io.StringIO()
        csv.writer(text).writerows([row[name] for name in self._columns] for row in rows)
        return text.getvalue()

    def _append(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Write lines at the end, all or none."""
        size = self.path.stat().st_size
        try:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                file.write(self._lines(rows))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self.path, size)
            raise

    def _replace(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Write the whole file."""
        with replacing(self.path) as aside:
            header = dict(zip(self._columns, self._columns, strict=True))
            aside.write_text(self._lines([header, *rows]), encoding="utf-8", newline="")
        self._whole = True
