"""Pictures that take long or much memory or crash their decoder, and their effect on other pictures."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from PIL import Image, features

from tests.data import bomb, encoded, noise, png
from tests.deploy.server import readers
from tests.deploy.server.served import PATIENCE, HeldEngine, Sender, advance, chunks_of, grey, serving, until
from vitascope.deploy.server.admission import Rejection
from vitascope.deploy.server.batcher import Expired
from vitascope.deploy.server.decoder_pool import UNKNOWN, DecoderPool, announced_pixels
from vitascope.deploy.server.decoder_process import DecodeError, DecodeOptions, decode_picture
from vitascope.models.decoding import ImageSource
from vitascope.models.preprocess import Pixels

ENDLESS = encoded(np.zeros((readers.ENDLESS, 4), dtype=np.uint8))
LARGER = encoded(np.zeros((2 * readers.ENDLESS, 40), dtype=np.uint8))
SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00"
"""Of a progressive JPEG of one component, without content."""


class Slow(HeldEngine):
    """An engine for which decoding of large pictures does not end."""

    @property
    def reader(self) -> Callable[[ImageSource], Pixels]:
        return readers.endless_if_large  # type: ignore[return-value]


def options(
    reader: Callable[[bytes], Pixels] = readers.endless_if_large, memory_mb: float = 512
) -> DecodeOptions:
    return DecodeOptions(reader=reader, max_megapixels=50, max_memory_mb=memory_mb, max_seconds=60)


@asynccontextmanager
async def decoders(given: DecodeOptions | None = None, count: int = 1) -> AsyncIterator[DecoderPool]:
    found = DecoderPool(count)
    found.start()
    await found.configure(given or options())
    try:
        yield found
    finally:
        await found.stop()


def soon(seconds: float = PATIENCE) -> float:
    return asyncio.get_running_loop().time() + seconds


async def late(found: DecoderPool) -> asyncio.Future[Pixels]:
    decoding = asyncio.ensure_future(found.decode(ENDLESS, deadline=soon()))
    await until(lambda: len(found.running) == 1)
    advance(PATIENCE)
    return decoding


def pids(found: DecoderPool) -> set[int]:
    return {process.pid for process in found.processes}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# The program


async def test_decoded_pixels_match_the_readers_at_model_size_and_full_size() -> None:
    picture = encoded(noise(30, 40, 1)[..., 0])
    for reader in (readers.FIT.pixels, readers.FIT.whole_pixels):
        async with decoders(options(reader)) as found:
            pixels = await found.decode(picture, deadline=soon())
            np.testing.assert_array_equal(pixels, reader(picture))
            assert pixels.flags.writeable


async def test_pixels_are_read_like_their_picture_and_within_the_same_limit() -> None:
    async with decoders(options(readers.FIT.pixels)) as found:
        draw = np.random.default_rng(0).integers
        for shape in ((30, 40, 3), (30, 40, 1), (700, 900, 3)):  # the last is more than a pipe holds
            pixels = draw(0, 256, shape, np.uint8)
            decoded = await found.decode(pixels, deadline=soon())
            np.testing.assert_array_equal(decoded, readers.FIT.pixels(encoded(pixels.squeeze())))
        with pytest.raises(DecodeError, match="million pixels, over the limit of 50"):
            decode_picture(np.broadcast_to(np.uint8(0), (10_000, 5_100, 3)), options())


def test_decoding_process_imports_neither_torch_nor_stores() -> None:
    code = "import sys, vitascope.deploy.server.decoder_process as _"
    code += "; assert not {'torch', 'vitascope.remote'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def spliced(scans: int) -> bytes:
    """A progressive JPEG with `scans` additional empty scans."""
    whole = encoded(np.zeros((16, 16), dtype=np.uint8), "JPEG", progressive=True)
    return whole[:-2] + SCAN * scans + whole[-2:]


def run_lengths() -> bytes:
    written = bytearray(encoded(np.zeros((8, 8), dtype=np.uint8), "BMP"))
    written[30] = 1
    return bytes(written)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (spliced(2000), "a JPEG may have 100 scans"),
        (b"\xff\xd8" + b"\xff\xfe\x00\x02" * 2000 + encoded(noise(8, 8), "JPEG")[2:], "1000 segments"),
        (png((8, 8), 8, 0, bytes(72), before=[(b"tEXt", b"a\0b")] * 3000), "chunks at most"),
        (b"P3\n2 2\n255\n" + b"1 " * 12, "not a picture of"),
        (encoded(noise(8, 8), "JPEG2000") if features.check("jpg_2000") else b"", "not a picture of"),
        (run_lengths(), "run-length"),
        (bomb(7_100), "over the limit of 50"),
    ],
)
def test_pictures_with_too_many_parts_and_unusual_formats_are_rejected(content: bytes, message: str) -> None:
    def never(content: bytes) -> Pixels:
        raise AssertionError("it was decoded")

    with pytest.raises(DecodeError, match=message) as rejected:
        decode_picture(content, options(never))
    assert rejected.value.status == (413 if "limit" in message else 422)


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_of_many_pixels_whose_data_end_after_a_kilobyte_is_rejected(progressive: bool) -> None:
    whole = encoded(noise(64, 64), "JPEG", progressive=progressive)
    frame, scan = whole.index(b"\xff\xc2" if progressive else b"\xff\xc0"), whole.index(b"\xff\xda")
    larger = whole[: frame + 5] + 2 * (7000).to_bytes(2, "big") + whole[frame + 9 : scan + 1000] + b"\xff\xd9"
    with pytest.raises(DecodeError, match="truncated") as rejected:
        decode_picture(larger, options(readers.FIT.pixels))
    assert rejected.value.status == 422


@pytest.mark.parametrize(
    "content",
    [
        encoded(noise(64, 64), "JPEG", progressive=True, exif=Image.Exif(), comment=b"\xff\xda" * 999),
        spliced(20) + b"\xff\xda" * 5000,  # the video after a phone's photograph
        png((8, 8), 8, 0, bytes(72), before=[(b"tEXt", b"a\0b")] * 300),
        encoded(noise(700, 700)),
        encoded(noise(8, 8), "BMP"),
        encoded(noise(8, 8), "TIFF", compression="tiff_lzw"),
    ],
)
def test_pictures_as_encoders_write_them_are_decoded(content: bytes) -> None:
    assert decode_picture(content, options(readers.FIT.pixels)).shape == (1, 4, 4)


def test_size_in_the_header_is_known_without_decoding() -> None:
    picture = Image.fromarray(noise(30, 41))
    exif = Image.Exif()
    exif[0x010E] = "a" * 3000
    kinds = {
        "JPEG": encoded(picture, "JPEG", exif=exif),
        "progressive": encoded(picture, "JPEG", progressive=True),
        "PNG": encoded(picture),
        "GIF": encoded(picture, "GIF"),
        "BMP": encoded(picture, "BMP"),
        "WebP": encoded(picture, "WEBP"),
        "WebP without loss": encoded(picture, "WEBP", lossless=True),
        "WebP with more": encoded(picture, "WEBP", exif=exif),
    }
    if features.check("avif"):
        kinds["AVIF"] = encoded(picture, "AVIF")
    assert {name: announced_pixels(content) for name, content in kinds.items()} == dict.fromkeys(
        kinds, 30 * 41
    )
    assert announced_pixels(encoded(picture, "TIFF")) == announced_pixels(b"") == UNKNOWN
    for content in kinds.values():  # truncated anywhere
        for length in range(40):
            assert announced_pixels(content[:length]) > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits a process's memory")
async def test_picture_that_needs_too_much_memory_is_rejected_and_the_process_survives() -> None:
    side = 2500  # 25 MB of pixels, four times that with transparency
    content = png((side, side), 16, 6, bytes((1 + 8 * side) * side))
    assert len(content) < 100_000
    async with decoders(options(readers.FIT.pixels, memory_mb=32)) as found:
        before = pids(found)
        with pytest.raises(DecodeError, match="more than 32 MB of memory") as rejected:
            await found.decode(content, deadline=soon())
        assert rejected.value.status == 413
        assert (await found.decode(grey(7), deadline=soon())).max() == 7
        assert pids(found) == before


# The processes


async def test_late_decoding_is_killed_and_the_next_picture_uses_another_process() -> None:
    async with decoders() as found:
        (before,) = pids(found)
        with pytest.raises(Expired):
            await (await late(found))
        await until(lambda: not is_alive(before))
        assert (await found.decode(grey(7), deadline=soon())).max() == 7


async def test_large_picture_yields_its_process_to_a_small_one() -> None:
    async with decoders() as found:
        slow = asyncio.ensure_future(found.decode(ENDLESS, deadline=soon()))
        await until(lambda: len(found.running) == 1)
        assert (await found.decode(grey(7), deadline=soon())).max() == 7
        with pytest.raises(Rejection, match="smaller pictures wait"):
            await slow


async def test_small_pictures_are_decoded_first() -> None:
    done: list[int] = []
    async with decoders() as found:
        sides = (60, 70, 30, 20)

        async def one(side: int) -> None:
            await found.decode(encoded(np.zeros((side, side), dtype=np.uint8)), deadline=soon())
            done.append(side)

        await asyncio.gather(*map(one, sides))
    assert done == [20, 30, 60, 70]


@pytest.mark.parametrize(("number", "seen"), [(signal.SIGKILL, False), (signal.SIGSEGV, True)])
async def test_process_that_ends_while_it_is_idle_costs_no_picture(number: int, seen: bool) -> None:
    async with decoders(count=2) as found:
        await until(lambda: found._idle == 2)
        before = pids(found)
        for pid in before:
            os.kill(pid, number)
        if seen:
            await until(lambda: not before & pids(found))
        assert (await found.decode(grey(7), deadline=soon())).max() == 7


async def test_picture_whose_processes_are_killed_gets_503() -> None:
    async with decoders() as found:
        slow = asyncio.ensure_future(found.decode(ENDLESS, deadline=soon()))
        for _ in range(2):
            await until(lambda: len(found.running) == 1)
            (pid,) = pids(found)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not found.running)
        with pytest.raises(Rejection, match="killed") as rejected:
            await slow
        assert rejected.value.status_code == 503
        assert (await found.decode(grey(7), deadline=soon())).max() == 7


async def test_internal_error_keeps_its_traceback() -> None:
    async with decoders(options(readers.broken)) as found:
        with pytest.raises(RuntimeError, match="ArithmeticError: a fault of ours"):
            await found.decode(grey(7), deadline=soon())


async def test_stop_awaits_a_process_that_is_being_replaced() -> None:
    """Its exit must not reach asyncio after the event loop is closed."""
    async with decoders() as found:
        (process,) = found.processes
        ended, killed = process.wait, asyncio.Event()

        async def wait_slowly() -> int:
            killed.set()
            await asyncio.sleep(0.05)
            return await ended()

        process.wait = wait_slowly  # type: ignore[method-assign]
        with pytest.raises(Expired):
            await (await late(found))
        await killed.wait()
    assert process.returncode is not None


# The server


async def test_ordinary_requests_succeed_while_endless_pictures_are_decoded() -> None:
    """There are more slow pictures than processes; the server stays ready."""
    async with serving(Slow()) as client:
        slow = [client.predict(content) for content in (ENDLESS, LARGER)]
        slow.append(asyncio.ensure_future(client.post("/v1/attention", content=ENDLESS)))
        await until(lambda: len(client.app.state.service.decoders.running) == 2)
        for _ in range(3):
            assert (await client.predict(grey(7))).status_code == 200
            assert (await client.get("/readyz")).status_code == 200
        advance(1000)
        statuses = [answer.status_code for answer in await asyncio.gather(*slow)]
        assert set(statuses) <= {429, 504}  # the deadline of decoding, also for explanations
        assert await client.counted("vitascope_expired_total") == statuses.count(504)


async def test_disconnect_during_decoding_ends_it() -> None:
    for path in ("/v1/predict", "/v1/attention"):
        async with serving(Slow()) as client:
            found = client.app.state.service.decoders
            leaver = Sender(client.app)
            leaver.scope |= {"path": path, "raw_path": path.encode()}
            leaving = asyncio.ensure_future(leaver.send(chunks_of(ENDLESS, 1)))
            await until(lambda found=found: len(found.running) == 1)
            before = pids(found)
            leaver.gone.set()
            assert await leaving == 499
            await until(lambda before=before: not all(map(is_alive, before)))
