"""The exception for errors that a user can cause and fix; the nearest valid name, for its message."""

from __future__ import annotations

import difflib
import os
import shlex
import signal
import unicodedata
from collections.abc import Iterable
from pathlib import Path

_JOINERS = "\u200c\u200d"  # needed in Persian, Indic scripts and emoji


class UserError(ValueError):
    """A request that cannot be met: the message states what is wrong, with the numbers, and the way out.

    The command line prints it in one line and exits with status 2; anything else is a fault of ours and
    keeps its traceback. Names from files and paths may be anything, so the message is made `printable`.
    """

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message)))

    printed_elsewhere = False
    """Whether another process of the same run, which raises it too, prints it."""


def printable(text: str, limit: int = 1500) -> str:
    """Text from a file in one line that a terminal only displays, without the middle of more than `limit`
    characters. Line breaks and tabs become spaces; ESC, U+202E (right to left) and so on become escapes."""
    if len(text) > limit:
        kept = limit // 3
        text = f"{text[: limit - kept - 5]} ... {text[-kept:]}"
    if text.isprintable():
        return text
    shown = "".join(_shown(character) for character in text)
    return printable(shown, limit) if len(shown) > limit else shown


def _shown(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode("ascii")


class Interrupted(Exception):  # noqa: N818 - a stop, not an error
    """Training was stopped by a signal, after saving a checkpoint or the finished model.

    Args:
        run: the run folder.
        signum: the signal.
        finished: the model is saved, and only figures or the report are missing.

    Attributes:
        command: the command that continues the run.
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
    if len(name) > 200:  # no name that anybody typed; comparing takes long
        return ""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; nearest: {match[0]}" if match else ""


def nearest_path(ref: str) -> str:
    """`; nearest: runs/photos` for `run/photo`, where that exists and this does not; else an empty string."""
    found = Path()
    for part in Path(ref).parts:
        name = part
        if not (found / part).exists():  # take the closest name there
            try:
                names = os.listdir(found)
            except OSError:  # not a folder, or not readable
                return ""
            match = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
            if not match:
                return ""
            name = match[0]
        found /= name
    return f"; nearest: {found}"


class UnknownNameError(UserError):
    """A name that this version does not know: of an option, or of one of its choices."""


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Reject a value that is not one of the choices, naming them."""
    choices = list(choices)
    if value not in choices:
        raise UnknownNameError(
            f"unknown {name} {value!r}{nearest(str(value), choices)}; it is one of {', '.join(choices)}"
        )
