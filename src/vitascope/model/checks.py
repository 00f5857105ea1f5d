"""Options against the types of their fields: what comes from a file or a command line may be anything."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitascope.errors import UserError, check_choice


@functools.cache
def field_types(kind: Hashable) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    return get_type_hints(kind)


def check_fields(options: object) -> None:
    """Refuse values of the wrong type, and those that are not among a field's choices.

    Raises:
        UserError: naming the field, the value and what it may be.
    """
    fields = field_types(type(options))  # type: ignore[arg-type]
    for name, kind in fields.items():
        value = getattr(options, name)
        if get_origin(kind) is Literal:
            check_choice(name, value, get_args(kind))
        elif not is_a(value, kind):
            raise UserError(f"{name} must be {wanted(kind)}, not {value!r}")


def is_a(value: object, kind: Any) -> bool:
    """Whether a value has a field's type: a whole number is a float too, true and false are no numbers."""
    if get_origin(kind) in (Union, UnionType):
        return any(is_a(value, part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple | list) and all(is_a(part, get_args(kind)[0]) for part in value)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def wanted(kind: Any) -> str:
    """A field's type in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(wanted(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of names" if get_args(kind)[0] is str else "a list of whole numbers"
    return {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )
