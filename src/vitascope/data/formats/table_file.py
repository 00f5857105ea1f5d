"""Tables as columns of text: CSV, TSV, JSON lines and Parquet. Nothing here knows what a column is for."""

from __future__ import annotations

import codecs
import csv
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitascope.errors import UserError
from vitascope.serialization import parse_json

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # whose first bytes are the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_DELIMITERS = {".csv": ",;\t", ".tsv": "\t,;"}  # the first of those that give the most columns


class TableFile(ABC):
    """A table; missing values are empty cells, and lists are JSON.

    Raises:
        UserError: the file cannot be read.
    """

    path: Path
    names: tuple[str, ...]
    """The names of the columns, in their order."""

    @abstractmethod
    def columns(self, wanted: Sequence[str]) -> dict[str, list[str]]:
        """The cells of some columns, by name."""


def open_table(path: Path) -> TableFile:
    """The table in a file, by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise UserError(
            f"{path}: a file of one JSON value, such as the boxes of COCO, is no table, and vitascope learns "
            "classes of whole images, not boxes; a table has one JSON object per line (.jsonl)"
        )
    with _explaining(path):
        table = {".jsonl": _JsonLines, ".parquet": _Parquet}.get(suffix, _Separated)(path)
    return table


class _Separated(TableFile):
    """CSV and TSV, as spreadsheets and pandas write them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            self._encoding = _encoding(file.read(4096))
        with open(path, encoding=self._encoding, newline="") as file:
            first = file.readline()
            self._skipped = first.lower().startswith("sep=")  # a hint for Excel
            header = file.readline() if self._skipped else first
        counts = {delimiter: _cells(header, delimiter) for delimiter in _DELIMITERS[path.suffix.lower()]}
        self._delimiter = max(counts, key=counts.__getitem__)
        with self._rows() as rows:
            self._header = [name.strip() for name in next(rows, [])]
        if not any(self._header):
            raise ValueError("its first row has no names of columns")
        self.names = _different(filter(None, self._header))  # the index of pandas has no name

    @contextmanager
    def _rows(self) -> Iterator[Any]:
        """A reader of the rows, with the header."""
        with open(self.path, encoding=self._encoding, newline="") as file:
            if self._skipped:
                file.readline()
            yield csv.reader(file, delimiter=self._delimiter, strict=True)

    def columns(self, wanted: Sequence[str]) -> dict[str, list[str]]:
        width, place_of = len(self._header), {name: place for place, name in enumerate(self._header)}
        places = [place_of[name] for name in wanted]
        columns: list[list[str]] = [[] for _ in wanted]
        with _explaining(self.path), self._rows() as rows:
            next(rows)
            try:
                for row in rows:
                    if len(row) != width and (not row or len(row) < width or any(row[width:])):
                        if not any(row):
                            continue
                        raise ValueError(
                            f"line {rows.line_num} has {len(row)} cells, the first row {width}; put "
                            f"cells that contain {self._delimiter!r} between quotes"
                        )
                    for column, place in zip(columns, places, strict=True):
                        column.append(row[place])
            except csv.Error as error:
                raise ValueError(f"line {rows.line_num}: {error}") from error
        return dict(zip(wanted, columns, strict=True))


class _JsonLines(TableFile):
    """One JSON object per row."""

    def __init__(self, path: Path) -> None:
        self.path, count = path, 0
        self._columns: dict[str, list[str]] = {}
        with open(path, "rb") as file:
            encoding = _encoding(file.read(4096))
        with open(path, encoding=encoding) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                    if "\\u" in line:  # half of a character is a UnicodeEncodeError
                        json.dumps(row, ensure_ascii=False).encode()
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f'line {number} is not an object, such as {{"image": "1.jpg"}}')
                for name, value in row.items():
                    cells = self._columns.setdefault(name, [])
                    cells.extend([""] * (count - len(cells)))  # of rows without it
                    cells.append(as_cell(value))
                count += 1
        self.names, self._count = tuple(self._columns), count
        if not self.names:
            raise ValueError("it has no rows")

    def columns(self, wanted: Sequence[str]) -> dict[str, list[str]]:
        return {
            name: self._columns[name] + [""] * (self._count - len(self._columns[name])) for name in wanted
        }


class _Parquet(TableFile):
    """Parquet; only the columns that are asked for are read."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import parquet, types
        except ModuleNotFoundError as error:
            raise UserError(f'{path}: Parquet needs an extra: pip install "vitascope[parquet]"') from error
        self.path, self._file = path, parquet.ParquetFile(path)
        schema = self._file.schema_arrow
        for field in schema:
            parts = [field.type, *(part.type for part in field.flatten())]
            if any(types.is_binary(part) or types.is_large_binary(part) for part in parts):
                raise ValueError(
                    f"its column {field.name!r} has pictures, not their paths; put the file into a folder of "
                    "its own, which is read as a Hugging Face data set"
                )
        self.names = _different(schema.names)

    def columns(self, wanted: Sequence[str]) -> dict[str, list[str]]:
        with _explaining(self.path):
            table = self._file.read(columns=list(wanted))
            return {name: [as_cell(value) for value in table.column(name).to_pylist()] for name in wanted}


def as_cell(value: Any) -> str:
    """A value as the text of a cell: nothing for None and NaN, JSON for a list or an object."""
    if isinstance(value, str):
        return value
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, float) and value.is_integer():  # pandas has such labels beside missing ones
        return str(int(value))
    return str(value)


def _cells(header: str, delimiter: str) -> int:
    """The number of cells of a line; 1 if one is too long for a cell, as with a wrong delimiter."""
    try:
        return len(next(csv.reader([header], delimiter=delimiter), []))
    except csv.Error:
        return 1


def _different(names: Iterable[str]) -> tuple[str, ...]:
    """The names; a ValueError if two are the same."""
    found = tuple(names)
    twice = [name for name, count in Counter(found).items() if count > 1]
    if twice:
        raise ValueError(f"it has the column {twice[0]!r} {found.count(twice[0])} times; rename one")
    return found


def _encoding(start: bytes) -> str:
    """The encoding of a text, by its first bytes: UTF-8, UTF-16 or UTF-32, with or without a mark."""
    for mark, encoding in _MARKS.items():
        if start.startswith(mark):
            return encoding
    zeros = start[0::2].count(0), start[1::2].count(0)
    first = "be" if zeros[0] > zeros[1] else "le"
    # Letters of a name of a column are Latin: three of four bytes are zeros, or one of two.
    if sum(zeros) > len(start) * 5 // 8:
        return f"utf-32-{first}"
    if max(zeros) > len(start) // 4:
        return f"utf-16-{first}"
    return "utf-8"


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Turn the errors of a file that cannot be read into one line that names it."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not text in UTF-8, UTF-16 or UTF-32 (a byte is "
            f"0x{error.object[error.start]:02x}); save it as UTF-8"
        ) from error
    except (OSError, ValueError, TypeError, NotImplementedError, csv.Error) as error:  # three of Arrow's
        raise UserError(f"{path}: cannot be read as a table: {error}") from error
