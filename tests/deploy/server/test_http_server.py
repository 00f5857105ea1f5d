"""Predictions that are rejected below the routes, and requests that are not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from tests.deploy.server.served import ALL, PATIENCE, Client, HeldEngine, grey, refusal, serving, until
from vitascope.deploy.server import admission
from vitascope.deploy.server.admission import SECURITY
from vitascope.deploy.server.http_server import Connection


@asynccontextmanager
async def over_http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application over one connection."""
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none")
    config.load()
    state = ServerState()

    def connection() -> Connection:
        return Connection(app.state.service, config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=PATIENCE
    ) as client:
        yield client
    server.close()


@asynccontextmanager
async def full(engine: HeldEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Client, FastAPI]]:
    """A server that has rejected a prediction because its queue is full, and sheds further predictions."""
    monkeypatch.setattr(admission, "SHED_LEAST", 600.0)
    monkeypatch.setattr(admission, "SHED_MOST", 600.0)
    monkeypatch.setattr(admission, "RECENT", 600.0)
    async with serving(engine, queue=1, **ALL) as client:
        accepted = await client.holding(engine)
        assert (await client.predict(grey(2))).status_code == 429
        yield client, client.app
        engine.go.set()
        await accepted


async def test_shed_prediction_has_the_same_429_as_the_routes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = HeldEngine()
    async with full(engine, monkeypatch) as (inside, app), over_http(app) as client:
        as_routed = await inside.predict(grey(2))
        with monkeypatch.context() as patch:  # any routed request fails
            patch.setattr(app, "middleware_stack", None)
            patch.setattr(FastAPI, "__call__", None)
            kserve = "/v1/models/vitascope:predict"
            for path in ("/v1/predict?top_k=1", "/", "/v2/models/vitascope/infer", kserve):  # one connection
                answer = await client.post(path, content=grey(2))
                assert refusal(answer, 429) == refusal(as_routed, 429)
                assert int(answer.headers["retry-after"]) >= 1
                assert {name: answer.headers.get(name) for name in SECURITY} == SECURITY
        assert await inside.counted("vitascope_refused_total") == 6
        assert "saturated" in refusal(await inside.get("/readyz"), 503)


async def test_other_requests_succeed_on_the_same_connection_while_shedding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = HeldEngine()
    async with full(engine, monkeypatch) as (_, app), over_http(app) as client:
        large = await client.post("/v1/predict", content=bytes(300_000))  # its body is discarded
        assert large.status_code == 429
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/v1/predict")).status_code == 405
        closing = await client.post("/v1/predict", content=grey(2), headers={"Connection": "close"})
        assert closing.status_code == 429
        engine.go.set()
        app.state.service.admission._shed_until = 0.0
        await until(lambda: app.state.service.admission.taken.requests == 0)
        assert (await client.post("/v1/predict", content=grey(2))).status_code == 200


async def test_shedding_starts_with_a_full_queue_and_ends_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "RECENT", 600.0)
    engine = HeldEngine()
    async with serving(engine, queue=1) as inside, over_http(inside.app) as client:
        accepted = await inside.holding(engine)
        state = inside.app.state.service
        answer = await client.post("/v1/predict", content=grey(2), headers={"X-Request-ID": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (429, "mine")
        assert "saturated" in refusal(await inside.get("/readyz"), 503)
        engine.go.set()
        assert (await accepted).status_code == 200
        now = asyncio.get_running_loop().time
        await until(lambda: state.admission.taken.requests == 0 and now() >= state.admission._shed_until)
        assert (await client.post("/v1/predict", content=grey(2))).status_code == 200
