"""Decoding with a deadline: a few warm decoder processes, which are killed and replaced.

A thread inside a C library cannot be ended; a process can. Waiting pictures are decoded smallest first, and a
much larger one must give up its process after `PATIENCE`, so that slow pictures do not block ordinary ones.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import pickle
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

import numpy as np

from vitascope.deploy.server import decoder_process
from vitascope.deploy.server.admission import Rejection
from vitascope.deploy.server.batcher import Expired
from vitascope.deploy.server.decoder_process import Content, DecodeError, DecodeOptions
from vitascope.models.preprocess import Pixels

PATIENCE, LARGER = 0.25, 4
"""Seconds that a picture may keep its process while one with a fourth of its pixels waits."""
GRACE = 0.1  # seconds until a picture whose client has left is killed: starting a new process takes as long
PAUSE = 1.0  # seconds before a process is replaced that ended before it could decode
SIZES = ((b"\x89PNG\r\n\x1a\n", ">II", 16), (b"GIF8", "<HH", 6), (b"BM", "<ii", 18))
"""Formats with their size at a fixed place."""
PIPE_SIZE = 2**20
"""Bytes of a pipe to a process: most pictures take one write, for which the event loop waits once."""
UNKNOWN = 2**40  # the pixels of a picture whose header does not give them: more than any other has

log = logging.getLogger("vitascope.decoding")


@dataclasses.dataclass(eq=False)
class _Job:
    content: Content
    num_pixels: int
    pixels: asyncio.Future[Pixels]
    begun: float = 0.0
    deaths: int = 0

    def fail(self, error: Exception) -> None:
        if not self.pixels.done():
            self.pixels.set_exception(error)


class DecoderPool:
    """A fixed number of decoder processes; everything here runs in the event loop."""

    def __init__(self, count: int = 2) -> None:
        self.processes: set[Process] = set()
        self.waiting: list[_Job] = []
        self.running: list[_Job] = []
        self._count = count
        self._idle = 0
        self._options: DecodeOptions | bytes = b""
        self._configured, self._ready, self._arrived = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the processes; called in the event loop."""
        self._tasks = [asyncio.create_task(self._keep_processes()) for _ in range(self._count)]

    async def configure(self, options: DecodeOptions) -> None:
        """Set the options, without which nothing is decoded; returns once a process is ready."""
        self._options = options
        self._configured.set()
        await self._ready.wait()

    async def stop(self) -> None:
        """Kill the processes and cancel what waits."""
        for task in self._tasks:
            task.cancel()
        for job in self.waiting:
            job.pixels.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                for process in list(self.processes):  # killed, but its task was cancelled before it ended
                    await process.wait()

    async def decode(self, content: Content, *, deadline: float) -> Pixels:
        """Return a picture's pixels, uint8 (C, H, W), or raise `DecodeError`, `Expired`, `Rejection`.

        A late or cancelled picture is not decoded any further.
        """
        loop = asyncio.get_running_loop()
        job = _Job(content, announced_pixels(content), loop.create_future())
        self.waiting.append(job)
        self._arrived.set()
        self._end_largest()
        try:
            await asyncio.wait([job.pixels], timeout=deadline - loop.time())
            if not job.pixels.done():
                job.fail(Expired("decoding"))
            return job.pixels.result()
        finally:
            job.pixels.cancel()
            if job in self.waiting:
                self.waiting.remove(job)

    async def _keep_processes(self) -> None:
        again: list[_Job] = []
        while True:
            try:
                await self._run_process(again)
            except (OSError, asyncio.IncompleteReadError) as error:
                log.warning("a decoder process did not start: %s", error)
                await asyncio.sleep(PAUSE)

    async def _run_process(self, again: list[_Job]) -> None:
        """Decode in a process until it ends; raises an error if it never was ready.

        A picture at which it ended for the first time is left in `again`, for a new process: another idle one
        may have ended too.
        """
        environment = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads would take memory
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "vitascope.deploy.server.decoder_process"),
            stdin=PIPE,
            stdout=PIPE,
            env=os.environ | environment,
            limit=2**20,
            start_new_session=True,  # Ctrl-C in a terminal is for the server
        )
        assert process.stdin is not None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # over the user's limit of all pipes, where 64 KiB remain
                pipe = process.stdin.transport.get_extra_info("pipe")
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self.processes.add(process)
        try:
            await self._configured.wait()
            await _exchange(process, self._options)
            ending = asyncio.ensure_future(process.wait())
            ending.add_done_callback(lambda _: self._arrived.set())
            self._ready.set()
            while await self._decode_next(process, again):
                pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            self.processes.discard(process)

    async def _decode_next(self, process: Process, again: list[_Job]) -> bool:
        """Decode the smallest waiting picture; returns whether the process can decode another."""
        job = again.pop() if again else await self._take(process)
        if job is None or job.pixels.done():
            return job is not None
        job.begun = asyncio.get_running_loop().time()
        self.running.append(job)
        self._end_largest()
        exchange = asyncio.ensure_future(_exchange(process, job.content))
        ends: set[asyncio.Future[Any]] = {exchange, job.pixels}
        patience = asyncio.get_running_loop().call_later(PATIENCE, self._end_largest)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if job.pixels.cancelled():
                await asyncio.wait({exchange}, timeout=GRACE)
            if not exchange.done():
                return False
            answer, shape, received = exchange.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await process.wait()
            job.deaths += 1
            if job.deaths == 1:
                again.append(job)
            elif status == -signal.SIGKILL:
                job.fail(Rejection(503, "the decoder processes are killed, maybe for lack of memory"))
            else:
                job.fail(DecodeError(422, f"cannot be decoded: the decoder process ended with {status}"))
            return False
        finally:
            exchange.cancel()
            patience.cancel()
            self.running.remove(job)
        if answer == decoder_process.FAULT:
            job.fail(RuntimeError(received.decode()))
        elif answer != decoder_process.DONE:
            job.fail(DecodeError(answer, received.decode()))
        elif not job.pixels.done():
            job.pixels.set_result(np.frombuffer(received, np.uint8).reshape(shape))  # (C, H, W)
        return True

    async def _take(self, process: Process) -> _Job | None:
        """The smallest waiting picture; None once the process has ended."""
        while not self.waiting and process.returncode is None:
            self._arrived.clear()
            self._idle += 1
            try:
                await self._arrived.wait()
            finally:
                self._idle -= 1
        if process.returncode is not None:
            return None
        job = min(self.waiting, key=lambda job: job.num_pixels)
        self.waiting.remove(job)
        return job

    def _end_largest(self) -> None:
        """Reject the largest running picture if a much smaller one waits and its time is over."""
        largest = max(self.running, key=lambda job: job.num_pixels, default=None)
        if largest is None or self._idle or not self.waiting:
            return
        if asyncio.get_running_loop().time() < largest.begun + PATIENCE:
            return
        if largest.num_pixels >= LARGER * min(job.num_pixels for job in self.waiting):
            largest.fail(Rejection(429, "decoding takes long, and smaller pictures wait"))


async def _exchange(process: Process, message: "DecodeOptions | Content") -> tuple[int, list[int], bytearray]:
    """Send a message to a process, and return its reply: status, shape, content."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pickle.dumps(message))
    await process.stdin.drain()
    head = await process.stdout.readexactly(decoder_process.HEADER.size)
    status, *shape, length = decoder_process.HEADER.unpack(head)
    return status, shape, bytearray(await process.stdout.readexactly(length))


def announced_pixels(content: Content) -> int:
    """Width times height by a picture's header, for the order of decoding; else `UNKNOWN`."""
    if not isinstance(content, bytes):
        return content.shape[0] * content.shape[1]
    size: tuple[Any, ...] = ()
    for signature, form, place in SIZES:
        if content.startswith(signature):
            size = _numbers(form, content, place)
    if content.startswith(b"\xff\xd8"):
        size = _jpeg_size(content)
    elif content[12:16] == b"VP8X":
        size = tuple(1 + int.from_bytes(content[at : at + 3], "little") for at in (24, 27))
    elif content[12:16] == b"VP8 ":
        size = tuple(number & 0x3FFF for number in _numbers("<HH", content, 26))
    elif content[12:16] == b"VP8L" and len(content) >= 25:
        bits = int.from_bytes(content[21:25], "little")
        size = (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    elif content[4:8] == b"ftyp" and (at := content.find(b"ispe", 0, 4096)) >= 0:
        size = _numbers(">II", content, at + 8)
    return abs(size[0] * size[1]) if size else UNKNOWN


def _jpeg_size(content: bytes) -> tuple[Any, ...]:
    """Height and width in the frame header, if that is among the first segments."""
    at = 2
    for _ in range(64):
        if content[at : at + 1] != b"\xff" or at + 4 > len(content):
            break
        if 0xC0 <= content[at + 1] <= 0xCF and content[at + 1] not in (0xC4, 0xC8, 0xCC):
            return _numbers(">HH", content, at + 5)
        at += 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    return ()


def _numbers(form: str, content: bytes, at: int) -> tuple[Any, ...]:
    return struct.unpack_from(form, content, at) if at + struct.calcsize(form) <= len(content) else ()
