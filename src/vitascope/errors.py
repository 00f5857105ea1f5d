"""What a user can cause and mend, as one exception; and the nearest valid name, for its message."""

from __future__ import annotations

import difflib
import os
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
    """Training was stopped by a signal, after saving a checkpoint to continue from."""

    def __init__(self, run: Path, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; everything is saved")
        self.run = run
        self.signum = signum


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: vit_b16` for a name that is close to a known one, else the empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; nearest: {match[0]}" if match else ""


def nearest_path(ref: str) -> str:
    """`; nearest: runs/photos` for `run/photo`, where that exists and this does not; else the empty string.

    Each part of the path that does not exist is replaced by the name there that is closest to it.
    """
    found = Path()
    for part in Path(ref).parts:
        name = part
        if not (found / part).exists():
            try:
                names = os.listdir(found)
            except OSError:  # no folder, or not ours to read
                return ""
            match = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
            if not match:
                return ""
            name = match[0]
        found /= name
    return f"; nearest: {found}"


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is not one of the choices, naming them."""
    choices = list(choices)
    if value not in choices:
        raise UserError(
            f"unknown {name} {value!r}{nearest(str(value), choices)}; it is one of {', '.join(choices)}"
        )
