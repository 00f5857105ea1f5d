"""A function of many items, in threads: reading, decoding, resizing and NumPy hold no lock of Python's."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from vitascope.network import Threads

T = TypeVar("T")
R = TypeVar("R")


def usable_cores() -> int:
    """The cores that this process may use, at least 1; torchrun's processes on a machine share them."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def in_threads(function: Callable[[T], R], items: Iterable[T], *, most: int | None = None) -> Iterator[R]:
    """Results in the order of the items, a few of them ahead, by at most so many threads."""
    threads = min(usable_cores(), most or sys.maxsize)
    ahead: collections.deque[Future[R]] = collections.deque()
    with Threads(threads) as pool:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) == 4 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
