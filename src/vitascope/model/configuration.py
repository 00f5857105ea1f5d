"""`Configuration`: frozen options in groups, set by flat keywords and checked against their types."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Hashable, Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

from vitascope.errors import UserError, check_choice, nearest


class Configuration:
    """Base of a configuration: a `dataclass(frozen=True, kw_only=True, init=False, repr=False)`.

    A field whose type is a dataclass is a group of options. The options of a group are also keywords of the
    configuration itself, so `ViTConfig(pool="mean")` equals
    `ViTConfig(readout=ReadoutOptions(pool="mean"))`. No two options have the same name.
    """

    option_kind: ClassVar[str] = "option"
    """Name of an option in error messages."""

    def __init__(self, **options: Any) -> None:
        """Set fields, and options of groups, by keyword; `UserError` for what is unknown or does not fit."""
        kind = cast(Any, type(self))
        fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(kind)}
        group_of = self.groups()
        grouped: dict[str, dict[str, Any]] = {}
        for name in options.keys() - fields.keys():
            group = group_of.get(name)
            if group is None:
                raise UserError(f"unknown {self.option_kind} {name!r}{nearest(name, group_of)}")
            grouped.setdefault(group, {})[name] = options[name]
        for name, field in fields.items():
            value = options.get(name, dataclasses.MISSING)
            if value is dataclasses.MISSING:
                factory = field.default_factory
                value = field.default if factory is dataclasses.MISSING else factory()
            if name in grouped:
                check_value(name, value, field_types(kind)[name])
                value = dataclasses.replace(value, **grouped[name])
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        check_fields(self)

    def replace(self, **options: Any) -> Self:
        """A copy with other options, checked as in the constructor."""
        own = {name: getattr(self, name) for name in field_types(cast(Any, type(self)))}
        return type(self)(**own | options)

    @classmethod
    @functools.cache
    def groups(cls) -> dict[str, str | None]:
        """The group of each option by its name; None for the fields of the class itself."""
        own: dict[str, str | None] = {}
        grouped: dict[str, str | None] = {}
        for name, field_type in field_types(cast(Any, cls)).items():
            if dataclasses.is_dataclass(field_type):
                grouped |= dict.fromkeys(field_types(cast(Any, field_type)), name)
            else:
                own[name] = None
        return own | grouped

    def option(self, name: str) -> Any:
        """The value of an option, in whichever group it is."""
        group = self.groups()[name]
        return getattr(self if group is None else getattr(self, group), name)

    def to_dict(self) -> dict[str, Any]:
        """The options by name, without groups, as plain values for JSON."""
        values = {name: self.option(name) for name in self.groups()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`, checked as in the constructor."""
        return cls(**values)

    def __repr__(self) -> str:
        default = type(self)()
        values = {name: self.option(name) for name in self.groups()}
        changed = {name: value for name, value in values.items() if value != default.option(name)}
        options = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in changed.items())
        return f"{type(self).__name__}({options})"


@functools.cache
def field_types(kind: Hashable) -> dict[str, Any]:
    """The type of each field of a dataclass, by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(cast(Any, kind))}


def check_fields(options: object, **least: int) -> None:
    """Raise `UserError` for a field of the wrong type, not among its choices, or below its least value."""
    for name, kind in field_types(cast(Any, type(options))).items():
        value = getattr(options, name)
        check_value(name, value, kind)
        if name in least and value is not None and value < least[name]:
            raise UserError(f"{name} must be at least {least[name]}, not {value!r}")


def check_value(name: str, value: object, kind: Any) -> None:
    """Raise `UserError` for a value that is not of a type or among its choices."""
    if get_origin(kind) is Literal:
        check_choice(name, value, get_args(kind))
    elif not has_type(value, kind):
        raise UserError(f"{name} must be {type_in_words(kind)}, not {value!r}")


def has_type(value: object, kind: Any) -> bool:
    """Whether a value fits a field's type: an integer is a float too, a boolean is neither."""
    if get_origin(kind) in (Union, UnionType):
        return any(has_type(value, part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple | list) and all(has_type(part, get_args(kind)[0]) for part in value)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def type_in_words(kind: Any) -> str:
    """A field's type, for error messages."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(type_in_words(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of names" if get_args(kind)[0] is str else "a list of whole numbers"
    words = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))
