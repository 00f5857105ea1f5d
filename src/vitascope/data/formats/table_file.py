"""Tables as columns of text: CSV, TSV, JSON lines and Parquet. Nothing here knows what a column is for."""

import csv
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from vitascope.errors import UserError
from vitascope.formatting import canonical
from vitascope.serialization import parse_json


@dataclasses.dataclass(frozen=True)
class TableFile:
    """The names of all columns, and the cells of some: text, empty if missing, JSON for a list."""

    names: tuple[str, ...]
    columns: dict[str, list[str]]


Choice: TypeAlias = Callable[[tuple[str, ...]], Iterable[str]]
"""The columns to read, from the names of all."""


def read_table(path: Path, choose: Choice = tuple) -> TableFile:
    """The table in a file, by its suffix; a UserError if it cannot be read."""
    readers = {".jsonl": _read_json_lines, ".parquet": _read_parquet}
    try:
        return readers.get(path.suffix.lower(), _read_separated)(path, choose)
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {_not_utf_8(path)}") from error
    except (OSError, ValueError, TypeError, NotImplementedError) as error:  # three of Arrow's
        raise UserError(f"{path}: cannot be read as a table: {error}") from error


def _read_separated(path: Path, choose: Choice) -> TableFile:
    """CSV and TSV, as spreadsheets and pandas write them."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(first)
        rows = csv.reader(itertools.chain([first], file), delimiter=delimiter, strict=True)
        try:
            header = [canonical(name.strip()) for name in next(rows, [])]
            names = _different(filter(None, header))  # the index of pandas has no name
            columns: dict[str, list[str]] = {name: [] for name in choose(names)}
            wanted = [(header.index(name), cells) for name, cells in columns.items()]
            for row in rows:
                if not any(row):
                    continue
                if len(row) < len(header) or any(row[len(header) :]):
                    raise ValueError(
                        f"line {rows.line_num} has {len(row)} cells, the first row {len(header)}; put cells "
                        f"that contain {delimiter!r} between quotes"
                    )
                for place, cells in wanted:
                    cells.append(row[place])
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from error
    return TableFile(names, columns)


def _delimiter(header: str) -> str:
    """The separator of a CSV's cells."""
    try:
        return csv.Sniffer().sniff(header, ",;\t").delimiter
    except csv.Error:  # one column
        return ","


def _read_json_lines(path: Path, choose: Choice) -> TableFile:
    """One JSON object per row."""
    columns: dict[str, list[str]] = {}
    count = 0
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                if "\\u" in line:  # half of a character is a UnicodeEncodeError
                    json.dumps(row, ensure_ascii=False).encode()
                if not isinstance(row, dict):
                    raise ValueError('not an object, such as {"image": "1.jpg"}')
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            for name, value in row.items():
                cells = columns.setdefault(canonical(name), [])
                cells.extend([""] * (count - len(cells)))  # of rows without it
                cells.append(as_cell(value))
            count += 1
    names = _different(columns)
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
        stored = file.schema_arrow.names
        names = _different(map(canonical, stored))
        chosen = {name: stored[names.index(name)] for name in choose(names)}
        table = file.read(columns=list(chosen.values()))
    return TableFile(
        names, {name: list(map(as_cell, table.column(own).to_pylist())) for name, own in chosen.items()}
    )


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


def _different(names: Iterable[str]) -> tuple[str, ...]:
    """The names; a ValueError if there are none, or if two are the same."""
    counts = Counter(list(names))
    if not counts:
        raise ValueError("it has no names of columns")
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ValueError(f"it has the column {name!r} {count} times; rename one")
    return tuple(counts)


def _not_utf_8(path: Path) -> str:
    """The first bytes of a file that are not UTF-8, their place, and a way out, in words."""
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        values = content[error.start : error.start + 4].hex(" ")
        return (
            f"not UTF-8: line {line:,} has the bytes {values} at position {error.start:,}; save it as UTF-8, "
            "or convert it with iconv -f ENCODING -t utf-8 OLD > NEW, from latin1 or utf-16 for example"
        )
    return "not UTF-8"  # it has changed meanwhile
