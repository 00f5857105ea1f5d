"""`vitascope learn`: exercises, checked in the model, by a package of their own."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.cli.parsing import Flag
from vitascope.errors import UserError

ExerciseFolder = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="[FOLDER]")]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learn:
    """Build a ViT equation by equation, with hints.

    The first call writes eight exercises into FOLDER, one equation each.

    Later calls check your answers in the model, with a hint for each wrong one.

    docs/learn has the lesson that belongs to them.

    Needs a package of the repository: pip install ./lessons.
    """

    folder: ExerciseFolder = Path("learn")
    """The folder of the exercises."""
    train: Flag = False
    """Train a small model on the digits, with your right answers and ours for the rest: 15 s on a CPU."""
    solution: str | None = None
    """Print our answer to one exercise, such as `attention`."""

    def call(self) -> None:
        """Write the exercises, or check them; train or print a solution if requested."""
        if self.train and self.solution is not None:
            raise UserError("give --train or --solution, not both")
        if find_spec("vitascope_lessons") is None:
            raise UserError(
                "vitascope learn needs vitascope-lessons, a package in the repository of vitascope: "
                "pip install ./lessons"
            )
        from vitascope_lessons.command import learn, print_solution

        if self.solution is not None:
            print_solution(self.solution)
        else:
            learn(self.folder, train=self.train)
