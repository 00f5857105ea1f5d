"""Places between the forward passes of an explanation, at which its caller may do something else or end it.

An occlusion runs the model hundreds of times. A server that has one model answers others meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_called: ContextVar[Callable[[], None] | None] = ContextVar("called", default=None)


@contextmanager
def pausing(call: Callable[[], None]) -> Iterator[None]:
    """Call a function before each forward pass of the methods that need many; what it raises ends them.

    It holds in this thread (or task) alone.
    """
    token = _called.set(call)
    try:
        yield
    finally:
        _called.reset(token)


def pause() -> None:
    """A method's next forward pass begins."""
    call = _called.get()
    if call is not None:
        call()
