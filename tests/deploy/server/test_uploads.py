"""Untrusted uploads: bodies and pictures that are rejected."""

import asyncio
import ctypes
import gc
import gzip
import json
import os
import signal
import socket
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from PIL import features

from tests.data import bomb, encoded
from tests.deploy.server.served import (
    ALL,
    EVERY_PATH,
    ROUTES,
    HeldEngine,
    Sender,
    asking,
    chunks_of,
    grey,
    picture,
    play,
    refusal,
    serving,
    until,
)
from tests.forked import ALARM, ending, fork
from vitascope.deploy.server.admission import Room
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.hardware import reuse_freed_memory

RAW = {"content-type": "application/octet-stream"}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
async def test_bomb_is_rejected_by_its_header() -> None:
    engine = HeldEngine()

    async with serving({"model": engine}, max_megapixels=50, **ALL) as client:
        # Pillow rejects the first, warns about the second, accepts the third.
        for side in (15_000, 12_000, 7_100):
            content = bomb(side)
            assert len(content) < 40_000
            for path in EVERY_PATH:
                if "embed" not in path and "explain" not in path:  # which this engine cannot do
                    reason = refusal(await client.post(path, **asking(path, content)), 413)
                    assert "limit" in reason
    assert engine.decoded == 0


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (
            json.dumps({"url": "http://127.0.0.1:9/cat.jpg"}),
            {"content-type": "application/json"},
            415,
            "not fetched",
        ),
        (b"x", {"content-type": "text/html"}, 415, "Content-Type text/html is not a picture's"),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415, "send a picture's bytes"),
        (b"not a picture", {}, 415, "a body without a Content-Type that is not a picture; send a picture's"),
        (b"", {}, 422, "the body is empty"),
        (b"not a picture", RAW, 422, "the body: not a picture of an accepted format: JPEG, "),
        (grey(1)[:40], {}, 422, "the body: "),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", RAW, 422, "not a picture"),
        (b"x", {"content-type": "multipart/form-data"}, 422, "a broken form"),
        (b"x", {"content-type": "multipart/form-data; boundary=z"}, 422, "form"),
        (grey(1), {"x-deadline-ms": "soon"}, 422, "X-Deadline-Ms is a whole number"),
        (grey(1), {"x-deadline-ms": "0"}, 422, "X-Deadline-Ms is a whole number"),
        (grey(1), {"x-deadline-ms": "9" * 400}, 422, "of at most 18 digits"),
        (grey(1), {"x-deadline-ms": "9" * 5000}, 422, "of at most 18 digits"),
        (grey(1), {"content-length": "9" * 5000}, 413, "Content-Length is not a readable number"),
    ],
)
async def test_non_picture_is_rejected_with_the_reason(
    content: bytes, headers: dict[str, str], status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_connection(*_: object) -> None:
        raise AssertionError("the server went out")

    monkeypatch.setattr(socket.socket, "connect", no_connection)
    async with serving(HeldEngine()) as client:
        assert message in refusal(await client.predict(content, headers=headers), status)
        assert (await client.predict(grey(3))).status_code == 200  # the server keeps running


async def test_every_common_format_is_detected_by_its_first_bytes() -> None:
    """`curl --data-binary` declares every body as a form."""
    async with serving(HeldEngine()) as client:
        for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", *["AVIF"] * features.check("avif")):
            content = encoded(np.full((4, 4, 3), 7, dtype=np.uint8), kind)
            for name in ({}, {"content-type": ""}, {"content-type": "application/x-www-form-urlencoded"}):
                assert (await client.predict(content, headers=name)).status_code == 200, kind


async def test_charset_of_a_form_is_ignored() -> None:
    body = (
        b'--z\r\nContent-Disposition: form-data; name="\\N{\xff"; filename="\\N{.png"\r\n\r\n'
        + grey(1)
        + b'\r\n--z\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xd8\x00\xff\r\n--z--\r\n'
    )
    async with serving(HeldEngine()) as client:
        for charset in ("punycode", "undefined", "utf8\x00", "idna", "utf-16"):
            headers = {"content-type": f"multipart/form-data; charset={charset}; boundary=z"}
            answer = await client.predict(body, headers=headers)
            assert answer.status_code == 200
            assert answer.json()["results"][0]["name"] == "\\N{.png"


@pytest.mark.parametrize("path", [path for path in EVERY_PATH if "embeddings" not in path])
async def test_compressed_body_is_read_within_the_limit(path: str, engine: TorchEngine) -> None:
    async with serving({"model": engine}, max_body_mb=0.1, **ALL) as client:
        request = client.build_request("POST", path, **asking(path, picture()))
        content, kind = request.content, {"content-type": request.headers.get("content-type", "")}

        async def status(coding: str, body: bytes) -> int:
            headers = kind | {"content-encoding": coding}
            return (await client.post(path, content=body, headers=headers)).status_code

        for coding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            whole = compress(content)
            assert await status(coding, whole) == 200
            for broken in (content, whole[:-9], whole + compress(b"")):
                assert await status(coding, broken) == 422
            assert await status(coding, compress(bytes(10**7))) == 413
        assert await status("br", content) == 415
        assert client.app.state.service.admission.taken == Room()


async def test_broken_file_of_a_form_has_an_error_and_the_others_have_predictions() -> None:
    async with serving(HeldEngine(), max_megapixels=1) as client:
        contents = {"good.png": grey(1), "bad.png": b"x", "huge.png": bomb(2000), "last.png": grey(255 // 5)}
        files = [("image", part) for part in contents.items()]
        answer = await client.post("/v1/predict", files=files)
        assert answer.status_code == 200
        good, bad, huge, last = answer.json()["results"]
        assert [one["name"] for one in (good, bad, huge, last)] == list(contents)
        assert set(bad) == set(huge) == {"name", "error"}
        assert "bad.png: not a picture" in bad["error"]
        assert "million pixels" in huge["error"]
        assert last["predictions"][0]["score"] == pytest.approx(0.2)
        assert good["predictions"]
        broken = [("image", (name, b"x")) for name in ("a.png", "b.png")]
        message = refusal(await client.post("/v1/predict", files=broken), 422)
        assert "a.png: not a picture" in message
        assert "b.png: not a picture" in message
        url = {"data": {"image": "http://127.0.0.1:9/"}, "files": {"x": ("", b"")}}
        assert "no file in the form" in refusal(await client.post("/v1/predict", **url), 422)


@pytest.mark.parametrize("path", EVERY_PATH)
async def test_body_over_the_limit_is_rejected_with_or_without_a_declared_length(path: str, engine) -> None:
    async with serving({"model": engine}, max_body_mb=0.1, **ALL) as client:
        answer = await client.post(path, content=bytes(200_000))
        assert answer.status_code == 413
        assert "over the limit of 0.1 MB" in answer.text
        declared = Sender(client.app, {"content-length": "10000000000"}, path)
        assert await declared.send(chunks_of(bytes(50_000), 1000)) == 413
        assert declared.asked == 0
        assert declared.headers[b"connection"] == b"close"
        waiting = Sender(client.app, {"content-length": "200000", "expect": "100-continue"}, path)
        assert await waiting.send(chunks_of(bytes(50_000), 1000)) == 413
        assert waiting.asked == 0
        endless = Sender(client.app, {"transfer-encoding": "chunked"}, path)
        assert await endless.send(chunks_of(bytes(50_000), 1000)) == 413
        assert endless.asked < 12  # four times the limit is read and discarded


@pytest.mark.parametrize("limit", [{"read_timeout_s": 0.05}, {"read_stall_s": 0.05}])
async def test_slow_and_stalled_uploads_are_aborted(limit: dict[str, float], engine: TorchEngine) -> None:
    async with serving({"model": engine}, **limit, **ALL) as client:
        for path in EVERY_PATH:
            slow = Sender(client.app, path=path)
            assert await slow.send(chunks_of(b"x", 3), end=False) == 408
            assert slow.headers[b"connection"] == b"close"
        assert client.app.state.service.admission.taken == Room()


async def test_stalled_uploads_occupy_no_place_in_the_queue(engine: TorchEngine) -> None:
    async with serving({"model": engine}, queue=2, **ALL) as client:
        service = client.app.state.service
        stalled = [Sender(client.app, path=path) for path in EVERY_PATH]
        sending = [asyncio.ensure_future(one.send(chunks_of(b"abc", 1), end=False)) for one in stalled]
        await until(lambda: service.admission.taken.size == 24)
        assert (await client.predict(grey(1))).status_code == 200
        assert (await client.get("/readyz")).status_code == 200

        async def overtaken() -> AsyncIterator[bytes]:
            service.admission.taken.places += 2  # whose bodies are complete before this one
            yield b"abc"

        for path in EVERY_PATH:
            assert await Sender(client.app, RAW, path).send(overtaken()) == 429
            service.admission.taken.places -= 2
        for one in stalled:
            one.gone.set()
        await asyncio.gather(*sending)
        assert service.admission.taken == Room()


async def test_bytes_of_bodies_read_at_once_are_bounded() -> None:
    async with serving({"model": HeldEngine()}, max_body_mb=0.1, max_bodies_mb=0.2, **ALL) as client:
        service = client.app.state.service
        stalled = [Sender(client.app, path=path) for path in ROUTES[:2]]
        sending = [asyncio.ensure_future(one.send(chunks_of(bytes(50_000), 2), end=False)) for one in stalled]
        await until(lambda: service.admission.taken.size == 200_000)
        for path in EVERY_PATH:
            if "embed" not in path and "explain" not in path:
                over = Sender(client.app, path=path)
                assert await over.send(chunks_of(b"x", 3)) == 503
                assert int(over.headers[b"retry-after"]) >= 1
        for one in stalled:
            one.gone.set()
        await asyncio.gather(*sending)
        assert service.admission.taken == Room()


async def test_bytes_of_bodies_count_until_their_requests_are_answered() -> None:
    engine, size = HeldEngine(), len(grey(1))
    async with serving(engine, max_body_mb=1.5 * size / 1e6, max_bodies_mb=1.5 * size / 1e6) as client:
        first = await client.holding(engine)
        assert "all bodies take more than" in refusal(await client.predict(grey(2)), 503)
        engine.go.set()
        assert (await first).status_code == 200
        assert (await client.predict(grey(2))).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_bodies_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def story() -> None:
        async with serving(HeldEngine()) as client:
            stalled = [Sender(client.app) for _ in range(10)]
            sending = [
                asyncio.ensure_future(one.send(parts_of(bytes(2**16), 200), end=False)) for one in stalled
            ]
            await until(lambda: client.app.state.service.admission.taken.size == 2000 * 2**16)
            held = resident()  # 131 MB of it are bodies
            for one in stalled:
                one.gone.set()
            await asyncio.gather(*sending)
            assert held - resident() > 5e7

    def work() -> None:
        signal.alarm(ALARM)
        reuse_freed_memory()  # as the server does
        ctypes.CDLL(None).malloc_trim(0)  # of what earlier tests have freed
        play(story())

    gc.collect()  # here, because the threads that some objects wait for in the end are not in the process
    gc.freeze()
    assert ending(fork(work)) == 0


async def parts_of(content: bytes, times: int) -> AsyncIterator[bytes]:
    for _ in range(times):
        yield bytes(bytearray(content))
