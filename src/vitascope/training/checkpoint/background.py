"""Checkpoints that are written while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from vitascope.run.run import Run
from vitascope.training.checkpoint.folders import start_checkpoint
from vitascope.training.distributed import group_of_a_thread, is_first


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread, one at a time.

    `save` returns once the state is copied to the CPU's memory. The folder gets its name when all files are
    on the disk, as for any checkpoint. Then the first process uploads a run that is in a store. All processes
    make a writer and call its methods at the same steps.
    """

    def __init__(self, run: Run, keep: int) -> None:
        self._run, self._keep = run, keep
        self._group = group_of_a_thread()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}

    @property
    def failed(self) -> bool:
        """Whether writing the last checkpoint has failed in this process; `wait` raises the error."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; waits for the one before, and raises its error."""
        self.wait()
        finish = start_checkpoint(
            self._run.path, step, state, keep=self._keep, group=self._group, copies=self._copies
        )
        self._writing = self._thread.submit(self._write, finish)

    def _write(self, finish: Callable[[], None]) -> None:
        finish()
        if self._run.store is not None and is_first():
            self._run.store.try_to_upload()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; UserError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait until the last checkpoint is complete or has failed, and end the thread."""
        self._thread.shutdown()
