"""Decoding with a deadline: a few processes that decode (`decoder`), kept warm, killed and replaced.

A thread in the middle of a library's C cannot be ended, a process can. Everything here happens in the event
loop. Pictures that wait are decoded smallest first, and one that is much larger than the next has to give up
its process after `PATIENCE`: a few slow pictures cannot keep ordinary ones waiting.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import logging
import os
import pickle
import struct
import sys
from typing import Any, cast

import numpy as np

from vitascope.data.preprocess import Pixels
from vitascope.deploy.server.decoder_process import HEADER, LENGTH, PIXELS, READY, REFUSED, Orders, Refused

DECODERS = 2
"""Processes that decode."""
PATIENCE = 0.25
"""Seconds that a large picture may keep its process while a small one waits."""
LARGER = 4
"""Times the pixels of the one that waits: as large is "much larger"."""
LEFT_ALONE = 0.1
"""Seconds that a process may go on with a picture whose client has left: a new process costs as much."""
PAUSE = 1.0
"""Seconds before a process that ended before it could decode is started again."""
UNKNOWN = 2**40
"""Pixels of a picture whose header does not tell them cheaply: more than any other has."""

log = logging.getLogger("vitascope.decoding")


class Late(Exception):  # noqa: N818 - nobody's error
    """A picture's deadline passed before it was decoded."""


class Displaced(Exception):  # noqa: N818 - a refusal
    """A picture took long while smaller ones waited."""


@dataclasses.dataclass(eq=False)
class _Picture:
    content: bytes
    pixels: int
    answer: asyncio.Future[Pixels]
    began: float = 0.0


class Decoders:
    """A fixed number of decoding processes.

    Args:
        count: processes.
    """

    def __init__(self, count: int = DECODERS) -> None:
        self._count = count
        self._orders: bytes | None = None
        self._processes: set[Decoder] = set()
        self._waiting: list[tuple[int, int, _Picture]] = []
        self._numbers = itertools.count()
        self._starting: set[asyncio.Task[None]] = set()
        self._warm = asyncio.Event()
        self._next_look: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        """Start the processes; called in the event loop."""
        for _ in range(self._count):
            self._start_one()

    async def order(self, orders: Orders) -> None:
        """Say how to decode; nothing is decoded before. Returns once a process is ready to."""
        self._orders = pickle.dumps(orders)
        for process in self._processes:
            process.send(self._orders)
        await self._warm.wait()

    async def stop(self) -> None:
        """End the processes, whatever they do; what waits is cancelled."""
        self._stopped = True
        for task in self._starting:
            task.cancel()
        if self._next_look is not None:
            self._next_look.cancel()
        for _, _, picture in self._waiting:
            picture.answer.cancel()
        for process in self._processes:
            process.kill()
        if ending := [process.ended for process in self._processes]:
            await asyncio.wait(ending, timeout=1)

    async def decode(self, content: bytes, *, deadline: float) -> Pixels:
        """An encoded picture as pixels, uint8 (C, H, W).

        Cancelled or late, it is not decoded any further.

        Args:
            content: the picture.
            deadline: on the event loop's clock.

        Raises:
            Refused: 413 or 422, as `decoder.decode`.
            Late: the deadline passed.
            Displaced: it took long while smaller pictures waited.
        """
        picture = _Picture(content, announced_pixels(content), asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, (picture.pixels, next(self._numbers), picture))
        self._serve()
        try:
            async with asyncio.timeout_at(deadline):
                return await picture.answer
        except TimeoutError:
            self._kill(picture)
            raise Late from None
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(LEFT_ALONE, self._kill, picture)
            raise
        finally:
            if any(picture is waiting for _, _, waiting in self._waiting):
                self._waiting = [entry for entry in self._waiting if entry[2] is not picture]
                heapq.heapify(self._waiting)

    def _kill(self, picture: _Picture) -> None:
        """Kill the process that works on a picture, if it still does."""
        for process in self._processes:
            if process.picture is picture:
                process.kill()

    def _serve(self) -> None:
        """Give pictures that wait to processes that do not work."""
        idle = [process for process in self._processes if process.is_idle]
        while self._waiting and idle:
            picture = heapq.heappop(self._waiting)[2]
            if not picture.answer.done():
                idle.pop().begin(picture)
        if self._waiting:
            self._make_room(self._waiting[0][0])

    def _make_room(self, pixels: int) -> None:
        """End the work on the largest picture, if it is much larger than this and has had its time."""
        busy = [process for process in self._processes if process.picture is not None]
        largest = max(busy, key=lambda process: process.pixels, default=None)
        if largest is None or largest.picture is None or largest.pixels < LARGER * pixels:
            return
        loop = asyncio.get_running_loop()
        left = largest.picture.began + PATIENCE - loop.time()
        if left > 0:
            if self._next_look is None:
                self._next_look = loop.call_later(left, self._look_again)
            return
        if not largest.picture.answer.done():
            largest.picture.answer.set_exception(Displaced())
        largest.kill()

    def _look_again(self) -> None:
        self._next_look = None
        self._serve()

    def _start_one(self) -> None:
        starting = asyncio.get_running_loop().create_task(self._started())
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _started(self) -> None:
        process = Decoder(self)
        self._processes.add(process)
        try:
            await process.start()
        except OSError as error:
            log.warning("a decoding process cannot be started: %s", error)
            self.has_ended(process)
            return
        if self._orders is not None:
            process.send(self._orders)

    def is_free(self) -> None:
        """A process has nothing to do."""
        self._warm.set()
        self._serve()

    def has_ended(self, process: Decoder) -> None:
        """A process has gone; another takes its place."""
        self._processes.discard(process)
        if self._stopped:
            return
        if process.is_ready:
            self._start_one()
        else:
            asyncio.get_running_loop().call_later(PAUSE, self._start_one)


class Decoder(asyncio.SubprocessProtocol):
    """One decoding process.

    Args:
        owner: is told when it is free, and when it has gone.
    """

    def __init__(self, owner: Decoders) -> None:
        self.picture: _Picture | None = None
        """The picture that it works on."""
        self.is_ready = False
        """Whether it has started and knows how to decode."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._killed = False
        self._received = bytearray()
        self._transport: asyncio.SubprocessTransport | None = None

    async def start(self) -> None:
        """Start the process.

        Raises:
            OSError: the system has no room for it.
        """
        here = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # whose threads' memory would count
        command = (sys.executable, "-P", "-m", "vitascope.deploy.server.decoder_process")
        await asyncio.get_running_loop().subprocess_exec(
            lambda: self,
            *command,
            stderr=None,
            env={**os.environ, **here, **alone},
            start_new_session=True,  # Ctrl-C in a terminal is the server's
        )

    @property
    def is_idle(self) -> bool:
        """Whether it can take a picture."""
        return self.is_ready and self.picture is None and not self._killed

    @property
    def pixels(self) -> int:
        """Of the picture that it works on."""
        return self.picture.pixels if self.picture is not None else 0

    def begin(self, picture: _Picture) -> None:
        """Decode a picture."""
        picture.began = asyncio.get_running_loop().time()
        self.picture = picture
        self.send(picture.content)

    def send(self, message: bytes) -> None:
        """Send it a message."""
        if self._transport is None:  # still starting: `Decoders` sends again
            return
        pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
        pipe.writelines((LENGTH.pack(len(message)), message))

    def kill(self) -> None:
        """End it, whatever it does; whoever waits for its picture is not answered."""
        self._killed = True
        self.picture = None
        if self._transport is not None:
            self._transport.close()  # kills it

    # The protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It has been started."""
        self._transport = cast("asyncio.SubprocessTransport", transport)
        if self._killed:
            self._transport.close()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """A part of a message."""
        self._received += data
        if len(self._received) < HEADER.size:
            return
        kind, *numbers, length = HEADER.unpack_from(self._received)
        if len(self._received) < HEADER.size + length:
            return
        received, self._received = self._received, bytearray()
        if not self._killed:
            self._answer(kind, numbers, received)

    def _answer(self, kind: int, numbers: list[int], received: bytearray) -> None:
        picture, self.picture = self.picture, None
        if kind == READY:
            self.is_ready = True
        elif picture is not None and not picture.answer.done():
            if kind == PIXELS:
                pixels = np.frombuffer(received, np.uint8, offset=HEADER.size)
                picture.answer.set_result(pixels.reshape(numbers))  # (C, H, W)
            else:
                reason = received[HEADER.size :].decode()
                error = Refused(numbers[0], reason) if kind == REFUSED else RuntimeError(reason)
                picture.answer.set_exception(error)
        self._owner.is_free()

    def process_exited(self) -> None:
        """It has ended."""
        picture, self.picture = self.picture, None
        if picture is not None and not picture.answer.done():
            status = None if self._transport is None else self._transport.get_returncode()
            picture.answer.set_exception(Refused(422, f"cannot be decoded: the decoder ended with {status}"))
        self._killed = True
        if self._transport is not None:
            self._transport.close()
        if not self.ended.done():
            self.ended.set_result(None)
        self._owner.has_ended(self)


def announced_pixels(content: bytes) -> int:
    """Width times height as a picture's header tells them, for the order of decoding; else `UNKNOWN`."""
    size: tuple[Any, ...] = ()
    if content.startswith(b"\xff\xd8"):
        size = _jpeg_size(content)
    elif content.startswith(b"\x89PNG\r\n\x1a\n"):
        size = _numbers(">II", content, 16)
    elif content.startswith(b"GIF8"):
        size = _numbers("<HH", content, 6)
    elif content.startswith(b"BM"):
        size = _numbers("<ii", content, 18)
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
    """Height and width in the frame's header, if that is among the first segments."""
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
