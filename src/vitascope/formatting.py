"""Numbers and tables as text, for the console, the server and the report; tables for pandas."""

import datetime
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from vitascope.errors import UserError

SEPARATOR = ";"
"""Between the classes of an image in a text."""


def canonical(name: str) -> str:
    """The name in Unicode's composed form (NFC): macOS writes `é` as two characters, most else as one."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 epoch`, `1,000 epochs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time: `12.3 s`, or `0:02:05` from two minutes on."""
    return f"{seconds:.1f} s" if seconds < 120 else str(datetime.timedelta(seconds=round(seconds)))


def speed(images_per_second: float) -> str:
    """A speed with at least two digits: `1,234 images/s`, `0.042 images/s`."""
    digits = ",.0f" if images_per_second >= 10 else ".2g"
    return f"{images_per_second:{digits}} images/s"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> Iterator[str]:
    """The lines of a table: some columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def pandas_library() -> Any:
    """The module `pandas`; UserError where it is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise UserError("to_dataframe needs pandas, which is not installed: pip install pandas") from error
    return pandas


def listed(texts: Sequence[str], most: int = 3) -> str:
    """The first of some texts, and the number of the others."""
    more = f" and {counted(len(texts) - most, 'other')}" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
