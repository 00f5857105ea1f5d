"""Requests with the hub's client: one error for whatever answers, within a time limit."""

import itertools
import os
import threading

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from vitascope import network
from vitascope.network import NotTheHubError, ask, in_threads, misunderstood, unreachable, usable_cores


def raising(error: BaseException) -> None:
    raise error


def test_result_of_a_call_is_returned() -> None:
    assert ask(lambda: 3) == 3
    assert ask(lambda: None, size=None) is None


@pytest.mark.parametrize(
    "error",
    [KeyError("url"), TypeError("a list"), ValueError("no JSON"), RecursionError("deep"), SystemExit(1)],
)
def test_what_a_wrong_answer_leads_to_is_one_error(error: BaseException) -> None:
    with pytest.raises(
        NotTheHubError, match=rf"does not answer as a hub does \({type(error).__name__}"
    ) as raised:
        ask(lambda: raising(error))
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [OSError(28, "full"), HFValidationError("a/b/c"), RuntimeError("xet")])
def test_errors_of_the_client_are_raised_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        ask(lambda: raising(error))
    assert raised.value is error


def test_no_answer_ends_with_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LIMIT", 0.1)
    released, others = threading.Event(), set(threading.enumerate())
    with pytest.raises(NotTheHubError, match=r"did not answer within 0.1 s|did not answer within 0.0 s"):
        ask(released.wait)
    (thread,) = {each for each in threading.enumerate() if each.name == "request"} - others
    assert thread.daemon
    released.set()


def test_unreachable_hub_is_distinguished_from_a_refusal() -> None:
    assert unreachable(ConnectionError("x")) == "the hub cannot be reached"
    assert unreachable(LocalEntryNotFoundError("x")) == "the hub cannot be reached"
    assert "the page of a proxy" in unreachable(misunderstood("the page of a proxy"))
    assert not unreachable(HFValidationError("a/b/c"))
    assert not unreachable(OSError(28, "full"))


def test_results_come_in_the_order_of_the_items_of_which_few_are_taken_ahead() -> None:
    items = itertools.count(1)
    results = in_threads(lambda item: item * item, items)
    assert next(results) == 1
    assert next(items) == 4 * usable_cores() + 1
    assert next(results) == 4


def test_an_error_is_raised_in_the_place_of_its_result() -> None:
    results = in_threads(lambda item: 1 // item, [1, 0])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_processes_of_torchrun_share_the_cores_that_this_one_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cores() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert usable_cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert usable_cores() == 1
