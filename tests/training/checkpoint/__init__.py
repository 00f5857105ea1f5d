"""Checkpoints of any state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitascope.run.layout import CHECKPOINTS, step_name
from vitascope.training.checkpoint.folders import start_checkpoint


def save_checkpoint(run: Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write a checkpoint to its end; returns its folder."""
    start_checkpoint(run, step, state, keep=keep, group=None, copies={})()
    return run / CHECKPOINTS / step_name(step)
