"""Several processes under `torchrun`: ranks, collective calls, and models in copies (DDP) or shards (FSDP2).

Without torchrun there is one process, and every function returns what it is given.

`torchrun --max-restarts` starts the same command again, with new processes. Its agents survive, and with them
their store, in which the first process notes the folder of its run. So a restarted command resumes its own
run, and an existing run of another launch is rejected as always.
"""

import itertools
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from vitascope.errors import UserError
from vitascope.models.encoder import Block
from vitascope.models.hardware import resolve_device
from vitascope.training.options.groups import ExecutionOptions

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


def join_processes(device: str) -> torch.device:
    """Join torchrun's process group, if it started this process; returns the device, by local rank."""
    if not dist.is_torchelastic_launched():
        return resolve_device(device)
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local < gpus:  # before anything else touches CUDA, which would take memory of the first GPU
        torch.cuda.set_device(local)
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        if local >= gpus:
            raise UserError(f"process {local} has no GPU: this machine has {gpus}; start {gpus} processes")
        resolved = torch.device("cuda", local)
    if not dist.is_initialized():
        # Never destroyed: with a sharded model, gloo's threads sometimes abort the program at its end.
        backend = "cpu:gloo,cuda:nccl" if resolved.type == "cuda" else "gloo"
        device_id = resolved if resolved.type == "cuda" else None  # else NCCL guesses it from the rank
        store = agents_store()
        group: dict[str, Any] = {}  # without it, torch finds all of it in the environment
        try:
            if store is not None:
                number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
                group = {"store": _own_part(store, number, count), "rank": number, "world_size": count}
            dist.init_process_group(backend, device_id=device_id, **group)
        except dist.DistError as error:
            reason = str(error).partition("\n")[0][:200]
            raise UserError(f"the processes of torchrun did not connect to each other: {reason}") from error
    return resolved


def agents_store() -> Store | None:
    """The store of torchrun's agents, which survives a restart of the processes; None if there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


_LAUNCHES = itertools.count()


class Launch:
    """The place in the store of torchrun's agents for one run: the n-th that each process begins."""

    def __init__(self) -> None:
        self._key = f"vitascope/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/run-{next(_LAUNCHES)}"

    @property
    def begun(self) -> str | None:
        """The run folder or URL that the processes before a restart noted; None without any."""
        store = agents_store()
        if store is None or not store.check([self._key]):
            return None
        return os.fsdecode(bytes.fromhex(store.get(self._key).decode()))

    def note(self, ref: str) -> None:
        """Note the run folder or URL that this launch has begun or resumed."""
        store = agents_store()
        if store is not None:
            store.set(self._key, os.fsencode(ref).hex())  # the store takes UTF-8 only


def restarts_left() -> bool:
    """Whether torchrun starts the processes again after a failure of this one."""
    count, most = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count is not None and most is not None and int(count) < int(most)


def _own_part(store: Store, rank: int, world_size: int) -> Store:
    """A part of the agents' store for these processes alone.

    Plain `init_process_group` reads the keys of the processes before a restart there, whose addresses are
    dead, and hangs (https://github.com/pytorch/pytorch/issues/135712; measured with torch 2.13). So each
    process shows a random name, and the first one answers the names with its own until all have come.
    """
    limit = store.timeout.total_seconds()  # type: ignore[attr-defined]
    mine, until = uuid.uuid4().hex, time.monotonic() + limit
    store.set(f"vitascope/name-{rank}", mine)
    if rank:
        first = store.get(f"vitascope/answer-{mine}").decode()  # waits, as long as the store's timeout
        store.set(f"{first}/here-{rank}", "")
        return PrefixStore(first, store)
    absent = set(range(1, world_size))
    while absent and time.monotonic() < until:  # later, torch itself reports who is absent
        for other in absent:
            if store.check([shown := f"vitascope/name-{other}"]):  # perhaps of a process before a restart
                store.set(f"vitascope/answer-{store.get(shown).decode()}", mine)
        time.sleep(0.02)
        absent = {other for other in absent if not store.check([f"{mine}/here-{other}"])}
    return PrefixStore(mine, store)


def rank() -> int:
    """The number of this process, from 0, also before it has joined the group."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def processes_sharing(device: torch.device) -> int:
    """The number of processes that share the memory of this process's device."""
    if device.type != "cpu" or not dist.is_initialized():
        return 1
    return int(os.environ["LOCAL_WORLD_SIZE"])


def is_first() -> bool:
    """Whether this process is the one that writes the run folder and prints."""
    return rank() == 0


def print_first(text: str) -> None:
    """Print at once, in the first process only."""
    if is_first():
        print(text, flush=True)


def by_all(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call a function that does not communicate in every process; a UserError of one is raised in all.

    Threads that communicate at the same time need a `group` each.
    """
    value, fault = None, None
    try:
        value = make()
    except UserError as error:
        fault = error
    for found in gather(fault, group):
        if found is not None:
            found.printed_elsewhere = not is_first()  # the first process prints it
            raise found
    return cast("T", value)


def by_first(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call a function in the first process alone; all processes get its (pickled) value, or its UserError."""
    return cast("T", gather(by_all(lambda: make() if is_first() else None, group), group)[0])


def lost_connection(error: RuntimeError) -> bool:
    """Whether gloo or NCCL raised this error because another process has ended or hangs."""
    if world_size() == 1:
        return False
    return isinstance(error, dist.DistError) or re.search("gloo|nccl", str(error), re.IGNORECASE) is not None


def group_of_a_thread() -> dist.ProcessGroup | None:
    """A group of all processes for a thread that communicates beside the others; None of one process."""
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all processes, by rank, in every process."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group)
    return values


def sum_over_processes(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scalars by name, each summed over the processes; on the CPU, in float64."""
    if not sums:
        return {}
    stacked = torch.stack([value.double().cpu() for value in sums.values()])
    if world_size() > 1:
        dist.all_reduce(stacked)
    return dict(zip(sums, stacked, strict=True))


def largest(*values: float) -> tuple[float, ...]:
    """The maximum of each value over the processes."""
    if world_size() == 1:
        return values
    flags = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return tuple(flags.tolist())


class Exchange:
    """The largest of the processes' numbers, which are exchanged while the next step runs."""

    def __init__(self) -> None:
        self._pending: tuple[dist.Work, Tensor] | None = None

    def largest(self, *values: float) -> tuple[float, ...]:
        """Send numbers, and return the largest of those sent last, zeros at first (one process: its own)."""
        if world_size() == 1:
            return values
        found = (0.0,) * len(values)
        if self._pending is not None:
            work, flags = self._pending
            work.wait()
            found = tuple(flags.tolist())
        flags = torch.tensor(values, dtype=torch.float64)
        self._pending = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True), flags
        return found

    def forget(self) -> None:
        """Leave what was sent last unanswered, in all processes alike."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None


def spread(
    module: nn.Module, execution: ExecutionOptions, device: torch.device, precision: torch.dtype
) -> nn.Module:
    """Wrap or shard a module, so that its gradients are averaged over the processes."""
    if world_size() == 1:
        return module
    if execution.parallel == "ddp":
        return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)
    shard(module, device, precision)
    return module


def shard(module: nn.Module, device: torch.device, precision: torch.dtype) -> None:
    """Shard each block of a module and then the rest over all processes, in place.

    For bf16, each process casts its shard and sends half the bytes, in place of autocast's casts of whole
    weights. Gradients are added up in float32, the dtype of the shards.
    """
    # The import takes half a second, which one process does not need.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if precision == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (world_size(),))
    for part in module.modules():
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def is_sharded(module: nn.Module) -> bool:
    """Whether a module is sharded; by its attributes, because importing its class takes half a second."""
    return hasattr(module, "reshard")


def shard_of(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def reshard(module: nn.Module) -> None:
    """Leave a sharded module its shards alone: after a forward pass without a backward one it is whole."""
    for part in module.modules():
        if is_sharded(part):
            cast("FSDPModule", part).reshard()


@contextmanager
def reducing(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Within the context, a backward pass averages gradients over the processes if `wanted`."""
    if isinstance(module, DistributedDataParallel) and not wanted:
        with module.no_sync():
            yield
        return
    if is_sharded(module):
        cast("FSDPModule", module).set_requires_gradient_sync(wanted)
    yield
