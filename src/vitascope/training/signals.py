"""SIGINT and SIGTERM as a request to stop after the step."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
