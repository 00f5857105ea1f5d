"""Processes forked from this one, which start at once because everything is imported already."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ALARM = 280
"""Seconds after which a process that hangs is ended; a busy machine takes long for what works."""


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


def import_once() -> None:
    """Import what each process of a group would otherwise import by itself, longer than a tiny run takes."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    with contextlib.suppress(ImportError):
        import torch.utils.tensorboard  # noqa: F401 - only its import matters


def in_group(count: int, work: Callable[[], object], meeting: Path) -> list[int]:
    """Run `work` in processes of one group, which meet by a file, within minutes; returns their endings."""

    def one(number: int) -> object:
        signal.alarm(ALARM)
        os.environ["LOCAL_WORLD_SIZE"] = str(count)  # as torchrun sets it
        store, timeout = dist.FileStore(str(meeting), count), timedelta(seconds=ALARM)
        dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=timeout)
        return work()

    import_once()
    children = [fork(lambda number=number: one(number)) for number in range(count)]
    return [ending(child) for child in children]


def torchrun(
    count: int, output: Path, work: Callable[..., object], *arguments: object, restarts: int = 0
) -> int:
    """Run `work(*arguments)` in processes as torchrun does, forked from this one, each within minutes;
    returns the exit status.

    What all of them print is in the file `output`.
    """

    def bounded(*arguments: object) -> None:
        signal.alarm(ALARM)
        work(*arguments)

    def launch() -> None:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - until the process ends
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=output.parent.name,
            max_restarts=restarts,
            start_method="fork",
            monitor_interval=0.1,
        )
        elastic_launch(config, bounded)(*arguments)

    import_once()
    return ending(fork(launch))
