"""The files of sharded states (FSDP2): each process writes its shards, and any process can read all of them.

Importing torch.distributed.checkpoint takes half a second, so only runs with shards import this module.
"""

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from vitascope.models.weights.files import reason_of
from vitascope.serialization import RestrictedUnpickler
from vitascope.training.checkpoint.state import FileRecord, file_record, loading
from vitascope.training.distributed import gather, is_first, rank

METADATA = ".metadata"

# The names in a pickled `.metadata` of tensors. BytesStorageMetadata is not admitted: torch would unpickle
# the shard of such an entry without any restriction.
_ADMITTED = {
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
}


def start_writing(
    folder: Path, shards: Mapping[str, DTensor], group: dist.ProcessGroup | None = None
) -> Callable[[], dict[str, FileRecord]]:
    """Copy the shards and begin to write them in a thread; all processes call it.

    Returns a function that waits until the files are written, and returns the records of all of them; it
    communicates in `group`, as the thread does.
    """
    written = cast("Future[Any]", async_save({**shards}, storage_writer=_Writer(folder), process_group=group))

    def finish() -> dict[str, FileRecord]:
        failure, files = None, {}
        try:
            written.result()
            mine = [*folder.glob(f"__{rank()}_*"), *([folder / METADATA] if is_first() else [])]
            files = {path.name: file_record(path) for path in sorted(mine)}
        except CheckpointException as error:  # raised in every process, whichever it happened in
            number, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            failure = f"{reason_of(cause)}, in process {number}"
        except OSError as error:
            failure = f"{reason_of(error)}, in process {rank()}"
        outcomes = gather((failure, files), group)
        for failure, _ in outcomes:
            if failure is not None:
                raise OSError(failure)
        return {name: values for _, files in outcomes for name, values in files.items()}

    return finish


def read_shard_files(folder: Path, missing: Mapping[str, Tensor]) -> None:
    """Fill tensors on the CPU, by their path in the state."""
    with loading(folder / METADATA), open(folder / METADATA, "rb") as file:
        described = RestrictedUnpickler(file, _ADMITTED).load()
    with loading(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            load(missing, storage_reader=_Reader(folder, described), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


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
