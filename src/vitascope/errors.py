"""What a user can cause and mend, as one exception; and the nearest valid name, for its message."""

from __future__ import annotations

import difflib
import shlex
import signal
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """A request that cannot be met: the message says what is wrong, with the numbers, and the way out.

    The command line prints it in one line and exits with status 2; anything else is a fault of ours and
    keeps its traceback.
    """

    said_elsewhere = False
    """Whether another process of the same run, which raises it too, prints it."""


class Interrupted(Exception):  # noqa: N818 - a stop, not an error
    """Training was stopped by a signal, after saving a checkpoint or the finished model.

    Args:
        run: the run folder.
        signum: the signal.
        finished: the model is saved, and only figures or the report are missing.

    Attributes:
        command: what continues the run.
    """

    def __init__(self, run: Path, signum: int, *, finished: bool = False) -> None:
        saved = f"the model is saved in {run / 'model'}" if finished else "everything is saved"
        super().__init__(f"stopped by {signal.Signals(signum).name}; {saved}")
        self.run = run
        self.signum = signum
        folder = shlex.quote(str(run))
        self.command = f"vitascope report {folder}" if finished else f"vitascope train --resume {folder}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: vit_b16` for a name that is close to a known one, else the empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; nearest: {match[0]}" if match else ""


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is not one of the choices, naming them."""
    choices = list(choices)
    if value not in choices:
        raise UserError(
            f"unknown {name} {value!r}{nearest(str(value), choices)}; it is one of {', '.join(choices)}"
        )
