"""The cache folder, and its lock."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from vitascope.errors import UserError
from vitascope.storage import explaining_failure, free_mb, locked

OWN_VARIABLE, GENERAL_VARIABLE = "VITASCOPE_CACHE", "XDG_CACHE_HOME"
"""The variables of the environment that `cache_folder` reads."""


def cache_folder() -> Path:
    """`$VITASCOPE_CACHE`, else `$XDG_CACHE_HOME/vitascope`, else `~/.cache/vitascope`."""
    if own := os.environ.get(OWN_VARIABLE):
        return Path(own).expanduser().absolute()
    general = os.environ.get(GENERAL_VARIABLE) or "~/.cache"
    return Path(general).expanduser().absolute() / "vitascope"


ADVICE = "make room, or set VITASCOPE_CACHE to another folder"
_OF_PROCESSES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def local_failure(error: BaseException) -> OSError | None:
    """The error of a local file, or of a limit of this machine, from which an error comes, or None.

    The system names the file in its errors, and libraries do not use these numbers for answers of a server.
    """
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (*_OF_PROCESSES, *_OF_DISKS):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def fault_in_words(error: OSError) -> str:
    """One line about a local failure during work on a store: the reason, the file, and what to do."""
    reason = " ".join((error.strerror or str(error)).split())
    if error.errno in _OF_PROCESSES:
        return f"this machine fails, not the store: {reason}; start fewer processes or workers"
    folder, place = cache_folder(), "" if error.filename is None else os.fsdecode(error.filename)
    if place and not Path(place).is_relative_to(folder):
        return f"this machine fails, not the store: {place}: {reason}"
    room = f"{free_mb(folder):,.1f} MB are free there"
    return f"the cache cannot be used: {place or folder}: {reason} ({room}); {ADVICE}"


def gigabytes(variable: str, default: float, least: float, accepted: str) -> float:
    """The bytes of a limit in the environment; a UserError says what is `accepted`: `least` GB or more."""
    text = os.environ.get(variable, "")
    with contextlib.suppress(ValueError):
        if (limit := float(text or default)) >= least:  # so that NaN fails too
            return limit * 1e9
    raise UserError(f"{variable} is a number of gigabytes, {accepted}, not {text!r}")


@contextlib.contextmanager
def writing_to_cache(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of the cache, which is made if absent; other processes wait."""
    with explaining_failure(folder, "the cache", ADVICE):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", wait=True):
            yield
