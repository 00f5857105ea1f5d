"""The weights of the best validation so far, in memory until it is time to write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

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
