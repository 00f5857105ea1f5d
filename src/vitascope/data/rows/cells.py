"""The cells of tables of results: names of columns, and texts that no program misreads."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitascope.errors import UserError

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, line ends, and marks of the direction of a text, which show another name."""
_FORMULA = re.compile(r"(?![-+]?[\d.]+([eE][-+]?\d+)?$)\s*[=+\-@]")
"""Begins as a formula, and is no number."""


def check_output(out: Path, endings: Sequence[str], kind: str) -> None:
    """Reject a file of another ending, a `.parquet` without pyarrow, and a folder that does not exist."""
    if out.suffix not in endings:
        raise UserError(f"{out}: {kind} ends in {', '.join(endings)}")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        others = " or ".join(ending for ending in endings if ending != out.suffix)
        raise UserError(f"Parquet needs pyarrow: pip install 'vitascope[parquet]'; or choose {others}")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out.parent}: no such folder")


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
    shown = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return f"'{shown}" if _FORMULA.match(shown) else shown


def escaped(text: str) -> str:
    r"""A path with its bytes that are no UTF-8 as `\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
