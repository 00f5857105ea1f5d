"""Sharded states (FSDP2): each process writes its shards, and any process can read all of them.

torch.distributed.checkpoint writes the DTensors of a state. In `state.pt` they are placeholders on the "meta"
device with shape and dtype. Loading needs no communication and returns whole tensors, so that a run can be
resumed with any number of processes.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from vitascope.errors import UserError
from vitascope.pickles import load_pickle
from vitascope.training.distributed import gather, is_first, rank

METADATA = ".metadata"

# The names in a pickled `.metadata` of tensors. BytesStorageMetadata is not admitted: torch would unpickle
# the shard of such an entry without any restriction.
_ADMITTED: dict[str, Any] = {
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,
    **{
        f"torch.distributed.checkpoint.metadata.{name}": getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    },
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}


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
        if isinstance(tensor, DTensor):
            shards[path] = tensor
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if not is_first():
            return tensor
        copy = copies.get(path)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
            copies[path] = copy
        return copy.copy_(tensor.detach())

    return _map_tensors(state, split), shards


def start_writing(
    folder: Path, shards: Mapping[str, DTensor], group: dist.ProcessGroup | None = None
) -> Callable[[], dict[str, FileRecord]]:
    """Copy the shards and begin to write them in a thread; all processes call it.

    Returns a function that waits until the files are written, and returns the records of all of them; it
    communicates in `group`, as the thread does.
    """
    if not shards:
        return dict
    written = cast("Future[Any]", async_save({**shards}, storage_writer=_Writer(folder), process_group=group))

    def finish() -> dict[str, FileRecord]:
        failure, files = None, {}
        try:
            written.result()
            mine = [*folder.glob(f"__{rank()}_*"), *([folder / METADATA] if is_first() else [])]
            files = {path.name: file_record(path) for path in sorted(mine)}
        except CheckpointException as error:  # raised in every process, whichever it happened in
            number, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            failure = f"{_reason(cause)}, in process {number}"
        except OSError as error:
            failure = f"{_reason(error)}, in process {rank()}"
        outcomes = gather((failure, files), group)
        for failure, _ in outcomes:
            if failure is not None:
                raise OSError(failure)
        return {name: values for _, files in outcomes for name, values in files.items()}

    return finish


def fill_shards(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with its placeholders replaced by whole tensors on the CPU."""
    missing: dict[str, Tensor] = {}

    def allocate(path: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        missing[path] = torch.empty_like(tensor, device="cpu")
        return missing[path]

    whole = _map_tensors(state, allocate)
    if not missing:
        return whole
    with loading(folder / METADATA):
        described = load_pickle((folder / METADATA).read_bytes(), _ADMITTED.get)
        if not isinstance(described, metadata.Metadata):
            raise ValueError(f"contains a {type(described).__name__}")
        for path, tensor in missing.items():
            found = described.state_dict_metadata.get(path)
            if not isinstance(found, metadata.TensorStorageMetadata) or found.size != tensor.shape:
                raise ValueError(f"does not describe {path}, of shape {tuple(tensor.shape)}")
            # Parts without a shard would keep whatever the memory contained before.
            if sum(math.prod(chunk.sizes) for chunk in found.chunks) != tensor.numel():
                raise ValueError(f"lists an incomplete set of shards of {path}")
        for stored in described.storage_data.values():
            if "/" in stored.relative_path:
                raise ValueError(f"names {stored.relative_path!r}, which is not in this folder")
    with loading(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            load(missing, storage_reader=_Reader(folder, described), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
    return whole


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


class _Writer(filesystem.FileSystemWriter):
    """Writes no record of itself, which would contain a path of this machine."""

    def storage_meta(self) -> None:
        """Return None: no record."""


class _Reader(filesystem.FileSystemReader):
    """Reads shards by metadata that are checked already; torch's reader would unpickle them unchecked."""

    def __init__(self, folder: Path, described: metadata.Metadata) -> None:
        super().__init__(folder)
        self._described = described

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The checked metadata."""
        return self._described


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
            f"{path}: complete, but this run cannot load it; nothing was executed: {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__  # torch wraps it in advice to load the file unsafely
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
