"""DataFrames of pandas as data: written as a table of JSON lines, which every function reads."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vitascope.data.table_options import TableOptions, roles_of
from vitascope.errors import UserError, naming

FILE = "data.jsonl"


@runtime_checkable
class DataFrame(Protocol):
    """What is used of `pandas.DataFrame`, which is no dependency."""

    columns: Any

    def __getitem__(self, name: str, /) -> Any:
        """A column."""

    def assign(self, **columns: Any) -> Any:
        """The frame with other columns."""

    def to_json(self, *arguments: Any, **options: Any) -> Any:
        """Write the frame."""


@contextmanager
def data_place(data: DataFrame | str | os.PathLike[str], table: TableOptions) -> Iterator[str]:
    """The DATA argument for some data; a frame is in a file while the context lasts.

    Its paths become absolute: they are relative to the folder `images`, or to the working directory.
    """
    if not isinstance(data, DataFrame):
        yield os.fspath(data)
        return
    with tempfile.TemporaryDirectory(prefix="vitascope-") as folder:
        path = Path(folder) / FILE
        _write(data, path, table)
        with naming(path, "the DataFrame"):
            yield str(path)


def _write(frame: DataFrame, path: Path, table: TableOptions) -> None:
    """Write one JSON object per row; the index is left out."""
    names = [str(name) for name in frame.columns]
    image = roles_of(names, table, "the DataFrame").image
    base = os.path.abspath(os.path.expanduser(table.images or "."))
    paths = frame[image].map(lambda cell: os.path.join(base, str(cell)), na_action="ignore")
    try:
        frame.assign(**{image: paths}).to_json(
            path, orient="records", lines=True, force_ascii=False, date_format="iso", default_handler=str
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"the DataFrame cannot be written as JSON: {error}") from error
