"""JSON and YAML as our files have them: records of plain values and finite numbers.

A file may be damaged, edited by hand or hostile. What the standard readers accept beyond our needs (NaN,
numbers that no float holds, references between values, tags that name types) is a ValueError here.
"""

import json
import math
import os
import pickle
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from vitascope.arguments import check_value
from vitascope.errors import UserError

TOO_DEEP = "it is nested too deeply"
MAX_DIGITS = 300
"""Digits of an integer: one with more is larger than any float."""


class RestrictedUnpickler(pickle.Unpickler):
    """Python's unpickler for some names alone, "module.name": no other object can be reached or called."""

    def __init__(self, file: IO[bytes], admitted: Collection[str], encoding: str = "ASCII") -> None:
        super().__init__(file, encoding=encoding)
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        """The object of a name; an UnpicklingError for one that is not admitted."""
        if f"{module}.{name}" not in self._admitted:
            raise pickle.UnpicklingError(f"the pickle refers to {f'{module}.{name}'[:200]!r}")
        return super().find_class(module, name)


@contextmanager
def explaining_faults(path: object, remedy: str = "restore it, or name another run") -> Iterator[None]:
    """Turn every fault of reading a file into one line: the file, what is wrong, and what to do."""
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        reason = str(error).removeprefix(f"{path}: ")
        raise UserError(f"{path} is broken: {reason}; {remedy}") from error


def check_record(
    values: object, types: Mapping[str, Any], needed: Collection[str] = (), others: Any = Any
) -> dict[str, Any]:
    """The values of an object of JSON or YAML by name, of which some are needed; a ValueError for no object,
    an absent name, or a value that is not of its annotation, or of that for `others`; see `check_value`."""
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__}, not an object")
    if absent := [name for name in needed if name not in values]:
        raise ValueError(f"it has no {', '.join(absent)}")
    for name, value in values.items():
        kind = types.get(name, others)
        if kind is not Any and kind is not type(value):
            check_value(name, value, kind)
    return values


def read_record(
    path: Path, types: Mapping[str, Any], needed: Collection[str] = (), others: Any = Any
) -> dict[str, Any]:
    """The record in a file of JSON, or of YAML by its ending, as of `check_record`; empty without a file."""
    if not path.is_file():
        return {}
    with explaining_faults(path):
        values = read_yaml(path) if path.suffix == ".yaml" else parse_json(path.read_text(encoding="utf-8"))
        return check_record(values, types, needed, others)


def parse_json(text: str) -> Any:
    """The value of a JSON text; a ValueError says why it is none of ours."""
    try:
        return _JSON.decode(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def _finite(text: str) -> float:
    """A number of JSON, but not NaN or Infinity, which Python's reader accepts."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _whole(text: str) -> int:
    """An integer of JSON; one beyond the range of floats would overflow later."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of two values under one name, readers keep different ones."""
    values = dict(pairs)
    for name, value in pairs:
        if values[name] != value:
            raise ValueError(f"the name {name[:40]!r} stands twice in an object, with two values")
    return values


_JSON = json.JSONDecoder(
    parse_float=_finite, parse_int=_whole, parse_constant=_finite, object_pairs_hook=_distinct
)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The value of a YAML file; an OSError, or a ValueError with the reason in one line."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, AttributeError, LookupError, TypeError) as error:
        # the last three are of tags such as !!int
        raise ValueError(_in_one_line(error)) from error
    _check_plain(value)
    return value


def _in_one_line(error: Exception) -> str:
    """A fault of YAML and its line; the library's own text has several lines."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return TOO_DEEP
    return " ".join(str(error).split())


class _Loader(yaml.SafeLoader):
    """A safe loader without references between values, of which a few bytes stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            place = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="references (& and *) are not read", problem_mark=place)
        return super().compose_node(parent, index)


def _check_plain(value: object) -> None:
    """Reject keys that are no text, values that JSON does not have, and numbers that no float holds."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"the name {str(key)[:40]!r} is not text: write it in quotes, as YAML reads no, yes, on "
                    "and off as true or false, and digits as a number"
                )
            _check_plain(part)
    elif isinstance(value, list):
        for part in value:
            _check_plain(part)
    elif isinstance(value, int | float):
        if not abs(value) < 10**MAX_DIGITS:
            raise ValueError("a number in it is not finite, or too large")
    elif not isinstance(value, str | None):
        raise ValueError(f"{str(value)[:40]!r} is a {type(value).__name__}, not text or a number; quote it")


def yaml_text(values: Mapping[str, Any]) -> str:
    """The YAML that `read_yaml` reads, with the names in their order."""
    return yaml.dump(dict(values), Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # a list that occurs twice is written twice
        return True
