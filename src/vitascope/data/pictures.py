"""The stream of pictures for an engine: batches of those that can be read, and why others cannot."""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.data.reading import B, Faults, ImageReader, ReadingPool, read_here, readable
from vitascope.models.engines.engine import Engine, in_order, stacks
from vitascope.models.engines.transfer import Fetched, copied_ahead, one_late, to_device
from vitascope.network import usable_cores

T = TypeVar("T", bound=Sized)

NICENESS = 10
"""Of processes that read: at the model's priority, its threads would wait for one that shares its core."""


@dataclasses.dataclass(frozen=True)
class PictureBatch(Generic[T]):
    """Pictures that were read together."""

    items: T
    """The n pictures: their indices, or their files."""
    stacks: Sequence[tuple[list[int], Tensor]]
    """Of the readable pictures of each size: their places among the readable, and their pixels, uint8
    (b, C, H, W), valid until the next batch."""
    faults: Mapping[int, str]
    """The reason for each of the others, by its place among the n."""

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """Whether each picture could be read, (n,)."""
        return np.array([place not in self.faults for place in range(len(self.items))], np.bool_)


def stream(
    engine: Engine, reader: ImageReader, batches: Iterable[B], batch_size: int, workers: int | None = None
) -> Generator[PictureBatch[B], None, None]:
    """Read the pictures of an engine in batches, by processes where there are several batches.

    Args:
        engine: which has pixels of its own where an exported model crops and resizes.
        reader: reads the pictures of a batch.
        batches: of at most `batch_size` pictures, taken a few ahead.
        workers: processes that read; 0 reads in this process, None means one per core.
    """
    if engine.own_pixels:
        for batch in batches:
            faults = Faults(len(batch))
            pictures = [pixels for _, pixels in readable(engine.pixels, reader.sources_of(batch), faults)]
            yield PictureBatch(batch, stacks(pictures), faults.reasons)
        return
    batches, workers = iter(batches), usable_cores() if workers is None else workers
    first = list(itertools.islice(batches, 2))
    batches = itertools.chain(first, batches)
    if not workers or len(first) < 2:  # starting processes takes longer than reading a batch
        yield from map(_together, read_here(reader, batches, 0))
        return
    pool: ReadingPool[B] = ReadingPool(reader.fill, reader.preprocess, batch_size, workers, niceness=NICENESS)
    with closing(pool):
        yield from map(_together, pool.read(batches))


def through_device(
    batches: Iterable[PictureBatch[T]], compute: Callable[[Tensor], Sequence[Tensor]], device: torch.device
) -> Iterator[tuple[PictureBatch[T], list[Tensor]]]:
    """Each batch with what is computed of its readable pictures, in their order, on the CPU; an accelerator
    computes one batch while the next is read and copied."""

    def send(batch: PictureBatch[T]) -> tuple[Tensor, ...]:
        return tuple(to_device(pixels, device) for _, pixels in batch.stacks)

    started = (
        (batch, Fetched(in_order(batch.stacks, list(map(compute, pixels)))))
        for batch, pixels in copied_ahead(batches, send, device)
    )
    for batch, fetched in one_late(started, device):
        yield batch, fetched.wait()


def _together(read: tuple[Any, npt.NDArray[np.uint8], dict[int, str]]) -> PictureBatch[Any]:
    items, pixels, faults = read
    good = [place for place in range(len(items)) if place not in faults]
    stack = torch.from_numpy(pixels[good] if faults else pixels)
    return PictureBatch(items, [(list(range(len(good))), stack)] if good else [], faults)
