"""Functions of many images in threads."""

import itertools
import os

import pytest

from vitascope.data.threads import in_threads, usable_cores


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
