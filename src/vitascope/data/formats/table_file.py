"""Tables as columns of text: CSV, TSV, JSON lines and Parquet. Nothing here knows what a column is for."""

from __future__ import annotations

import codecs
import csv
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

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


@dataclasses.dataclass(frozen=True)
class TableFile:
    """The names of all columns of a table, and the cells of some: text, empty for a missing value, JSON for a
    list."""

    names: tuple[str, ...]
    columns: dict[str, list[str]]


Choice: TypeAlias = Callable[[tuple[str, ...]], Iterable[str]]
"""The columns to read, from the names of all."""


def all_of_them(names: tuple[str, ...]) -> tuple[str, ...]:
    """The choice of all columns."""
    return names


def read_table(path: Path, choose: Choice = all_of_them) -> TableFile:
    """The table in a file, by its suffix; a UserError if it cannot be read."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise UserError(
            f"{path}: a file of one JSON value, such as the boxes of COCO, is no table, and vitascope learns "
            "classes of whole images, not boxes; a table has one JSON object per line (.jsonl)"
        )
    with _explaining(path):
        return {".jsonl": _read_json_lines, ".parquet": _read_parquet}.get(suffix, _read_separated)(
            path, choose
        )


def _read_separated(path: Path, choose: Choice) -> TableFile:
    """CSV and TSV, as spreadsheets and pandas write them."""
    with open(path, encoding=_encoding(path), newline="") as file:
        first = file.readline()
        if first.lower().startswith("sep="):  # a hint for Excel
            first = file.readline()
        counts = {delimiter: _cells(first, delimiter) for delimiter in _DELIMITERS[path.suffix.lower()]}
        delimiter = max(counts, key=counts.__getitem__)
        rows = csv.reader(itertools.chain([first], file), delimiter=delimiter, strict=True)
        try:
            header = [name.strip() for name in next(rows, [])]
            if not any(header):
                raise ValueError("its first row has no names of columns")
            names = _different(filter(None, header))  # the index of pandas has no name
            columns: dict[str, list[str]] = {name: [] for name in choose(names)}
            wanted = [(header.index(name), cells) for name, cells in columns.items()]
            for row in rows:
                if len(row) != len(header) and (len(row) < len(header) or any(row[len(header) :])):
                    if not any(row):
                        continue
                    raise ValueError(
                        f"line {rows.line_num} has {len(row)} cells, the first row {len(header)}; put cells "
                        f"that contain {delimiter!r} between quotes"
                    )
                for place, cells in wanted:
                    cells.append(row[place])
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from error
    return TableFile(names, columns)


def _read_json_lines(path: Path, choose: Choice) -> TableFile:
    """One JSON object per row."""
    columns: dict[str, list[str]] = {}
    count = 0
    with open(path, encoding=_encoding(path)) as file:
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
                cells = columns.setdefault(name, [])
                cells.extend([""] * (count - len(cells)))  # of rows without it
                cells.append(as_cell(value))
            count += 1
    if not columns:
        raise ValueError("it has no rows")
    names = tuple(columns)
    return TableFile(
        names, {name: columns[name] + [""] * (count - len(columns[name])) for name in choose(names)}
    )


def _read_parquet(path: Path, choose: Choice) -> TableFile:
    """Parquet; only the columns that are chosen are read."""
    try:
        from pyarrow import parquet, types
    except ModuleNotFoundError as error:
        raise UserError(f'{path}: Parquet needs an extra: pip install "vitascope[parquet]"') from error
    with parquet.ParquetFile(path) as file:
        for field in file.schema_arrow:
            parts = [field.type, *(part.type for part in field.flatten())]
            if any(types.is_binary(part) or types.is_large_binary(part) for part in parts):
                raise ValueError(
                    f"its column {field.name!r} has pictures, not their paths; put the file into a folder of "
                    "its own, which is read as a Hugging Face data set"
                )
        names = _different(file.schema_arrow.names)
        chosen = list(dict.fromkeys(choose(names)))
        table = file.read(columns=chosen)
    return TableFile(names, {name: list(map(as_cell, table.column(name).to_pylist())) for name in chosen})


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


def _encoding(path: Path) -> str:
    """The encoding of a text, by its first bytes: UTF-8, UTF-16 or UTF-32, with or without a mark."""
    with open(path, "rb") as file:
        start = file.read(4096)
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
