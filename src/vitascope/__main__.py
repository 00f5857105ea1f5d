"""`vitascope` and `python -m vitascope`: the command line, whose import Ctrl-C ends in one line."""

import atexit
import os
import sys
import threading
import time

PATIENCE = 0.5
"""Seconds that the threads of libraries have to end after a failure or a signal."""


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        from vitascope.cli import main as run

        status = run()
    except KeyboardInterrupt:
        print("vitascope: interrupted", file=sys.stderr)
        status = 130
    except SystemExit as stop:
        if not isinstance(stop.code, int):
            raise
        status = stop.code
    if status:
        _leave_threads(status)
    return status


def _leave_threads(status: int) -> None:
    """End the process if threads are left, such as one that hangs in an upload; Python would wait for it."""
    end = time.monotonic() + PATIENCE
    left = [each for each in threading.enumerate() if not each.daemon and each != threading.main_thread()]
    for thread in left:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in left):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
