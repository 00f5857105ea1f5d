"""A load on an HTTP server: closed loop (so many requests at a time) or open loop (at times fixed before).

    python benchmarks/load.py http://127.0.0.1:8000/v1/predict picture.jpg --rate 300 --seconds 20
    python benchmarks/load.py http://127.0.0.1:8000/v1/predict picture.jpg --concurrency 64 --seconds 10

In the open loop a request is sent at its time whatever has become of those before, on a connection that is
free or a new one, and its latency counts from that time: a server that stalls cannot make the load wait for
it, and so not hide that it stalls. Bytes are sent and answers read by an asyncio protocol of a few lines, so
that one core makes thousands of requests a second; how late requests were sent is reported too.
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
"""Seconds by which this process may be late with its requests, before it says that it was the bottleneck."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a request."""

    scheduled: float
    """Seconds after the start at which it was to be sent."""
    sent: float
    """At which it was."""
    done: float
    """At which its answer was there, or its connection broke."""
    status: int
    """0 where there was no answer."""

    @property
    def latency(self) -> float:
        """Seconds from when it was to be sent to its answer."""
        return self.done - self.scheduled


@dataclasses.dataclass(frozen=True)
class Load:
    """A load that was made."""

    seconds: float
    answers: tuple[Answer, ...]

    def count(self) -> Counter[int]:
        """Answers by status."""
        return Counter(answer.status for answer in self.answers)

    def accepted_per_second(self) -> float:
        """Answers of 200, by the time from the first request to the last of them."""
        good = [answer.done for answer in self.answers if answer.status == 200]
        return len(good) / max(good) if good else 0.0

    def latency(self, share: float, status: int = 200) -> float:
        """Seconds that a share of the answers of a status stayed within; NaN where there are none."""
        found = sorted(answer.latency for answer in self.answers if answer.status == status)
        return found[min(len(found) - 1, int(share * len(found)))] if found else float("nan")

    def lateness(self) -> float:
        """Seconds by which 99% of the requests were sent late, at most: this process's own doing."""
        late = sorted(answer.sent - answer.scheduled for answer in self.answers)
        return late[min(len(late) - 1, int(0.99 * len(late)))] if late else 0.0


class Connection(asyncio.Protocol):
    """A connection that is kept open; one request at a time."""

    def __init__(self, idle: Callable[[Connection], None]) -> None:
        self._idle = idle
        self._done: Callable[[int], None] | None = None
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def ask(self, request: bytes, done: Callable[[int], None]) -> None:
        """Send a request; `done` is called with the answer's status."""
        assert self._transport is not None
        self._done, self._received = done, b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """A part of an answer."""
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
        """It has gone; a request that waits for its answer has none."""
        self.is_open = False
        self._finish(0)

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    def _finish(self, status: int) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            done(status)


class Client:
    """Sends one request again and again, and notes what becomes of it.

    Args:
        url: where to.
        body: a picture's bytes.
        headers: more of them.
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
        """Requests at given seconds after the start; unanswered ones are waited for so many seconds."""
        self._start = time.perf_counter()
        for scheduled in times:
            wait = self._start + scheduled - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await asyncio.sleep(0)  # late: let answers be read all the same
            self._send(scheduled, lambda: None)
        end = time.perf_counter() + patience
        while len(self._answers) < len(times) and time.perf_counter() < end:
            await asyncio.sleep(0.01)
        missing = len(times) - len(self._answers)
        now = time.perf_counter() - self._start
        self._answers += [Answer(times[-1], times[-1], now, 0)] * missing
        return self._load(times[-1] if len(times) else 0.0)

    async def closed_loop(self, concurrency: int, seconds: float) -> Load:
        """So many requests at a time: each answer brings the next request."""
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
    """When requests are sent: evenly, or at random as independent people would."""
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
    how.add_argument("--rate", type=float, help="open loop: requests a second")
    how.add_argument("--concurrency", type=int, help="closed loop: requests at a time")
    parser.add_argument("--poisson", action="store_true", help="open loop: at random times, not evenly")
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
