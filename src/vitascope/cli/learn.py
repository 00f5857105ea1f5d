"""`vitascope learn`: exercises, checked in the model."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.cli.parsing import Flag, MaybeText
from vitascope.errors import UserError, check_choice
from vitascope.language import say

LINES = 8
"""Of what a reader's file prints."""

ExerciseFolder = tyro.conf.Positional[
    Annotated[Path, tyro.conf.arg(metavar="[FOLDER]", help_behavior_hint="")]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learn:
    """Build a ViT equation by equation, with hints.

    The first call writes eight exercises into FOLDER, one equation each.

    Later calls check your answers in the model, with a hint for each wrong one.

    docs/learn has the lesson that belongs to them.
    """

    folder: ExerciseFolder = Path("learn")
    """The folder of the exercises. Default: learn."""
    train: Flag = False
    """Train a small model on the digits, with your right answers and ours for the rest: 15 s on a CPU."""
    solution: MaybeText = None
    """Print our answer to one exercise, such as `attention`."""

    def call(self) -> None:
        """Write the exercises, or check them; train or print a solution if requested."""
        from vitascope.learn.exercises import NAMES, solution_text, write_exercises

        if self.solution is not None:
            if self.train:
                raise UserError("give --train or --solution, not both")
            check_choice("exercise", self.solution, NAMES)
            print(solution_text(self.solution), end="")
            return
        written = write_exercises(self.folder)
        for path in written:
            print(say("wrote {path}", path=path))
        if len(written) == len(NAMES) and not self.train:
            command = self._command()
            text = say("Open the first, write its equation, and run `{command}` again.", command=command)
            print(f"\n{text}")
            return
        self._check()

    def _command(self) -> str:
        """This command without options."""
        folder = "" if self.folder == Path("learn") else f" {shlex.quote(str(self.folder))}"
        return f"vitascope learn{folder}"

    def _check(self) -> None:
        """Check every exercise, and train if requested."""
        from vitascope.learn.exercises import NAMES, path_of
        from vitascope.learn.processes import check_all

        answers = check_all(self.folder)
        for number, answer in enumerate(answers, start=1):
            print(say(f"{{number}} {{name:<11}} {answer.state}", number=number, name=answer.name))
            for line in [*shown(answer.printed), *answer.hint.splitlines()]:
                print(f"    {line}")
        right = [answer.name for answer in answers if answer.state == "right"]
        if self.train:
            self._train(right)
            return
        if len(right) == len(NAMES):
            text = say("The model is yours now. `{command} --train` trains it.", command=self._command())
            print(f"\n{text}")
            return
        first = next(answer.name for answer in answers if answer.state != "right")
        text = say("Next: {path}", path=path_of(self.folder, first))
        print(f"\n{text}")

    def _train(self, names: list[str]) -> None:
        """Train, and print the course and the result."""
        from vitascope.learn.checking import function_in
        from vitascope.learn.exercises import path_of
        from vitascope.learn.practice import practice

        listed = ", ".join(names) or say("none")
        text = say("training with {number} of your parts: {names}", number=len(names), names=listed)
        print(f"\n{text}")
        report = partial(print, file=sys.stdout)
        os.environ["PYTHONBREAKPOINT"] = "0"
        with redirect_stdout(None):  # a function that prints or stops would do so in every step
            functions = {name: function_in(path_of(self.folder, name), name) for name in names}
            accuracy = practice(functions, report)
        print(say("{accuracy:.1%} of 360 test images are right", accuracy=accuracy))


def shown(printed: str) -> list[str]:
    """The first lines of what a reader's file prints, marked."""
    lines = printed.splitlines()
    return [f"| {line}" for line in lines[:LINES]] + ["| ..."] * (len(lines) > LINES)
