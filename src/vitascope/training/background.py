"""Work beside the steps: losses that are read late, best weights and checkpoints that are written late."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from vitascope.models.engines.transfer import Fetched
from vitascope.training.checkpoint.folders import start_checkpoint
from vitascope.training.distributed import group_of_a_thread, is_first
from vitascope.training.run.run import Run


class StepLosses:
    """Gives losses to a function once they are on the CPU, with their own step and learning rate.

    A loss on an accelerator is read at the next `read`, once another step has been started: the device always
    has work. On a CPU it is read at once. All processes of a run read the same ones, in the same order.
    """

    def __init__(self, receive: Callable[[int, float, Tensor], None]) -> None:
        self._receive = receive
        self._unread: tuple[int, float, Fetched] | None = None

    def add(self, step: int, rate: float, loss: Tensor) -> None:
        """Begin to copy a loss, a scalar."""
        self.read()
        self._unread = step, rate, Fetched([loss])
        if not self._unread[2].late:
            self.read()

    def read(self) -> None:
        """Read the loss that was added last, unless it has been read."""
        unread, self._unread = self._unread, None
        if unread is not None:
            step, rate, fetched = unread
            (loss,) = fetched.wait()
            self._receive(step, rate, loss)


WRITE_SECONDS = 10.0
"""The least time between two best weights that are written, apart from those that a checkpoint refers to."""


class BestWeights:
    """Keeps the newest best weights of a run, and writes them at most every `WRITE_SECONDS`.

    Writing a model takes a fraction of a second, in which a small run does several epochs. A checkpoint names
    the step of the best weights, so `write` precedes each checkpoint. What a crash loses was found after the
    newest checkpoint, and the resumed run finds it again.

    Args:
        save: writes a state dict to its folder.
    """

    def __init__(self, save: Callable[[Mapping[str, Tensor]], None]) -> None:
        self._save = save
        self._copies: dict[str, Tensor] = {}  # whose memory is used again
        self._waiting = False
        self.due_at = 0.0
        """When the next weights are written at once, by `time.monotonic`."""

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Write these weights in place of those before, or copy them to the CPU's memory to be written."""
        if time.monotonic() >= self.due_at:
            self._write(state)
            return
        for name, value in state.items():
            if name in self._copies:
                self._copies[name].copy_(value)
            else:
                self._copies[name] = value.detach().to("cpu", copy=True)
        self._waiting = True

    def write(self) -> None:
        """Write the weights that are still in memory, if there are any."""
        if self._waiting:
            self._write(self._copies)

    def _write(self, state: Mapping[str, Tensor]) -> None:
        self._save(state)
        self._waiting, self.due_at = False, time.monotonic() + WRITE_SECONDS


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
