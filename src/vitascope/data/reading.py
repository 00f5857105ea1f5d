"""Images read ahead by other processes, into memory that all of them share.

Every batch is cut among the processes, so that the first one of an epoch is ready soon, and only a few
batches are read ahead, however many processes read. No pixels go through pipes. PyTorch's DataLoader gives
each process whole batches, allocates new shared memory for each, and raises the death of a process anywhere
in the main thread; here it is one error, in the call that asks for the batch.
"""

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vitascope.data.randomness import crop_draws
from vitascope.data.stored import ImageFile, fetched_ahead
from vitascope.errors import UserError, printable
from vitascope.formatting import counted
from vitascope.models.decoding import ImageError, ImageSource
from vitascope.models.preprocess import Box, Pixels, Preprocess
from vitascope.network import in_threads
from vitascope.remote import source_at

B = TypeVar("B", npt.NDArray[np.int64], Sequence[ImageFile])
"""A batch: the indices of its images, or their files."""
S = TypeVar("S")
T = TypeVar("T")
READ_AHEAD = 4
"""Batches in the shared memory: one in use, the others read or being read."""
MAX_UNREADABLE = 0.1
"""The share of unreadable images above which a set is rejected."""
NAMED = 10
"""Unreadable pictures whose reasons are printed, and kept of a job of any size."""
_IGNORED = (signal.SIGINT, signal.SIGTERM)
_RATIO = 4 / 3
"""Largest aspect ratio of a random crop, both ways."""


@dataclasses.dataclass
class Faults:
    """The pictures of a job that cannot be read: which, why, and how many."""

    images: int = 0
    """The pictures of the job; those so far, if it does not know their number before."""
    set_name: str = ""
    """Of a set of images, of which at most `MAX_UNREADABLE`, or one image, may be unreadable."""
    count: int = 0
    """The unreadable pictures."""
    reasons: dict[Any, str] = dataclasses.field(default_factory=dict)
    """By the picture: its name or index."""

    def add(self, picture: str | int, reason: str) -> None:
        """Record an unreadable picture, once."""
        if picture in self.reasons:
            return
        self.reasons[picture] = reason
        self.count += 1
        if self.set_name and self.count > max(1, MAX_UNREADABLE * self.images):
            verdict = self._in_words(f"cannot be read, at least {self.count:,}")
            raise UserError(f"more than {MAX_UNREADABLE:.0%} {verdict}; remove or repair them")

    def tally(self, error: str | None) -> None:
        """Count a picture of a job of any size, with the error if it is unreadable; the first are kept."""
        self.images += 1
        if error is not None:
            self.count += 1
            if len(self.reasons) < NAMED:
                self.reasons[self.images] = error

    def check_some(self) -> None:
        """Raise a UserError if all pictures are unreadable."""
        if self.count == self.images:
            raise UserError(f"none {self._in_words('can be read')}")

    def _in_words(self, verdict: str) -> str:
        of_set = f" of the {self.set_name} set" if self.set_name else ""
        reasons = "; ".join(self.left_out[:3]) or "there is none"
        return f"of {counted(self.images, 'image')}{of_set} {verdict}: {reasons}"

    @property
    def left_out(self) -> tuple[str, ...]:
        """The reasons, each with the name of its picture."""
        return tuple(self.reasons.values())

    def lines(self) -> list[str]:
        """The count, and the first reasons."""
        more = [f"  and {self.count - NAMED:,} more"] if self.count > NAMED else []
        reasons = [f"  {printable(reason)}" for reason in self.left_out[:NAMED]]
        return [f"{self.count:,} of {counted(self.images, 'image')} could not be read:", *reasons, *more]

    @classmethod
    def of(cls, images: int, reasons: Sequence[str]) -> Self:
        """The record of a finished job, from all reasons."""
        return cls(images, count=len(reasons), reasons=dict(enumerate(reasons)))


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """An image's pixels as a function of its index and, where it is cropped at random before the resize (with
    `seed` and a `crop_scale` below 1), of the epoch. Indices may be those of repetitions, as `Batch` has.

    Without `sources`, batches have the files themselves, or URLs.
    """

    sources: Sequence[ImageSource] | None
    preprocess: Preprocess
    seed: int | None = None
    crop_scale: float = 1.0

    def __call__(self, index: int, epoch: int) -> Pixels:
        """The pixels of an image in an epoch, uint8 (C, H, W)."""
        assert self.sources is not None
        source = self.sources[index % len(self.sources)]
        if self.seed is None or self.crop_scale >= 1:
            return self.preprocess.pixels(source)
        (draws,) = crop_draws(self.seed, epoch, np.array([index]))
        rows, columns = self.preprocess.image_size
        return self.preprocess.cropped(
            source,
            lambda width, height: random_crop(width, height, draws, self.crop_scale, columns / rows),
        )

    def fill(self, batch: B, epoch: int, pixels: Pixels) -> dict[int, str]:
        """Read images into rows of (n, C, H, W); returns errors by row."""
        if isinstance(batch, np.ndarray):
            return fill_rows(lambda index: self(int(index), epoch), batch, pixels)
        return fill_rows(self.preprocess.pixels, self.sources_of(batch), pixels)

    def sources_of(self, batch: B) -> Sequence[ImageSource]:
        """The pictures of a batch."""
        if not isinstance(batch, np.ndarray):
            return list(map(source_at, batch))
        assert self.sources is not None
        return [self.sources[index] for index in batch.tolist()]


def fill_rows(read: Callable[[Any], Pixels], wanted: Iterable[Any], pixels: Pixels) -> dict[int, str]:
    """Read images into rows of (n, C, H, W); returns errors by row."""
    faults = {}
    for row, one in enumerate(wanted):
        try:
            pixels[row] = read(one)
        except ImageError as error:
            faults[row] = str(error)
    return faults


def readable(
    read: Callable[[S], T], sources: Iterable[S], faults: Faults, together: int = 1
) -> Iterator[tuple[int, T]]:
    """The result for each readable source, with the source's number, by threads, a few tasks ahead.

    A task has so many sources `together`; the unreadable ones are added to `faults`, by number.
    """

    def result(source: S) -> T | ImageError:
        try:
            return read(source)
        except ImageError as error:
            return error

    ahead = fetched_ahead(sources)
    tasks = iter(lambda: list(itertools.islice(ahead, together)), [])
    results = in_threads(lambda some: list(map(result, some)), tasks)
    for number, one in enumerate(itertools.chain.from_iterable(results)):
        if isinstance(one, ImageError):
            faults.add(number, str(one))
        else:
            yield number, one


def random_crop(
    width: int, height: int, draws: npt.NDArray[np.float64], smallest: float, aspect: float = 1.0
) -> Box:
    """A random crop of a picture, as in the training of Inception (Szegedy et al. 2015, section 6).

    `aspect` is the ratio of the model's images, width over height.
    """
    # Its area is uniform in [smallest, 1] of the picture's, the logarithm of its aspect ratio uniform in the
    # part of [3/4, 4/3] times the model's that fits into the picture, its place uniform. Where none fits
    # (almost all of a long picture) it is the largest crop of the nearest aspect ratio.
    area, ratio, x, y = map(float, draws)  # uniform in [0, 1), from `randomness.crop_draws`
    share = 1 - area * (1 - smallest)
    lowest, highest = share * width / height, width / height / share  # of the crops that fit
    low, high = (min(max(bound, aspect / _RATIO), aspect * _RATIO) for bound in (lowest, highest))
    proportions = low * (high / low) ** ratio
    crop_width = min((share * width * height * proportions) ** 0.5, width, height * proportions)
    crop_height = min(crop_width / proportions, height)
    left, top = x * (width - crop_width), y * (height - crop_height)
    return left, top, left + crop_width, top + crop_height


def read_here(
    reader: ImageReader, batches: Iterable[B], epoch: int
) -> Iterator[tuple[B, Pixels, dict[int, str]]]:
    """As `ReadingPool.read`, in this process."""
    for batch in batches:
        pixels = np.empty((len(batch), reader.preprocess.channels, *reader.preprocess.image_size), np.uint8)
        yield batch, pixels, reader.fill(batch, epoch, pixels)


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back, also in the processes that are started meanwhile; Windows cannot."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ReadingPool(Generic[B]):
    """Processes that read images; they live until `close`, or until the pool is garbage.

    `fill` reads a part of a batch, in an epoch, into its pixels, and returns errors by row; it is picklable.

    They ignore SIGINT and SIGTERM, which a terminal or a scheduler sends to all processes of a run: this
    process saves its state first, and then ends them. If it is killed, they end by themselves.
    """

    def __init__(
        self,
        fill: Callable[[B, int, Pixels], dict[int, str]],
        preprocess: Preprocess,
        batch_size: int,  # of the largest batch
        workers: int,
        niceness: int = 0,
    ) -> None:
        shape = (READ_AHEAD, batch_size, preprocess.channels, *preprocess.image_size)
        pixels = multiprocessing.RawArray("B", int(np.prod(shape)))
        self._pixels = np.frombuffer(pixels, np.uint8).reshape(shape)
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[BaseProcess] = []
        # It runs at the end of the program as well, before multiprocessing waits for its processes.
        self.close = Finalize(self, _end, (self._processes, self._connections), exitpriority=10)
        for _ in range(workers):
            connection, far_end = multiprocessing.Pipe()
            self._connections.append(connection)
            process = multiprocessing.Process(
                target=_serve, args=(far_end, self._connections, fill, pixels, shape, niceness), daemon=True
            )
            with _held_signals():  # until it ignores them
                process.start()
            far_end.close()  # so that the connection breaks when the process ends
            self._processes.append(process)

    def read(self, batches: Iterable[B], epoch: int = 0) -> Iterator[tuple[B, Pixels, dict[int, str]]]:
        """Each batch with its pixels (n, C, H, W), valid until the next, and its errors by row."""
        asked: deque[tuple[int, B]] = deque()
        for number, batch in enumerate(batches):
            slot = number % READ_AHEAD
            cuts = np.linspace(0, len(batch), len(self._connections) + 1).astype(int).tolist()
            for worker, connection in enumerate(self._connections):
                start, stop = cuts[worker], cuts[worker + 1]
                try:
                    connection.send((slot, start, stop, batch[start:stop], epoch))
                except ConnectionError:
                    self._answer(worker)  # raises the reason
            asked.append((slot, batch))
            if len(asked) == READ_AHEAD:
                yield self._collect(*asked.popleft())
        while asked:
            yield self._collect(*asked.popleft())

    def _collect(self, slot: int, batch: B) -> tuple[B, Pixels, dict[int, str]]:
        faults: dict[int, str] = {}
        for worker in range(len(self._processes)):
            faults |= self._answer(worker)
        return batch, self._pixels[slot, : len(batch)], faults

    def _answer(self, worker: int) -> dict[int, str]:
        try:
            answer = self._connections[worker].recv()
        except (EOFError, ConnectionError):
            self._processes[worker].join()
            code = self._processes[worker].exitcode or 0
            if code >= 0:
                raise RuntimeError("a process that reads images has failed; its traceback is above") from None
            raise UserError(
                f"a process that reads images was killed by {signal.Signals(-code).name}, most likely "
                f"because memory ran out: use fewer workers (now {len(self._processes)}) or a smaller batch "
                "size"
            ) from None
        if isinstance(answer, UserError):
            raise answer
        return answer


def _end(processes: list[BaseProcess], connections: "list[Connection[Any, Any]]") -> None:
    """Kill processes, which only read and so have nothing to lose."""
    for process in processes:
        process.kill()
    for process, connection in zip(processes, connections, strict=True):
        process.join()
        connection.close()


def _serve(
    connection: "Connection[Any, Any]",
    inherited: "Sequence[Connection[Any, Any]]",
    fill: Callable[[Any, int, Pixels], dict[int, str]],
    pixels: Any,
    shape: tuple[int, ...],
    niceness: int,
) -> None:
    """The main function of a process: serve requests until the other end closes."""
    for near_end in inherited:  # a fork has them open too, and would keep itself waiting
        near_end.close()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if niceness and hasattr(os, "nice"):
        os.nice(niceness)
    torch.set_num_threads(1)
    slots = np.frombuffer(pixels, np.uint8).reshape(shape)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            slot, start, stop, part, epoch = connection.recv()
            try:
                faults = fill(part, epoch, slots[slot, start:stop])
            except UserError as error:  # not about a single image
                connection.send(error)
                return
            connection.send({start + row: reason for row, reason in faults.items()})
