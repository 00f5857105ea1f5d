"""Requests that come one by one, computed in batches by one thread: a bounded queue with deadlines.

Everything here happens in the event loop, but for the computing itself. While one batch is computed, the next
gathers; so batches grow with the load, and a lone request waits for nobody. Long work is computed a part at a
time, with a batch of what waits between any two parts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

MARGIN = 0.5
"""The share of the time until its deadline that a request may be expected to take: it is an estimate."""
LAST_MARGIN = 0.9
"""The same once the request is read and decoded: refused now, that was done for nothing."""


class Overloaded(Exception):  # noqa: N818 - a refusal
    """There is no room for a request, or no time before its deadline."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(reason)
        self.ahead = retry_after
        """Seconds of work that are ahead."""
        self.retry_after = max(1, math.ceil(retry_after))
        """Whole seconds after which there may be room."""


class Expired(Exception):  # noqa: N818 - nobody's error
    """A request's deadline has passed."""

    def __init__(self, *, computing: bool) -> None:
        super().__init__(
            "the deadline passed while " + ("computing" if computing else "waiting in the queue")
        )
        self.computing = computing
        """Whether its batch had been begun; a request that expires in the queue is never computed."""


class Work:
    """A kind of work: what computes a batch of it, and how long that takes.

    Args:
        name: what metrics call it.
        compute: a list of items to as many results, in order; called in the model's thread.
        max_batch: items at a time.
    """

    def __init__(self, name: str, compute: Callable[[list[Any]], Sequence[Any]], max_batch: int) -> None:
        self.name = name
        self.compute = compute
        self.max_batch = max_batch
        self.seconds_each = 0.0
        """Of an item, by the last batches; 0 before the first."""

    def learn(self, seconds: float, items: int) -> None:
        """Remember how long a batch took; that it got slower sooner than that it got faster."""
        each = seconds / items
        weight = 0.5 if each > self.seconds_each else 0.2
        self.seconds_each += (weight if self.seconds_each else 1.0) * (each - self.seconds_each)


class LongWork(Work):
    """A kind of work that takes long: each item is a function, called with another that ends a part.

    Args:
        name: what metrics call it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, _one_part, max_batch=1)
        self.part = Work(f"part of {name}", _one_part, max_batch=1)
        """How long a part takes."""


class Abandoned(BaseException):
    """Raised inside long work that nobody waits for any more, at the end of a part."""


class Steps:
    """A function in a thread of its own, which runs only while `step` waits for it.

    Args:
        function: called with a function that ends a part: it returns when the next part is to begin.
    """

    def __init__(self, function: Callable[[Callable[[], None]], Any]) -> None:
        self._function = function
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="long work", daemon=True)
        self._thread.start()
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def step(self) -> None:
        """Run a part, or what is left to the end."""
        self._go.release()
        self._paused.acquire()

    def abandon(self) -> None:
        """Let it end: now if it pauses, else at the end of its part."""
        self._abandoned = True
        self._go.release()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                self.value = self._function(self._pause)
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            self.error = error
        self.is_done = True
        self._paused.release()

    def _pause(self) -> None:
        self._paused.release()
        self._go.acquire()
        if self._abandoned:
            raise Abandoned


def _one_part(steps: list[Steps]) -> list[Any]:
    for one in steps:
        one.step()
    return [one.value for one in steps]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A result, and how it came about."""

    value: Any
    queue_seconds: float
    model_seconds: float
    batch_size: int


class Observer(Protocol):
    """Who is told of every batch."""

    def batch(self, work: str, items: int, queue_seconds: Sequence[float], model_seconds: float) -> None:
        """A batch was computed."""


@dataclasses.dataclass(eq=False)
class _Job:
    work: Work
    item: Any
    deadline: float
    answer: asyncio.Future[Outcome]
    since: float
    begun: float | None = None
    seconds: float = 0.0
    """For which it has been computed, if in parts."""


class Batcher:
    """The queue, and the thread that works through it.

    Args:
        capacity: items that may wait, at most.
        max_wait: seconds that an item waits for company where fewer than a batch are there.
        observer: is told of every batch.
    """

    def __init__(self, *, capacity: int, max_wait: float = 0.0, observer: Observer | None = None) -> None:
        self.capacity = capacity
        self.max_wait = max_wait
        self._observer = observer
        self._jobs: deque[_Job] = deque()
        self._queued: Counter[Work] = Counter()
        self._running: list[_Job] = []
        self._running_since = 0.0
        self._long: _Job | None = None
        self._steps: Steps | None = None
        self._waiting = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work; called in the event loop."""
        self._loop_task = asyncio.get_running_loop().create_task(self._work_through())

    async def stop(self) -> None:
        """Stop; what still waits is cancelled, and what is being computed is not waited for."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        for job in [*self._jobs, *self._running, *([self._long] if self._long else [])]:
            job.answer.cancel()
        if self._steps is not None:
            self._steps.abandon()
        self._jobs.clear()
        self._queued.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def waiting(self) -> int:
        """Items in the queue."""
        return len(self._jobs)

    @property
    def computing(self) -> int:
        """Items of the batch that is being computed."""
        return len(self._running)

    def seconds_computing(self) -> float:
        """How long the present batch has been computed; 0 where there is none."""
        return self._now() - self._running_since if self._running else 0.0

    def seconds_ahead(self, work: Work | None = None) -> float:
        """How long, by what was measured so far, what waits and is computed will take.

        Args:
            work: what is to come after it; of long work, only the parts that come before that count, unless
                it is long itself. None counts everything.
        """
        short = [(one, jobs) for one, jobs in self._queued.items() if not isinstance(one, LongWork)]
        queued = sum(jobs * one.seconds_each for one, jobs in short)
        running = [job.work.part if isinstance(job.work, LongWork) else job.work for job in self._running]
        ahead = queued + max(0.0, sum(one.seconds_each for one in running) - self.seconds_computing())
        long = [(one, jobs) for one, jobs in self._queued.items() if isinstance(one, LongWork) and jobs]
        if work is None or isinstance(work, LongWork):
            begun = self._long
            left = max(0.0, begun.work.seconds_each - begun.seconds) if begun else 0.0
            return ahead + left + sum(jobs * one.seconds_each for one, jobs in long)
        parts = [one.part.seconds_each for one, _ in long]
        if self._long is not None and isinstance(self._long.work, LongWork):
            parts.append(self._long.work.part.seconds_each)
        batches = 1 + sum(jobs for _, jobs in short) // work.max_batch
        return ahead + max(parts, default=0.0) * batches

    def check_room(self, work: Work, deadline: float, *, coming: int = 0, margin: float = MARGIN) -> None:
        """Refuse an item that would not fit, or would not be done in time.

        Args:
            work: of what kind.
            deadline: on the event loop's clock.
            coming: items of its kind that were let in and are not in the queue yet: they come before it.
            margin: the share of the time until the deadline that it may take.

        Raises:
            Overloaded: saying which of the two, and when to try again.
        """
        ahead = self.seconds_ahead(work)
        if len(self._jobs) >= self.capacity:
            raise Overloaded(f"the queue is full: {len(self._jobs)} of {self.capacity} wait", ahead)
        left = deadline - self._now()
        ahead += coming * work.seconds_each
        if ahead > 0 and ahead + work.seconds_each > margin * left:
            raise Overloaded(f"{ahead:.2f} s of work are ahead, and {left:.2f} s are left", ahead)

    async def submit(self, work: Work, item: Any, *, deadline: float) -> Outcome:
        """Queue an item and wait for its result; cancelled while it waits, it is never computed.

        Raises:
            Overloaded: as `check_room`.
            Expired: the deadline passed.
            Exception: whatever `work.compute` raised for this item.
        """
        self.check_room(work, deadline, margin=LAST_MARGIN)
        job = _Job(work, item, deadline, asyncio.get_running_loop().create_future(), self._now())
        self._jobs.append(job)
        self._queued[work] += 1
        self._waiting.set()
        try:
            async with asyncio.timeout_at(deadline):
                return await job.answer
        except TimeoutError:
            if job.answer.done() and not job.answer.cancelled() and job.answer.exception() is not None:
                raise  # it is the work's own
            raise Expired(computing=job.begun is not None) from None
        finally:
            if job.begun is None and job in self._jobs:
                self._jobs.remove(job)
                self._queued[work] -= 1

    async def _work_through(self) -> None:
        """Batch after batch, for ever."""
        while True:
            if not self._jobs and self._long is None:
                self._waiting.clear()
                await self._waiting.wait()
            if self.max_wait and self._long is None and len(self._jobs) < self._jobs[0].work.max_batch:
                await asyncio.sleep(self.max_wait)
            self._running = self._next_batch()
            self._running_since = self._now()
            if self._running:
                await self._compute(self._running)
            self._running = []
            if self._long is not None:
                await self._go_on(self._long)

    def _next_batch(self) -> list[_Job]:
        """The oldest job, and others of its kind in the order in which they came; none that is too late.

        Long work is none of them: the oldest becomes `_long` where there is none.
        """
        now = self._now()
        alive = [job for job in self._jobs if job.deadline > now and not job.answer.done()]
        short = [job for job in alive if not isinstance(job.work, LongWork)]
        batch = (
            [job for job in short if job.work is short[0].work][: short[0].work.max_batch] if short else []
        )
        if self._long is None:
            self._long = next((job for job in alive if isinstance(job.work, LongWork)), None)
            if self._long is not None:
                self._long.begun = now
        for job in batch:
            job.begun = now
        self._jobs = deque(job for job in alive if job.begun is None)
        self._queued = Counter(job.work for job in self._jobs)
        return batch

    async def _go_on(self, job: _Job) -> None:
        """Compute the next part of long work, or end it where nobody waits for it any more."""
        steps = self._steps = self._steps or Steps(job.item)
        if job.answer.done():
            steps.abandon()
            self._long = self._steps = None
            return
        assert isinstance(job.work, LongWork)
        self._running, self._running_since = [job], self._now()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, job.work.compute, [steps])
        self._running = []
        seconds = self._now() - self._running_since
        job.work.part.learn(seconds, 1)
        job.seconds += seconds
        if not steps.is_done:
            return
        self._long = self._steps = None
        if steps.error is None:
            self._hand_out([job], [steps.value], job.seconds)
        elif not job.answer.done():
            job.answer.set_exception(steps.error)

    async def _compute(self, batch: list[_Job]) -> None:
        """Compute a batch in the thread; where that fails, each item alone: only the culprit is to fail."""
        work, begun = batch[0].work, self._now()
        computing = asyncio.get_running_loop().run_in_executor(
            self._thread, work.compute, [job.item for job in batch]
        )
        await asyncio.wait([computing])
        seconds = self._now() - begun
        error = computing.exception()
        if error is None:
            self._hand_out(batch, computing.result(), seconds)
        elif len(batch) == 1:
            if not batch[0].answer.done():
                batch[0].answer.set_exception(error)
        else:
            for job in batch:
                if not job.answer.done():
                    await self._compute([job])

    def _hand_out(self, batch: list[_Job], values: Sequence[Any], seconds: float) -> None:
        work = batch[0].work
        work.learn(seconds, len(batch))
        waits = [(job.begun or 0.0) - job.since for job in batch]
        if self._observer is not None:
            self._observer.batch(work.name, len(batch), waits, seconds)
        for job, value, wait in zip(batch, values, waits, strict=True):
            if not job.answer.done():
                job.answer.set_result(Outcome(value, wait, seconds, len(batch)))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
