"""Several processes under `torchrun`: who this one is, what they agree on, how a model is spread over them.

torch.distributed does the work; without torchrun every function here is the identity.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

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
    """Join the processes that torchrun has started, if it has; returns this process's device.

    With CUDA each process has the GPU of its local rank; tensors are reduced by NCCL there, by gloo on CPUs.
    Once joined, a process stays so until it ends: torchrun's cannot meet twice.

    Raises:
        UserError: a device that this machine lacks, or more processes on a machine than it has GPUs.
    """
    resolved = resolve_device(device)
    if not dist.is_torchelastic_launched():
        return resolved
    if resolved.type == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"process {local} has no GPU of its own: this machine has {gpus}; start as many")
        resolved = torch.device("cuda", local)
        torch.cuda.set_device(resolved)
    if not dist.is_initialized():
        # Never destroyed: at the end of the program, gloo's threads of a sharded model abort it now and then.
        dist.init_process_group("cpu:gloo,cuda:nccl" if resolved.type == "cuda" else "gloo")
    return resolved


def rank() -> int:
    """This process's number, from 0, also before it has joined the others and after it has left them."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process writes the run folder and speaks."""
    return rank() == 0


def by_first(make: Callable[[], T]) -> T:
    """What the first process makes, in all of them; a UserError of its is raised in all of them.

    The value is pickled on its way, between processes of one run.
    """
    if world_size() == 1:
        return make()
    answer: list[Any] = [None, None]
    if is_first():
        try:
            answer[0] = make()
        except UserError as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise _of_all(answer[1])
    return answer[0]


def by_all(make: Callable[[], T]) -> T:
    """What every process makes for itself; a UserError of one is raised in all of them.

    Without it the others would wait for one that is gone. Nothing that is made may wait for the others.
    """
    value, fault = None, None
    try:
        value = make()
    except UserError as error:
        fault = error
    for found in gather(fault):
        if found is not None:
            raise _of_all(found)
    assert value is not None
    return value


def _of_all(error: UserError) -> UserError:
    """An error that is raised in all processes, and printed by the first."""
    error.said_elsewhere = not is_first()
    return error


def lost_connection(error: RuntimeError) -> bool:
    """Whether gloo or NCCL raised this because another process is gone, or does not answer any more."""
    if world_size() == 1:
        return False
    return isinstance(error, dist.DistError) or re.search("gloo|nccl", str(error), re.IGNORECASE) is not None


def gather(value: T) -> list[T]:
    """A value from each process, in all of them, by rank."""
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


def largest(*values: float) -> tuple[float, ...]:
    """The largest of each value over the processes: what one of them asks for, all do."""
    if world_size() == 1:
        return values
    flags = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return tuple(flags.tolist())


def spread(module: nn.Module, parallel: str, device: torch.device) -> nn.Module:
    """A module whose gradients are averaged over the processes.

    Args:
        module: the same in every process, on its device.
        parallel: `ddp`: every process holds all of it. `fsdp`: every process holds a shard of each block
            and of the rest, and gathers a block when it is computed (Zhao et al. 2023; FSDP2's
            `fully_shard`, in place).
        device: this process's.
    """
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


@contextmanager
def reducing(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Whether a backward pass averages gradients over the processes, or only adds to this one's own."""
    if isinstance(module, DistributedDataParallel) and not wanted:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
    yield
