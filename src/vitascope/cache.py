"""The cache folder, and its lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from vitascope.storage import explaining_failure, locked

CACHE_VARIABLES = ("VITASCOPE_CACHE", "XDG_CACHE_HOME")
"""The variables of the environment that `cache_folder` reads."""


def cache_folder() -> Path:
    """`$VITASCOPE_CACHE`, else `$XDG_CACHE_HOME/vitascope`, else `~/.cache/vitascope`."""
    if own := os.environ.get("VITASCOPE_CACHE"):
        return Path(own).expanduser().absolute()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(general).expanduser().absolute() / "vitascope"


@contextlib.contextmanager
def writing_to_cache(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of the cache, which is made if absent; other processes wait."""
    advice = "make room, or set VITASCOPE_CACHE to another folder"
    with explaining_failure(folder, "the cache", advice):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", wait=True):
            yield
