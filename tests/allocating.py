"""A step of known memory, for a process that imports little."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def allocating(megabytes: int) -> Iterator[Callable[[], list[list[list[float]]]]]:
    """A step that briefly needs `megabytes` of memory, after a preparation that needed more."""
    bytearray(200_000_000)[::4096] = bytes(48_829)

    def step() -> list[list[list[float]]]:
        held = bytearray(megabytes * 1_000_000)
        held[::4096] = bytes(len(held[::4096]))
        return [[[1.0]]]

    yield step
