"""Writing files so that each is whole or is the old one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vitascope.errors import UserError
from vitascope.weights.files import CheckpointError


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, unless it is there.

    Raises:
        CheckpointError: it cannot be made: there is a file, or the path is too long, say.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file, not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise CheckpointError(f"{folder}: cannot write a model there: {reason}; name a new folder") from error


def write_safetensors(path: Path, state: Mapping[str, Tensor]) -> Path:
    """Write tensors, which must be contiguous and on the CPU; what two names share is written for each.

    Raises:
        CheckpointError: they cannot be written, for want of space say.
    """
    aside = path.with_name(f".{path.name}")
    taken: dict[int, str] = {}
    apart = {  # the format knows no sharing, and its library refuses it
        name: tensor.clone() if taken.setdefault(tensor.data_ptr(), name) != name else tensor
        for name, tensor in state.items()
    }
    try:
        save_file(apart, aside, metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    return settle(aside, path)


def write_json(path: Path, values: Mapping[str, Any]) -> Path:
    """Write a JSON object."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return settle(aside, path)


def settle(aside: Path, path: Path) -> Path:
    """Flush a file that was written aside to the disk, and give it its name."""
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to instead: the file is renamed to `path` when it is whole, and removed otherwise.

    Each process has a path of its own, since two may write the same report; the last one to end stays.
    """
    aside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield aside
        settle(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def explaining_failure(path: Path, what: str, advice: str) -> Iterator[None]:
    """Turn a failure to write, on a full disk say, into one line: what and where, why, and what to do.

    Raises:
        UserError: in the place of an `OSError` or a `CheckpointError`.
    """
    try:
        yield
    except BrokenPipeError:  # of what is printed
        raise
    except CheckpointError as error:
        raise UserError(f"{error}; {advice}") from error
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        there = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
        free = shutil.disk_usage(there).free / 1e6
        raise UserError(
            f"{path}: {what} cannot be written: {reason} ({free:,.1f} MB are free there); {advice}"
        ) from error
