"""Engines and requests for the tests of the server."""

import asyncio
import base64
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import torch
from fastapi import FastAPI

from tests.data import encoded, noise
from tests.models import small_model
from vitascope.deploy.server import decoder_process
from vitascope.deploy.server.app import create_app
from vitascope.deploy.server.http_server import HTTPServer, server_of
from vitascope.deploy.server.server import listen
from vitascope.deploy.server.settings import Settings
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.engine import Answers, Engine, TorchEngine
from vitascope.models.preprocess import Pixels, Preprocess

NAMES = ("ant", "bee", "cat", "dog", "<script>alert(1)</script>")
ALL: dict[str, Any] = {"protocols": ("huggingface", "openai", "oip", "kserve")}
"""The settings of a server that answers in every protocol."""
ROUTES = ("/", "/v1/embeddings", "/v1/models/vitascope:predict", "/v2/models/vitascope/infer")
"""A path of each."""
EVERY_PATH = ("/v1/predict", "/models/model/v1/predict", "/v1/embed", "/v1/explain", *ROUTES)
"""Paths that take pictures, of a server with all protocols and a model of the name `model`."""
POISON = 255
"""A picture of this brightness breaks its batch."""
PATIENCE = 120
"""Seconds after which a wait is given up."""
PATIENT: dict[str, Any] = {
    **dict.fromkeys(("deadline_ms", "explain_deadline_ms"), 600_000.0),
    **dict.fromkeys(("read_timeout_s", "read_stall_s", "header_timeout_s", "keep_alive_s"), 600.0),
}
"""Limits that no machine reaches, however busy it is; tests of limits `advance` the clock."""


class HeldEngine(Engine):
    """Predicts a picture's brightness once released; records each picture that it decodes and computes."""

    def __init__(self) -> None:
        self.preprocess = Preprocess(image_size=(4, 4), channels=1, mean=(0.5,), std=(0.5,))
        self.class_names = NAMES
        self.num_classes = len(NAMES)
        self.decoded = 0
        self.batches: list[list[int]] = []
        self.begun = threading.Event()
        self.go = threading.Event()
        self.go.set()

    @property
    def description(self) -> str:
        return "a held engine"

    @property
    def reader(self) -> Callable[[ImageSource], Pixels]:
        def counting(image: ImageSource) -> Pixels:
            self.decoded += 1
            return self.preprocess.pixels(image)

        return counting

    def answers(self, pixels: torch.Tensor) -> Answers:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        brightness = [int(picture[0, 0, 0]) for picture in pixels]
        if POISON in brightness:
            raise ArithmeticError("a poison picture")
        self.batches.append(brightness)
        first = torch.tensor(brightness)[:, None] / 255
        probabilities = torch.cat([first, ((1 - first) / 4).expand(-1, 4)], dim=1)
        return Answers(probabilities.log(), probabilities)

    def computed(self) -> list[int]:
        return [brightness for batch in self.batches for brightness in batch]

    def hold(self) -> None:
        self.begun.clear()
        self.go.clear()


class DecodersInThreads:
    """Decodes like the server's processes, without their slow start."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def configure(self, options: decoder_process.DecodeOptions) -> None:
        self.options = options

    async def decode(self, content: decoder_process.Content, *, deadline: float) -> Pixels:
        return await asyncio.to_thread(decoder_process.decode_picture, content, self.options)


def torch_engine(**options: Any) -> TorchEngine:
    model = small_model(**{"class_names": NAMES, **options})
    return TorchEngine(model, precision="fp32", device="cpu")


def grey(brightness: int) -> bytes:
    return encoded(np.full((4, 4), brightness, dtype=np.uint8))


def picture(seed: int = 0) -> bytes:
    return encoded(noise(30, 40, seed=seed))


class Client(httpx.AsyncClient):
    def __init__(self, app: FastAPI) -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://127.0.0.1", timeout=PATIENCE)
        self.app = app

    def predict(self, content: bytes, **options: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.ensure_future(self.post("/v1/predict", content=content, **options))

    async def holding(self, engine: HeldEngine) -> asyncio.Task[httpx.Response]:
        engine.hold()
        first = self.predict(grey(1))
        assert await asyncio.to_thread(engine.begun.wait, PATIENCE)
        return first

    async def counted(self, name: str) -> float:
        lines = (await self.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@asynccontextmanager
async def serving(
    engine: Engine | Callable[[], Engine] | dict[str, Any],
    token: str | None = None,
    *,
    ready: bool = True,
    **settings: Any,
) -> AsyncIterator[Client]:
    """A server in this process and its client; waits until it is ready if `ready`."""
    app = create_app(engine, Settings(**{"access_log": False, **PATIENT, **settings}), token)
    async with app.router.lifespan_context(app), Client(app) as client:
        if ready:
            await until(lambda: app.state.service.admission.why_not_ready() == "")
        if isinstance(engine, HeldEngine):
            engine.batches.clear()
        try:
            yield client
        finally:
            if isinstance(engine, HeldEngine):
                engine.go.set()


@asynccontextmanager
async def listening(
    engine: Engine | dict[str, Engine], token: str | None = None, **settings: Any
) -> AsyncIterator[tuple[HTTPServer, tuple[str, int]]]:
    """The address of a server in this process on a real port; waits until it is ready."""
    given = Settings(**{"access_log": False, "port": 0, **PATIENT, **settings})
    app = create_app(engine, given, token)
    server = server_of(app)
    with listen(given) as port:
        running = asyncio.ensure_future(server.serve(sockets=[port]))
        try:
            await until(lambda: server.started and app.state.service.admission.why_not_ready() == "")
            yield server, port.getsockname()[:2]
        finally:
            if isinstance(engine, HeldEngine):
                engine.go.set()
            server.should_exit = True
            await running


async def until(true: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.001)


def advance(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


def play(story: Awaitable[Any]) -> None:

    async def run() -> None:
        await story

    asyncio.run(run())


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (reason,) = response.json().values()
    assert list(response.json()) == ["error"]
    return reason


class Sender:
    """A client of the ASGI application: sends chunks as the server asks for them, and may disconnect."""

    def __init__(
        self, app: FastAPI, headers: dict[str, str] | None = None, path: str = "/v1/predict"
    ) -> None:
        self.app = app
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (name.encode(), value.encode())
                for name, value in {"host": "localhost", **(headers or {})}.items()
            ],
        }
        self.asked = 0
        self.gone = asyncio.Event()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}

    async def send(self, chunks: AsyncIterator[bytes], *, end: bool = True) -> int:
        async def receive() -> dict[str, Any]:
            self.asked += 1
            async for chunk in chunks:
                return {"type": "http.request", "body": chunk, "more_body": True}
            if end and not self.gone.is_set() and not self.ended:
                self.ended = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def answer(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status, self.headers = message["status"], dict(message["headers"])

        self.ended = False
        await self.app(self.scope, receive, answer)
        return self.status


def asking(path: str, content: bytes) -> dict[str, Any]:
    """The keywords of a request for the prediction of a picture, in the form of the path's protocol."""
    text = base64.b64encode(content).decode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    if path.endswith((":predict", ":explain")):
        return {"json": {"instances": [text]}}
    return {"json": {"inputs": [tensor]}} if path.endswith("/infer") else {"content": content}


async def chunks_of(content: bytes, times: int) -> AsyncIterator[bytes]:
    for _ in range(times):
        yield content
