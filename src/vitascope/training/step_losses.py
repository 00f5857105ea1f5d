"""The losses of single steps, read without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vitascope.data.transfer import Fetched


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
