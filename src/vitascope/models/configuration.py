"""`Configuration`: frozen options in groups, set by flat keywords and checked against their types."""

import dataclasses
import functools
import os
import reprlib
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, ClassVar, Self, TypeVar, cast, get_type_hints

from vitascope._version import __version__
from vitascope.arguments import CheckedFields, check_value, field_annotations
from vitascope.errors import UnknownNameError, UserError, suggestion

T = TypeVar("T")


class Configuration(CheckedFields):
    """Base of a configuration: a `dataclass(frozen=True, kw_only=True, init=False, repr=False)`.

    A field whose type is a dataclass is a group of options. The options of a group are also keywords of the
    configuration itself, so `ViTConfig(pool="mean")` equals
    `ViTConfig(readout=ReadoutOptions(pool="mean"))`. No two options have the same name.
    """

    option_kind: ClassVar[str] = "option"
    """Name of an option in error messages."""

    def __init__(self, **options: Any) -> None:
        """Set fields, and options of groups, by keyword; `UserError` for an unknown or unfit value."""
        kind = cast(Any, type(self))
        fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(kind)}
        group_of = self.groups()
        grouped: dict[str, dict[str, Any]] = {}
        for name in options.keys() - fields.keys():
            group = group_of.get(name)
            if group is None:
                raise UnknownNameError(f"unknown {self.option_kind} {name!r}{suggestion(name, group_of)}")
            grouped.setdefault(group, {})[name] = _plain(options[name])
        for name, field in fields.items():
            field_type = field_types(kind)[name]
            if name not in options:
                is_group = dataclasses.is_dataclass(field_type)
                value = field_type(**grouped.get(name, {})) if is_group else field.default
            else:
                value = _plain(options[name])
                if name in grouped:
                    check_value(name, value, field_type)
                    value = dataclasses.replace(value, **grouped[name])
            object.__setattr__(self, name, value)
        self.__post_init__()

    def replace(self, **options: Any) -> Self:
        """A copy with other options, checked as in the constructor."""
        fields = {name: getattr(self, name) for name in field_types(cast(Any, type(self)))}
        return type(self)(**fields | options)

    @classmethod
    @functools.cache
    def groups(cls) -> dict[str, str | None]:
        """The group of each option by its name; None for the fields of the class itself."""
        single: dict[str, str | None] = {}
        grouped: dict[str, str | None] = {}
        for name, field_type in field_types(cast(Any, cls)).items():
            if dataclasses.is_dataclass(field_type):
                grouped |= dict.fromkeys(field_types(cast(Any, field_type)), name)
            else:
                single[name] = None
        return single | grouped

    def option(self, name: str) -> Any:
        """The value of an option, in whichever group it is."""
        group = self.groups()[name]
        return getattr(self if group is None else getattr(self, group), name)

    def to_dict(self) -> dict[str, Any]:
        """The options by name, without groups, as plain values for JSON."""
        values = {name: _plain(self.option(name)) for name in self.groups()}
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


@contextmanager
def options_of(file: object) -> Iterator[None]:
    """Name the file that options were read from in their errors, and a reason why one may be unknown."""
    try:
        yield
    except UserError as error:
        newer = f"; a newer version of vitascope than this one, {__version__}, may have written it"
        unknown = isinstance(error, UnknownNameError)
        raise UserError(f"{file}: {error}{newer if unknown else ''}") from error


def _plain(value: Any) -> Any:
    """A value as YAML and JSON have it: a path is text, a number of NumPy is Python's."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, Integral) else value


@functools.cache
def field_types(kind: Hashable) -> dict[str, Any]:
    """The type of each field of a dataclass, by name, without the traits in `Annotated`."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(cast(Any, kind))}


def traits(kind: Any, trait: type[T]) -> dict[str, T]:
    """The trait of a class that options have in `Annotated`, by name; groups included."""
    named: dict[str, T] = {}
    for name, field_type in field_types(kind).items():
        metadata = getattr(field_annotations(kind)[name], "__metadata__", ())
        for part in metadata:
            if isinstance(part, trait):
                named[name] = part
        if dataclasses.is_dataclass(field_type):
            named |= traits(field_type, trait)
    return named
