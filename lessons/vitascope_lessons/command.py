"""What `vitascope learn` writes, checks and prints."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from vitascope.errors import check_choice
from vitascope.language import say
from vitascope_lessons.checking import function_in
from vitascope_lessons.exercises import NAMES, path_of, solution_text, write_exercises
from vitascope_lessons.practice import practice
from vitascope_lessons.processes import check_all

LINES = 8
"""Of what a reader's file prints."""


def print_solution(name: str) -> None:
    """Print our answer to an exercise."""
    check_choice("exercise", name, NAMES)
    print(solution_text(name), end="")


def learn(folder: Path, *, train: bool) -> None:
    """Write the exercises that a folder does not have, or check all of them, and train if requested."""
    written = write_exercises(folder)
    for path in written:
        print(say("wrote {path}", path=path))
    command = "vitascope learn" if folder == Path("learn") else f"vitascope learn {shlex.quote(str(folder))}"
    if len(written) == len(NAMES) and not train:
        text = say("Open the first, write its equation, and run `{command}` again.", command=command)
        print(f"\n{text}")
        return
    right = check_answers(folder)
    if train:
        train_model(folder, right)
        return
    if len(right) == len(NAMES):
        text = say("The model is yours now. `{command} --train` trains it.", command=command)
    else:
        first = next(name for name in NAMES if name not in right)
        text = say("Next: {path}", path=path_of(folder, first))
    print(f"\n{text}")


def check_answers(folder: Path) -> list[str]:
    """Check every exercise, print the answers with their hints, and return the names of the right ones."""
    answers = check_all(folder)
    for number, answer in enumerate(answers, start=1):
        print(say(f"{{number}} {{name:<11}} {answer.state}", number=number, name=answer.name))
        for line in [*shown(answer.printed), *answer.hint.splitlines()]:
            print(f"    {line}")
    return [answer.name for answer in answers if answer.state == "right"]


def train_model(folder: Path, names: list[str]) -> None:
    """Train with the reader's functions of some exercises, and print the course and the result."""
    listed = ", ".join(names) or say("none")
    text = say("training with {number} of your parts: {names}", number=len(names), names=listed)
    print(f"\n{text}")
    report = partial(print, file=sys.stdout)
    os.environ["PYTHONBREAKPOINT"] = "0"
    with redirect_stdout(None):  # a function that prints or stops would do so in every step
        functions = {name: function_in(path_of(folder, name), name) for name in names}
        accuracy = practice(functions, report)
    print(say("{accuracy:.1%} of 360 test images are right", accuracy=accuracy))


def shown(printed: str) -> list[str]:
    """The first lines of what a reader's file prints, marked."""
    lines = printed.splitlines()
    return [f"| {line}" for line in lines[:LINES]] + ["| ..."] * (len(lines) > LINES)
