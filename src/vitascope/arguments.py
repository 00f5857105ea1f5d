"""Checks of values against types: of options when they are set, of arguments when a function is called."""

import dataclasses
import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vitascope.errors import UnknownNameError, UserError, check_choice, suggestion

F = TypeVar("F", bound=Callable[..., Any])

_PICTURES = {"images", "picture", "pictures"}
_PRACTICALLY_OPEN = 1e6
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def checked(function: F) -> F:
    """Check the arguments of each call against the annotations; an unknown name, another type or range is a
    `UserError`.

    What reads pictures rejects them by name, so they are left to it.
    """
    signature = inspect.signature(function)

    @functools.cache
    def kinds() -> dict[str, Any]:  # at the first call: help and imports stay fast
        found = get_type_hints(function, include_extras=True)
        return {
            name: found[name]
            for name, parameter in signature.parameters.items()
            if name in found.keys() - _PICTURES and parameter.kind not in _VARIADIC
        }

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            if not (unknown := [name for name in kwargs if name not in signature.parameters]):
                raise
            accepted = [name for name in signature.parameters if name != "self"]
            nearest = suggestion(unknown[0], accepted) or f"; it takes {', '.join(accepted)}"
            name = function.__qualname__.removesuffix(".__init__").removesuffix(".__call__")
            raise UnknownNameError(f"{name} has no argument {unknown[0]!r}{nearest}") from error
        for name, kind in kinds().items():
            if name in bound.arguments:
                value = bound.arguments[name]
                check_value(name, value, kind)
                if isinstance(value, Integral) and not isinstance(value, int):
                    bound.arguments[name] = int(value)  # of NumPy, which torch rejects
        return function(*bound.args, **bound.kwargs)

    return cast("F", call)


def check_fields(options: Any) -> None:
    """Check the fields of a frozen dataclass against their annotations; lists become tuples."""
    for name, kind in field_annotations(cast("Any", type(options))).items():
        value = getattr(options, name)
        check_value(name, value, kind)
        if isinstance(value, list):
            object.__setattr__(options, name, tuple(value))


class CheckedFields:
    """A frozen dataclass whose values are checked when it is created."""

    def __post_init__(self) -> None:
        check_fields(self)


@functools.cache
def field_annotations(kind: Hashable) -> dict[str, Any]:
    """The annotation of each field of a dataclass, by name, with the traits in `Annotated`."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cast("Any", kind))}


@dataclasses.dataclass(frozen=True)
class NamesFile:
    """A trait of options that may name a file or folder, which may be moved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The accepted values of a number, or of each of several, in `Annotated[float, Range(ge=0, lt=1)]`."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    multiple_of: int = 1

    def check(self, name: str, value: float | Sequence[float] | None) -> None:
        """Raise `UserError` for a number outside; None is not a number."""
        for number in value if isinstance(value, Sequence) else () if value is None else (value,):
            inside = self.gt < number < self.lt and self.ge <= number <= self.le
            if not inside or (self.multiple_of > 1 and number % self.multiple_of):
                raise UserError(f"{name} must be {self._in_words(number)}, not {value!r}")

    def _in_words(self, value: float) -> str:
        """The range; one that is practically open at its end, by the end that the value is beyond."""
        low, high = max(self.ge, self.gt), min(self.le, self.lt)
        if self.multiple_of > 1:
            return f"a positive multiple of {self.multiple_of}"
        if value >= high > _PRACTICALLY_OPEN:
            return f"below {high:,}"
        if high > _PRACTICALLY_OPEN:
            return "positive" if low == self.gt else f"at least {low:g}"
        return f"in {'(' if low == self.gt else '['}{low:g}, {high:g}{')' if high == self.lt else ']'}"


@dataclasses.dataclass(frozen=True)
class Increasing:
    """The accepted order of several numbers, in `Annotated[tuple[float, float], Increasing()]`."""

    def check(self, name: str, value: float | Sequence[float] | None) -> None:
        """Raise `UserError` for a number that is not above the one before it; None is not a number."""
        numbers = value if isinstance(value, Sequence) else ()
        if any(second <= first for first, second in itertools.pairwise(numbers)):
            raise UserError(f"{name} must increase, not {value!r}")


def check_value(name: str, value: object, kind: Any) -> None:
    """Raise `UserError` for a value that is not of a type, among its choices, in its `Range` or order."""
    if get_origin(kind) is Annotated:
        check_value(name, value, kind.__origin__)
        for trait in kind.__metadata__:
            if isinstance(trait, Range | Increasing):
                trait.check(name, cast("float | Sequence[float] | None", value))
    elif get_origin(kind) is Literal:
        choices = get_args(kind)
        if isinstance(choices[0], str):
            check_choice(name, value, choices)
        elif not has_type(value, int) or value not in choices:
            raise UserError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    elif not has_type(value, kind):
        raise UserError(f"{name} must be {type_in_words(kind)}, not {value!r}")


def has_type(value: object, kind: Any) -> bool:
    """Whether a value fits a type: an integer is a float too, a boolean is neither."""
    if kind is Any:
        return True
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(has_type(value, part) for part in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return _is_tuple(value, args)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(has_type(part, args[1]) for part in value.values())
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def _is_tuple(value: object, kinds: tuple[Any, ...]) -> bool:
    """Whether a list or tuple has the types of `tuple[kind, ...]`, or of a tuple of fixed length."""
    if not isinstance(value, tuple | list):
        return False
    expected = [kinds[0]] * len(value) if kinds[1:] == (...,) else kinds
    return len(value) == len(expected) and all(map(has_type, value, expected))


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # of an integer beyond the floats
        return False


_PLURALS = {str: "names", int: "whole numbers", float: "numbers", tuple[int, int]: "pairs of whole numbers"}


def type_in_words(kind: Any) -> str:
    """A type, for error messages."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(type_in_words, args)))
    if origin is Literal:
        return ", ".join(map(repr, args))
    if origin is tuple and args[-1] is not ...:
        return f"a pair of {_PLURALS[args[0]]}"
    if origin is tuple:
        return f"a list of {_PLURALS[args[0]]}"
    if origin in (Iterable, Sequence):
        return f"a list of {type_in_words(args[0])}"
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        NoneType: "null",
        os.PathLike: "a path",
        Mapping: "values by name",
        Callable: "a function",
    }
    kind = origin or kind
    return words.get(kind, getattr(kind, "__name__", str(kind)))
