"""Parts computed on Ray: actors hold the model, and Ray Data gives each a part, and another if one dies."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np

from vitascope.errors import UserError
from vitascope.predict.part_worker import PartDone, PartTask, PartWorker
from vitascope.predict.parts import Parts
from vitascope.storage import WINDOWS

CONNECT_SECONDS = 5.0
AUTO = "auto"
_NOT_THERE = re.compile(
    r"No module named 'vitascope[\w.]*'|Can't get attribute '\w+' on <module 'vitascope[\w.]*'"
)


class RayPartWorker:
    """`PartWorker` for Ray Data: a batch is a part's number."""

    def __init__(self, parts: Parts, task: PartTask) -> None:
        self.worker = PartWorker(parts, task)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute a part."""
        done = self.worker.compute(int(batch["part"][0]))
        return {name: np.array([value]) for name, value in dataclasses.asdict(done).items()}


@dataclasses.dataclass(frozen=True)
class Share:
    """What each worker takes of a node, and how many fit into the cluster."""

    cpus: int
    gpus: int
    workers: int


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Be connected to a cluster: `auto` for that of this machine or of `RAY_ADDRESS`, `HOST:PORT` of a head,
    None for one on this machine that lives as long as the context. Signals are handled as before.
    Meanwhile nothing can be printed on standard output, where Ray describes the death of a worker at length.

    Raises:
        UserError: no Ray; no cluster there, or one of another version.
    """
    if WINDOWS:
        raise UserError("--engine ray needs Linux or macOS; leave it out, or use WSL")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(f"--engine ray needs ray: pip install 'vitascope[ray]' ({error})") from error
    check_reachable(address)
    # Ray would report its use to its makers, and Ray Data log on any actor that Ray may restart.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it raises, `explained` explains
    local: dict[str, Any] = {"include_dashboard": False} if address is None else {}
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        try:
            ray.init(address=address or "local", logging_level="ERROR", log_to_driver=False, **local)
        except ConnectionError as error:  # of `auto`; `check_reachable` finds others
            raise UserError(
                "no Ray runs on this machine: start it with `ray start`, or leave out the address, for Ray "
                "during this command alone"
            ) from error
        except (ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            raise UserError(f"Ray at {address or 'this machine'}: {in_one_line(error)}") from error
        try:
            if threading.current_thread() is threading.main_thread():  # only it may set them
                for number, handler in signals.items():
                    signal.signal(number, handler)
            ray.data.DataContext.get_current().enable_progress_bars = False
            yield
        finally:
            ray.shutdown()


def check_reachable(address: str | None) -> None:
    """Reject an address at which no process listens, where Ray would wait for long and end the process."""
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS", AUTO)
    if address is None or address in (AUTO, "local"):
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise UserError(
            f"the address of Ray is auto or HOST:PORT, not {address!r}: for a cluster elsewhere, run the "
            "command there with `ray job submit`"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"Ray at {address} cannot be reached: {error}; start it with `ray start --head`, or leave out "
            "the address for Ray on this machine"
        ) from error


def in_one_line(error: BaseException) -> str:
    """The message of one of Ray's exceptions, without its advice on further lines."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__


def compute_on_ray(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
    """Compute parts on the cluster that this process is connected to, one worker per CPU or per GPU.

    Raises:
        UserError: a cluster without room for a worker; a part at which workers die again and again; workers
            without vitascope.
    """
    import ray
    from ray.data import ActorPoolStrategy

    share = share_of(task, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    if task.workers is None:
        task = dataclasses.replace(task, workers=share.cpus - 1)
    # A block per part: what is computed again if a worker dies. A second one waits at each, without which
    # Ray Data would start no workers on nodes that join later.
    blocks = ray.data.from_items([{"part": part} for part in wanted], override_num_blocks=len(wanted))
    computed = blocks.map_batches(
        RayPartWorker,
        batch_size=1,
        batch_format="numpy",
        fn_constructor_args=(parts, task),
        compute=ActorPoolStrategy(
            min_size=1,
            initial_size=min(share.workers, len(wanted)),
            max_size=len(wanted),
            max_tasks_in_flight_per_actor=2,
        ),
        num_cpus=share.cpus,
        num_gpus=share.gpus,
    )
    try:
        for row in computed.iter_rows():
            yield PartDone(int(row["part"]), int(row["died"]), str(row["error"]))
    except ray.exceptions.RayError as error:
        raise explained(error) from error


def share_of(task: PartTask, nodes: Sequence[dict[str, float]]) -> Share:
    """What a worker takes: a GPU where there are any, with its share of the CPUs to read with; else a CPU.

    `nodes` have the resources of each node, `CPU` and `GPU`.

    Raises:
        UserError: no node with so much.
    """
    sizes = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
    with_gpu = [(cpus, gpus) for cpus, gpus in sizes if gpus]
    gpus = int(task.device.startswith("cuda") or (task.device == "auto" and bool(with_gpu)))
    readers = task.workers
    if readers is None:
        readers = max(0, min((each // gpu for each, gpu in with_gpu), default=1) - 1) if gpus else 0
    workers = sum(
        min(each // (1 + readers), *[gpu] * gpus) if gpus else each // (1 + readers) for each, gpu in sizes
    )
    if not workers:
        found = ", ".join(f"{each} CPUs and {gpu} GPUs" for each, gpu in sorted(set(sizes)))
        raise UserError(
            f"no node of Ray has the {1 + readers} CPUs{' and the GPU' * gpus} of a worker: they have "
            f"{found or 'nothing'}"
        )
    return Share(1 + readers, gpus, workers)


def explained(error: Exception) -> Exception:
    """What a user can do about an exception of Ray; a fault in our own code keeps its traceback."""
    from ray.exceptions import RayTaskError

    if missing := _NOT_THERE.search(str(error)):
        return UserError(
            f"a worker cannot load vitascope ({missing.group()}): install the same version on all nodes"
        )
    if isinstance(error, RayTaskError):
        return error
    return UserError(f"Ray failed: {in_one_line(error)}; the parts that are done are kept")
