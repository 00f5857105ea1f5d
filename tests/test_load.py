"""The load generator: it keeps its schedule whatever the server does, and counts every request."""

import asyncio
import importlib
import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
load = importlib.import_module("load")


class Answering(asyncio.Protocol):
    """A server that answers after some seconds, with each of its statuses in turn."""

    def __init__(self, seconds: float, statuses: "itertools.cycle[int]") -> None:
        self.seconds, self.statuses = seconds, statuses

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"picture"):
            asyncio.get_running_loop().call_later(self.seconds, self.answer)

    def answer(self) -> None:
        status = next(self.statuses)
        if status:
            self.transport.write(b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\n{}" % status)
        else:
            self.transport.close()


def against(server: tuple[float, list[int]], scenario):
    """The result of a scenario with a client of such a server."""

    async def run():
        seconds, statuses = server
        turns = itertools.cycle(statuses)
        there = await asyncio.get_running_loop().create_server(
            lambda: Answering(seconds, turns), "127.0.0.1", 0
        )
        port = there.sockets[0].getsockname()[1]
        found = await scenario(load.Client(f"http://127.0.0.1:{port}/x?y=1", b"picture"))
        there.close()
        return found

    return asyncio.run(run())


def test_open_loop_does_not_wait_for_answers() -> None:
    times = [0.001 * number for number in range(50)]
    made = against((0.3, [200]), lambda client: client.open_loop(times))
    assert made.count() == {200: 50}
    assert max(answer.sent for answer in made.answers) < min(answer.done for answer in made.answers)
    assert made.latency(0.5) >= 0.3


def test_latency_is_measured_from_the_scheduled_time() -> None:
    answers = tuple(load.Answer(0.1 * number, 1.0, 1.5, 200) for number in range(11))
    made = load.Load(1.0, answers)
    assert made.latency(1.0) == 1.5
    assert made.latency(0.0) == 0.5
    assert made.lateness() == 1.0


def test_every_request_is_counted_by_its_status() -> None:
    times = [0.001 * number for number in range(40)]
    made = against((0.0, [200, 429, 0, 503]), lambda client: client.open_loop(times))
    assert made.count() == {200: 10, 429: 10, 0: 10, 503: 10}
    numbers = load.report(made)
    assert (numbers["requests"], numbers["status_200"], numbers["status_0"]) == (40, 10, 10)


def test_unanswered_request_is_counted() -> None:
    made = against((60.0, [200]), lambda client: client.open_loop([0.0, 0.001], patience=0.05))
    assert made.count() == {0: 2}


def test_closed_loop_has_a_fixed_number_of_requests_at_a_time() -> None:
    made = against((0.02, [200]), lambda client: client.closed_loop(4, 0.3))
    begun = sorted(made.answers, key=lambda answer: answer.sent)
    for first, later in zip(begun, begun[4:], strict=False):
        assert later.sent >= min(answer.done for answer in begun if answer.done >= first.done) - 1e-6
    assert len(made.answers) >= 8


@pytest.mark.parametrize("poisson", [False, True])
def test_arrivals_have_the_rate(poisson: bool) -> None:
    times = load.arrivals(1000, 10, poisson=poisson)
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 10
    assert len(times) == pytest.approx(10_000, rel=0.05)
