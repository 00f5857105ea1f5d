"""The server's answers, and everything that it refuses: what comes in over HTTP is nobody's friend."""

import asyncio
import hmac
import io
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from PIL import ExifTags, Image

from tests.data import noise
from tests.deploy.server.served import (
    NAMES,
    POISON,
    Client,
    HeldEngine,
    bomb,
    encoded,
    grey,
    picture,
    play,
    serving,
    torch_engine,
    until,
)
from tests.model import small_resnet
from vitascope.deploy.engine import TorchEngine
from vitascope.deploy.predictor import Predictor
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.explain.methods import METHODS
from vitascope.explain.rollout import rollout
from vitascope.weights.store import default_preprocess


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return torch_engine()


def refusal(response: httpx.Response, status: int) -> str:
    """The reason of an answer that is an error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (reason,) = response.json().values()
    assert list(response.json()) == ["error"]
    return reason


# --- answers


def test_raw_body_and_form_get_the_predictor_s_answer(engine: TorchEngine) -> None:
    files = [picture(seed) for seed in range(3)]
    expected = Predictor(engine)(files, top_k=2)

    async def story() -> None:
        async with serving(engine) as client:
            raw = (await client.predict(files[0], params={"top_k": 2})).json()
            parts = [("image", (f"{number}.png", content)) for number, content in enumerate(files)]
            form = (await client.post("/v1/predict?top_k=2", files=parts)).json()
        assert set(raw["timing"]) == {"queue_ms", "model_ms", "batch_size"}
        assert [one["name"] for one in form["results"]] == ["0.png", "1.png", "2.png"]
        answers = [raw, *form["results"]]
        for answer, wanted in zip(answers, [expected[0], *expected], strict=True):
            for guess, want in zip(answer["predictions"], wanted, strict=True):
                assert (guess["label"], guess["index"]) == (want.label, want.index)
                assert guess["score"] == pytest.approx(want.score, abs=1e-6)

    play(story())


def pictures_of_every_kind() -> dict[str, bytes]:
    rgb = Image.fromarray(noise(30, 40))
    rgba = Image.fromarray(noise(30, 40, 4))
    wide = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50
    kinds = {
        "CMYK": encoded(rgb.convert("CMYK"), "JPEG"),
        "palette": encoded(rgb.convert("P", palette=Image.Palette.ADAPTIVE)),
        "palette with transparency": encoded(rgb.quantize(16), transparency=0),
        "LA": encoded(rgba.convert("LA")),
        "RGBA": encoded(rgba),
        "16 bits": encoded(Image.fromarray(wide)),
        "floats": encoded(Image.fromarray(wide.astype(np.float32) / 65535), "TIFF"),
        "GIF": encoded(rgb, "GIF"),
        "WebP": encoded(rgb, "WEBP"),
        "black and white": encoded(rgb.convert("1")),
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        kinds[f"EXIF {orientation}"] = encoded(rgb, "JPEG", exif=exif)
    return kinds


@pytest.fixture(scope="module")
def served_kinds(engine: TorchEngine) -> dict[str, np.ndarray]:
    """Probabilities by class of a picture of every kind, as the server answers."""
    found = {}

    async def story() -> None:
        async with serving(engine) as client:
            for name, content in pictures_of_every_kind().items():
                guesses = (await client.predict(content)).json()["predictions"]
                found[name] = np.array([g["score"] for g in sorted(guesses, key=lambda g: g["index"])])

    play(story())
    return found


@pytest.mark.parametrize("kind", pictures_of_every_kind())
def test_picture_of_every_kind_is_answered_as_without_the_server(
    kind: str, engine: TorchEngine, served_kinds: dict[str, np.ndarray]
) -> None:
    pixels = engine.preprocess.pixels(pictures_of_every_kind()[kind])
    alone = engine.probabilities(torch.from_numpy(pixels)[None])[0].numpy()
    np.testing.assert_allclose(served_kinds[kind], alone, atol=1e-6)


def test_pictures_that_are_computed_together_are_answered_as_alone(engine: TorchEngine) -> None:
    files = [picture(seed) for seed in range(6)]

    async def story() -> None:
        async with serving(engine) as client:
            alone = [(await client.predict(content)).json() for content in files]
            together = [answer.json() for answer in await asyncio.gather(*map(client.predict, files))]
        assert max(answer["timing"]["batch_size"] for answer in together) > 1
        for one, other in zip(alone, together, strict=True):
            assert [g["index"] for g in one["predictions"]] == [g["index"] for g in other["predictions"]]
            np.testing.assert_allclose(
                [g["score"] for g in one["predictions"]],
                [g["score"] for g in other["predictions"]],
                atol=1e-6,
            )

    play(story())


def test_embedding_is_the_model_s(engine: TorchEngine) -> None:
    pixels = torch.from_numpy(engine.pixels(picture()))[None]

    async def story() -> None:
        async with serving(engine) as client:
            answer = (await client.post("/v1/embed", content=picture())).json()
        np.testing.assert_allclose(answer["embedding"], engine.embed(pixels)[0].numpy(), atol=1e-6)

    play(story())


def test_explanation_is_the_library_s_as_numbers_and_as_a_picture(engine: TorchEngine) -> None:
    pixels = engine.pixels(picture())
    images = engine.preprocess.normalize(torch.from_numpy(pixels)[None])

    async def story() -> None:
        async with serving(engine) as client:
            got = (await client.post("/v1/explain?method=rollout", content=picture())).json()
            np.testing.assert_allclose(got["heatmap"], rollout(engine.model, images)[0], atol=1e-6)
            assert got["target"] is None
            cats = (await client.post("/v1/explain?target=cat", content=picture())).json()
            assert cats["target"] == {"label": "cat", "index": 2}
            expected = METHODS["grad-cam"](engine.model, images, 2)[0]
            np.testing.assert_allclose(cats["heatmap"], expected, atol=1e-6)
            predicted = (await client.post("/v1/explain", content=picture())).json()["target"]["index"]
            assert predicted == int(engine.probabilities(torch.from_numpy(pixels)[None]).argmax())
            png = await client.post("/v1/explain?format=png", content=picture())
            assert png.headers["content-type"] == "image/png"
            assert np.ptp(np.asarray(Image.open(io.BytesIO(png.content)))) > 50

    play(story())


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("method=rolout", "unknown method 'rolout'; nearest: rollout"),
        ("target=cow", "no class 'cow'"),
        ("target=7", "no class 7"),
        ("method=rollout&target=cat", "leave out the target"),
        ("format=gif", "query.format"),
    ],
)
def test_explanation_that_cannot_be_had_is_refused(query: str, said: str, engine: TorchEngine) -> None:
    async def story() -> None:
        async with serving(engine) as client:
            assert said in refusal(await client.post(f"/v1/explain?{query}", content=picture()), 422)

    play(story())


def test_model_that_does_not_attend_explains_what_it_can() -> None:
    model = small_resnet()
    resnet = TorchEngine(model, default_preprocess(model.config), precision="fp32", device="cpu")

    async def story() -> None:
        async with serving(resnet) as client:
            said = refusal(await client.post("/v1/explain?method=rollout", content=picture()), 422)
            assert "rollout reads attention, which this model has not" in said
            assert (await client.post("/v1/explain", content=picture())).status_code == 200

    play(story())


@pytest.mark.parametrize("path", ["/v1/embed", "/v1/explain"])
def test_exported_file_answers_predictions_only_and_says_so(path: str) -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            said = refusal(await client.post(path, content=grey(1)), 501)
            assert "this needs the model itself; what is served is a held engine" in said

    play(story())


def test_model_page_tells_classes_preprocessing_and_limits(engine: TorchEngine) -> None:
    async def story() -> None:
        async with serving(engine, max_body_mb=3) as client:
            about = (await client.get("/v1/model")).json()
        assert about["class_names"] == list(NAMES)
        assert about["preprocess"] == engine.preprocess.to_dict()
        assert about["engine"] == engine.description
        assert about["limits"]["max_body_mb"] == 3

    play(story())


# --- what is refused


def test_bomb_is_refused_by_its_header() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine, max_megapixels=50) as client:
            for side in (
                15_000,
                12_000,
                7_100,
            ):  # Pillow refuses the first, warns of the second, takes the third
                content = bomb(side)
                assert len(content) < 40_000
                reason = refusal(await client.predict(content), 413)
                assert "limit" in reason
        assert engine.decoded == 0

    with pytest.warns(Image.DecompressionBombWarning):
        play(story())


@pytest.mark.parametrize(
    ("content", "headers", "status", "said"),
    [
        (
            json.dumps({"url": "http://127.0.0.1:9/cat.jpg"}),
            {"content-type": "application/json"},
            415,
            "not fetched",
        ),
        (b"x", {"content-type": "text/html"}, 415, "Content-Type text/html holds no picture"),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415, "send a picture's bytes"),
        (b"", {}, 422, "the body is empty"),
        (b"not a picture", {}, 422, "the body: not a picture that Pillow can read"),
        (grey(1)[:40], {}, 422, "the body: "),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", {}, 422, "not a picture"),
        (b"x", {"content-type": "multipart/form-data"}, 422, "a broken form"),
        (b"x", {"content-type": "multipart/form-data; boundary=z"}, 422, "form"),
        (grey(1), {"x-deadline-ms": "soon"}, 422, "X-Deadline-Ms is a whole number"),
        (grey(1), {"x-deadline-ms": "0"}, 422, "X-Deadline-Ms is a whole number"),
    ],
)
def test_what_is_no_picture_is_refused_and_told_why(
    content: bytes, headers: dict[str, str], status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_connection(*_: object) -> None:
        raise AssertionError("the server went out")

    monkeypatch.setattr(socket.socket, "connect", no_connection)

    async def story() -> None:
        async with serving(HeldEngine()) as client:
            assert said in refusal(await client.predict(content, headers=headers), status)
            assert (await client.predict(grey(3))).status_code == 200  # and it goes on

    play(story())


def test_address_in_a_form_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            form = await client.post(
                "/v1/predict", data={"image": "http://127.0.0.1:9/"}, files={"x": ("", b"")}
            )
            assert "no file in the form" in refusal(form, 422)

    play(story())


def test_form_of_too_many_files_and_several_pictures_for_one_explanation_are_refused(
    engine: TorchEngine,
) -> None:
    async def story() -> None:
        async with serving(engine, max_files=2) as client:
            files = [("image", (f"{number}.png", picture())) for number in range(3)]
            assert "more than 2 files" in refusal(await client.post("/v1/predict", files=files), 422)
            assert "not 2" in refusal(await client.post("/v1/explain", files=files[:2]), 422)

    play(story())


def test_broken_file_of_a_form_is_named() -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            files = [("image", ("good.png", grey(1))), ("image", ("bad.png", b"x"))]
            assert "bad.png: not a picture" in refusal(await client.post("/v1/predict", files=files), 422)

    play(story())


class Sender:
    """A client of the ASGI application itself: sends chunks as the server asks for them, and may go away."""

    def __init__(self, app: FastAPI, headers: dict[str, str] | None = None) -> None:
        self.app = app
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/predict",
            "raw_path": b"/v1/predict",
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


async def chunks_of(content: bytes, times: int) -> AsyncIterator[bytes]:
    for _ in range(times):
        yield content


def test_body_over_the_limit_is_refused_declared_or_not_and_not_kept() -> None:
    async def story() -> None:
        async with serving(HeldEngine(), max_body_mb=0.1) as client:
            reason = refusal(await client.predict(bytes(200_000)), 413)
            assert "over the limit of 0.1 MB" in reason
            declared = Sender(client.app, {"content-length": "10000000000"})
            assert await declared.send(chunks_of(bytes(50_000), 1000)) == 413
            assert declared.asked == 0
            assert declared.headers[b"connection"] == b"close"
            waiting = Sender(client.app, {"content-length": "200000", "expect": "100-continue"})
            assert await waiting.send(chunks_of(bytes(50_000), 1000)) == 413
            assert waiting.asked == 0
            endless = Sender(client.app, {"transfer-encoding": "chunked"})
            assert await endless.send(chunks_of(bytes(50_000), 1000)) == 413
            assert endless.asked < 12  # four times the limit is read, and thrown away

    play(story())


def test_slow_upload_is_given_up() -> None:
    async def story() -> None:
        async with serving(HeldEngine(), read_timeout_s=0.05) as client:
            slow = Sender(client.app)
            assert await slow.send(chunks_of(b"x", 3), end=False) == 408
            assert slow.headers[b"connection"] == b"close"
            assert client.app.state.service.in_flight == 0

    play(story())


def test_load_over_capacity_is_refused_with_when_to_come_again_and_passes() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine, queue=4, max_batch=2) as client:
            engine.hold()
            accepted = [client.predict(grey(number)) for number in range(4)]
            await until(lambda: client.app.state.service.in_flight == 4)
            refused = await asyncio.gather(*(client.predict(grey(9)) for _ in range(8)))
            for answer in refused:
                assert "4 requests are in work" in refusal(answer, 429)
                assert int(answer.headers["retry-after"]) >= 1
            assert "saturated" in refusal(await client.get("/readyz"), 503)
            assert (await client.get("/livez")).status_code == 200
            engine.go.set()
            assert {answer.status_code for answer in await asyncio.gather(*accepted)} == {200}
            assert (await client.predict(grey(5))).status_code == 200
            assert await client.counted("vitascope_refused_total") == 8
            assert client.app.state.service.in_flight == 0
        assert sorted(engine.computed()) == [0, 1, 2, 3, 5]

    play(story())


def test_nothing_of_a_refused_body_is_read() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine, queue=1) as client:
            engine.hold()
            accepted = client.predict(grey(1))
            await until(lambda: client.app.state.service.in_flight == 1)
            refused = Sender(client.app)
            assert await refused.send(chunks_of(grey(2), 1)) == 429
            assert refused.asked == 0
            engine.go.set()
            await accepted

    play(story())


def test_deadline_that_passes_in_the_queue_is_a_504_and_never_computed() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine) as client:
            engine.hold()
            first = client.predict(grey(1))
            await asyncio.to_thread(engine.begun.wait, 30)
            late = await client.predict(grey(2), headers={"X-Deadline-Ms": "30"})
            assert "waiting in the queue" in refusal(late, 504)
            engine.go.set()
            assert (await first).status_code == 200
            assert await client.counted("vitascope_expired_total") == 1
        assert engine.computed() == [1]

    play(story())


def test_client_may_only_shorten_the_deadline() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine, deadline_ms=300) as client:
            engine.hold()
            late = await client.predict(grey(2), headers={"X-Deadline-Ms": "60000"})
            assert "while computing" in refusal(late, 504)

    play(story())


def test_what_a_request_waited_before_it_was_seen_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitascope.deploy.server.service.LOOK", 0.2)

    async def story() -> None:
        async with serving(HeldEngine(), deadline_ms=500) as client:
            service = client.app.state.service
            time.sleep(1)  # the event loop itself has too much to do
            await until(lambda: service.lag > 0.5)
            assert "before they are seen" in refusal(await client.predict(grey(1)), 429)
            await until(lambda: service.lag < 0.1)
            assert (await client.predict(grey(1))).status_code == 200

    play(story())


def test_client_that_goes_while_it_waits_is_never_computed() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine) as client:
            service = client.app.state.service
            engine.hold()
            first = client.predict(grey(1))
            await asyncio.to_thread(engine.begun.wait, 30)
            leaver = Sender(client.app)
            leaving = asyncio.ensure_future(leaver.send(chunks_of(grey(2), 1)))
            await until(lambda: service._batcher.waiting == 1)
            leaver.gone.set()
            await leaving
            assert service._batcher.waiting == 0
            engine.go.set()
            await first
            assert await client.counted("vitascope_abandoned_total") == 1
        assert engine.computed() == [1]

    play(story())


def test_poison_picture_fails_its_own_request_only() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine) as client:
            engine.hold()
            first = client.predict(grey(1))
            await asyncio.to_thread(engine.begun.wait, 30)
            tasks = [client.predict(content) for content in (grey(2), b"broken", grey(POISON), grey(3))]
            await until(lambda: client.app.state.service._batcher.waiting == 3)
            engine.go.set()
            good, broken, poison, other = await asyncio.gather(*tasks)
            assert "not a picture" in refusal(broken, 422)
            assert "a fault of the server's" in refusal(poison, 500)
            assert good.status_code == other.status_code == (await first).status_code == 200
            assert (await client.predict(grey(4))).status_code == 200

    play(story())


# --- health


def test_server_lives_while_the_model_loads_and_is_ready_when_it_has() -> None:
    loaded = threading.Event()

    def load() -> HeldEngine:
        assert loaded.wait(30)
        return HeldEngine()

    async def story() -> None:
        async with serving(load, ready=False) as client:
            assert (await client.get("/livez")).status_code == 200
            said = refusal(await client.get("/readyz"), 503)
            assert said == "the model is still loading"
            early = await client.predict(grey(1))
            assert said == refusal(early, 503)
            assert early.headers["retry-after"] == "1"
            loaded.set()
            await until(lambda: client.app.state.service.why_not_ready() == "")
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.predict(grey(1))).status_code == 200

    play(story())


def test_model_that_cannot_be_loaded_is_told() -> None:
    def load() -> HeldEngine:
        raise UserError("no such model")

    async def story() -> None:
        async with serving(load, ready=False) as client:
            service = client.app.state.service
            await until(lambda: service.fault is not None)
            assert "cannot be loaded: no such model" in refusal(await client.get("/readyz"), 503)
            assert isinstance(service.fault, UserError)

    play(story())


def test_server_lives_while_the_model_hangs_and_is_not_ready() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine, stalled_s=0.05) as client:
            engine.hold()
            hung = client.predict(grey(1))
            await asyncio.to_thread(engine.begun.wait, 30)
            await until(lambda: "has not answered" in client.app.state.service.why_not_ready())
            assert (await client.get("/livez")).status_code == 200
            assert "the model has not answered for" in refusal(await client.get("/readyz"), 503)
            engine.go.set()
            await hung
            assert (await client.get("/readyz")).status_code == 200

    play(story())


def test_stopping_server_refuses_what_is_new_and_finishes_what_it_has() -> None:
    engine = HeldEngine()

    async def story() -> None:
        async with serving(engine) as client:
            engine.hold()
            accepted = client.predict(grey(1))
            await asyncio.to_thread(engine.begun.wait, 30)
            client.app.state.service.draining = True
            refused = await client.predict(grey(2))
            assert "stopping" in refusal(refused, 503)
            assert refused.headers["connection"] == "close"
            assert "stopping" in refusal(await client.get("/readyz"), 503)
            engine.go.set()
            assert (await accepted).status_code == 200

    play(story())


def test_metrics_count_requests_by_route_and_what_the_model_did() -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            await asyncio.gather(*(client.predict(grey(number)) for number in range(5)))
            await client.predict(b"x")
            await client.get("/secret/path")
            text = (await client.get("/metrics")).text
        assert 'vitascope_requests_total{route="/v1/predict",status="200"} 5.0' in text
        assert 'vitascope_requests_total{route="/v1/predict",status="422"} 1.0' in text
        assert 'vitascope_requests_total{route="other",status="404"} 1.0' in text
        assert 'vitascope_computed_total{work="predict"} 5.0' in text
        assert "vitascope_requests_in_flight 0.0" in text
        assert "secret" not in text

    play(story())


# --- who may ask


def test_token_is_asked_for_and_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, kept: bytes) -> bool:
        compared.append((given, kept))
        return given == kept

    monkeypatch.setattr(hmac, "compare_digest", compare)

    async def story() -> None:
        async with serving(HeldEngine(), token="s3cret") as client:
            for header in (None, "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret-and-more"):
                headers = {} if header is None else {"Authorization": header}
                answer = await client.predict(grey(1), headers=headers)
                assert "bearer token" in refusal(answer, 401)
                assert answer.headers["www-authenticate"] == "Bearer"
            right = {"Authorization": "Bearer s3cret"}
            assert (await client.predict(grey(1), headers=right)).status_code == 200
            for path in ("/v1/model", "/metrics", "/docs", "/openapi.json", "/nothing"):
                assert (await client.get(path)).status_code == 401
            for path in ("/livez", "/readyz"):
                assert (await client.get(path)).status_code == 200

    play(story())
    assert (b"wrong", b"s3cret") in compared
    assert (b"s3cret", b"s3cret") in compared


def test_pages_of_other_sites_may_not_use_the_server() -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            other = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
            answers = [
                await client.predict(grey(1), headers=other),
                await client.options(
                    "/v1/predict", headers={**other, "Access-Control-Request-Method": "POST"}
                ),
                await client.get("/v1/model", headers=other),
            ]
            assert [answer.status_code for answer in answers] == [403, 403, 200]
            for answer in answers:
                assert not [name for name in answer.headers if name.startswith("access-control")]
                assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            same = await client.predict(grey(1), headers={"Sec-Fetch-Site": "same-origin"})
            assert same.status_code == 200

    play(story())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:8000", "my.name"])
def test_own_names_are_answered(host: str) -> None:
    async def story() -> None:
        async with serving(HeldEngine(), allowed_hosts=("my.name",)) as client:
            assert (await client.get("/livez", headers={"Host": host})).status_code == 200

    play(story())


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]"])
def test_name_of_another_site_that_points_here_is_refused(host: str) -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            assert "--allowed-hosts" in refusal(await client.get("/v1/model", headers={"Host": host}), 421)

    play(story())


def test_server_of_a_network_answers_to_any_name_unless_told() -> None:
    assert Settings().host == "127.0.0.1"
    assert Settings(host="0.0.0.0").hosts == ()
    assert Settings(host="0.0.0.0", allowed_hosts=("a.example",)).hosts == ("a.example",)


def test_every_answer_says_what_a_browser_may_make_of_it(engine: TorchEngine) -> None:
    async def story() -> None:
        async with serving(engine) as client:
            await until(lambda: client.app.state.service.why_not_ready() == "")
            answers = [
                await client.predict(picture()),
                await client.predict(b"x"),
                *[
                    await client.get(path)
                    for path in ("/livez", "/docs", "/docs.css", "/nothing", "/v1/model")
                ],
            ]
        for answer in answers:
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert NAMES[-1] in answers[0].text  # a class may be called anything, in JSON
        assert answers[0].headers["content-type"] == "application/json"

    play(story())


def test_fault_of_the_server_says_nothing_of_its_inside() -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            answer = await client.predict(grey(POISON))
            assert "poison" not in refusal(answer, 500)
            assert "default-src 'self'" in answer.headers["content-security-policy"]

    play(story())


# --- its description


def test_description_and_its_page_have_every_route_and_no_script(engine: TorchEngine) -> None:
    async def story(client: Client | None = None) -> None:
        async with serving(engine) as client:
            described = (await client.get("/openapi.json")).json()
            page = (await client.get("/docs")).text
        for path in ("/v1/predict", "/v1/explain", "/v1/embed", "/v1/model", "/livez", "/readyz", "/metrics"):
            assert path in described["paths"]
            assert path in page
        body = described["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
        assert set(body) == {"image/*", "application/octet-stream", "multipart/form-data"}
        assert "<script" not in page
        assert "style=" not in page
        assert "https://" not in page

    play(story())


def test_page_escapes_the_address_that_it_was_asked_by(engine: TorchEngine) -> None:
    async def story() -> None:
        async with serving(engine, host="0.0.0.0") as client:
            page = (await client.get("/docs", headers={"Host": "<script>alert(1)</script>"})).text
        assert "<script" not in page

    play(story())
