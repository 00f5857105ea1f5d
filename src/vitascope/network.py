"""Threads, and limits on what others may answer, and how slowly: a store's or the hub's client, downloads.

A mirror or a proxy may answer in the hub's place. The hub's client has no time limit for some requests, and
raises whatever an answer of another form leads to.
"""

import collections
import http.client
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self, TypeVar

from vitascope.formatting import duration

T = TypeVar("T")
R = TypeVar("R")

LIMIT = 60.0
"""Seconds for a request, beside the transfer of a large file."""
SLOWEST = 20_000
"""Bytes per second, on average, below which the transfer of a large file counts as hanging."""
STALLED = 1_000
"""Bytes per second, on average over `LIMIT`, below which a download counts as hanging."""
_CHUNK = 2**18


def seconds_for(size: int) -> float:
    """The time limit of a request that transfers so many bytes."""
    return LIMIT + size / SLOWEST


class StalledError(TimeoutError):
    """A download that is too slow to wait for."""


def chunks(response: http.client.HTTPResponse, size: int | None = None) -> Iterator[bytes]:
    """The content of a response as it arrives, at most `size` bytes of it; StalledError if it hardly does."""
    began, received, left = time.monotonic(), 0, _CHUNK if size is None else size
    while chunk := response.read1(min(_CHUNK, left)):
        yield chunk
        received += len(chunk)
        left = _CHUNK if size is None else left - len(chunk)
        seconds = time.monotonic() - began
        if seconds > LIMIT:
            if received < seconds * STALLED:
                raise StalledError(f"only {received:,} bytes in {duration(seconds)}")
            began, received = time.monotonic(), 0


def within(call: Callable[[], T], seconds: float) -> T:
    """The result of a call; a StalledError if it takes longer. The call must not raise StopIteration."""
    with Threads(1) as thread:
        result = thread.submit(call)
        wait([result], min(seconds, threading.TIMEOUT_MAX))
        if not result.done():
            raise StalledError(f"no answer within {duration(seconds)}")
        return result.result()


class Threads:
    """Threads for calls that may hang in a request: neither `with` nor the end of the process waits for them.

    Python joins the threads of a `ThreadPoolExecutor` before it ends, also after a signal.
    """

    def __init__(self, count: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._most, self._count, self._closed = count, 0, False

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in a thread."""
        future: Future[T] = Future()
        self._calls.put((future, lambda: call(*args)))
        if self._count < self._most:
            self._count += 1
            threading.Thread(target=self._work, name="request", daemon=True).start()
        return future

    def map(self, call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """The results for all items, in their order; all calls are submitted at once."""
        futures = [self.submit(call, item) for item in items]
        return (future.result() for future in futures)

    def close(self) -> None:
        """End the threads after the calls that they are in; no other call begins."""
        self._closed = True
        for _ in range(self._count):
            self._calls.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while (found := self._calls.get()) is not None and not self._closed:
            future, call = found
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where the result is taken
                future.set_exception(error)
            del found, future, call  # what they hold would live until the next call


class NotTheHubError(ConnectionError):
    """Nobody answers in time, or somebody who is not a hub."""


def ask(call: Callable[[], T], *, size: int | None = 0) -> T:
    """The result of a call of the hub's client that transfers `size` bytes; None for an unknown number.

    Raises:
        NotTheHubError: no result within the time limit, or an answer that the client does not understand.
        Exception: one of `client_errors`.
    """
    from huggingface_hub import constants

    limit = threading.TIMEOUT_MAX if size is None else seconds_for(size)

    def understood() -> T:
        try:
            return call()
        except BaseException as error:  # KeyError, TypeError, RecursionError of nested JSON, ...
            if isinstance(error, client_errors()) and not isinstance(error, RecursionError):
                raise
            raise misunderstood(error) from error

    try:
        return within(understood, limit)
    except StalledError as error:
        raise NotTheHubError(f"{constants.ENDPOINT} did not answer within {duration(limit)}") from error


def misunderstood(answer: object) -> NotTheHubError:
    """The error for an answer that no hub gives, or for what the client raises then."""
    from huggingface_hub import constants

    error = answer if isinstance(answer, BaseException) else None
    shown = " ".join(f"{type(error).__name__}: {error}".split() if error else str(answer).split())[:120]
    found = NotTheHubError(
        f"{constants.ENDPOINT} does not answer as a hub does ({shown}; a proxy, or a wrong HF_ENDPOINT)"
    )
    found.__cause__ = error
    return found


def client_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the client and of its transport, whichever library that is."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    return (HTTPError, HFValidationError, OSError, RuntimeError)  # the last: of hf_xet


def status_of(error: Exception) -> int | None:
    """The HTTP status of the hub's answer, if it gave one."""
    return getattr(getattr(error, "response", None), "status_code", None)


def unreachable(error: Exception) -> str:
    """The reason why the hub gave no answer, or is down or busy; empty for another error."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
    )

    if isinstance(error, NotTheHubError):
        return str(error)
    if isinstance(error, HfHubHTTPError):
        status = status_of(error) or 500
        return f"the hub answers {status}" if status >= 500 or status in (408, 429) else ""
    no_answer = (HTTPError, LocalEntryNotFoundError, ConnectionError, TimeoutError)
    return "the hub cannot be reached" if isinstance(error, no_answer) else ""


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
