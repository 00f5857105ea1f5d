"""Load an HTTP server: closed loop (a number of concurrent requests) or open loop (a fixed schedule).

    python benchmarks/load.py http://127.0.0.1:8000/v1/predict picture.jpg --rate 300 --seconds 20
    python benchmarks/load.py http://127.0.0.1:8000/v1/predict picture.jpg --concurrency 64 --seconds 10

The open loop sends each request at its scheduled time, on a free connection or a new one, even if earlier
requests have no answer yet. Latency counts from the scheduled time, so a stalled server cannot delay the load
and hide the stall. A small asyncio protocol sends requests and reads answers, so one core makes thousands of
requests per second. The output includes the lateness of this process with its requests.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

LATE = 0.05
"""Lateness in seconds of this process with its requests, above which it reports itself as the bottleneck."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The times and the status of a request."""

    scheduled: float
    """Scheduled time of sending, in seconds after the start."""
    sent: float
    """Actual time of sending."""
    done: float
    """Time of the complete answer or of a broken connection."""
    status: int
    """0 without an answer."""

    @property
    def latency(self) -> float:
        """Seconds from the scheduled time to the answer."""
        return self.done - self.scheduled


@dataclasses.dataclass(frozen=True)
class Load:
    """The answers of a finished load."""

    seconds: float
    answers: tuple[Answer, ...]

    def count(self) -> Counter[int]:
        """The number of answers by status."""
        return Counter(answer.status for answer in self.answers)

    def accepted_per_second(self) -> float:
        """Answers with status 200, divided by the seconds from the first request to the last such answer."""
        good = [answer.done for answer in self.answers if answer.status == 200]
        return len(good) / max(good) if good else 0.0

    def latency(self, share: float, status: int = 200) -> float:
        """A quantile of the latency of the answers with a status, in seconds; NaN without any."""
        found = sorted(answer.latency for answer in self.answers if answer.status == status)
        return found[min(len(found) - 1, int(share * len(found)))] if found else float("nan")

    def lateness(self) -> float:
        """The 99% quantile of the delay with which this process sent requests, in seconds."""
        late = sorted(answer.sent - answer.scheduled for answer in self.answers)
        return late[min(len(late) - 1, int(0.99 * len(late)))] if late else 0.0


class Connection(asyncio.Protocol):
    """A persistent connection with one request at a time."""

    def __init__(self, idle: Callable[[Connection], None]) -> None:
        self._idle = idle
        self._done: Callable[[int], None] | None = None
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when the connection is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def ask(self, request: bytes, done: Callable[[int], None]) -> None:
        """Send a request and call `done` with the status of its answer."""
        assert self._transport is not None
        self._done, self._received = done, b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Called with a part of an answer."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        closing = b"connection: close" in lower
        self.is_open = self.is_open and not closing
        self._finish(int(head[9:12]))
        if not closing:
            self._idle(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the connection is closed; a waiting request gets status 0."""
        self.is_open = False
        self._finish(0)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def _finish(self, status: int) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            done(status)


class Client:
    """Sends the same request repeatedly and records the answers.

    Args:
        url: the URL of the requests.
        body: the bytes of an image.
        headers: additional headers.
    """

    def __init__(self, url: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or 80
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = {"Host": parts.netloc, "Content-Type": "image/jpeg", "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **(headers or {})}.items())
        self._request = f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body
        self._free: list[Connection] = []
        self._answers: list[Answer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._start = 0.0
        self._busy = 0

    async def open_loop(self, times: Sequence[float], patience: float = 10.0) -> Load:
        """Send requests at given seconds after the start; wait up to `patience` seconds for answers."""
        self._start = time.perf_counter()
        for scheduled in times:
            wait = self._start + scheduled - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await asyncio.sleep(0)  # late, but answers have to be read
            self._send(scheduled, lambda: None)
        end = time.perf_counter() + patience
        while len(self._answers) < len(times) and time.perf_counter() < end:
            await asyncio.sleep(0.01)
        missing = len(times) - len(self._answers)
        now = time.perf_counter() - self._start
        self._answers += [Answer(times[-1], times[-1], now, 0)] * missing
        return self._load(times[-1] if len(times) else 0.0)

    async def closed_loop(self, concurrency: int, seconds: float) -> Load:
        """Keep `concurrency` requests open for some seconds: each answer triggers the next request."""
        self._start = time.perf_counter()

        def again() -> None:
            now = time.perf_counter() - self._start
            if now < seconds:
                asyncio.get_running_loop().call_soon(lambda: self._send(now, again))

        for _ in range(concurrency):
            again()
        await asyncio.sleep(seconds)
        asked = time.perf_counter()
        while self._busy and time.perf_counter() < asked + 10:
            await asyncio.sleep(0.01)
        return self._load(seconds)

    def _load(self, seconds: float) -> Load:
        for connection in self._free:
            connection.close()
        return Load(seconds, tuple(self._answers))

    def _send(self, scheduled: float, then: Callable[[], None]) -> None:
        self._busy += 1
        sent = 0.0

        def done(status: int) -> None:
            self._busy -= 1
            self._answers.append(Answer(scheduled, sent, time.perf_counter() - self._start, status))
            then()

        sent = time.perf_counter() - self._start
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                connection.ask(self._request, done)
                return
        task = asyncio.get_running_loop().create_task(self._ask_anew(done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_anew(self, done: Callable[[int], None]) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._free.append), self._host, self._port
            )
        except OSError:
            done(0)
            return
        connection.ask(self._request, done)


def arrivals(rate: float, seconds: float, *, poisson: bool, seed: int = 0) -> list[float]:
    """Times of requests: evenly spaced, or random as from independent clients."""
    if not poisson:
        return [number / rate for number in range(int(rate * seconds))]
    draw, times, now = random.Random(seed), [], 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        times.append(now)
    return times


def report(load: Load) -> dict[str, float | int]:
    """The numbers of a load."""
    by_status = load.count()
    return {
        "requests": len(load.answers),
        "accepted_per_second": round(load.accepted_per_second(), 1),
        **{f"status_{status}": count for status, count in sorted(by_status.items())},
        **{f"p{round(100 * share)}_ms": round(1000 * load.latency(share), 1) for share in (0.5, 0.99)},
        "slowest_ms": round(1000 * load.latency(1.0), 1),
        "refused_p99_ms": round(1000 * load.latency(0.99, 429), 1),
        "own_lateness_p99_ms": round(1000 * load.lateness(), 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Make a load and print its numbers as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("picture", type=Path)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--rate", type=float, help="open loop: requests per second")
    how.add_argument("--concurrency", type=int, help="closed loop: concurrent requests")
    parser.add_argument(
        "--poisson", action="store_true", help="open loop: random times instead of even spacing"
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args(argv)
    client = Client(given.url, given.picture.read_bytes())
    before = time.process_time()
    if given.rate is None:
        load = asyncio.run(client.closed_loop(given.concurrency, given.seconds))
    else:
        times = arrivals(given.rate, given.seconds, poisson=given.poisson)
        load = asyncio.run(client.open_loop(times))
    spent = time.process_time() - before
    if load.lateness() > LATE:
        print("this process was late with its requests: it was the bottleneck", file=sys.stderr)
    print(json.dumps({**report(load), "own_cpu": round(spent / load.seconds, 3)}))


if __name__ == "__main__":
    main()
