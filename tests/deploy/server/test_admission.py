"""Room in the server: the queue and its time, connections, and predictions that never reach the routes."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI

from tests.deploy.server.served import ALL, PATIENCE, HeldEngine, advance, grey, listening, refusal, until
from tests.deploy.server.test_batcher import Long, playing, turns, within
from vitascope.deploy.server import admission
from vitascope.deploy.server.admission import MOST_CONNECTIONS, SECURITY, Overloaded, connection_limit
from vitascope.deploy.server.batcher import LongWork
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError


async def test_item_that_would_miss_its_deadline_is_rejected_with_a_retry_time() -> None:
    async with playing() as scene:
        scene.work.learn(seconds=8000.0, items=4)  # 2000 s each
        tasks = await scene.queued(1, 2, 3)
        with pytest.raises(Overloaded, match=r"s of work are ahead, and (1000|99)") as rejected:
            await scene.ask(4, deadline=within(1000))
        assert 6000 <= int(rejected.value.headers["Retry-After"]) <= 8000
        tasks.append(scene.ask(5, deadline=within(20_000)))
        await turns()
        scene.model.go.set()
        await asyncio.gather(*tasks)
    assert scene.model.computed() == [0, 1, 2, 3, 5]


async def test_decoded_item_is_rejected_only_if_it_would_miss_its_deadline() -> None:
    async with playing() as scene:
        scene.work.learn(seconds=2000.0, items=4)  # 500 s each
        tasks = await scene.queued(1)  # up to 1000 s are ahead
        deadline = within(2000)
        with pytest.raises(Overloaded):  # before reading, half of the time is reserved
            scene.begin(deadline)
        tasks.append(scene.ask(2, deadline=deadline))
        scene.model.go.set()
        assert [outcome.value for outcome in await asyncio.gather(*tasks)] == [2, 4]


async def test_requests_in_decoding_count_as_work_ahead() -> None:
    async with playing() as scene:
        scene.work.learn(seconds=400.0, items=4)  # 100 s each
        deadline = within(1000)
        scene.admission.taken.places = 1 + 2  # one is computed, two are decoded
        scene.begin(deadline)
        scene.admission.taken.places = 1 + 5
        with pytest.raises(Overloaded):
            scene.begin(deadline)


async def test_idle_model_accepts_items_despite_slow_past_work() -> None:
    async with playing(held=False) as scene:
        scene.work.learn(seconds=6000.0, items=1)
        assert (await scene.ask(1, deadline=within(1000))).value == 2


async def test_part_of_long_work_in_the_queue_is_ahead_of_a_prediction() -> None:
    async with playing() as scene:
        work, long = LongWork("explain"), Long(1)
        work.part.learn(seconds=4000.0, items=1)
        long.go.release()
        explaining = scene.ask(long, work=work)
        await turns()
        with pytest.raises(Overloaded, match="4000"):
            scene.begin(within(2000))
        scene.model.go.set()
        await explaining


async def test_prediction_waits_for_one_part_of_long_work_and_long_work_for_all_parts() -> None:
    async with playing(held=False) as scene:
        work, long = LongWork("explain"), Long(1)
        work.learn(seconds=6000.0, items=1)
        work.part.learn(seconds=0.001, items=1)
        explaining = scene.ask(long, work=work)
        await long.part(1)
        waiting = scene.ask(1, deadline=within(2000))
        with pytest.raises(Overloaded, match="s of work are ahead"):
            await scene.ask(Long(1), deadline=within(2000), work=work)
        long.go.release()
        assert (await waiting).value == 2
        await explaining


def test_connection_limit_is_below_the_open_file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MOST_CONNECTIONS
    for files, connections in ((1024, 896), (64, 32), (10**6, most), (resource.RLIM_INFINITY, most)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connection_limit(Settings()) == connections
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert connection_limit(Settings(max_connections=800)) == 800
    with pytest.raises(UserError, match="this process may open 1024 files, which"):
        connection_limit(Settings(max_connections=900))


@asynccontextmanager
async def full(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI, HeldEngine]]:
    """A server that sheds predictions because its queue is full, and a client with one connection."""
    for name in ("SHED_LEAST", "SHED_MOST", "RECENT"):
        monkeypatch.setattr(admission, name, 100.0)
    engine, one = HeldEngine(), httpx.Limits(max_connections=1)
    async with listening(engine, queue=1, **ALL) as (server, (host, port)):
        url = f"http://{host}:{port}"
        async with httpx.AsyncClient(base_url=url, limits=one, timeout=PATIENCE) as client:
            engine.hold()
            async with httpx.AsyncClient(timeout=PATIENCE) as other:
                accepted = asyncio.ensure_future(other.post(f"{url}/v1/predict", content=grey(1)))
                await asyncio.to_thread(engine.begun.wait, PATIENCE)
                yield client, server.config.app, engine
                engine.go.set()
                assert (await accepted).status_code == 200


async def test_shed_prediction_has_the_same_429_as_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full(monkeypatch) as (client, app, _):
        routed = await client.post("/v1/explain", content=grey(2))
        assert "1 requests are in progress" in refusal(routed, 429)
        with monkeypatch.context() as patch:  # any routed request fails
            patch.setattr(app, "middleware_stack", None)
            patch.setattr(FastAPI, "__call__", None)
            kserve = "/v1/models/vitascope:predict"
            for path in ("/v1/predict?top_k=1", "/", "/v2/models/vitascope/infer", kserve):  # one connection
                answer = await client.post(path, content=grey(2), headers={"X-Request-ID": "mine"})
                assert refusal(answer, 429) == refusal(routed, 429)
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["x-request-id"] == "mine"
                assert {name: answer.headers[name] for name in SECURITY} == SECURITY
                assert set(answer.headers) == set(routed.headers)
        text = (await client.get("/metrics")).text
        assert "vitascope_refused_total 5.0" in text
        assert 'vitascope_requests_total{route="/v1/predict",status="429"} 1.0' in text
        assert "saturated" in refusal(await client.get("/readyz"), 503)


async def test_other_requests_succeed_on_the_connection_while_shedding_which_ends(monkeypatch) -> None:
    async with full(monkeypatch) as (client, app, engine):
        for content, headers in ((bytes(300_000), {}), (grey(2), {"Connection": "close"})):  # discarded
            answer = await client.post("/v1/predict", content=content, headers=headers)
            assert answer.status_code == 429
            assert (await client.get("/livez")).status_code == 200
            assert (await client.get("/v1/predict")).status_code == 405
        engine.go.set()
        advance(100)
        await until(lambda: app.state.service.admission.taken.requests == 0)
        assert (await client.post("/v1/predict", content=grey(2))).status_code == 200
