"""One policy for pickles in untrusted files.

A pickle is a program for Python's unpickler, which can call whatever can be imported. `scan_pickle` reads the
instructions without running them, and rejects every name that is not on the caller's allow-list.
`load_pickle` runs a scanned pickle with nothing but the caller's objects within its reach.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable, Iterator
from typing import IO, Any

MAX_INSTRUCTIONS = 2_000_000
"""A state dict of 20,000 tensors has 0.6 million; each instruction may make an object of a hundred bytes."""
_NEVER = {"EXT1", "EXT2", "EXT4", "PERSID", "OBJ", "INST", "DUP", "NEXT_BUFFER", "READONLY_BUFFER"}
_KEEPING = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, ArithmeticError, EOFError)


def scan_pickle(stream: IO[bytes], admits: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the argument of each instruction of one pickle; nothing is run.

    An UnpicklingError rejects dotted names that `admits` does not accept, instructions that saved values do
    not need, more than `MAX_INSTRUCTIONS`, and a stream without a complete pickle.
    """
    texts = ["", ""]  # the last two that were pushed, which STACK_GLOBAL takes
    memo: dict[int, str] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            instruction = opcode.name
            if count >= MAX_INSTRUCTIONS:
                raise pickle.UnpicklingError(f"a pickle of more than {MAX_INSTRUCTIONS:,} instructions")
            if instruction in _KEEPING:
                place = len(memo) if argument is None else argument
                if place > count:  # the unpickler allocates as many places
                    raise pickle.UnpicklingError(f"place {place:,} in the memo after {count:,} instructions")
                memo[place], argument = texts[1], place
            elif instruction.endswith("GET"):
                texts = [texts[1], memo.get(argument or 0, "")]
            elif instruction.endswith("GLOBAL") or instruction == "INST":
                name = ".".join(texts) if argument is None else argument.replace(" ", ".")
                if not admits(name):
                    raise pickle.UnpicklingError(f"the pickle refers to {name[:200]!r}")
            elif isinstance(argument, str):
                texts = [texts[1], argument]
            if instruction in _NEVER:
                raise pickle.UnpicklingError(f"the pickle has the instruction {instruction}")
            yield instruction, argument
    except _FAULTS as error:
        raise pickle.UnpicklingError(f"not a whole pickle: {error}") from error


def load_pickle(content: bytes, find: Callable[[str], Any], *, max_tuples: int | None = None) -> Any:
    """The value of a scanned pickle, which refers to nothing but what `find` returns for dotted names (None
    rejects a name). Texts of Python 2 are decoded as Latin-1."""
    # Nested or shared tuples as keys of a dictionary take endless time to hash.
    instructions = scan_pickle(io.BytesIO(content), lambda name: find(name) is not None)
    limit, made, kept, previous = math.inf if max_tuples is None else max_tuples, 0, set(), ""
    for instruction, argument in instructions:
        made += instruction.startswith("TUPLE")
        if made > limit:
            raise pickle.UnpicklingError(f"a pickle of more than {limit} tuples")
        if previous.startswith("TUPLE") and instruction in _KEEPING:
            kept.add(argument)
        again = instruction.endswith("GET") and argument in kept
        if limit < math.inf and (again or instruction.startswith("POP")):  # POP bares a tuple for the memo
            raise pickle.UnpicklingError(f"a tuple is used twice (instruction {instruction})")
        previous = instruction
    try:
        return _Unpickler(io.BytesIO(content), find).load()
    except (*_FAULTS, RecursionError) as error:
        raise pickle.UnpicklingError(f"not a whole pickle: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Python's unpickler with the names of `find` alone."""

    def __init__(self, stream: IO[bytes], find: Callable[[str], Any]) -> None:
        super().__init__(stream, fix_imports=False, encoding="latin1")
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        found = self._find(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"the pickle refers to {f'{module}.{name}'[:200]!r}")
        return found
