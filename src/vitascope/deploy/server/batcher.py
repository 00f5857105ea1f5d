"""The queue before the model: requests that arrive together are computed together, within bounds.

While one batch is computed, the next one gathers, so batches grow with the load and a single request never
waits for others. Long work is computed in parts; a batch of waiting requests goes between any two of them.

The queue belongs to the event loop; the methods that compute run in the model's thread and say so.
"""

import asyncio
import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Pause = Callable[[], None]
Observe = Callable[[str, Sequence[float], float], None]


class Pace:
    """The time that something takes."""

    seconds_each = 0.0
    """Seconds, from recent times; 0 before the first."""

    def learn(self, seconds: float, items: int) -> None:
        """Update the time per item; slower batches count more than faster ones."""
        each = seconds / items
        weight = 0.5 if each > self.seconds_each else 0.2
        self.seconds_each += (weight if self.seconds_each else 1.0) * (each - self.seconds_each)


class Work(Pace):
    """A kind of work: its name in the metrics, and a function from items to as many results."""

    def __init__(self, name: str, compute: Callable[[list[Any]], Sequence[Any]], max_batch: int = 1) -> None:
        self.name, self.compute, self.max_batch = name, compute, max_batch
        self.part: Pace = self
        """What runs before other work may: all of it, or a part of long work."""


class LongWork(Work):
    """Work in parts: each item is a function that calls its argument, `pause`, at the end of a part."""

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda calls: [call() for call in calls])
        self.part = Pace()


class Expired(Exception):  # noqa: N818 - named like the response
    """A deadline passed in a stage: `queued`, `computing` or `decoding`."""

    def __init__(self, stage: str) -> None:
        super().__init__(
            f"the deadline passed while {'waiting in the queue' if stage == 'queued' else stage}"
        )
        self.stage = stage


class Abandoned(BaseException):
    """Raised by `pause` in long work whose result nobody awaits any more."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A result with its timing."""

    value: Any
    queue_seconds: float
    model_seconds: float
    batch_size: int


@dataclasses.dataclass(eq=False)
class _Job:
    work: Work
    item: Any
    deadline: float
    result: asyncio.Future[Outcome]
    since: float
    begun: float | None = None
    seconds: float = 0.0  # computed so far, in parts

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Batcher:
    """The queue, and the thread that computes.

    `observe` gets each batch's name, the queue seconds of its items, and its model seconds.
    """

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self.jobs: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._running_since = 0.0
        self._long: _Job | None = None
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to compute; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_task = self._loop.create_task(self._run())

    async def stop(self) -> None:
        """Cancel everything; does not wait for the running computation."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        for job in [*self.jobs, *self._running, *([self._long] if self._long else [])]:
            job.result.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def pending(self) -> int:
        """Items that wait or are computed."""
        return len(self.jobs) + len(self._running)

    @property
    def is_computing(self) -> bool:
        """Whether a batch is computed."""
        return bool(self._running)

    def seconds_computing(self) -> float:
        """The age of the running batch; 0 without one."""
        return self._loop.time() - self._running_since if self._running else 0.0

    def seconds_ahead(self, work: Work | None = None) -> float:
        """The estimated time of all pending work, or of the part that comes before a new item of `work`."""
        ahead = sum(job.work.part.seconds_each for job in self._running) - self.seconds_computing()
        ahead, long, items, parts = max(0.0, ahead), 0.0, 0, 0.0
        if self._long is not None:
            long = max(0.0, self._long.work.seconds_each - self._long.seconds)
            parts = self._long.work.part.seconds_each
        for queued, count in Counter(job.work for job in self.jobs).items():
            if isinstance(queued, LongWork):
                long += count * queued.seconds_each
                parts = max(parts, queued.part.seconds_each)
            else:
                ahead += count * queued.seconds_each
                items += count
        if work is None or isinstance(work, LongWork):
            return ahead + long
        return ahead + parts * (
            1 + items // work.max_batch
        )  # a part of long work goes between any two batches

    async def submit(self, work: Work, item: Any, *, deadline: float) -> Outcome:
        """Queue an item and await its result; an item that is cancelled in the queue is never computed.

        Raises `Expired`, or the error of `work.compute` for this item. Ask `Admission` first for room.
        """
        job = _Job(work, item, deadline, self._loop.create_future(), self._loop.time())
        self.jobs.append(job)
        self._arrived.set()
        try:
            async with asyncio.timeout_at(deadline):
                return await job.result
        except TimeoutError:
            if job.result.done() and not job.result.cancelled() and job.result.exception() is not None:
                raise  # by the work itself
            raise Expired("queued" if job.begun is None else "computing") from None
        finally:
            if job.begun is None and job in self.jobs:
                self.jobs.remove(job)

    async def _run(self) -> None:
        while True:
            while not self.jobs:
                self._arrived.clear()
                await self._arrived.wait()
            batches = [await self._next_batch(), [self._long] if self._long else []]
            for batch in batches:
                if any(not job.result.done() for job in batch):
                    self._begin_part(batch)
                    await self._loop.run_in_executor(self._thread, self._compute, batch)
            self._long = None

    async def _next_batch(self) -> list[_Job]:
        """The oldest short job with others of its kind, in order; the oldest long job becomes `_long`."""
        now = self._loop.time()
        alive = [job for job in self.jobs if job.deadline > now and not job.result.done()]
        short = [job for job in alive if not isinstance(job.work, LongWork)]
        batch = [job for job in short if job.work is short[0].work]
        batch = batch[: batch[0].work.max_batch] if batch else []
        begun = list(batch)
        if self._long is None:
            self._long = next((job for job in alive if isinstance(job.work, LongWork)), None)
            begun += [self._long] if self._long else []
        for job in begun:
            job.begun = now
        self.jobs = deque(job for job in alive if job.begun is None)
        return batch

    def _begin_part(self, batch: list[_Job]) -> None:
        self._running, self._running_since = batch, self._loop.time()

    def _end_part(self, job: _Job) -> None:
        """End what runs, before its result is given: whoever awaits it finds the model free."""
        seconds, self._running = self._loop.time() - self._running_since, []
        job.seconds += seconds
        if job.work.part is not job.work:
            job.work.part.learn(seconds, 1)

    def _compute(self, batch: list[_Job]) -> None:
        """In the model's thread: compute a batch; if that fails, each item alone, because one may be bad."""
        first = batch[0]
        self._begin_part(batch)
        try:
            items = [job.item for job in batch]
            if isinstance(first.work, LongWork):
                items = [functools.partial(first.item, functools.partial(self._pause, first))]
            values = first.work.compute(items)
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            self._running = []
            if len(batch) == 1:
                self._loop.call_soon_threadsafe(first.fail, error)
                return
            for job in batch:
                if not job.result.done():
                    self._compute([job])
        else:
            self._end_part(first)
            self._loop.call_soon_threadsafe(self._finish, batch, values)

    def _pause(self, job: _Job) -> None:
        """In the model's thread: end a part of long work, and compute a batch before the next one."""
        self._end_part(job)
        if not job.result.done():
            taking = asyncio.run_coroutine_threadsafe(self._next_batch(), self._loop)
            if batch := taking.result():
                self._compute(batch)
        if job.result.done():
            raise Abandoned
        self._begin_part([job])

    def _finish(self, batch: list[_Job], values: Sequence[Any]) -> None:
        work, seconds = batch[0].work, batch[0].seconds
        work.learn(seconds, len(batch))
        waits = [(job.begun or 0.0) - job.since for job in batch]
        self._observe(work.name, waits, seconds)
        for job, value, wait in zip(batch, values, waits, strict=True):
            if not job.result.done():
                job.result.set_result(Outcome(value, wait, seconds, len(batch)))
