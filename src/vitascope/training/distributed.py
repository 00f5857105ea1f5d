"""Several processes under `torchrun`: ranks, collective calls, and models in copies (DDP) or shards (FSDP2).

Without torchrun there is one process, and every function returns what it is given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from vitascope.errors import UserError
from vitascope.model.encoder import Block
from vitascope.model.hardware import resolve_device

T = TypeVar("T")


def join_processes(device: str) -> torch.device:
    """Join torchrun's process group, if it started this process; returns the device, by local rank."""
    resolved = resolve_device(device)
    if not dist.is_torchelastic_launched():
        return resolved
    if resolved.type == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"process {local} has no GPU: this machine has {gpus}; start {gpus} processes")
        resolved = torch.device("cuda", local)
        torch.cuda.set_device(resolved)
    if not dist.is_initialized():
        # Never destroyed: with a sharded model, gloo's threads sometimes abort the program at its end.
        dist.init_process_group("cpu:gloo,cuda:nccl" if resolved.type == "cuda" else "gloo")
    return resolved


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


def by_all(make: Callable[[], T]) -> T:
    """Call a function that does not communicate in every process; a UserError of one is raised in all."""
    value, fault = None, None
    try:
        value = make()
    except UserError as error:
        fault = error
    for found in gather(fault):
        if found is not None:
            found.printed_elsewhere = not is_first()  # the first process prints it
            raise found
    return cast("T", value)


def by_first(make: Callable[[], T]) -> T:
    """Call a function in the first process alone; all processes get its (pickled) value, or its UserError."""
    return cast("T", gather(by_all(lambda: make() if is_first() else None))[0])


def lost_connection(error: RuntimeError) -> bool:
    """Whether gloo or NCCL raised this error because another process has ended or hangs."""
    if world_size() == 1:
        return False
    return isinstance(error, dist.DistError) or re.search("gloo|nccl", str(error), re.IGNORECASE) is not None


def gather(value: T) -> list[T]:
    """The values of all processes, by rank, in every process."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_processes(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scalars by name, each summed over the processes; on the CPU, in float64."""
    if not sums:
        return {}
    stacked = torch.stack([value.double().cpu() for value in sums.values()])
    if world_size() > 1:
        dist.all_reduce(stacked)
    return dict(zip(sums, stacked, strict=True))


def add_up(values: Tensor) -> Tensor:
    """Add a tensor on the CPU to those of the other processes, in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def largest(*values: float) -> tuple[float, ...]:
    """The maximum of each value over the processes."""
    if world_size() == 1:
        return values
    flags = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return tuple(flags.tolist())


def spread(module: nn.Module, parallel: str, device: torch.device) -> nn.Module:
    """Wrap or shard a module, so that its gradients are averaged over the processes."""
    if world_size() == 1:
        return module
    if parallel == "fsdp":
        shard(module, device)
        return module
    return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)


def shard(module: nn.Module, device: torch.device) -> None:
    """Shard each block of a module and then the rest, in place."""
    mesh = init_device_mesh(device.type, (world_size(),))
    for part in module.modules():
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)


def reshard(module: nn.Module) -> None:
    """Leave a sharded module its shards alone: after a forward pass without a backward one it is whole."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def reducing(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Within the context, a backward pass averages gradients over the processes if `wanted`."""
    if isinstance(module, DistributedDataParallel) and not wanted:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
    yield
