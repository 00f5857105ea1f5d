"""Pickles read as data: obeyed are the few instructions that arrays, texts and numbers are made of.

A pickle is a program for Python's unpickler, which can call whatever can be imported. One whose `find_class`
admits little can still be told to fill the memory, or to change what it admits. Here `pickletools` takes the
program apart, and its instructions are carried out one by one on a stack of plain values: nothing is
imported, called or changed, whatever the pickle asks for.
"""

from __future__ import annotations

import dataclasses
import math
import pickletools
import re
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from vitascope.errors import UserError

MAX_INSTRUCTIONS = 2_000_000
"""Above this a pickle is refused; the largest batch that is published, of CIFAR-100, has 350,000."""

_NAMES = {
    **dict.fromkeys(["numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"], "array"),
    **dict.fromkeys(["numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer"], "buffer"),
    **{"numpy ndarray": "ndarray", "numpy dtype": "dtype", "_codecs encode": "encode"},
}
"""What a pickled array of integers refers to, of NumPy before 2 (`core`) and since (`_core`)."""
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclasses.dataclass(frozen=True)
class _Name:
    """What stands on the stack for something of NumPy's."""

    role: str


@dataclasses.dataclass
class _Type:
    """A NumPy type; its byte order is told afterwards."""

    dtype: np.dtype[Any]


@dataclasses.dataclass
class _Array:
    """A NumPy array; what is in it may be told afterwards."""

    values: npt.NDArray[Any] | None = None


def read_pickle(content: bytes, name: str) -> dict[str, Any]:
    """A pickled dictionary of numbers, texts, bytes, lists, tuples and integer arrays.

    Any protocol, of Python 2 and 3. Texts of Python 2 are decoded as Latin-1; keys that are bytes become
    text. Arrays are read-only.

    Args:
        content: the pickle.
        name: what messages call it.

    Raises:
        UserError: it asks for anything else, which it names; it is cut short or no pickle; it has more than
            `MAX_INSTRUCTIONS`; an array's size contradicts its content.
    """
    machine = _Machine(name)
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
            if count >= MAX_INSTRUCTIONS:
                raise UserError(f"{name}: refused: a pickle of more than {MAX_INSTRUCTIONS:,} instructions")
            machine.obey(instruction.name, argument)
        result = machine.stack.pop()
        if not isinstance(result, dict):
            raise UserError(f"{name}: the pickle holds a {type(result).__name__}, not a dictionary")
        return {
            key.decode("latin-1") if isinstance(key, bytes) else str(key): (
                value.values if isinstance(value, _Array) else value
            )
            for key, value in result.items()
        }
    except UserError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{name}: not a whole pickle: {error}") from error


class _Machine:
    """Python's pickle machine without its ways out.

    `obey` raises ValueError, TypeError, IndexError or KeyError for a program that makes no sense, and
    UserError for one that wants what is not here.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def obey(self, instruction: str, argument: Any) -> None:
        """Carry out one instruction."""
        stack = self.stack
        match instruction:
            case _ if instruction in _VALUES:
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self.memo[argument])
            case "MARK":
                self.marks.append(len(stack))
            case "EMPTY_LIST" | "EMPTY_DICT":
                stack.append([] if instruction == "EMPTY_LIST" else {})
            case "LIST" | "DICT" | "TUPLE" | "APPENDS" | "SETITEMS":
                self._gather(instruction)
            case "APPEND" | "SETITEM":
                self.marks.append(len(stack) - (1 if instruction == "APPEND" else 2))
                self._gather(f"{instruction}S")
            case _ if instruction in _TUPLES:
                cut = len(stack) - _TUPLES[instruction]
                stack[cut:] = [tuple(stack[cut:])]
            case _ if instruction in _CONSTANTS:
                stack.append(_CONSTANTS[instruction])
            case "GLOBAL" | "INST":
                stack.append(self._named(argument))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(self._named(f"{_text(module)} {_text(attribute)}"))
            case "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                stack.append(_made(called.role if isinstance(called, _Name) else "", arguments))
            case "BUILD":
                state = stack.pop()
                _complete(stack[-1], state)
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                self._refuse(f"has the instruction {instruction}")

    def _gather(self, instruction: str) -> None:
        """Put everything above the last mark into a list, a dictionary or a tuple."""
        cut = self.marks.pop()
        items = self.stack[cut:]
        del self.stack[cut:]
        if instruction == "TUPLE":
            self.stack.append(tuple(items))
            return
        if instruction in ("LIST", "DICT"):
            self.stack.append([] if instruction == "LIST" else {})
        into = self.stack[-1]
        if instruction in ("LIST", "APPENDS") and isinstance(into, list):
            into.extend(items)
        elif instruction in ("DICT", "SETITEMS") and isinstance(into, dict):
            keys = items[::2]
            if not all(isinstance(key, str | bytes | int) for key in keys):
                raise ValueError("a dictionary whose keys are no texts")
            into.update(zip(keys, items[1::2], strict=True))
        else:
            raise ValueError(f"{instruction} on a {type(into).__name__}")

    def _named(self, wanted: str) -> _Name:
        if wanted not in _NAMES:
            self._refuse(f"asks for {wanted.replace(' ', '.')[:200]!r}")
        return _Name(_NAMES[wanted])

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{self.name}: refused, and not run: this pickle {what}, which arrays and texts do not need"
        )


def _made(role: str, arguments: tuple[Any, ...]) -> Any:
    """What NumPy's function of that role would return for the arguments."""
    if role == "dtype":
        kind = _text(arguments[0])
        if not re.fullmatch(r"[<>=|]?[iu][1248]", kind):
            raise ValueError(f"an array of {kind[:40]!r}, not of integers")
        return _Type(np.dtype(kind))
    if role == "encode":
        text, encoding = arguments
        if _text(encoding) not in ("latin1", "latin-1"):
            raise ValueError(f"bytes written as {_text(encoding)[:40]!r}")
        return text.encode("latin-1") if isinstance(text, str) else text
    if role == "array":  # the arguments are a placeholder's: class, shape (0,), type "b"
        return _Array()
    if role == "buffer":
        content, kind, shape, order = arguments
        return _Array(_array(content, kind, shape, fortran=order == "F"))
    raise ValueError("a call of what cannot be called")


def _complete(made: Any, state: Any) -> None:
    """What NumPy's `__setstate__` does: byte order for a type; shape, type and content for an array."""
    if isinstance(made, _Type):
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise ValueError(f"a byte order of {order[:40]!r}")
        made.dtype = made.dtype.newbyteorder(order)  # type: ignore[arg-type]
    elif isinstance(made, _Array):
        _, shape, kind, fortran, content = state
        made.values = _array(content, kind, shape, fortran=bool(fortran))
    else:
        raise ValueError(f"BUILD on a {type(made).__name__}")


def _array(content: Any, kind: Any, shape: Any, *, fortran: bool) -> npt.NDArray[Any]:
    """An array over bytes that are there; nothing is allocated for what is only promised."""
    if isinstance(content, str):  # bytes of Python 2
        content = content.encode("latin-1")
    if not (isinstance(content, bytes | bytearray) and isinstance(kind, _Type) and isinstance(shape, tuple)):
        raise ValueError("an array without shape, type or content")
    if len(shape) > 4 or not all(isinstance(size, int) and 0 <= size < 2**32 for size in shape):
        raise ValueError("an array of no sensible shape")
    promised = math.prod(shape) * kind.dtype.itemsize
    if promised != len(content):
        raise ValueError(f"an array {shape} of {kind.dtype} has {promised:,} bytes, not {len(content):,}")
    return np.frombuffer(bytes(content), kind.dtype).reshape(shape, order="F" if fortran else "C")


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):  # what refers to itself often is endless when it is printed
        raise ValueError(f"a {type(value).__name__} where a text is needed")
    return value.decode("latin-1") if isinstance(value, bytes) else value
