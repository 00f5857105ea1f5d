"""States in shards (FSDP2): each process writes its own, and any process reads them all.

torch.distributed.checkpoint writes the DTensors of a state, each process its own shards; in the state that
the first process writes they stand on "meta", with shape and dtype. Read they come whole, without any
communication, so that a run continues with any number of processes, in shards or not.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from vitascope.errors import UserError
from vitascope.training.distributed import gather, is_first, rank

METADATA = ".metadata"

# What a `.metadata` of tensors is pickled with (and dtypes). BytesStorageMetadata is not among it: an entry
# of that class makes torch read a pickle that may run anything.
_DCP = "torch.distributed.checkpoint"
_ADMITTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
}


class FileRecord(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def record(path: Path) -> FileRecord:
    """A file's size and SHA-256, in hexadecimal."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def set_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """A state with its DTensors on "meta", and the DTensors by their path in it."""
    shards: dict[str, DTensor] = {}

    def apart(path: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        shards[path] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return _each_tensor(state, apart), shards


def write_shards(folder: Path, shards: Mapping[str, DTensor]) -> dict[str, FileRecord]:
    """Write and flush the shards of every process; every process calls it.

    Returns:
        The files of all processes, by name.

    Raises:
        OSError: the first failure, in every process.
    """
    failure, files = None, {}
    try:
        save(dict(shards), storage_writer=_Writer(folder))
        mine = [*folder.glob(f"__{rank()}_*"), *([folder / METADATA] if is_first() else [])]
        files = {path.name: record(path) for path in sorted(mine)}
    except CheckpointException as error:  # in every process, whichever it happened in
        number, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        failure = f"{_reason(cause)}, in process {number}"
    except OSError as error:
        failure = f"{_reason(error)}, in process {rank()}"
    outcomes = gather((failure, files))
    for failure, _ in outcomes:
        if failure is not None:
            raise OSError(failure)
    return {name: values for _, files in outcomes for name, values in files.items()}


def fill(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as it was read from `state.pt`, with the tensors that are in shards, whole and on the CPU.

    Args:
        folder: the checkpoint, verified.
        state: dicts of tensors and values, those in shards on "meta".

    Raises:
        UserError: `.metadata` would run code, or does not describe these tensors.
    """
    missing: dict[str, Tensor] = {}

    def empty(path: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        missing[path] = torch.empty_like(tensor, device="cpu")
        return missing[path]

    whole = _each_tensor(state, empty)
    if missing:
        _read_shards(folder, missing)
    return whole


def _each_tensor(
    state: Mapping[str, Any], change: Callable[[str, Tensor], Tensor], prefix: str = ""
) -> dict[str, Any]:
    """The same dicts with every tensor changed, by its path in them."""
    changed: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            value = _each_tensor(value, change, f"{prefix}{key}/")
        elif isinstance(value, Tensor):
            value = change(f"{prefix}{key}", value)
        changed[key] = value
    return changed


def _read_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, by path, from the shards of all processes that wrote."""
    with unreadable(folder / METADATA), open(folder / METADATA, "rb") as file:
        metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"holds a {type(metadata).__name__}")
        for path, tensor in tensors.items():
            found = metadata.state_dict_metadata.get(path)
            if not isinstance(found, TensorStorageMetadata) or found.size != tensor.shape:
                raise ValueError(f"does not describe {path}, of shape {tuple(tensor.shape)}")
            # What no shard covers would stay whatever the memory held before.
            if sum(math.prod(chunk.sizes) for chunk in found.chunks) != tensor.numel():
                raise ValueError(f"lists shards of {path} that are not the whole of it")
        for stored in metadata.storage_data.values():
            if "/" in stored.relative_path:
                raise ValueError(f"names {stored.relative_path!r}, which is not beside it")
    with unreadable(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        try:
            load(tensors, storage_reader=_Reader(folder, metadata), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


class _Writer(FileSystemWriter):
    """Writes no record of itself, which would hold a path of this machine."""

    def storage_meta(self) -> None:
        """Nothing."""


class _Reader(FileSystemReader):
    """Reads shards by metadata that were checked: torch's own reader unpickles whatever is there."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checked ones."""
        return self._metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what `_ADMITTED` names, and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"its pickle calls for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Turn what a file that verified, and yet is not one of ours, makes torch raise into one line."""
    try:
        yield
    except UserError:
        raise
    except (
        *(
            OSError,
            EOFError,
            RuntimeError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            AssertionError,
        ),
        pickle.UnpicklingError,
    ) as error:
        raise UserError(
            f"{path}: whole, but not what this run can load; nothing was run: {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """The cause in one line."""
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__  # torch wraps it in advice to load the file unsafely
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
