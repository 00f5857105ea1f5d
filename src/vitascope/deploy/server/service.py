"""What the server's routes work with: the model, the way of a picture to it, and whether it is ready.

A route reads pictures with `read_picture`, and computes with `predict`, `embed` or `run`, which go through
one bounded queue to the one thread that has the model. Routes never touch the model in the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from vitascope.deploy.server.batcher import Batcher, Expired, LongWork, Outcome, Overloaded, Work
from vitascope.deploy.server.decoder_pool import Decoders, Displaced, Late
from vitascope.deploy.server.decoder_process import Orders, Refused
from vitascope.deploy.server.metrics import Metrics
from vitascope.deploy.server.settings import Settings
from vitascope.deploy.server.uploads import (
    Arriving,
    Refusal,
    RequestIds,
    Upload,
    deadline_seconds,
    read_uploads,
)

if TYPE_CHECKING:
    import torch
    from starlette.requests import Request

    from vitascope.data.preprocess import Pixels
    from vitascope.deploy.predict.engine import Engine

R = TypeVar("R")
SPARE = 5.0
"""Seconds beyond the deadline after which a decoding process ends itself."""
LOOK = 0.05
"""Seconds between two looks at how late the event loop is."""
SHED_LEAST, SHED_MOST = 0.005, 0.02
"""Seconds for which predictions are refused without another look once there was no room for one ..."""
SHED_SHARE = 0.25
"""... which is this share of the time that the work ahead takes: the model does not run out of it."""
RECENT = 1.0
"""Seconds for which a refusal says that the server is saturated."""


class Service:
    """A model behind a queue.

    Args:
        open_engine: opens the model; called once, in a thread.
        settings: the limits.
    """

    def __init__(self, open_engine: Callable[[], Engine], settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.draining = False
        """Whether the server is about to stop: what comes now gets 503."""
        self.in_flight = 0
        """Requests that have been let in and not been answered."""
        self.unanswered = 0
        """Requests that were in flight when the time to finish them was over."""
        self.request_ids = RequestIds()
        self.arriving = Arriving()
        """Those of them whose bodies are being read."""
        self.lag = 0.0
        """Seconds that a request has waited before it is seen: how late the event loop was last found."""
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._last_refusal = float("-inf")
        self._shed_until = float("-inf")
        self._shed_answer = (b"", b"")
        self._batcher = Batcher(
            capacity=settings.queue, max_wait=settings.max_wait_ms / 1000, observer=self.metrics
        )
        self._decoders = Decoders()
        self._predict = Work("predict", self._probabilities, settings.max_batch)
        self._embed = Work("embed", self._embeddings, settings.max_batch)
        self._alone: dict[str, Work] = {}
        self._loading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._given_up: asyncio.Future[None] | None = None

    # The model's life

    async def start(self) -> None:
        """Begin to load the model, in the background."""
        self._given_up = asyncio.get_running_loop().create_future()
        self._batcher.start()
        self._decoders.start()
        self._loading = asyncio.get_running_loop().create_task(self._load())
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    @property
    def is_loading(self) -> bool:
        """Whether the model is neither there nor known to be impossible."""
        return self._engine is None and self.fault is None

    @property
    def fault(self) -> BaseException | None:
        """What stopped the model from loading; None as long as nothing did."""
        loading = self._loading
        return loading.exception() if loading and loading.done() and not loading.cancelled() else None

    def give_up(self) -> None:
        """The time to finish is over: what is in flight gets 503."""
        if self._given_up is not None and not self._given_up.done():
            self.unanswered = self.in_flight
            self._given_up.set_result(None)

    async def stop(self) -> None:
        """Give up whatever is not done."""
        for task in (self._loading, self._watching):
            if task is not None:
                task.cancel()
        await self._batcher.stop()
        await self._decoders.stop()

    @property
    def engine(self) -> Engine:
        """What answers.

        Raises:
            Refusal: 503, it is not loaded yet, or cannot be.
        """
        if self._engine is None:
            raise Refusal(503, self.why_not_ready(), retry_after=1)
        return self._engine

    def why_not_ready(self) -> str:
        """Why no request should be sent here now; empty where all is well."""
        if self.draining:
            return "the server is stopping"
        if self._engine is None:
            return f"the model cannot be loaded: {self.fault}" if self.fault else "the model is still loading"
        stalled = self._batcher.seconds_computing()
        if stalled > self.settings.stalled_s:
            return f"the model has not answered for {stalled:.0f} s"
        if self._now() - self._last_refusal < RECENT:
            return "saturated: requests are being refused"
        return ""

    @property
    def is_computing(self) -> bool:
        """Whether the model's thread is at work, on a batch or on loading."""
        return self._batcher.computing > 0

    # Requests

    def check_room(self, *, at_once: bool) -> None:
        """Refuse a request before anything of it is read, where it could not be computed in time.

        Args:
            at_once: it is a prediction, so that it is known how long it may wait.

        Raises:
            Refusal: 503 or 429, with the seconds after which to try again.
        """
        if self.draining:
            raise Refusal(503, "the server is stopping", retry_after=1)
        _ = self.engine
        try:
            self._check_places(1)
            if at_once:
                self._check_time()
        except Overloaded as overload:
            raise self._refusal(overload) from overload

    def shed(self, client: str, given_id: bytes | None) -> bytes | None:
        """The whole answer, 429, to a prediction for which there is no room; None where there may be.

        It is counted and logged as any other. The reason that it gives may be `SHED_MOST` old.

        Args:
            client: its address.
            given_id: its X-Request-ID.
        """
        from vitascope.deploy.server.middleware import log_access, refusal_parts

        if self.draining or self._engine is None:
            return None
        now = self._now()
        if now >= self._shed_until:
            try:
                self._check_places(1)
                self._check_time()
            except Overloaded as overload:
                self._shed_answer = refusal_parts(_no_room(overload))
                self._shed_until = now + min(max(SHED_SHARE * overload.ahead, SHED_LEAST), SHED_MOST)
            else:
                return None
        self._last_refusal = now
        self.metrics.refused.inc()
        self.metrics.answered("/v1/predict", 429, 0.0)
        request_id = self.request_ids.of(given_id)
        if self.settings.access_log:
            log_access(client, "POST", "/v1/predict", 429, 0.0, request_id)
        head, body = self._shed_answer
        return b"%sx-request-id: %s\r\n\r\n%s" % (head, request_id, body)

    def _check_time(self) -> None:
        """Refuse a prediction that could not be computed before its deadline."""
        deadline = self.deadline(None)
        if deadline <= self._now():
            raise Overloaded(f"requests wait for {self.lag:.1f} s before they are seen", self.lag)
        arrived = self.in_flight - self.arriving.requests
        coming = max(0, arrived - self._batcher.waiting - self._batcher.computing)
        self._batcher.check_room(self._predict, deadline, coming=coming)

    def _check_places(self, more: int) -> None:
        """Refuse `more` requests beyond the queue's places; those whose bodies are still read take none."""
        limit = self.settings.queue
        if self.in_flight - self.arriving.requests + more > limit:
            ahead = self._batcher.seconds_ahead()
            raise Overloaded(f"{limit} requests are in work, which is the limit", ahead)

    def enter(self, counted: bool) -> None:
        """A request has been let in; `counted` among those that need the model."""
        self.in_flight += counted
        self.metrics.in_flight.inc(counted)

    def leave(self, counted: bool) -> None:
        """It has been answered."""
        self.in_flight -= counted
        self.metrics.in_flight.dec(counted)

    def deadline(self, request: Request | None, milliseconds: float | None = None) -> float:
        """When a request has to be answered, on the event loop's clock; counted from when it came.

        Args:
            request: whose X-Deadline-Ms may make it less.
            milliseconds: the longest; by default a prediction's.

        Raises:
            Refusal: 422, the header is no number above 0.
        """
        longest = (self.settings.deadline_ms if milliseconds is None else milliseconds) / 1000
        asked = None if request is None else deadline_seconds(request)
        return self._now() - self.lag + (longest if asked is None else min(asked, longest))

    async def read_uploads(self, request: Request) -> list[Upload]:
        """The encoded pictures of a request, one of a raw body, or all files of a form.

        Raises:
            Refusal: 408, 413, 415 or 422, saying why; 429, no room is left now that the body is whole.
        """
        uploads = await read_uploads(request, self.settings, self.arriving)
        try:
            self._check_places(0)  # it has been among `in_flight` since its headers came
        except Overloaded as overload:
            raise self._refusal(overload) from overload
        return uploads

    async def read_picture(self, request: Request) -> Pixels:
        """The one picture of a request, decoded as the model takes it: uint8 (C, H, W).

        Raises:
            Refusal: as `read_uploads` and `decode`; 422, not one picture but several; 499, the client has
                gone.
        """
        uploads = await self.read_uploads(request)
        if len(uploads) != 1:
            raise Refusal(422, f"one picture is expected here, not {len(uploads)}")
        decoding = self.decode(uploads[0], deadline=self.deadline(request))
        pixels: Pixels = await self.unless_gone(request, decoding)
        return pixels

    async def decode(self, upload: Upload, *, deadline: float) -> Pixels:
        """An encoded picture as the model takes it: uint8 (C, H, W); decoded in a process of its own.

        Raises:
            Refusal: 413, too many pixels or too much memory; 422, it cannot be decoded; 429, it takes long
                while smaller pictures wait; 503, no model yet; 504, the deadline passed.
        """
        _ = self.engine
        try:
            return await self._decoders.decode(upload.content, deadline=deadline)
        except Refused as refused:
            raise Refusal(refused.status, upload.told(refused)) from refused
        except Displaced as displaced:
            self.metrics.refused.inc()
            reason = "decoding takes long, and smaller pictures wait"
            raise Refusal(429, upload.told(reason), retry_after=1) from displaced
        except Late as late:
            self.metrics.expired.labels("decoding").inc()
            raise Refusal(504, upload.told("the deadline passed while decoding")) from late

    # Computing

    async def predict(self, pixels: Pixels, *, deadline: float) -> Outcome:
        """Probabilities (K,) of a picture, float32 on the CPU, computed together with others.

        Raises:
            Refusal: 429, there is no room or no time; 504, the deadline passed; 503, no model; 501, one
                without a head.
        """
        self.check_classes()
        return await self._submit(self._predict, pixels, deadline)

    async def embed(self, pixels: Pixels, *, deadline: float) -> Outcome:
        """The pooled representation (D,) of a picture, float32 on the CPU, computed together with others.

        Raises:
            Refusal: as `predict`; 501, an exported model, which has none.
        """
        self.torch_engine()
        return await self._submit(self._embed, pixels, deadline)

    async def run(self, function: Callable[..., R], *args: Any, deadline: float, kind: str = "other") -> R:
        """A function's result, computed alone; predictions go between its parts, cancelling ends it there.

        Args:
            function: called with `args`; `vitascope.explain.forward` tells its parts.
            *args: its arguments.
            deadline: as `deadline` gives it.
            kind: what metrics call it; things of one kind take about the same time.

        Raises:
            Refusal: as `predict`.
            Exception: what the function raises.
        """

        def in_parts(pause: Callable[[], None]) -> R:
            from vitascope.explain.forward import before_each_forward

            with before_each_forward(pause):
                return function(*args)

        work = self._alone.get(kind) or LongWork(kind)
        outcome = await self._submit(work, in_parts, deadline)
        self._alone[kind] = work  # kept only now: what fails may be of a kind that a client made up
        return outcome.value

    def check_classes(self) -> None:
        """Reject predictions of a model without a head before their pictures are read.

        Raises:
            Refusal: 501, it has no head; 503, it is not loaded.
        """
        if not self.engine.num_classes:
            raise Refusal(501, "this model has no head, so it predicts no classes; use /v1/embed")

    def torch_engine(self) -> Any:
        """The engine, where it is a model in torch, which alone can be looked into: a `TorchEngine`.

        Raises:
            Refusal: 501, it is an exported file; 503, it is not loaded.
        """
        from vitascope.deploy.predict.engine import TorchEngine

        if not isinstance(self.engine, TorchEngine):
            raise Refusal(501, f"this needs the model itself; what is served is {self.engine.description}")
        return self.engine

    async def unless_gone(self, request: Request, answer: Any) -> Any:
        """Await an answer for a client as long as it is there; once it has gone, nothing more is computed.

        Raises:
            Refusal: 499, the client has closed the connection; 503, the server ends.
        """
        assert self._given_up is not None
        answering = asyncio.ensure_future(answer)
        leaving = asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait({answering, leaving, self._given_up}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            if self._given_up.done():
                raise Refusal(503, "the server is stopping", retry_after=1)
            self.metrics.abandoned.inc()
            raise Refusal(499, "the client has gone")
        finally:
            answering.cancel()
            leaving.cancel()

    async def _submit(self, work: Work, item: Any, deadline: float) -> Outcome:
        _ = self.engine  # 503 before anything is queued
        try:
            return await self._batcher.submit(work, item, deadline=deadline)
        except Overloaded as overload:
            raise self._refusal(overload) from overload
        except Expired as expired:
            self.metrics.expired.labels("computing" if expired.computing else "queued").inc()
            raise Refusal(504, str(expired)) from expired

    def _refusal(self, overload: Overloaded) -> Refusal:
        self._last_refusal = self._now()
        self.metrics.refused.inc()
        return _no_room(overload)

    async def _load(self) -> None:
        """Open the model in the model's thread, and let it compute, so that no request meets a first time."""
        work = Work("load", lambda _: [self._opened()], 1)
        engine: Engine = (await self._batcher.submit(work, None, deadline=float("inf"))).value
        settings = self.settings
        await self._decoders.order(
            Orders(
                reader=engine.reader,
                max_megapixels=settings.max_megapixels,
                max_memory_mb=settings.max_decode_mb,
                max_seconds=settings.deadline_ms / 1000 + SPARE,
            )
        )
        self._engine = engine

    async def _watch(self) -> None:
        """Keep `lag` true: a loop that has more to do than it can is late with everything."""
        while True:
            due = self._now() + LOOK
            await asyncio.sleep(LOOK)
            self.lag = self._now() - due

    def _opened(self) -> Engine:
        import torch

        # Handlers import these: later, the event loop would stand still for the seconds that takes.
        from vitascope.deploy.server import attention_pack, explanations  # noqa: F401

        engine = self._open_engine()
        shape = (engine.preprocess.channels, *engine.preprocess.image_size)
        for count in (1, self.settings.max_batch):
            begun = time.perf_counter()
            with _few_threads(engine, count):
                engine.outputs(torch.zeros(count, *shape, dtype=torch.uint8))
        self._predict.learn(time.perf_counter() - begun, count)
        self.metrics.serves(engine)
        return engine

    def _probabilities(self, pictures: list[Pixels]) -> Sequence[torch.Tensor]:
        with _few_threads(self.engine, len(pictures)):
            return list(self.engine.predict(pictures))

    def _embeddings(self, pictures: list[Pixels]) -> Sequence[torch.Tensor]:
        import torch

        engine = self.torch_engine()
        with _few_threads(engine, len(pictures)):
            return list(engine.embed(torch.stack([torch.from_numpy(one) for one in pictures])))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _no_room(overload: Overloaded) -> Refusal:
    return Refusal(429, str(overload), retry_after=overload.retry_after)


@contextmanager
def _few_threads(engine: Engine, pictures: int) -> Iterator[None]:
    """One thread for a batch so small that threads would wait for each other, and for those that serve."""
    from vitascope.deploy.predict.engine import TorchEngine
    from vitascope.model.hardware import suitable_threads

    if not isinstance(engine, TorchEngine):
        yield
        return
    with suitable_threads(engine.config, engine.device, pictures):
        yield


async def _until_gone(request: Request) -> None:
    """Returns when the client closes its connection; the request's body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
