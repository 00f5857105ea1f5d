"""What comes in over HTTP is nobody's friend: bodies and pictures that are refused."""

import json
import socket

import pytest
from PIL import Image

from tests.deploy.server.served import (
    HeldEngine,
    Sender,
    bomb,
    chunks_of,
    grey,
    picture,
    play,
    refusal,
    serving,
)
from vitascope.deploy.engine import TorchEngine


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
        (b"not a picture", {}, 422, "the body: not a picture of a format that is read here: JPEG, "),
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
