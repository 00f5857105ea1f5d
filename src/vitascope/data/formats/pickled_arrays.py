"""Pickled dictionaries of numbers, texts and integer arrays, as CIFAR is published.

The pickle gets stand-ins for NumPy's functions, which allocate no more bytes than the pickle contains.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.errors import UserError
from vitascope.pickles import load_pickle

MAX_TUPLES = 100
"""Pickling an array takes six or seven."""


def read_pickle(content: bytes, name: str) -> dict[str, Any]:
    """A pickled dictionary of numbers, texts, bytes, lists, tuples and integer arrays (read-only), written by
    Python 2 or 3; keys that are bytes become text. `name` stands in messages."""
    try:
        values = load_pickle(content, _FOUND.get, max_tuples=MAX_TUPLES)
        if not isinstance(values, dict):
            raise pickle.UnpicklingError(f"it contains a {type(values).__name__}, not a dictionary")
        return {
            _text(key) if isinstance(key, bytes) else str(key): (
                value.values if isinstance(value, _Array) else value
            )
            for key, value in values.items()
        }
    except (pickle.UnpicklingError, ValueError) as error:
        raise UserError(f"{name}: rejected: {error}") from error


class _StandIn:
    """A stand-in for a function of NumPy's, without attributes to change."""

    __slots__ = ("_make",)

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a function has no state")


class _Type:
    """A NumPy type of integers."""

    def __init__(self, kind: Any, *_: Any) -> None:
        if not re.fullmatch(r"[<>=|]?[iu][1248]", _text(kind)):
            raise ValueError(f"an array of {_text(kind)[:40]!r}, not of integers")
        self.dtype = np.dtype(_text(kind))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise ValueError(f"a byte order of {order[:40]!r}")
        self.dtype = self.dtype.newbyteorder(order)  # type: ignore[arg-type]


class _Array:
    """A NumPy array; `__setstate__` may fill it."""

    def __init__(self, values: npt.NDArray[Any] | None = None) -> None:
        self.values = values

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        self.values = _array(content, kind, shape, "F" if fortran else "C")


def _array(content: Any, kind: Any, shape: Any, order: Any) -> npt.NDArray[Any]:
    """An array over bytes that the pickle contains."""
    if isinstance(content, str):  # bytes of Python 2
        content = content.encode("latin-1")
    if not (isinstance(content, bytes | bytearray) and isinstance(kind, _Type) and isinstance(shape, tuple)):
        raise ValueError("an array without shape, type or content")
    if len(shape) > 4 or not all(isinstance(size, int) and 0 <= size < 2**32 for size in shape):
        raise ValueError("an array of no sensible shape")
    promised = math.prod(shape) * kind.dtype.itemsize
    if promised != len(content):
        raise ValueError(f"an array {shape} of {kind.dtype} has {promised:,} bytes, not {len(content):,}")
    return np.frombuffer(bytes(content), kind.dtype).reshape(shape, order="F" if order == "F" else "C")


def _encoded(text: Any, encoding: Any) -> Any:
    if _text(encoding) not in ("latin1", "latin-1"):
        raise ValueError(f"bytes written as {_text(encoding)[:40]!r}")
    return text.encode("latin-1") if isinstance(text, str) else text


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise ValueError(f"a {type(value).__name__} where a text is needed")
    return value.decode("latin-1") if isinstance(value, bytes) else value


_EMPTY = _StandIn(lambda *_: _Array())  # the arguments are a placeholder's: class, shape (0,), type "b"
_FILLED = _StandIn(lambda content, kind, shape, order: _Array(_array(content, kind, shape, order)))
_FOUND = {
    "numpy.core.multiarray._reconstruct": _EMPTY,  # NumPy 1
    "numpy._core.multiarray._reconstruct": _EMPTY,
    "numpy.core.numeric._frombuffer": _FILLED,
    "numpy._core.numeric._frombuffer": _FILLED,
    "numpy.ndarray": _StandIn(None),
    "numpy.dtype": _StandIn(_Type),
    "_codecs.encode": _StandIn(_encoded),
}
"""The names in a pickled array of integers."""
