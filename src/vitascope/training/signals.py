"""SIGINT and SIGTERM: stop after the current step, or stop work that can be repeated."""

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from vitascope.errors import Interrupted

if TYPE_CHECKING:
    from vitascope.training.run.run import Run  # commands on many images need no runs

T = TypeVar("T")


@dataclasses.dataclass
class Stop:
    """The signal that requested a stop; 0 if there was none."""

    signum: int = 0


@contextmanager
def stop_signals(*, patient: bool = False) -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into a request to stop after the step; a second signal acts at once."""
    stop = Stop()

    def request(signum: int, restore: Callable[[], None]) -> None:
        stop.signum = signum
        if not patient:
            restore()

    with _handling(request):
        yield stop


@contextmanager
def interruptible(stop: Stop) -> Iterator[None]:
    """Let a requested stop, SIGINT and SIGTERM raise a KeyboardInterrupt; `stop` names the signal."""

    def interrupt(signum: int, restore: Callable[[], None]) -> None:
        stop.signum = signum
        restore()
        raise KeyboardInterrupt  # passes every `except Exception`

    with _handling(interrupt):
        if stop.signum:
            raise KeyboardInterrupt
        yield


def until_stopped(items: Iterator[T], stop: Stop) -> Iterator[T]:
    """The items until a stop is requested, also while the next one is awaited: a request may hang."""
    while True:
        try:
            with interruptible(stop):
                item = next(items)
        except StopIteration:
            return
        except KeyboardInterrupt:
            if not stop.signum:
                raise
            return
        yield item


@contextmanager
def stopped_at_once(run: "Run") -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Interrupted`, for work that a later command repeats from its start."""
    stop = Stop()
    try:
        with interruptible(stop):
            yield
    except KeyboardInterrupt as error:
        if not stop.signum:
            raise
        raise Interrupted(run.path, stop.signum, finished=run.finished) from error


@contextmanager
def _handling(act: Callable[[int, Callable[[], None]], None]) -> Iterator[None]:
    """Handle both signals with `act(signum, restore)`; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    for signum in previous:
        signal.signal(signum, lambda number, _: act(number, restore))
    try:
        yield
    finally:
        restore()
