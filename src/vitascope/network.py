"""Limits on what others may answer, and how slowly: requests with the hub's client, and downloads.

A mirror or a proxy may answer in the hub's place. The hub's client has no time limit for some requests, and
raises whatever an answer of another form leads to.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

from vitascope.formatting import duration

T = TypeVar("T")

LIMIT = 60.0
"""Seconds for a request, beside the transfer of a large file."""
SLOWEST = 20_000
"""Bytes per second, on average, below which the transfer of a large file counts as hanging."""
STALLED = 1_000
"""Bytes per second, on average over `LIMIT`, below which a download counts as hanging."""
_CHUNK = 2**18


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


class NotTheHubError(ConnectionError):
    """Nobody answers in time, or somebody who is not a hub."""


def ask(call: Callable[[], T], *, size: int | None = 0) -> T:
    """The result of a call of the hub's client that transfers `size` bytes; None for an unknown number.

    Raises:
        NotTheHubError: no result within the time limit, or an answer that the client does not understand.
        Exception: one of `client_errors`.
    """
    from huggingface_hub import constants

    limit = threading.TIMEOUT_MAX if size is None else LIMIT + size / SLOWEST
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - KeyError, TypeError, RecursionError of nested JSON, ...
            known = isinstance(error, client_errors()) and not isinstance(error, RecursionError)
            result.set_exception(error if known else misunderstood(error))

    # A daemon, because a request that hangs must not keep the process.
    threading.Thread(target=work, name="request to the hub", daemon=True).start()
    wait([result], limit)
    if not result.done():
        raise NotTheHubError(f"{constants.ENDPOINT} did not answer within {duration(limit)}")
    return result.result()


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
