"""How commands on many images end: with images that could not be read, or by a signal."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from vitascope.errors import printable
from vitascope.formatting import counted

if TYPE_CHECKING:
    from vitascope.predict.result_file import Tally


def exit_if_unreadable(tally: Tally) -> None:
    """Name unreadable images on standard error and exit with status 1; return if there are none."""
    if not tally.unreadable:
        return
    print(f"{tally.unreadable:,} of {counted(tally.images, 'image')} could not be read:", file=sys.stderr)
    for reason in tally.reasons:
        print(f"  {printable(reason)}", file=sys.stderr)
    if tally.unreadable > len(tally.reasons):
        print(f"  and {tally.unreadable - len(tally.reasons):,} more", file=sys.stderr)
    sys.exit(1)


def exit_stopped(signum: int, state: str) -> NoReturn:
    """Print the signal that stopped the command and the state that is left; exit with 128 plus its number."""
    print(f"vitascope: stopped by {signal.Signals(signum).name}; {state}", file=sys.stderr)
    sys.exit(128 + signum)
