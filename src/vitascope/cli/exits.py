"""How commands on many images end: with images that could not be read, or by a signal."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from vitascope.data.reading import Faults


def exit_if_unreadable(faults: "Faults") -> None:
    """Name unreadable images on standard error and exit with status 1; return if there are none."""
    if faults.count:
        print("\n".join(faults.lines()), file=sys.stderr)
        sys.exit(1)


def exit_if_left_out(read: int, reasons: Sequence[str]) -> None:
    """As `exit_if_unreadable`, for the number of images that were read and the reasons of the others."""
    from vitascope.data.reading import Faults

    exit_if_unreadable(Faults.of(read + len(reasons), reasons))


def exit_stopped(signum: int, state: str) -> NoReturn:
    """Print the signal that stopped the command and the state that is left; exit with 128 plus its number."""
    print(f"vitascope: stopped by {signal.Signals(signum).name}; {state}", file=sys.stderr)
    sys.exit(128 + signum)


@contextmanager
def exiting_if_stopped(state: str | Callable[[], str]) -> Iterator[None]:
    """Let SIGINT and SIGTERM stop work at once; prints the state that is left and exits as `exit_stopped`."""
    from vitascope.training.signals import Stop, interruptible

    stop = Stop()
    try:
        with interruptible(stop):
            yield
    except KeyboardInterrupt:
        if not stop.signum:  # it came before the handler of the signals
            raise
        exit_stopped(stop.signum, state if isinstance(state, str) else state())


def exiting_with_parts(out: Path, name: str, advice: str) -> AbstractContextManager[None]:
    """As `exiting_if_stopped`, with the finished parts of a file as the state that is left."""
    from vitascope.data.rows.parts import kept_parts

    return exiting_if_stopped(lambda: kept_parts(out, name, advice))
