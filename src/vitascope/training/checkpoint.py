"""Checkpoints that a run resumes from: whole or not there, and proved by a checksum.

A checkpoint is a folder `checkpoints/step-00001234/` with `state.pt` and `manifest.json`, which holds the
SHA-256 of the state. It is written aside, flushed to the disk and renamed; only then is the old one removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from vitascope.errors import UserError

STATE, MANIFEST = "state.pt", "manifest.json"


def save_checkpoint(run: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint and remove the older ones.

    Args:
        run: the run folder.
        step: steps done.
        state: tensors and plain values only, so that it loads with `weights_only`.

    Raises:
        UserError: it cannot be written (a full disk, say); the older checkpoint is untouched.
    """
    folder = run / "checkpoints" / f"step-{step:08d}"
    if (folder / MANIFEST).is_file():
        return folder  # this step is saved already, and would be the same
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True, exist_ok=True)
        with open(aside / STATE, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        with open(aside / MANIFEST, "w", encoding="utf-8") as text:
            json.dump({"step": step, "sha256": {STATE: sha256(aside / STATE)}}, text)
            text.flush()
            os.fsync(text.fileno())
        os.replace(aside, folder)
        sync_folder(folder.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"{folder}: the checkpoint cannot be written: {error}; the older one is whole"
        ) from error
    for old in checkpoints(run):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def load_checkpoint(run: Path) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint that verifies: steps done and state; None where there is no checkpoint.

    Raises:
        UserError: there are checkpoints, and none verifies; names what is wrong with each.
    """
    faults = []
    for folder in sorted(checkpoints(run), reverse=True):
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["sha256"][STATE] != sha256(folder / STATE):
                raise ValueError(f"{folder / STATE} does not have the checksum in {MANIFEST}")
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
            return int(manifest["step"]), state
        except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
            faults.append(f"{folder}: {error}")
            print(f"vitascope: {folder} is broken and left aside: {error}", file=sys.stderr)
    if faults:
        raise UserError(f"{run}: no checkpoint is whole: {'; '.join(faults)}")
    return None


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run; half-written ones have another name."""
    return [path for path in (run / "checkpoints").glob("step-*") if (path / MANIFEST).is_file()]


def sha256(path: Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
