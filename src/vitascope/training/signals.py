"""SIGINT and SIGTERM: a request to stop after the step, or an end of what can be done again."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitascope.errors import Interrupted


@dataclasses.dataclass
class Stop:
    """Which signal asked for a stop, 0 if none did."""

    signum: int = 0


@contextmanager
def stop_signals(*, patient: bool = False) -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into a request to stop after the step; a second one, of either, acts at once.

    Args:
        patient: no further one acts. Of several processes each is told more than once, by whoever tells all
            of them and by torchrun, which passes on what it is told, and kills what takes too long.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return

    def ask(signum: int, frame: object) -> None:
        stop.signum = signum
        for number, handler in previous.items() if not patient else ():
            signal.signal(number, handler)

    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum in previous:
        signal.signal(signum, ask)
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def stopped_at_once(run: Path) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Interrupted`, for work that a later command repeats from its start.

    Args:
        run: the run folder; the error tells whether its model is written.

    Raises:
        Interrupted: at the first signal. A second one acts as before.
    """
    received = 0
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        nonlocal received
        received = signum
        for number, handler in previous.items():
            signal.signal(number, handler)
        raise KeyboardInterrupt  # which no `except Exception` on its way takes for an error

    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum in previous:
        signal.signal(signum, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        if not received:
            raise
        finished = (run / "model" / "config.json").is_file()
        raise Interrupted(run, received, finished=finished) from error
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
