"""A function of many images, in threads: reading, decoding and resizing hold no lock of Python's."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in the order of the items, a few of them ahead."""
    threads = os.cpu_count() or 1
    ahead: collections.deque[Future[R]] = collections.deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) == 4 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
