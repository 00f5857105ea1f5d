"""Requests with the hub's client: one error for whatever answers, within a time limit."""

import threading

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from vitascope import network
from vitascope.network import NotTheHubError, ask, misunderstood, unreachable


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
