"""Checkpoints of any state."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitascope.layout import CHECKPOINTS, MANIFEST, step_name
from vitascope.training.checkpoint.folders import start_checkpoint
from vitascope.training.checkpoint.state import file_record


def save_checkpoint(run: Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write a checkpoint to its end; returns its folder."""
    start_checkpoint(run, step, state, keep=keep, group=None, copies={})()
    return run / CHECKPOINTS / step_name(step)


def replace_file(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = file_record(folder / name)
    (folder / MANIFEST).write_text(json.dumps(manifest))
