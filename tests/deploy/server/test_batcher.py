"""The queue before the model: batching, rejection, and items that are never computed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.deploy.server.served import PATIENCE, advance
from vitascope.deploy.server.admission import Admission, Room
from vitascope.deploy.server.batcher import Batcher, Expired, LongWork, Outcome, Work
from vitascope.deploy.server.metrics import Metrics
from vitascope.deploy.server.settings import Settings

FAR = float("inf")


class Held:
    """Doubles numbers once released; records every batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        if -1 in items:
            raise ArithmeticError("-1 cannot be doubled")
        self.batches.append(items)
        return [2 * item for item in items]

    def computed(self) -> list[int]:
        return [item for batch in self.batches for item in batch]


class Scene:
    def __init__(self, capacity: int, max_batch: int) -> None:
        self.model = Held()
        self.batcher, self.work = Batcher(lambda *_: None), Work("double", self.model, max_batch)
        self.admission = Admission(Settings(queue=capacity), self.batcher, Metrics())
        self.admission.closed = ""

    def ask(self, item: Any, deadline: float = FAR, work: Work | None = None) -> asyncio.Task[Outcome]:
        """Queue an item, or raise `Overloaded`, as the server does."""
        self.admission.admit(Room(), work=work or self.work, deadline=deadline)
        return asyncio.ensure_future(self.batcher.submit(work or self.work, item, deadline=deadline))

    def begin(self, deadline: float) -> None:
        self.admission.admit(Room(), Room(requests=1), work=self.work, deadline=deadline)

    async def queued(self, *items: int) -> list[asyncio.Task[Outcome]]:
        tasks = [self.ask(item) for item in items]
        await turns()
        return tasks


async def turns() -> None:
    """Let the event loop run everything that does not need the thread."""
    for _ in range(5):
        await asyncio.sleep(0)


def within(seconds: float) -> float:
    """A deadline in `seconds` from now."""
    return asyncio.get_running_loop().time() + seconds


@asynccontextmanager
async def playing(*, capacity: int = 8, max_batch: int = 4, held: bool = True) -> AsyncIterator[Scene]:
    """A new batcher; when it has stopped, its model has recorded all batches."""
    scene = Scene(capacity, max_batch)
    model = scene.model
    scene.batcher.start()
    if held:
        scene.ask(0)
        await asyncio.to_thread(model.begun.wait, PATIENCE)
    else:
        model.go.set()
    try:
        yield scene
    finally:
        model.go.set()
        await scene.batcher.stop()
        await asyncio.to_thread(scene.batcher._thread.shutdown)  # the blocked batch is recorded by then


async def test_nothing_is_computed_any_more_when_a_result_or_an_error_arrives() -> None:
    async with playing(held=False) as scene:
        for item in range(5):
            outcome = await scene.batcher.submit(scene.work, item, deadline=FAR)
            assert (outcome.value, outcome.batch_size) == (2 * item, 1)
            assert not scene.batcher.is_computing
            with pytest.raises(ArithmeticError):
                await scene.batcher.submit(scene.work, -1, deadline=FAR)
            assert not scene.batcher.is_computing


async def test_items_queued_during_computation_form_one_batch_in_order() -> None:
    async with playing() as scene:
        tasks = await scene.queued(1, 2, 3, 4, 5)
        scene.model.go.set()
        outcomes = await asyncio.gather(*tasks)
        assert [outcome.value for outcome in outcomes] == [2, 4, 6, 8, 10]
        assert [outcome.batch_size for outcome in outcomes] == [4, 4, 4, 4, 1]
    assert scene.model.batches == [[0], [1, 2, 3, 4], [5]]


async def test_batches_do_not_mix_kinds_of_work_and_the_oldest_is_first() -> None:
    async with playing() as scene:
        other = Work("other", scene.model, 4)
        tasks = [scene.ask(1), scene.ask(10, work=other), scene.ask(2), scene.ask(20, work=other)]
        await turns()
        scene.model.go.set()
        await asyncio.gather(*tasks)
    assert scene.model.batches == [[0], [1, 2], [10, 20]]


async def test_deadline_missed_while_the_loop_was_busy_expires_the_item() -> None:
    async with playing() as scene:
        late = scene.ask(1, deadline=within(1000))
        await turns()
        advance(1000)  # the loop has not run its timers
        assert await scene.batcher._next_batch() == []
        with pytest.raises(Expired):
            await late
    assert scene.model.computed() == [0]


async def test_item_that_expires_during_computation_fails_and_the_rest_of_its_batch_succeeds() -> None:
    async with playing() as scene:
        scene.model.go.set()
        await (await scene.queued(1))[0]
        scene.model.go.clear()
        scene.model.begun.clear()
        patient, hasty = scene.ask(2), scene.ask(3, deadline=within(1000))
        await asyncio.to_thread(scene.model.begun.wait, PATIENCE)
        advance(1000)
        with pytest.raises(Expired, match="while computing") as expired:
            await hasty
        assert expired.value.stage == "computing"
        scene.model.go.set()
        assert (await patient).value == 4


async def test_stop_cancels_queued_items_and_does_not_wait_for_the_thread() -> None:
    async with playing() as scene:
        (waiting,) = await scene.queued(1)
        await scene.batcher.stop()
        with suppress(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()
        assert scene.batcher.is_computing


class Long:
    """Long work of `parts` parts; each waits until it is released."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.begun = 0
        self.was_ended = False
        self.go = threading.Semaphore(0)

    def __call__(self, pause: Callable[[], None]) -> str:
        for _ in range(self.parts):
            try:
                pause()
            except BaseException:
                self.was_ended = True
                raise
            self.begun += 1
            assert self.go.acquire(timeout=PATIENCE)
        return "done"

    async def part(self, number: int) -> None:
        """Wait until the part has begun."""
        while self.begun < number:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("end", ["cancelled", "late", "stopped"])
async def test_abandoned_long_work_ends_after_its_current_part(end: str) -> None:
    async with playing(held=False) as scene:
        long = Long(100)
        explaining = scene.ask(long, within(1000), work=LongWork("explain"))
        await long.part(1)
        if end == "cancelled":
            explaining.cancel()
        elif end == "stopped":
            await scene.batcher.stop()
        else:
            advance(1000)
        with pytest.raises((asyncio.CancelledError, Expired)):
            await explaining
        long.go.release()
        while not long.was_ended:
            await asyncio.sleep(0.001)
        assert long.begun == 1  # its second part never runs
        if end != "stopped":
            assert (await scene.ask(4)).value == 8


async def test_long_tasks_run_one_after_another_and_fail_independently() -> None:
    async with playing(held=False) as scene:

        def broken(pause: Callable[[], None]) -> None:
            pause()
            raise ArithmeticError("no explanation")

        work, long = LongWork("explain"), Long(2)
        first, second = scene.ask(long, work=work), scene.ask(broken, work=work)
        await long.part(1)
        assert not second.done()
        long.go.release(2)
        assert (await first).value == "done"
        with pytest.raises(ArithmeticError, match="no explanation"):
            await second
