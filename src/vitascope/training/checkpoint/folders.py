"""Checkpoint folders: complete or absent, and verified by checksums.

A checkpoint is a folder `checkpoints/step-00001234/` with `state.pt`, the shards of several processes
(`shard_files.py`), and `manifest.json` with the size and the SHA-256 of every file. It is written aside,
flushed and renamed; only then are old ones renamed, then removed. All processes call these functions.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitascope.arguments import Range
from vitascope.errors import UserError
from vitascope.layout import CHECKPOINTS, MANIFEST, step_name, step_of_folder
from vitascope.serialization import check_record, explaining_faults, parse_json
from vitascope.storage import explaining_failure, flush, settle
from vitascope.training.checkpoint.state import (
    FileRecord,
    file_record,
    loading,
    split_shards,
    without_placeholders,
)
from vitascope.training.distributed import by_first, is_first

STATE = "state.pt"
_ASIDE = re.compile(r"\.step-\d{8,}\.(\d+|old)")


def start_checkpoint(
    run: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    group: dist.ProcessGroup | None,
    copies: dict[str, Tensor],
) -> Callable[[], None]:
    """Copy the state; returns the function that writes the checkpoint, perhaps in a thread.

    It writes nothing if a valid checkpoint of this step is there, and removes older ones but `keep` - 1. It
    communicates in `group`. Once it has ended, the memory of `copies` can be used again.
    """
    folder = run / CHECKPOINTS / step_name(step)
    aside = by_first(lambda: _begin(folder))
    if aside is None:
        return lambda: None
    whole, shards = split_shards(state, copies)
    written: Callable[[], dict[str, FileRecord]] = dict
    if shards:
        from vitascope.training.checkpoint.shard_files import start_writing  # takes half a second

        written = start_writing(aside, shards, group)

    def finish() -> None:
        try:
            with _writing(folder):
                records = written()
            by_first(lambda: _commit(aside, folder, step, whole, records), group)
        except UserError:
            if is_first():
                shutil.rmtree(aside, ignore_errors=True)  # the next save removes the rest
            raise
        if is_first():
            _remove_older(folder, keep)

    return finish


def _remove_older(folder: Path, keep: int) -> None:
    """Remove the checkpoints before this one but `keep` - 1, and the remains of interrupted saves."""
    older = [other for other in checkpoints(folder.parent.parent) if _step(other) < _step(folder)]
    for other in older[: max(0, len(older) - (keep - 1))]:
        try:
            os.replace(other, other.with_name(f".{other.name}.old"))
        except OSError as error:
            print(f"vitascope: {other} is old and cannot be removed: {error.strerror}", file=sys.stderr)
    for rest in _leftovers(folder.parent):
        _remove(rest)


def load_checkpoint(run: Path) -> tuple[int, dict[str, Any]] | None:
    """Load the newest valid checkpoint, with whole tensors on the CPU: (steps done, state), or None."""
    folder = by_first(lambda: _newest_valid(run))
    return None if folder is None else (_step(folder), _read(folder))


def load_checkpoint_at(folder: Path) -> tuple[int, dict[str, Any]]:
    """Load this checkpoint, as `load_checkpoint` does."""
    by_first(lambda: verify(folder))
    return _step(folder), _read(folder)


def discard_newer(folder: Path) -> None:
    """Rename newer checkpoints, from which a run that continues here diverges; the next save removes them."""
    for other in _numbered(folder.parent.parent):
        if _step(other) > _step(folder):
            os.replace(other, other.with_name(f".{other.name}.old"))


def to_resume(run: Path) -> str:
    """The advice for a full disk while the run's model is not written yet."""
    return f"make room, then run `vitascope train --resume {shlex.quote(str(run))}`"


def remove_checkpoints(run: Path, *, keep_state: bool = False) -> None:
    """Remove a finished run's checkpoints, perhaps but the newest, and the models beside; others stay."""
    folder = run / CHECKPOINTS
    models = [folder / name for name in ("start", "last", "best") if (folder / name).is_dir()]
    kept = checkpoints(run)[-1:] if keep_state else []
    for path in (*models, *(one for one in _numbered(run) if one not in kept), *_leftovers(folder)):
        _remove(path)
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; other files and folders are ignored."""
    return [folder for folder in _numbered(run) if (folder / MANIFEST).is_file()]


def verify(folder: Path) -> None:
    """Check a checkpoint's manifest, and the size and checksum of every file."""
    if not (folder / MANIFEST).is_file() or step_of_folder(folder.name) is None:
        raise UserError(f"{folder}: not a checkpoint, which is a folder step-00001234 with a {MANIFEST}")
    step = _step(folder)
    types = {"step": Annotated[int, Range(ge=step, le=step)]}
    with explaining_faults(folder / MANIFEST, "remove this checkpoint"):
        manifest = check_record(parse_json((folder / MANIFEST).read_text("utf-8")), types, ("step", "files"))
        records = check_record(manifest["files"], {}, (STATE,))
    try:
        for name, expected in records.items():
            if file_record(folder / name) != expected:
                raise UserError(f"{folder / name}: its size or SHA-256 is not that of {MANIFEST}")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _numbered(run: Path) -> list[Path]:
    folders = (run / CHECKPOINTS).glob("step-*")
    return sorted(
        (path for path in folders if step_of_folder(path.name) is not None and path.is_dir()), key=_step
    )


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _newest_valid(run: Path) -> Path | None:
    faults: list[str] = []
    for folder in reversed(_numbered(run)):
        try:
            verify(folder)
        except UserError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            print(f"vitascope: {fault}; falls back to step {_step(folder)}", file=sys.stderr)
        return folder
    if faults:
        raise UserError(f"{run}: all checkpoints are broken: {'; '.join(faults)}; start a new run")
    return None


def _read(folder: Path) -> dict[str, Any]:
    with loading(folder / STATE):
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        whole, missing = without_placeholders(state)
    if missing:
        from vitascope.training.checkpoint.shard_files import read_shard_files  # takes half a second

        read_shard_files(folder, missing)
    return whole


def _begin(folder: Path) -> Path | None:
    """Make an empty folder to write to; None if a valid checkpoint is there already."""
    if (folder / MANIFEST).is_file():
        try:
            verify(folder)
            return None
        except UserError as error:
            print(f"vitascope: {error}; it is written again", file=sys.stderr)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    with _writing(folder):
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
    return aside


def _commit(
    aside: Path, folder: Path, step: int, state: Mapping[str, Any], records: Mapping[str, FileRecord]
) -> None:
    with _writing(folder):
        with open(aside / STATE, "wb") as file:  # by Python, which reports why a write failed
            try:
                torch.save(state, file)
            except RuntimeError as error:
                cause = error.__context__
                raise (cause if isinstance(cause, OSError) else OSError(error)) from error
        files = {STATE: file_record(aside / STATE), **records}
        manifest = {"step": step, "torch": str(torch.__version__), "files": files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        if folder.is_dir():  # broken
            os.replace(folder, folder.with_name(f".{folder.name}.old"))
        settle(aside, folder)
        flush(folder.parent.parent)


def _leftovers(folder: Path) -> list[Path]:
    """The remains of interrupted saves, and renamed checkpoints."""
    return [path for path in sorted(folder.glob(".step-*")) if _ASIDE.fullmatch(path.name) and path.is_dir()]


def _remove(folder: Path) -> None:
    """Remove a folder; failing to do so is a warning."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        print(f"vitascope: {folder} cannot be removed: {error.strerror}", file=sys.stderr)


def _writing(folder: Path) -> AbstractContextManager[None]:
    """Turns a failure to write into one line."""
    advice = f"older checkpoints are complete: {to_resume(folder.parent.parent)}"
    return explaining_failure(folder, "the checkpoint", advice)
