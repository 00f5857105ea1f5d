"""A state as it is saved: in `state.pt`, and beside it the shards of several processes (`shard_files.py`).

In `state.pt` sharded tensors are placeholders on the "meta" device with shape and dtype. Loading needs no
communication and returns whole tensors, so that a run can be resumed with any number of processes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.training.distributed import is_first

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
) -> tuple[dict[str, Any], dict[str, DTensor]]:
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


def reason_of(error: BaseException) -> str:
    """The reason of an error in one line."""
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__  # torch wraps it in advice to load the file unsafely
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
