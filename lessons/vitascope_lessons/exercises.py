"""The files of the exercises."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from vitascope.errors import UserError
from vitascope.language import say
from vitascope.storage import explaining_failure, make_folder, replacing
from vitascope_lessons import solutions

NAMES = tuple(solutions.SOLUTIONS)
"""The exercises in their order; each is a function of this name, in a file of this name."""
TO_WRITE = "    ...  # "
"""The beginning of the line in the place of a function's body; the rest depends on the reader's language."""


def solution_text(name: str) -> str:
    """The file of a solved exercise, with its docstrings in the reader's language."""
    text = Path(solutions.__path__[0], f"{name}.py").read_text(encoding="utf-8")
    for docstring in docstrings(text):
        text = text.replace(docstring, say(docstring))
    return text


def docstrings(text: str) -> list[str]:
    """The docstrings of a module and of its functions, as they stand there."""
    module = ast.parse(text)
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    found = [ast.get_docstring(node, clean=False) for node in functions]
    return [*filter(None, [ast.get_docstring(module, clean=False), *found])]


def exercise_text(name: str) -> str:
    """The file of an exercise: the solved one, without the body of its function."""
    text = solution_text(name)
    (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    docstring, last = function.body[0], function.body[-1]
    assert docstring.end_lineno is not None
    assert last.end_lineno is not None
    lines = text.splitlines(keepends=True)
    to_write = f"{TO_WRITE}{say('write the equation here, and return its result')}\n"
    return "".join([*lines[: docstring.end_lineno], to_write, *lines[last.end_lineno :]])


def is_begun(path: Path, name: str) -> bool:
    """Whether a reader's file has anything but a docstring and `...` in its function, or cannot be parsed."""
    if path.exists() and not path.is_file():  # such as a pipe, which `read_bytes` waits for
        return True
    try:
        parts = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # which `check` shows
        return True
    bodies = [part.body for part in parts if isinstance(part, ast.FunctionDef) and part.name == name]
    return not bodies or not all(
        isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in bodies[-1]
    )


def path_of(folder: Path, name: str) -> Path:
    """The reader's file of an exercise."""
    return folder / f"{NAMES.index(name) + 1}_{name}.py"


def write_exercises(folder: Path) -> list[Path]:
    """Write the exercises that a folder does not have; return their files.

    Raises:
        UserError: it is a file, or a folder of other files without an exercise, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; the exercises need a folder")
    missing = [name for name in NAMES if not os.path.lexists(path_of(folder, name))]
    # Hidden files may be those that another call is writing.
    if len(missing) == len(NAMES) and any(folder.glob("[!.]*")):
        raise UserError(f"{folder} has files, and none of them is an exercise: name a new folder")
    make_folder(folder)
    with explaining_failure(folder, "the exercises", "name another folder"):
        for name in missing:
            with replacing(path_of(folder, name)) as aside:
                aside.write_text(exercise_text(name), encoding="utf-8")
    return [path_of(folder, name) for name in missing]
