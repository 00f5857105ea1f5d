"""Overload, deadlines, disconnecting clients, and loading and stopping the model."""

import asyncio
import threading

import pytest
import torch

from tests.deploy.server.served import (
    ALL,
    PATIENCE,
    POISON,
    ROUTES,
    HeldEngine,
    Sender,
    advance,
    asking,
    chunks_of,
    grey,
    picture,
    refusal,
    serving,
    until,
)
from vitascope.deploy.server.admission import STOPPING, Room
from vitascope.models.engines.engine import Answers, TorchEngine


async def test_overload_is_rejected_with_a_retry_time_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitascope.deploy.server.admission.RECENT", 600.0)
    engine = HeldEngine()
    async with serving(engine, queue=4, max_batch=2) as client:
        engine.hold()
        accepted = [client.predict(grey(number)) for number in range(4)]
        await until(lambda: client.app.state.service.admission.taken.places == 4)
        rejected = await asyncio.gather(*(client.predict(grey(9)) for _ in range(8)))
        for answer in rejected:
            assert "4 requests are in progress" in refusal(answer, 429)
            assert int(answer.headers["retry-after"]) >= 1
        assert "saturated" in refusal(await client.get("/readyz"), 503)
        assert (await client.get("/livez")).status_code == 200
        engine.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*accepted)} == {200}
        assert (await client.predict(grey(5))).status_code == 200
        assert await client.counted("vitascope_refused_total") == 8
        assert client.app.state.service.admission.taken == Room()
    assert sorted(engine.computed()) == [0, 1, 2, 3, 5]


async def test_request_that_expires_in_the_queue_is_a_504_and_never_computed() -> None:
    engine = HeldEngine()
    async with serving(engine) as client:
        first = await client.holding(engine)
        late = client.predict(grey(2), headers={"X-Deadline-Ms": "100000"})
        await until(lambda: client.app.state.service.batcher.pending == 2)
        advance(100)
        assert "waiting in the queue" in refusal(await late, 504)
        engine.go.set()
        assert (await first).status_code == 200
        assert await client.counted("vitascope_expired_total") == 1
    assert engine.computed() == [1]


async def test_waiting_for_the_event_loop_counts_against_the_deadline(monkeypatch) -> None:
    monkeypatch.setattr("vitascope.deploy.server.service.LAG_INTERVAL", 1000.0)
    async with serving(HeldEngine(), deadline_ms=300_000, **ALL) as client:
        service = client.app.state.service
        advance(1500)  # the loop runs 500 s after it should have measured
        await until(lambda: service.admission.lag > 300)
        for path in ("/v1/predict", "/v1/embed", "/models/vitascope", *ROUTES):
            sender = Sender(client.app, path=path)
            assert await sender.send(chunks_of(grey(1), 1)) == 429
            assert sender.asked == 0
        advance(1000)
        await until(lambda: service.admission.lag < 100)
        assert (await client.predict(grey(1))).status_code == 200


@pytest.mark.parametrize("path", ["/v1/predict", *(path for path in ROUTES if "embed" not in path)])
async def test_request_of_a_disconnected_client_is_never_computed(path: str) -> None:
    engine = HeldEngine()
    async with serving(engine, **ALL) as client:
        service = client.app.state.service
        first = await client.holding(engine)
        leaver = Sender(client.app, path=path)
        body = client.build_request("POST", path, **asking(path, grey(2))).content
        leaving = asyncio.ensure_future(leaver.send(chunks_of(body, 1)))
        await until(lambda: service.batcher.pending == 2)
        leaver.gone.set()
        await leaving
        assert service.batcher.pending == 1
        engine.go.set()
        await first
        assert await client.counted("vitascope_abandoned_total") == 1
    assert engine.computed() == [1]


async def test_failing_picture_fails_only_its_own_request() -> None:
    engine = HeldEngine()
    async with serving(engine) as client:
        first = await client.holding(engine)
        contents = (grey(2), grey(2)[:40], grey(POISON), grey(3))
        tasks = [client.predict(content) for content in contents]
        await until(lambda: client.app.state.service.batcher.pending == 4)
        engine.go.set()
        good, broken, poison, other = await asyncio.gather(*tasks)
        assert "the body: " in refusal(broken, 422)
        assert "an error of the server" in refusal(poison, 500)
        assert good.status_code == other.status_code == (await first).status_code == 200
        assert (await client.predict(grey(4))).status_code == 200


async def test_server_is_live_during_loading_and_ready_afterwards() -> None:
    loaded = threading.Event()

    def load() -> HeldEngine:
        assert loaded.wait(PATIENCE)
        return HeldEngine()

    async with serving(load, ready=False) as client:
        assert (await client.get("/livez")).status_code == 200
        message = refusal(await client.get("/readyz"), 503)
        assert message == "the model is still loading"
        early = await client.predict(grey(1))
        assert message == refusal(early, 503)
        assert early.headers["retry-after"] == "1"
        loaded.set()
        await until(lambda: client.app.state.service.admission.why_not_ready() == "")
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.predict(grey(1))).status_code == 200


async def test_server_with_a_hanging_model_is_live_but_not_ready() -> None:
    engine = HeldEngine()
    async with serving(engine, stalled_s=0.05) as client:
        hung = await client.holding(engine)
        await until(lambda: "has not answered" in client.app.state.service.admission.why_not_ready())
        assert (await client.get("/livez")).status_code == 200
        assert "the model has not answered for" in refusal(await client.get("/readyz"), 503)
        engine.go.set()
        await hung
        assert (await client.get("/readyz")).status_code == 200


async def test_stopping_server_rejects_new_requests_and_finishes_accepted_ones() -> None:
    engine = HeldEngine()
    async with serving(engine) as client:
        accepted = await client.holding(engine)
        client.app.state.service.admission.closed = STOPPING
        rejected = await client.predict(grey(2))
        assert "stopping" in refusal(rejected, 503)
        assert rejected.headers["connection"] == "close"
        assert "stopping" in refusal(await client.get("/readyz"), 503)
        engine.go.set()
        assert (await accepted).status_code == 200


class Passes:
    """Records predictions and the forward passes of explanations; blocks the third pass until released."""

    def __init__(self, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.third = threading.Event()
        self.go = threading.Event()
        embed, answers = engine.model.embed, engine.answers

        def explaining(images: torch.Tensor) -> torch.Tensor:
            if torch.is_inference_mode_enabled():  # a prediction
                return embed(images)
            self.seen.append("pass")
            if self.seen.count("pass") == 3:
                self.third.set()
                assert self.go.wait(PATIENCE)
            return embed(images)

        def predicting(pixels: torch.Tensor) -> Answers:
            self.seen.append("prediction")
            return answers(pixels)

        monkeypatch.setattr(engine.model, "embed", explaining)
        monkeypatch.setattr(engine, "answers", predicting)


EXPLAINED = ("/v1/explain?method=occlusion", "/v1/heatmap?method=integrated-gradients&target=1")


@pytest.mark.parametrize("path", EXPLAINED)
async def test_prediction_runs_between_the_passes_of_an_explanation(engine, path: str, monkeypatch) -> None:
    async with serving(engine) as client:
        passes = Passes(engine, monkeypatch)
        explaining = asyncio.ensure_future(client.post(path, content=picture()))
        assert await asyncio.to_thread(passes.third.wait, PATIENCE)
        predicting = client.predict(picture())
        await until(lambda: client.app.state.service.batcher.pending == 2)
        passes.go.set()
        assert (await predicting).status_code == (await explaining).status_code == 200
        assert passes.seen[3] == "prediction"
        assert passes.seen[4:] == ["pass"] * len(passes.seen[4:]) != []


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/explain", "/v1/attention", "/v1/heatmap?target=1"])
async def test_small_models_compute_in_one_thread(engine: TorchEngine, path: str, monkeypatch) -> None:
    threads: list[int] = []
    embed = engine.model.embed

    def counting(images: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return embed(images)

    async with serving(engine) as client:
        model_thread = client.app.state.service.batcher._thread
        usual = await asyncio.wrap_future(model_thread.submit(torch.get_num_threads))
        model_thread.submit(torch.set_num_threads, 2).result()
        monkeypatch.setattr(engine.model, "embed", counting)
        assert (await client.post(path, content=picture())).status_code == 200
        assert set(threads) == {1}
        assert await asyncio.wrap_future(model_thread.submit(torch.get_num_threads)) == 2
        model_thread.submit(torch.set_num_threads, usual).result()


async def test_explanation_ends_when_its_client_disconnects(engine: TorchEngine, monkeypatch) -> None:
    async with serving(engine) as client:
        passes = Passes(engine, monkeypatch)
        leaver = Sender(client.app)
        leaver.scope |= {"path": "/v1/explain", "query_string": b"method=occlusion"}
        leaving = asyncio.ensure_future(leaver.send(chunks_of(picture(), 1)))
        assert await asyncio.to_thread(passes.third.wait, PATIENCE)
        leaver.gone.set()
        assert await leaving == 499
        passes.go.set()
        assert (await client.predict(picture())).status_code == 200
        assert passes.seen == ["pass"] * 3 + ["prediction"]
