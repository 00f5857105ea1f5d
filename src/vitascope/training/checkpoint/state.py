"""The state of a run: the same for one process, DDP and FSDP, and as it is saved.

It is in `state.pt`, and beside it are the shards of several processes (`shard_files.py`). In `state.pt`
sharded tensors are placeholders on the "meta" device with shape and dtype. Loading needs no communication and
returns whole tensors, so that a run can be resumed with any number of processes.
"""

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.models.weights.files import reason_of
from vitascope.training.distributed import is_first, shard_of, world_size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def model_state(module: nn.Module, *, whole: bool = True) -> dict[str, Any]:
    """Tensors by the names of the module, which is not wrapped; with shards, whole ones are on the CPU."""
    if not whole or world_size() == 1:
        return module.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state by parameter name, with each process's own shards; empty before the first step.

    As `get_optimizer_state_dict` of torch.distributed.checkpoint, whose import takes half a second.
    """
    if not optimizer.state:
        return {}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {
        "state": {names[parameter]: state for parameter, state in optimizer.state.items()},
        "param_groups": [
            {name: value for name, value in group.items() if name != "params"}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def restore_model(module: nn.Module, state: dict[str, Any]) -> None:
    """Load full tensors into a module; every process passes them."""
    missing = sorted(module.state_dict().keys() - state.keys())
    if missing:
        raise UserError(f"the checkpoint has no {', '.join(missing)}; start a new run")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, strict=True))


def restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the full state into an optimizer; an empty state leaves it as it is."""
    if state:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        whole = StateDictOptions(full_state_dict=True, strict=True)
        set_optimizer_state_dict(module, optimizer, state, options=whole)


def all_finite(module: nn.Module) -> bool:
    """Whether all parameters in this process are finite."""
    finite = [torch.isfinite(shard_of(parameter)).all() for parameter in module.parameters()]
    return bool(torch.stack(finite).all())  # one wait for the device


class FileRecord(TypedDict):
    """The manifest's record of a file: size, and SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def file_record(path: Path) -> FileRecord:
    """A file's size and SHA-256."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def split_shards(
    state: Mapping[str, Any], copies: dict[str, Tensor]
) -> "tuple[dict[str, Any], dict[str, DTensor]]":
    """The state with its DTensors replaced by placeholders on "meta", and the DTensors by their path.

    In the first process, which writes them, the other tensors are copied to the CPU: into `copies`, by path,
    where one of the same kind is there already, because new memory takes longer than the copy.
    """
    shards: dict[str, DTensor] = {}

    def split(path: str, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "placements"):  # a DTensor, whose import takes half a second
            shards[path] = cast("DTensor", tensor)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if not is_first():
            return tensor
        copy = copies.get(path)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
            copies[path] = copy
        return copy.copy_(tensor.detach())

    return _map_tensors(state, split), shards


def without_placeholders(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state with its placeholders replaced by new tensors on the CPU, and these by their path."""
    missing: dict[str, Tensor] = {}

    def allocate(path: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        missing[path] = torch.empty_like(tensor, device="cpu")
        return missing[path]

    return _map_tensors(state, allocate), missing


def _map_tensors(
    state: Mapping[str, Any], change: Callable[[str, Tensor], Tensor], prefix: str = ""
) -> dict[str, Any]:
    """The nested dicts with every tensor replaced by `change(path, tensor)`."""
    changed: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            value = _map_tensors(value, change, f"{prefix}{key}/")
        elif isinstance(value, Tensor):
            value = change(f"{prefix}{key}", value)
        changed[key] = value
    return changed


# Raised by torch for a file with a valid checksum that is not a state of ours.
_FAULTS = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    pickle.UnpicklingError,
)


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Turn torch's errors about a file into one line."""
    try:
        yield
    except UserError:
        raise
    except _FAULTS as error:
        raise UserError(
            f"{path}: complete, but this run cannot load it; nothing was executed: {reason_of(error)}"
        ) from error
