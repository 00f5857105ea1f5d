"""Checkpoints that a run resumes from: whole or not there, and proved by checksums.

A checkpoint is a folder `checkpoints/step-00001234/` with `state.pt`, the shards of it that several processes
hold (`sharded.py`), and `manifest.json`: size and SHA-256 of every file. It is written aside, flushed to the
disk and renamed; only then are old ones removed, which lose their name before their files.

Every process of a run calls these functions together; without torchrun there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitascope.errors import UserError
from vitascope.storage import explaining_failure
from vitascope.training.checkpoint.sharded import (
    FileRecord,
    fill,
    record,
    set_apart,
    unreadable,
    write_shards,
)
from vitascope.training.distributed import by_first, is_first
from vitascope.weights.files import read_json

STATE, MANIFEST = "state.pt", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.step-\d{8,}\.(\d+|old)")


def save_checkpoint(run: Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write a checkpoint, then remove old ones; what is saved already, and whole, is left as it is.

    Args:
        run: the run folder.
        step: steps done.
        state: dicts of tensors and plain values, so that it loads with `weights_only`. Of a DTensor each
            process writes its shard; everything else is the first one's.
        keep: how many to keep, this one among them. Newer ones are not counted, and are left alone.

    Raises:
        UserError: it cannot be written (a full disk, say); older checkpoints are untouched.
    """
    folder = run / "checkpoints" / f"step-{step:08d}"
    aside = by_first(lambda: _begin(folder))
    if aside is None:
        return folder
    try:
        whole, shards = set_apart(state)
        with _writing(folder):
            records = write_shards(aside, shards) if shards else {}
        by_first(lambda: _commit(aside, folder, step, whole, records))
    except UserError:
        if is_first():
            shutil.rmtree(aside, ignore_errors=True)  # what stays is removed after the next save
        raise
    if is_first():
        _prune(folder, keep)
    return folder


def load_checkpoint(run: Path) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint that verifies: steps done and state; None where there is no checkpoint.

    Every tensor comes whole, on the CPU, however many processes wrote it. Broken checkpoints are named on
    stderr.

    Raises:
        UserError: there are checkpoints, and none verifies: says what is wrong with each; or the newest that
            does cannot be loaded, because it would run code, say.
    """
    folder = by_first(lambda: _newest_whole(run))
    return None if folder is None else (_step(folder), _read(folder))


def load_checkpoint_at(folder: Path) -> tuple[int, dict[str, Any]]:
    """Exactly this checkpoint; as `load_checkpoint` otherwise.

    Raises:
        UserError: no checkpoint there, or it is broken: says which file, and how.
    """
    by_first(lambda: verify(folder))
    return _step(folder), _read(folder)


def set_aside_newer(folder: Path) -> None:
    """Take the name from checkpoints newer than this one, which a run goes on from: they lead elsewhere.

    Their files go with the next save.
    """
    for other in _numbered(folder.parent.parent):
        if _step(other) > _step(folder):
            os.replace(other, other.with_name(f".{other.name}.old"))


def to_resume(run: Path) -> str:
    """What to do when the disk is full and the run's model is not written yet."""
    return f"make room, then run `vitascope train --resume {shlex.quote(str(run))}`"


def remove_checkpoints(run: Path) -> None:
    """Remove what a finished run no longer needs: its checkpoints, and the models beside them.

    Other files and folders are not touched. What cannot be removed is no reason to stop.
    """
    folder = run / "checkpoints"
    models = [folder / name for name in ("start", "last", "best") if (folder / name).is_dir()]
    aside = [rest for rest in folder.glob(".step-*") if _ASIDE.fullmatch(rest.name) and rest.is_dir()]
    for found in (*_numbered(run), *models, *aside):
        try:
            shutil.rmtree(found)
        except OSError as error:
            print(f"vitascope: {found} cannot be removed: {error.strerror}", file=sys.stderr)
    with contextlib.suppress(OSError):  # it holds something else
        folder.rmdir()


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. Other files and folders are not touched, nor counted."""
    return [folder for folder in _numbered(run) if (folder / MANIFEST).is_file()]


def verify(folder: Path) -> None:
    """Check that a checkpoint is whole: its manifest, then the size of every file, then the checksums.

    Raises:
        UserError: says which file is missing or changed.
    """
    if not (folder / MANIFEST).is_file() or not _NAME.fullmatch(folder.name):
        raise UserError(f"{folder}: no checkpoint; one is a folder step-00001234 with a {MANIFEST}")
    manifest = read_json(folder / MANIFEST)
    records = manifest.get("files")
    if not isinstance(records, dict) or STATE not in records or not all(map(_is_record, records.items())):
        raise UserError(f"{folder / MANIFEST}: broken: it lists no files with sizes and checksums")
    if manifest.get("step") != _step(folder):
        raise UserError(
            f"{folder / MANIFEST}: of step {manifest.get('step')!r:.40}, in the folder {folder.name}"
        )
    try:
        for name, expected in records.items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                raise UserError(f"{folder / name}: {size} bytes, and {expected['bytes']} were written")
        for name, expected in records.items():
            if record(folder / name) != expected:
                raise UserError(f"{folder / name}: not the SHA-256 in {MANIFEST}: the file has changed")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _is_record(item: tuple[str, object]) -> bool:
    name, values = item
    plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    return (
        plain
        and isinstance(values, dict)
        and {"bytes": int, "sha256": str} == {key: type(value) for key, value in values.items()}
    )


def _numbered(run: Path) -> list[Path]:
    """The folders that are named like checkpoints, by step."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted((path for path in folders if _NAME.fullmatch(path.name) and path.is_dir()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _newest_whole(run: Path) -> Path | None:
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
        raise UserError(f"{run}: no checkpoint is whole: {'; '.join(faults)}; start a new run")
    return None


def _read(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint that is verified."""
    with unreadable(folder / STATE):
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise UserError(f"{folder / STATE}: holds a {type(state).__name__}, no state of a run")
    return fill(folder, state)


def _begin(folder: Path) -> Path | None:
    """An empty folder to write aside in; None where the checkpoint is there, and whole."""
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
    """State and manifest, flushed; then the folder gets its name, which is what makes it a checkpoint."""
    with _writing(folder):
        with open(aside / STATE, "wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # how torch's zip writer reports a file that takes no more
                raise (
                    error.__context__ if isinstance(error.__context__, OSError) else OSError(error)
                ) from error
            file.flush()
            os.fsync(file.fileno())
        files = {STATE: record(aside / STATE), **records}
        manifest = {"step": step, "torch": str(torch.__version__), "files": files}
        with open(aside / MANIFEST, "w", encoding="utf-8") as text:
            json.dump(manifest, text, indent=2)
            text.flush()
            os.fsync(text.fileno())
        _sync_folder(aside)
        if folder.is_dir():  # broken, and now there is a whole one
            os.replace(folder, folder.with_name(f".{folder.name}.old"))
        os.replace(aside, folder)
        _sync_folder(folder.parent)
        _sync_folder(folder.parent.parent)


def _prune(newest: Path, keep: int) -> None:
    """Remove old checkpoints, and what killed saves left. What cannot be removed is no reason to stop."""
    older = [folder for folder in checkpoints(newest.parent.parent) if _step(folder) < _step(newest)]
    for folder in older[: max(0, len(older) - (keep - 1))]:
        try:
            os.replace(
                folder, folder.with_name(f".{folder.name}.old")
            )  # half a checkpoint never has its name
        except OSError as error:
            print(f"vitascope: {folder} is old and cannot be removed: {error.strerror}", file=sys.stderr)
    for rest in sorted(newest.parent.glob(".step-*")):
        if _ASIDE.fullmatch(rest.name) and rest.is_dir():
            try:
                shutil.rmtree(rest)
            except OSError as error:
                print(f"vitascope: {rest} cannot be removed: {error.strerror}", file=sys.stderr)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what keeps a checkpoint from being written into one line: where, why, and the way out."""
    with explaining_failure(
        folder, "the checkpoint", f"older ones are whole: {to_resume(folder.parent.parent)}"
    ):
        yield


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
