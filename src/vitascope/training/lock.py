"""One process a run: two that write to the same folder would mix their checkpoints and metrics."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import IO

from vitascope.errors import UserError

LOCK = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # some network file systems


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold a run folder. The kernel lets go of it when the process ends, however it ends.

    Where the file system has no locks, a warning on stderr says so, and the run goes on.

    Raises:
        UserError: another process holds it (says which), or the folder cannot be written.
    """
    try:
        file = open(run / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, and in workers
    except OSError as error:
        raise UserError(f"{run}: cannot be written: {error.strerror}") from error
    with file:
        register_after_fork(file, TextIOWrapper.close)  # a worker that outlives a killed run must not hold it
        _take(run, file)
        yield


def _take(run: Path, file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        raise UserError(f"{run} is in use by {holder}; wait until it is done, or stop it") from error
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        print(
            f"vitascope: {run} cannot be locked ({error.strerror}): start no second run there",
            file=sys.stderr,
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
