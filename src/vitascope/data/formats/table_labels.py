"""The classes of images from the cells of a table: one class or several per image, in any usual form."""

from __future__ import annotations

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

_ONE, _ZERO = {"1", "1.0", "true"}, {"0", "0.0", "false", ""}
_NOT_A_NUMBER = {"nan", "na", "n/a", "none", "null", "?"}
"""What stands for no number in a column of numbers, in lower case."""
_UNKNOWN = {"-1", "-1.0", *_NOT_A_NUMBER}
"""What stands for an unknown label in columns of 0 and 1, in lower case."""
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
_WHOLE = re.compile(r"\s*[-+]?\d+(\.0*)?\s*")
MANY_NUMBERS = 20
"""Different numbers above which a column is no column of classes if most of them stand in one row only."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """The names of each image's classes."""

    rows: Sequence[tuple[str, ...]]
    """Of an image without a label, none."""
    several: bool
    """Whether an image may have any number of classes; else it has one, or is unlabelled."""
    form: str
    """How they were read, in words."""
    unknown: Sequence[tuple[str, ...]] = ()
    """The classes of each image that are unknown; all of an image without a label. Empty if all are known."""


def of_cells(cells: Sequence[str], column: str, options: TableOptions, place: object) -> Labels:
    """The labels in one column."""
    cells = list(map(canonical, cells))
    counts = Counter(cells)
    different = [cell for cell in counts if _bare(cell).strip()]
    where, form = f"{place}: the column {column}", ""
    record = next((cell for cell in different if cell.startswith("{") and cell.endswith("}")), None)
    if record is not None:
        raise UserError(f"{where}: {record[:60]!r} is an object; a label is a name, or a list of names")
    if different and all(map(_is_list, different)):
        names, form = {cell: _parsed(cell, where) for cell in different}, "in lists"
    elif (separator := _separator(different, options)) is not None:
        names = {cell: _divided(cell, separator) for cell in different}
        form = f"separated by {separator!r}"
    else:
        names = _whole_cells(counts, different, where)
    without = Counter({cell.strip(): counts[cell] for cell in different if not form and not names[cell]})
    several = options.labels == "several" or (options.labels is None and bool(form))
    longer = next((cell for cell in different if len(names[cell]) > 1), None)
    if not several and longer is not None:
        raise UserError(f"{where} has several labels in {longer!r}, but labels=one")
    by_name: Counter[str] = Counter()
    for cell in different:
        by_name.update(dict.fromkeys(names[cell], counts[cell]))
    _check_spellings(by_name, where)
    known = {cell: tuple(dict.fromkeys(name.strip() for name in names[cell])) for cell in different}
    none: tuple[str, ...] = ()
    form = f"several classes per image{form and ', ' + form}" if several else "one class per image"
    if without:
        form += f", {' and '.join(sorted(without))} in {counted(without.total(), 'row')} is no label"
    return Labels([known.get(cell, none) for cell in cells], several, form)


def _whole_cells(counts: Counter[str], different: Sequence[str], where: str) -> dict[str, tuple[str, ...]]:
    """The label of each cell that is one; numbers to be predicted, which are no classes, are a UserError."""
    bare = {cell: _bare(cell) for cell in different}
    missing = {cell for cell, text in bare.items() if text.strip().lower() in _NOT_A_NUMBER}
    texts = [text for cell, text in bare.items() if cell not in missing]
    are_numbers = bool(texts) and all(map(_NUMBER.fullmatch, texts))
    missing = missing if are_numbers else set()  # else they are names, as of a class "none"
    whole = are_numbers and all(map(_WHOLE.fullmatch, texts))
    numbers = sorted(map(float, texts)) if are_numbers else []
    single = sum(counts[cell] == 1 for cell in different if cell not in missing)
    if numbers and (not whole or (len(numbers) > MANY_NUMBERS and 2 * single > len(numbers))):
        raise UserError(
            f"{where} has {len(numbers):,} different numbers from {numbers[0]:g} to {numbers[-1]:g}, and "
            "vitascope learns classes, not numbers (no regression): name another column of labels, or divide "
            "the numbers into classes"
        )
    # A program writes 1.0 for 1 where other cells of the column are empty. -1 is no label, as in the hub's
    # data sets, but beside 1 alone.
    unknown = whole and minus_one_is_none(numbers)
    names = {cell: (text.partition(".")[0].strip() if whole else text,) for cell, text in bare.items()}
    none = missing | {cell for cell, name in names.items() if unknown and name == ("-1",)}
    return {cell: () if cell in none else name for cell, name in names.items()}


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
    names = tuple(columns)
    if options.blank == "unknown":
        columns = {
            name: [cell if cell.strip() else "-1" for cell in cells] for name, cells in columns.items()
        }
    others = {name: _others(column) for name, column in columns.items()}
    if wrong := {name: found for name, found in others.items() if found}:
        some = [
            f"{name} has " + ", ".join(f"{cell!r} in {counted(n, 'row')}" for cell, n in found.most_common(4))
            for name, found in wrong.items()
        ]
        raise UserError(
            f"{place}: {counted(len(wrong), 'column')} of 0 and 1 with other cells: {'; '.join(some[:4])}; "
            "write 0, 1, or -1 for what is unknown, leave these rows out, or name other columns of labels: "
            "columns label=A,B"
        )
    names = tuple(map(canonical, names))
    _check_spellings(Counter(names), f"{place}: the names of the columns")
    rows: list[tuple[str, ...]] = []
    known: dict[tuple[bool, ...], tuple[str, ...]] = {}
    for cells in zip(*columns.values(), strict=True):
        key = tuple(cell.strip().lower() in _ONE for cell in cells)
        if key not in known:
            known[key] = tuple(dict.fromkeys(name for name, has in zip(names, key, strict=True) if has))
        rows.append(known[key])
    unknown = [
        tuple(name for name, cell in zip(names, cells, strict=True) if cell.strip().lower() in _UNKNOWN)
        for cells in zip(*columns.values(), strict=True)
    ]
    count = sum(map(len, unknown))
    for name, column in columns.items() if count else ():  # -1 for "no", as in some published data
        if not {cell.strip().lower() for cell in column} & _ZERO:
            raise UserError(
                f"{place}: the column {name} has no 0, only 1 and what is unknown (-1): write 0 where the "
                "class does not apply"
            )
    if count and options.labels == "one":
        raise UserError(
            f"{place}: labels=one, but {counted(count, 'cell')} of the columns of 0 and 1 are unknown"
        )
    one = all(len(row) == 1 for row in known.values()) and not count
    if options.labels == "one" and (faults := sum(len(row) > 1 for row in rows)):
        raise UserError(f"{place}: labels=one, but {faults:,} of {len(rows):,} rows have several classes")
    several = options.labels == "several" or (options.labels is None and not one)
    blank = sum(not cell.strip() for column in columns.values() for cell in column)
    zeros = f", {counted(blank, 'blank cell')} as 0" if blank else ""
    zeros += f", {counted(count, 'unknown cell')}" if count else ""
    kind = "several classes" if several else "one class"
    form = f"{len(names):,} columns of 0 and 1{zeros}, {kind} per image"
    return Labels(rows, several, form, unknown if count else ())


def is_indicator(cells: Iterable[str]) -> bool:
    """Whether a column has 0 and 1, and of other values those alone that mean that it is not known."""
    found = {cell.strip().lower() for cell in set(cells)}
    return found <= _ONE | _ZERO | _UNKNOWN and bool(found & _ONE) and bool(found & _ZERO - {""})


def _others(column: Sequence[str]) -> Counter[str]:
    """The cells that are neither 0 nor 1 nor blank nor unknown."""
    return Counter(cell for cell in column if cell.strip().lower() not in _ONE | _ZERO | _UNKNOWN)


def _is_list(cell: str) -> bool:
    return cell.lstrip().startswith("[") and cell.rstrip().endswith("]")


def _parsed(cell: str, where: str) -> tuple[str, ...]:
    """The names in a list, as JSON or Python writes it."""
    try:
        values = json.loads(cell)
    except ValueError:
        try:
            values = ast.literal_eval(cell.strip())  # a list of pandas, written as CSV
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise UserError(f"{where}: {cell[:60]!r} is not a list in JSON") from error
    except RecursionError as error:
        raise UserError(f"{where}: {cell[:60]!r} is nested too deeply") from error
    if not isinstance(values, list) or not all(type(value) in (str, int) for value in values):
        raise UserError(f"{where}: {cell[:60]!r} is not a list of names")
    return tuple(name for value in values if (name := str(value)).strip())


def _separator(different: Sequence[str], options: TableOptions) -> str | None:
    """The text between the classes in a cell; None if a cell is one class."""
    if options.label_separator is not None or options.labels == "one":
        return options.label_separator
    different = list(dict.fromkeys(map(_bare, different)))
    for separator in (";", "|"):
        if any(separator in cell for cell in different):
            return separator
    # Commas and spaces also stand within names, such as "golden retriever": it is a list if the parts recur.
    parts = _part_counts(different, ",")
    if any("," in cell for cell in different) and max(parts.values()) > 1:
        return ","
    words = _part_counts(different, " ")
    alone = sum(cell.strip() in words for cell in different)
    if len(words) < len(different) and (2 * len(words) <= len(different) or alone == len(words)):
        return " "
    return None


def _bare(cell: str) -> str:
    """A cell without separators at its ends."""
    inner = cell.strip(" \t\r\n,;|")
    return cell if inner == cell.strip() else inner


def _part_counts(different: Sequence[str], separator: str) -> Counter[str]:
    """The number of cells that each part is in."""
    counts: Counter[str] = Counter()
    for cell in different:
        counts.update(set(_divided(cell, separator)))
    return counts


def _divided(cell: str, separator: str) -> tuple[str, ...]:
    """The parts of a cell, without spaces around them."""
    return tuple(filter(None, (part.strip() for part in cell.split(separator))))


def _check_spellings(counts: Counter[str], where: str) -> None:
    """Reject names that differ only in case or spaces, with the numbers of their rows."""
    alike: dict[str, list[str]] = {}
    for name in counts:
        alike.setdefault(" ".join(name.casefold().split()), []).append(name)
    twice = [names for names in alike.values() if len(names) > 1]
    if twice:
        first = sorted(twice[0], key=lambda name: (-counts[name], name))
        written = ", ".join(f"{name!r} ({counts[name]:,})" for name in first)
        more = f", and so has {counted(len(twice) - 1, 'other label')}" if len(twice) > 1 else ""
        raise UserError(
            f"{where} has a label in {len(first)} spellings, {written}{more}; if they are one class, write "
            f"{first[0].strip()!r} everywhere, else give them names that differ more"
        )
