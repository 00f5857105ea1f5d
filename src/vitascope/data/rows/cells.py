"""Rows of tables of results: names of columns, texts that no program misreads, lines of CSV, Parquet."""

import csv
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vitascope.errors import UserError

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, line ends, and marks of the direction of a text, which show another name."""
_FORMULA = re.compile(r"(?![-+]?[\d.]+([eE][-+]?\d+)?$)\s*[=+\-@]")
"""Begins as a formula, and is no number."""
_LINES = csv.writer(SimpleNamespace(write=str), lineterminator="\n")


def check_output(out: Path, endings: Sequence[str], kind: str) -> None:
    """Reject a file of another ending, a `.parquet` without pyarrow, and a folder that does not exist."""
    if out.suffix not in endings:
        raise UserError(f"{out}: {kind} ends in {', '.join(endings)}")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        others = " or ".join(ending for ending in endings if ending != out.suffix)
        raise UserError(f"Parquet needs pyarrow: pip install 'vitascope[parquet]'; or choose {others}")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out.parent}: no such folder")


def check_absent(*files: Path) -> None:
    """Reject files that exist."""
    for file in files:
        if file.exists():
            raise UserError(f"{file} exists and is not overwritten; remove it, or choose another file")


def column_names(labels: Sequence[str], others: Iterable[str]) -> tuple[str, ...]:
    """A name for each class's column, (K,): its label or, where another column has that name, with its index.

    ImageNet has two classes "crane".
    """
    taken, listed, found = {*others}, {*labels}, []
    for index, label in enumerate(labels):
        name = label
        while name in taken or (name != label and name in listed):
            name = f"{name} ({index})"
        taken.add(name)
        found.append(name)
    return tuple(found)


def csv_text(text: str) -> str:
    """A name for a cell of CSV: control characters escaped, and an apostrophe before what spreadsheets would
    run as a formula (OWASP, "CSV Injection")."""
    shown = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), escaped(text))
    return f"'{shown}" if _FORMULA.match(shown) else shown


def csv_line(cells: Iterable[object]) -> str:
    """A line of CSV: texts as `csv_text`, numbers of float32 in as many digits as tell them apart."""
    return str(_LINES.writerow([csv_text(cell) if isinstance(cell, str) else cell for cell in cells]))


def write_parquet(path: Path, tables: Iterable[Any], group_rows: Callable[[Any], int]) -> int:
    """Write tables of pyarrow, at least one, to a file, and return the number of their rows.

    Groups of rows are the same however the rows are divided; `group_rows` returns their size for a schema.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = iter(tables)
    first = next(tables)
    size, count, waiting = group_rows(first.schema), 0, list[Any]()
    with pq.ParquetWriter(path, first.schema) as writer:
        for table in itertools.chain([first], tables):
            count += table.num_rows
            waiting.append(table)
            while sum(part.num_rows for part in waiting) >= size:
                whole = pa.concat_tables(waiting).combine_chunks()
                writer.write_table(whole.slice(0, size))
                waiting = [whole.slice(size)]
        writer.write_table(pa.concat_tables(waiting).combine_chunks())
    return count


def escaped(text: str) -> str:
    r"""A path with its bytes that are no UTF-8 as `\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
