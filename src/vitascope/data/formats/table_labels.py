"""The classes of images from the cells of a table: one class or several per image, in any usual form."""

import ast
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from vitascope.data.table_options import TableOptions
from vitascope.data.targets import minus_one_is_none
from vitascope.errors import UserError
from vitascope.formatting import canonical, counted

_NOT_A_NUMBER = {"nan", "na", "n/a", "none", "null", "?"}
"""What stands for no number in a column of numbers, in lower case."""
_VALUES: dict[str, bool | None] = {
    **dict.fromkeys(("1", "1.0", "true"), True),
    **dict.fromkeys(("0", "0.0", "false"), False),
    **dict.fromkeys(("-1", "-1.0", *_NOT_A_NUMBER)),
}
"""The meaning of a cell in columns of 0 and 1, in lower case; None for unknown."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+(\.0*)?")
_AT_ENDS = " \t\r\n,;|"
"""Stray separators, which divide nothing."""
MANY_NUMBERS = 20
"""Different numbers above which a column is no column of classes if most of them stand in one row only."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """The names of each image's classes."""

    rows: Sequence[tuple[str, ...] | None]
    """None for an image without a label."""
    several: bool
    """Whether an image may have any number of classes; else it has one, or is unlabelled."""
    form: str
    """How they were read, in words."""
    unknown: Sequence[tuple[str, ...]] = ()
    """The classes of each image that are unknown; empty if all are known."""


def of_cells(column: Sequence[str], name: str, options: TableOptions, place: object) -> Labels:
    """The labels in one column."""
    bare = {cell: canonical(cell).strip(_AT_ENDS) for cell in set(column)}
    counts = Counter(bare[cell] for cell in column)
    different = [cell for cell in counts if cell]
    where, form = f"{place}: the column {name}", ""
    if different and all(cell[0] == "[" and cell[-1] == "]" for cell in different):
        names, form = {cell: _listed(cell, where) for cell in different}, "in lists"
    elif (separator := _separator(different, options)) is not None:
        names, form = {cell: _parts(cell, separator) for cell in different}, f"separated by {separator!r}"
    else:
        names = _single(counts, where)
    several = options.labels == "several" or (options.labels is None and bool(form))
    longer = next((cell for cell in different if len(names[cell]) > 1), None)
    if not several and longer is not None:
        raise UserError(f"{where} has several labels in {longer!r}, but labels=one")
    _check_spellings(counts, names, where)
    without = [] if form else sorted(cell for cell in different if not names[cell])
    form = f"several classes per image{form and ', ' + form}" if several else "one class per image"
    if without:
        rows = counted(sum(counts[cell] for cell in without), "row")
        form += f", {' and '.join(without)} in {rows} is no label"
    classes = {cell: names.get(text, ()) or (() if several else None) for cell, text in bare.items()}
    return Labels([classes[cell] for cell in column], several, form)


def _single(counts: Counter[str], where: str) -> dict[str, tuple[str, ...]]:
    """The label of each cell that is one; numbers to be predicted, which are no classes, are a UserError."""
    texts = [cell for cell in counts if cell and cell.lower() not in _NOT_A_NUMBER]
    if not texts or not all(map(_NUMBER.fullmatch, texts)):
        return {cell: (cell,) for cell in counts if cell}
    whole, numbers = all(map(_WHOLE.fullmatch, texts)), sorted(map(float, texts))
    single = sum(counts[cell] == 1 for cell in texts)
    if not whole or (len(numbers) > MANY_NUMBERS and 2 * single > len(numbers)):
        raise UserError(
            f"{where} has {len(numbers):,} different numbers from {numbers[0]:g} to {numbers[-1]:g}, and "
            "vitascope learns classes, not numbers (no regression): name another column of labels, or divide "
            "the numbers into classes"
        )
    # A program writes 1.0 for 1 where other cells of the column are empty. -1 is no label, as in the hub's
    # data sets, but beside 1 alone.
    names = {cell: (cell.partition(".")[0],) for cell in texts}
    none = [("-1",)] if minus_one_is_none(numbers) else []
    return {cell: names[cell] if cell in names and names[cell] not in none else () for cell in counts}


def numbered(cells: Sequence[str]) -> list[str]:
    """The cells of a column of groups or folds; if all are whole numbers, or stand for none, in one form: `1`
    for `1.0`, and a blank for `nan`."""
    texts = {cell: canonical(cell.strip()) for cell in set(cells)}
    none = {cell for cell, text in texts.items() if text.lower() in {"", *_NOT_A_NUMBER}}
    if not texts.keys() - none or not all(_WHOLE.fullmatch(texts[cell]) for cell in texts.keys() - none):
        return [texts[cell] for cell in cells]
    return ["" if cell in none else texts[cell].partition(".")[0] for cell in cells]


def of_columns(columns: dict[str, list[str]], options: TableOptions, place: object) -> Labels:
    """The labels in columns of 0 and 1, one per class: several per image, unless each image has one."""
    if options.label_separator is not None:
        raise UserError(f"{place}: label_separator is for one column of labels, not for columns of 0 and 1")
    meaning: dict[str, bool | None] = {**_VALUES, "": None if options.blank == "unknown" else False}
    values: dict[str, list[bool | None]] = {}
    blank = 0
    for name, column in columns.items():
        counts = Counter(column)
        texts = {cell: cell.strip().lower() for cell in counts}
        if others := [(cell, n) for cell, n in counts.most_common() if texts[cell] not in meaning]:
            some = ", ".join(f"{cell!r} in {counted(n, 'row')}" for cell, n in others[:4])
            raise UserError(
                f"{place}: a column of 0 and 1 with other cells: {name} has {some}; write 0, 1, or -1 for "
                "what is unknown, leave these rows out, or name other columns of labels: columns label=A,B"
            )
        kinds = {cell: meaning[text] for cell, text in texts.items()}
        if None in kinds.values() and False not in kinds.values():  # -1 for "no", as in some published data
            raise UserError(
                f"{place}: the column {name} has no 0, only 1 and what is unknown (-1): write 0 where the "
                "class does not apply"
            )
        blank += sum(n for cell, n in counts.items() if not texts[cell] and kinds[cell] is False)
        values[name] = [kinds[cell] for cell in column]
    keys = list(zip(*values.values(), strict=True))
    known, unknown = (
        {key: tuple(n for n, value in zip(columns, key, strict=True) if value is kind) for key in set(keys)}
        for kind in (True, None)
    )
    count = sum(len(unknown[key]) for key in keys)
    several = options.labels != "one" and (
        options.labels == "several" or count > 0 or any(len(row) != 1 for row in known.values())
    )
    if not several and (faults := sum(len(known[key]) > 1 for key in keys)):
        raise UserError(f"{place}: labels=one, but {faults:,} of {len(keys):,} rows have several classes")
    form = f"{len(columns):,} columns of 0 and 1" + (
        f", {counted(blank, 'blank cell')} as 0" if blank else ""
    )
    form += f", {counted(count, 'unknown cell')}" if count else ""
    form += f", {'several classes' if several else 'one class'} per image"
    rows = [
        known[key] if known[key] or (several and len(unknown[key]) < len(columns)) else None for key in keys
    ]
    return Labels(rows, several, form, [unknown[key] for key in keys] if count else ())


def is_indicator(cells: Iterable[str]) -> bool:
    """Whether a column has 0 and 1, and of other values those alone that mean that it is not known."""
    texts = {cell.strip().lower() for cell in set(cells)} - {""}
    return texts <= _VALUES.keys() and {True, False} <= {_VALUES[text] for text in texts}


def _listed(cell: str, where: str) -> tuple[str, ...]:
    """The names in a list, as JSON or Python writes it."""
    try:
        values = json.loads(cell)
    except (ValueError, RecursionError):
        try:
            values = ast.literal_eval(cell)  # a list of pandas, written as CSV
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            values = None
    if not isinstance(values, list) or not all(type(value) in (str, int) for value in values):
        raise UserError(f"{where}: {cell[:60]!r} is not a list of names in JSON")
    return tuple(dict.fromkeys(name for value in values if (name := str(value).strip())))


def _separator(different: Sequence[str], options: TableOptions) -> str | None:
    """The text between the classes in a cell; None if a cell is one class."""
    if options.label_separator is not None or options.labels == "one":
        return options.label_separator
    for separator in (";", "|"):
        if any(separator in cell for cell in different):
            return separator
    # Commas and spaces also stand within names, such as "golden retriever": it is a list if the parts recur.
    if any("," in cell for cell in different) and max(_part_counts(different, ",").values()) > 1:
        return ","
    words = _part_counts(different, " ")
    alone = sum(cell in words for cell in different)
    if len(words) < len(different) and (2 * len(words) <= len(different) or alone == len(words)):
        return " "
    return None


def _part_counts(different: Sequence[str], separator: str) -> Counter[str]:
    """The number of cells that each part is in."""
    return Counter(part for cell in different for part in _parts(cell, separator))


def _parts(cell: str, separator: str) -> tuple[str, ...]:
    """The different parts of a cell, without spaces around them."""
    return tuple(dict.fromkeys(filter(None, map(str.strip, cell.split(separator)))))


def _check_spellings(counts: Counter[str], names: dict[str, tuple[str, ...]], where: str) -> None:
    """Reject names that differ only in case or spaces, with the numbers of their rows."""
    alike: dict[str, Counter[str]] = {}
    for cell, row in names.items():
        for name in row:
            alike.setdefault(" ".join(name.casefold().split()), Counter())[name] += counts[cell]
    twice = [spellings for spellings in alike.values() if len(spellings) > 1]
    if twice:
        first = sorted(twice[0].items(), key=lambda item: (-item[1], item[0]))
        written = ", ".join(f"{name!r} ({count:,})" for name, count in first)
        more = f", and so has {counted(len(twice) - 1, 'other label')}" if len(twice) > 1 else ""
        raise UserError(
            f"{where} has a label in {len(first)} spellings, {written}{more}; if they are one class, write "
            f"{first[0][0]!r} everywhere, else give them names that differ more"
        )
