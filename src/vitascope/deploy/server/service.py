"""The model behind a queue: the way of a picture to the model, and loading.

Routes read pictures with `read_uploads` and compute by `outcomes`; `run` does both. Everything is computed
through one queue, in the one thread that has the model; `Admission` bounds it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from vitascope.deploy.server.admission import STOPPING, Admission, Rejection
from vitascope.deploy.server.batcher import Batcher, LongWork, Outcome, Pause, Work
from vitascope.deploy.server.decoder_pool import DecoderPool
from vitascope.deploy.server.decoder_process import DecodeError, DecodeOptions
from vitascope.deploy.server.metrics import Metrics
from vitascope.deploy.server.settings import Settings
from vitascope.deploy.server.uploads import Upload, deadline_seconds, read_uploads
from vitascope.errors import UserError
from vitascope.models.trust import FAMILIAR

if TYPE_CHECKING:
    import torch
    from starlette.requests import Request

    from vitascope.deploy.predict.explanation import Explanation
    from vitascope.models.engines.engine import Engine, TorchEngine
    from vitascope.models.preprocess import Pixels

R = TypeVar("R")
BESIDE = "/beside"
"""Before the paths of the model that the explorer shows beside the server's own."""
NAMED = "/models/"
"""With a name, before the paths of one of several models."""
PLACE = re.compile(rf"({BESIDE}|{NAMED}[^/]+)(/.*)", re.DOTALL)
COMPUTED = "/v1/"
"""The beginning of paths that need a model."""
OF_PROTOCOLS = {"huggingface": (NAMED,), "oip": ("/v2/models/",)}
"""More of them, by protocol."""
PREDICTIONS = re.compile(
    r"/|/v1/predict|/models/(.+)|/v1/models/(.+):predict|/v2/models/(.+?)(?:/versions/[^/]+)?/infer"
)
EMBEDDINGS = re.compile(r"/v1/embed(?:dings)?")
"""Paths of work with the usual deadline, in every protocol, with the model's name."""
REQUEST_ID = re.compile(rb"[0-9A-Za-z._~:/+=@-]{1,128}")
"""The accepted form of X-Request-ID: nothing that could break a line of the log."""
SPARE = 5.0  # seconds beyond the deadline after which a decoder process ends itself
LAG_INTERVAL = 0.05  # seconds between two measurements of the event loop's lag

access_log = logging.getLogger("vitascope.access")


class Service:
    """A model behind a queue; `open_engine` is called once, in the model's thread.

    `place` is before the model's paths: empty, `/models/NAME` or `/beside`. The `first` of several models has
    the queue, the thread, the limits and the metrics of all; it starts, ends and counts for them.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        settings: Settings,
        place: str = "",
        first: Service | None = None,
    ) -> None:
        self.settings = settings
        self.place, self.first = place, first or self
        self.name = place.rpartition("/")[2]
        self.places: dict[str, Service] = first.places if first else {"": self}
        self.places[place] = self
        self.metrics: Metrics = first.metrics if first else Metrics()
        self.reading: asyncio.Semaphore = first.reading if first else asyncio.Semaphore(1)  # of large JSON
        self.unanswered = 0  # requests in progress when the time to finish them was over
        self.batcher: Batcher = first.batcher if first else Batcher(self.metrics.observe_batch)
        self.admission: Admission = (
            first.admission if first else Admission(settings, self.batcher, self.metrics)
        )
        self.decoders = DecoderPool()
        self._id_prefix, self._id_numbers = secrets.token_hex(4).encode(), itertools.count(1)
        self._open_engine = open_engine
        self._engine: Engine | None = None
        others = (path for name in settings.protocols for path in OF_PROTOCOLS.get(name, ()))
        self._computed = (COMPUTED, *others)  # the beginnings of paths that need a model
        # From pictures to probabilities (K,) and to pooled representations (D,), float32 on the CPU
        self._kind = f"{self.name}/" if self.name else ""  # before the names of its work in the metrics
        self.predictions = Work(f"{self._kind}predict", self._answers, settings.max_batch)
        self.embeddings = Work(f"{self._kind}embed", self._embeddings, settings.max_batch)
        self._long_works: dict[str, LongWork] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._given_up: asyncio.Future[None] | None = None

    # Loading, readiness, end

    async def start(self, *, wait_for_model: bool = False) -> None:
        """Begin to load the models, in the background, or load them."""
        loop = asyncio.get_running_loop()
        self._given_up = loop.create_future()
        self.batcher.start()
        for model in self.models:
            model.decoders.start()
        self._tasks = [loop.create_task(self._load_all()), loop.create_task(self._measure_lag())]
        while wait_for_model and not (self._engine or self.fault or self.admission.closed == STOPPING):
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Drop everything that is not done."""
        for task in self._tasks:
            task.cancel()
        await self.batcher.stop()
        for model in self.models:
            await model.decoders.stop()

    def give_up(self) -> None:
        """Answer the requests in flight with 503."""
        if self._given_up is not None and not self._given_up.done():
            self.unanswered = self.admission.taken.requests
            self._given_up.set_result(None)

    @property
    def fault(self) -> BaseException | None:
        """The exception that loading the models raised."""
        loading = self.first._tasks[0] if self.first._tasks else None
        return loading.exception() if loading and loading.done() and not loading.cancelled() else None

    @property
    def engine(self) -> Engine:
        """The loaded engine; rejects (503) until it is loaded."""
        if self._engine is None:
            raise Rejection(503, self.admission.why_not_ready())
        return self._engine

    # Several models

    @property
    def models(self) -> tuple[Service, ...]:
        """All models of the server, the first one first."""
        return tuple(dict.fromkeys(self.places.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which clients of other protocols choose this model."""
        name = self.name or self.engine.name or "model"
        short = name.rstrip("/").rpartition("/")[2]
        return tuple(dict.fromkeys((name, short, "vitascope"))) if self is self.first else (name,)

    def find(self, name: str) -> Service | None:
        """The model of a name, if there is one."""
        return self.places.get(NAMED + name) or (self if name in self.names else None)

    def named(self, name: str) -> Service:
        """The model of a name; rejects others (404)."""
        if model := self.find(name):
            return model
        names = [name for model in self.models if model.place != BESIDE for name in model.names]
        raise Rejection(404, f"no model {name[:80]!r} here; known are {', '.join(names)}")

    def model_of(self, path: str) -> tuple[Service, str]:
        """The model whose place a path begins with, and the rest of the path."""
        match = PLACE.fullmatch(path)
        model = self.places.get(match[1]) if match else None
        return (model, match[2]) if match and model else (self, path)

    # Admission

    def work_of(self, path: str) -> Work | None:
        """The predictions or embeddings that a path needs; None of other work, which may have a longer
        deadline, and before the model is loaded."""
        if self._engine is None:
            return None
        if EMBEDDINGS.fullmatch(path):
            return self.embeddings
        if not (match := PREDICTIONS.fullmatch(path)):
            return None
        name = next(filter(None, match.groups()), None)
        model = (name and self.find(name)) or self
        return model.predictions if model.engine.num_classes else model.embeddings

    def shed(self, path: str, client: str, client_id: bytes | None) -> bytes | None:
        """The raw 429 for a prediction without room, logged and counted; None if there is room."""
        model, inside = self.model_of(path)
        if self.admission.closed or EMBEDDINGS.fullmatch(inside) or not self.computes("POST", inside):
            return None
        work = model.work_of(inside)
        response = self.admission.shed(work, model.deadline()) if work else None
        if response is None:
            return None
        request_id = self.request_id(client_id)
        self.metrics.observe_request(path, 429, 0.0)
        self.log_request(client, "POST", path, 429, 0.0, request_id)
        head, body = response
        return b"%sx-request-id: %s\r\n\r\n%s" % (head, request_id, body)

    def request_id(self, given: bytes | None) -> bytes:
        """The client's X-Request-ID if it has the accepted form, else a new one."""
        if given is not None and REQUEST_ID.fullmatch(given):
            return given
        return b"%s-%x" % (self._id_prefix, next(self._id_numbers))

    def log_request(
        self, client: str, method: str, path: str, status: int, seconds: float, request_id: bytes
    ) -> None:
        """Log a request in one line, without its query, which may be private."""
        if self.settings.access_log:
            about = client, method, path, status, 1000 * seconds, request_id.decode("ascii")
            access_log.info("%s %s %s %d %.1f ms %s", *about)

    def computes(self, method: str, path: str) -> bool:
        """Whether a request needs the model, and so a place in the queue."""
        if path == "/":
            return method == "POST" and "huggingface" in self.settings.protocols
        return method == "POST" and path.startswith(self._computed)

    def deadline(self, request: Request | None = None, milliseconds: float | None = None) -> float:
        """The deadline of a request, on the event loop's clock; X-Deadline-Ms may make it earlier."""
        longest = (milliseconds or self.settings.deadline_ms) / 1000
        asked = None if request is None else deadline_seconds(request)
        return _now() - self.admission.lag + min(longest, asked or longest)

    # Computing

    async def outcomes(
        self, request: Request, work: Work, uploads: Sequence[Upload]
    ) -> list[Outcome | Rejection]:
        """Do the work for each picture of a request; a `Rejection` for one that cannot be read."""
        deadline = self.deadline(request)

        async def outcome(upload: Upload) -> Outcome | Rejection:
            try:
                pixels = await self.decoders.decode(upload.content, deadline=deadline)
            except DecodeError as error:
                return rejected(upload, error)
            self.admission.admit(request.state.claim, work=work, deadline=deadline)
            return await self.batcher.submit(work, pixels, deadline=deadline)

        async def all_of_them() -> list[Outcome | Rejection]:
            tasks = [asyncio.ensure_future(outcome(upload)) for upload in uploads]
            try:
                return await asyncio.gather(*tasks)
            finally:  # if one raises, or this is cancelled, the others are cancelled
                for task in tasks:
                    task.cancel()

        return await self.unless_gone(request, all_of_them())

    async def run(
        self,
        request: Request,
        kind: str,
        function: Callable[..., R],
        *args: Any,
        uploads: Sequence[Upload] | None = None,
    ) -> R:
        """`function(engine, pixels, *args)` for a request's only picture; predictions go between its passes.

        Functions of one kind, which is their name in the metrics, take about the same time. `uploads` are the
        pictures of a body that has been read.
        """
        uploads = await read_uploads(request, self.admission) if uploads is None else uploads
        if len(uploads) != 1:
            raise Rejection(422, f"expected one picture, not {len(uploads)}")
        (upload,) = uploads
        decoding = self.decoders.decode(upload.content, deadline=self.deadline(request))
        try:
            pixels = await self.unless_gone(request, decoding)
        except DecodeError as error:
            raise rejected(upload, error) from error

        def in_parts(pause: Pause) -> R:
            from vitascope.analysis.explain.inputs import before_each_forward

            with _few_threads(self.engine, 1), before_each_forward(pause):
                return function(self.engine, pixels, *args)

        work = self._long_works.get(kind) or LongWork(self._kind + kind)
        deadline = self.deadline(request, self.settings.explain_deadline_ms)
        self.admission.admit(request.state.claim, work=work, deadline=deadline)
        computing = self.batcher.submit(work, in_parts, deadline=deadline)
        outcome = await self.unless_gone(request, computing)
        self._long_works[kind] = work  # only now: a kind that fails may have been invented by a client
        return outcome.value

    async def explain(
        self,
        request: Request,
        method: str | None = None,
        target: str | None = None,
        uploads: Sequence[Upload] | None = None,
    ) -> Explanation:
        """Explain a request's only picture, by default by the method of `vitascope explain`."""
        from vitascope.analysis.explain.methods import DEFAULT_METHOD
        from vitascope.deploy.predict.explanation import explain_pixels
        from vitascope.deploy.server.attention_pack import batch_size

        method = method or DEFAULT_METHOD
        compute = functools.partial(explain_pixels, batch_size=batch_size(self.torch_engine().device))
        return await self.run(request, f"explain-{method}", compute, method, target, uploads=uploads)

    def check_classes(self) -> None:
        """Reject predictions of a model without a head (501)."""
        if not self.engine.num_classes:
            raise Rejection(501, "this model has no head, so it predicts no classes; use /v1/embed")

    def check_features(self) -> None:
        """Reject features of an exported classifier (501)."""
        from vitascope.models.engines.features import OWN

        try:
            self.engine.resolved(OWN)
        except UserError as error:
            raise Rejection(501, str(error)) from error

    def torch_engine(self) -> TorchEngine:
        """The engine of a torch model; rejects (501) an exported file, which returns only its outputs."""
        from vitascope.models.engines.engine import TorchEngine

        if not isinstance(self.engine, TorchEngine):
            raise Rejection(501, f"this needs the torch model; the served model is {self.engine.description}")
        return self.engine

    async def unless_gone(self, request: Request, work: Coroutine[Any, Any, R]) -> R:
        """Await work, and cancel it if the client leaves (499) or the server ends (503)."""
        given_up = self.first._given_up
        assert given_up is not None

        async def until_gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":  # the body has been read
                pass

        working: asyncio.Future[R] = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(until_gone())
        ends: set[asyncio.Future[Any]] = {working, leaving, given_up}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if given_up.done():
                raise Rejection(503, self.admission.why_not_ready())
            self.metrics.abandoned.inc()
            raise Rejection(499, "the client left")
        finally:
            working.cancel()
            leaving.cancel()

    # In the background, and in the model's thread

    async def _load_all(self) -> None:
        try:
            engines = [await model._load() for model in self.models]
        except BaseException as error:
            self.admission.closed = f"the model cannot be loaded: {error}"
            raise
        for model, engine in zip(self.models, engines, strict=True):
            model._engine = engine
        if self.admission.closed != STOPPING:
            self.admission.closed = ""

    async def _load(self) -> Engine:
        work = Work("load", lambda _: [self._open()])
        engine: Engine = (await self.batcher.submit(work, None, deadline=float("inf"))).value
        megapixels, memory_mb = self.settings.max_megapixels, self.settings.max_decode_mb
        max_seconds = self.settings.deadline_ms / 1000 + SPARE
        await self.decoders.configure(DecodeOptions(engine.reader, megapixels, memory_mb, max_seconds))
        return engine

    async def _measure_lag(self) -> None:
        while True:
            due = _now() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.admission.lag = _now() - due

    def _open(self) -> Engine:
        """Open the model and run it, so that no request pays for its first run."""
        engine = self._open_engine()
        import torch

        from vitascope.analysis.explain import plots  # noqa: F401

        # Routes import these; on the first request, that would stop the event loop for seconds.
        from vitascope.deploy.predict import explanation  # noqa: F401
        from vitascope.deploy.server import attention_pack  # noqa: F401
        from vitascope.models.engines import selection

        shape = (engine.preprocess.channels, *engine.preprocess.image_size)
        for count in (1, self.settings.max_batch):
            begun = time.perf_counter()
            with _few_threads(engine, count):
                engine.outputs(torch.zeros(count, *shape, dtype=torch.uint8))
        self.predictions.learn(time.perf_counter() - begun, count)
        self.metrics.model.labels(engine.name, engine.architecture, engine.digest).set(1)
        if engine.sets is not None:
            self.metrics.usual.labels(self.name, "ambiguous").set(float(engine.sets.ambiguous))
            if not selection.AUTO.unchecked(engine):
                self.metrics.usual.labels(self.name, "unfamiliar").set(1 - FAMILIAR)
        return engine

    def _answers(self, pictures: list[Pixels]) -> Sequence[tuple[torch.Tensor, ...]]:
        """Of each picture the probabilities (K,), and the familiarity () if it is known."""
        with _few_threads(self.engine, len(pictures)):
            return list(zip(*self.engine.predict(pictures).known()[1:], strict=True))

    def _embeddings(self, pictures: list[Pixels]) -> Sequence[torch.Tensor]:
        with _few_threads(self.engine, len(pictures)):
            (found,) = self.engine.features_of_pictures(pictures)
            return list(found.cpu())


def answer(content: Any) -> Response:
    """A response in JSON."""
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")


def rejected(upload: Upload, error: DecodeError) -> Rejection:
    """The rejection of one picture (413, 422); the others of a request still get results."""
    return Rejection(error.status, f"{upload.name or 'the body'}: {error}")


def _few_threads(engine: Engine, pictures: int) -> AbstractContextManager[None]:
    """Use one thread for a batch so small that threads would wait for each other and for the server's."""
    from vitascope.models.engines.engine import TorchEngine
    from vitascope.models.hardware import suitable_threads

    if not isinstance(engine, TorchEngine):
        return nullcontext()
    return suitable_threads(engine.config, engine.device, pictures)


def _now() -> float:
    return asyncio.get_running_loop().time()
