"""Processes forked from this one, which start at once because everything is imported already."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; returns its id.

    The process exits with the integer that `work` returns, else with 0; after an exception, which it prints,
    with 1.
    """
    if (child := os.fork()) == 0:
        status = 1
        try:
            result = work()
            status = result if isinstance(result, int) else 0
        except BaseException:  # noqa: BLE001 - nothing of this process may run in the child
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return child


def ending(child: int) -> int:
    """Wait for a process; returns its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_group(count: int, work: Callable[[], object], meeting: Path) -> list[int]:
    """Run `work` in processes of one group, which meet by a file, within a minute; returns their endings."""

    def one(number: int) -> object:
        signal.alarm(60)
        store, timeout = dist.FileStore(str(meeting), count), timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=timeout)
        return work()

    children = [fork(lambda number=number: one(number)) for number in range(count)]
    return [ending(child) for child in children]
