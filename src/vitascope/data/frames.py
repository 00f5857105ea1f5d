"""DataFrames of pandas as data: written as a table of JSON lines, which every function reads."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vitascope.data.table_options import TableOptions, roles_of
from vitascope.errors import UserError

FILE = "data.jsonl"


@runtime_checkable
class DataFrame(Protocol):
    """What is used of `pandas.DataFrame`, which is no dependency."""

    columns: Any

    def astype(self, dtype: Any) -> Any:
        """The frame with values of another type."""

    def notna(self) -> Any:
        """Whether each value is one."""


@contextmanager
def stored(data: DataFrame | str | os.PathLike[str], table: TableOptions) -> Iterator[str]:
    """The DATA argument for some data; a frame is in a file while the context lasts.

    Its paths become absolute: they are relative to the folder `images`, or to the working directory.
    """
    if not isinstance(data, DataFrame):
        yield os.fspath(data)
        return
    with tempfile.TemporaryDirectory(prefix="vitascope-") as folder:
        path = Path(folder) / FILE
        _write(data, path, table)
        try:
            yield str(path)
        except UserError as error:
            error.args = (str(error).replace(str(path), "the DataFrame"),)
            raise


def _write(frame: DataFrame, path: Path, table: TableOptions) -> None:
    """Write one JSON object per row; the index is left out."""
    names = [str(name) for name in frame.columns]
    if len(set(names)) < len(names):
        raise UserError(f"the DataFrame has several columns of the same name: {', '.join(sorted(names))}")
    image = roles_of(names, table, "the DataFrame").image
    base = os.path.abspath(os.path.expanduser(table.images or "."))
    values = frame.astype(object).where(frame.notna(), None)
    with open(path, "w", encoding="utf-8") as file:
        for number, row in enumerate(values.itertuples(index=False, name=None), 1):
            cells = dict(zip(names, map(_finite, row), strict=True))
            if cells[image] is not None:
                cells[image] = os.path.join(base, str(cells[image]))
            try:
                file.write(json.dumps(cells, ensure_ascii=False, default=_plain) + "\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"the DataFrame: row {number:,} cannot be written as JSON: {error}"
                ) from error


def _finite(value: Any) -> Any:
    """A value; infinity, which no JSON has, as text: the column may be one that is not used."""
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _plain(value: Any) -> Any:
    """A value of NumPy, or another one, as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)
