"""Steps that are timed in turns."""

from collections.abc import Callable

import pytest

from vitascope.deploy.export import throughput
from vitascope.deploy.export.throughput import take_turns

ROUNDS = 3


class Clock:
    """A clock that advances only by the duration of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(throughput.time, "perf_counter", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_steps_alternate_after_an_untimed_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def step(name: str) -> Callable[[], None]:
        return lambda: (order.append(name), clock.wait(1))[0]

    clock = Clock(monkeypatch)
    for seconds in (2 * ROUNDS, None):
        times = take_turns([step("a"), step("b")], rounds=ROUNDS, seconds=seconds)
        assert order == ["a", "b"] + ROUNDS * ["a", "b"]
        assert times == 2 * [ROUNDS * [1.0]]
        order.clear()


def test_steps_longer_than_the_time_limit_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    steps = [lambda: clock.wait(50), lambda: clock.wait(0.25), lambda: clock.wait(9)]
    times = take_turns(steps, rounds=ROUNDS, seconds=1)
    assert times == [[50], [0.25], [9]]
    assert clock.now == 2 * 59.25  # with one untimed round
