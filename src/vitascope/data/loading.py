"""From a split to batches of uint8 pixels: kept in memory where they fit, read by workers where not."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.data.reading import Faults, ImageReader, ReadingPool, read_here
from vitascope.data.splits import ImageSet, check_every_class
from vitascope.models.engines.transfer import copied_ahead, to_device
from vitascope.models.preprocess import Pixels, Preprocess
from vitascope.network import usable_cores

MEMORY_BUDGET = 2**30
"""Bytes of pixels in a split that is read before the first epoch, and kept on the device. The number does not
depend on the machine, because a larger split is cropped before the resize (`crop_scale`)."""
ALONE_SECONDS = 0.5
"""Time for which a split is read without workers: starting them takes longer than reading a small split."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """This process's images of a batch."""

    pixels: Tensor  # uint8 (B, C, H, W) on the device
    targets: Tensor  # (B, ...) on the device, rows of the labels; (B, 0) for images without labels
    # (B,) into the split of N images; the r-th repetition of an image in an epoch has its index plus r N.
    indices: npt.NDArray[np.int64]
    planned: int  # images of the whole batch, over all processes, unreadable ones included

    def split(self, parts: int) -> "list[Batch]":
        """At most `parts` batches of about the same size, none of them empty unless this one is."""
        cuts = even_cuts(len(self.indices), parts)
        spans = [span for span in itertools.pairwise(cuts) if span[0] < span[1]]
        return [
            Batch(self.pixels[a:b], self.targets[a:b], self.indices[a:b], self.planned) for a, b in spans
        ] or [self]


class Loader:
    """Batches of a split, in an order that depends on nothing but seed and epoch.

    An epoch has each image once; with `balanced` it has as many places, and every class equally often.
    Images that cannot be read are left out and collected in `faults`, by path.
    """

    def __init__(
        self,
        images: ImageSet,
        preprocess: Preprocess,
        batch_size: int,  # over all processes; the last batch of an epoch may be smaller
        *,
        seed: int | None = None,  # of the order and of the crops; None keeps the split's own order
        device: torch.device | str = "cpu",  # a split that fits in `memory_budget` is kept there
        workers: int | None = None,  # processes that read; 0 reads in this process, None: one per core
        memory_budget: int = MEMORY_BUDGET,
        # Bytes for a larger split, whose images are kept on the device once they have been read, unless they
        # are cropped anew in each epoch; a split without room is read again in every epoch.
        room: int = 0,
        # This process and the number of processes, each of which gets its slice of every batch. Slices begin
        # at even places, so that neighbours 2k and 2k+1 stay together; one may be empty in the last batch.
        part: tuple[int, int] = (0, 1),
        # Smallest share of the area in a random crop (`reading.random_crop`); only images that are read again
        # in every epoch, with a `seed`, are cropped here, see `crops`.
        crop_scale: float = 1.0,
        # Repeated augmentation (Hoffer et al. 2020): copies of each image in a batch. An epoch has as many
        # images as without, and so sees one of `repeats` different ones. Needs a `seed`.
        repeats: int = 1,
        balanced: bool = False,  # with a `seed`; see `balanced_order`
        streams: int = 1,  # with a `seed`: parts of every batch, each from shards of its own; see `woven`
    ) -> None:
        self.images = images
        self._labels = np.empty((len(images), 0)) if images.targets is None else images.targets.rows
        self.preprocess = preprocess
        self.batch_size = batch_size
        self.seed = seed
        self.device = torch.device(device)
        self.workers = usable_cores() if workers is None else workers
        self.part = part
        self.repeats = repeats if seed is not None else 1
        self.streams = streams if seed is not None else 1
        self.faults = Faults(len(images), images.name)
        size = preprocess.channels * math.prod(preprocess.image_size)
        streamed = len(images) * size > memory_budget
        self.crops = streamed and seed is not None and crop_scale < 1  # batches are cropped already
        self._reader = ImageReader(images.sources, preprocess, seed, crop_scale if self.crops else 1.0)
        self._pool: ReadingPool[npt.NDArray[np.int64]] | None = None  # kept for the next epoch
        self._rows = np.arange(len(images))  # of each image in `_kept`; -1 for one that is in no order
        self._unread = np.full(len(images), streamed)  # whether an image has to be read
        self._broken = np.zeros(len(images), np.bool_)  # whether it could not be read
        self._kept: Tensor | None = None  # (N, C, H, W), on the device
        if not streamed:
            self._kept = self._cache()
        elif not self.crops and len(images) * size <= room:
            shape = (len(images), preprocess.channels, *preprocess.image_size)
            self._kept = torch.empty(shape, dtype=torch.uint8, device=self.device)
        self.balanced = balanced
        if balanced:
            check_every_class(images.subset(images.name, self._readable_indices()), "balanced sampling")

    def __len__(self) -> int:
        """The number of images, without those that are known to be unreadable."""
        return len(self._readable_indices())

    @property
    def kept_bytes(self) -> int:
        """The memory of the device that this loader has, or will have filled after an epoch."""
        return 0 if self._kept is None else self._kept.nbytes

    @property
    def batches_per_epoch(self) -> int:
        """Batches in an epoch, the same for all processes."""
        return math.ceil(len(self) / self.batch_size)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on."""
        order = self._order(epoch)
        begins = range(start * self.batch_size, len(order), self.batch_size)
        planned = [min(self.batch_size, len(order) - begin) for begin in begins]
        rank, world = self.part
        batches = []  # this process's part of each
        for begin, count in zip(begins, planned, strict=True):
            cuts = even_cuts(count, world)
            batches.append(order[begin + cuts[rank] : begin + cuts[rank + 1]])
        moved = zip(copied_ahead(self._read(batches, epoch), self._moved, self.device), planned, strict=True)
        for ((indices, *_), (pixels, targets)), count in moved:
            yield Batch(pixels, targets, indices, count)

    def _read(
        self, batches: Sequence[npt.NDArray[np.int64]], epoch: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], "Pixels | None", npt.NDArray[np.int64]]]:
        """The readable images of each batch, and the pixels and indices of those that are not kept yet."""
        if self._kept is None:
            yield from ((read, pixels, read) for pixels, read in self._streamed(batches, epoch))
            return
        N = len(self.images)
        if not any(self._unread[batch % N].any() for batch in batches):
            yield from ((batch[~self._broken[batch % N]], None, batch[:0]) for batch in batches)
            return
        unread = (batch[self._unread[batch % N]] for batch in batches)
        for batch, (pixels, read) in zip(batches, self._streamed(unread, epoch), strict=True):
            self._unread[read % N] = False
            yield batch[~self._broken[batch % N]], pixels, read

    def _moved(
        self, part: tuple[npt.NDArray[np.int64], "Pixels | None", npt.NDArray[np.int64]]
    ) -> tuple[Tensor, Tensor]:
        indices, pixels, read = part
        images = indices % len(self.images)
        targets = to_device(self._labels[images], self.device)
        if self._kept is None:
            assert pixels is not None
            return to_device(pixels, self.device, reused=True), targets
        if pixels is not None and len(pixels):
            new = to_device(read % len(self.images), self.device)
            self._kept.index_copy_(0, new, to_device(pixels, self.device))
        return self._kept[to_device(self._rows[images], self.device)], targets

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The indices of an epoch in its order, without those of images that are known to be unreadable."""
        if self.balanced:
            assert self.seed is not None
            return balanced_order(self.images, self._readable_indices(), self.seed, epoch)
        if self.seed is None:
            return self._readable_indices()
        orders = self.images.streams(self.seed, epoch, self.streams)
        order = woven([order[self._rows[order] >= 0] for order in orders], self.batch_size)
        return order if self.repeats == 1 else self._repeated(order)

    def _repeated(self, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first images of an order, `repeats` copies of each, as many indices as before.

        As in DeiT's RASampler, the copies of an image share a batch, where they lie far apart: neighbours,
        which are mixed, are different images, and with several processes each copy is in another one.
        """
        place = np.arange(len(order))
        copy = place % self.repeats
        indices = order[place // self.repeats] + copy * len(self.images)
        return indices[np.lexsort((copy, place // self.batch_size))]

    def _readable_indices(self) -> npt.NDArray[np.int64]:
        """The indices of the readable images, as far as is known."""
        return np.flatnonzero(self._rows >= 0)

    def _cache(self) -> Tensor:
        """Read every image once, in the split's order, into one array without gaps."""
        shape = (len(self.images), self.preprocess.channels, *self.preprocess.image_size)
        kept, rows = np.empty(shape, np.uint8), np.full(len(self.images), -1)
        readable = 0
        for pixels, indices in self._once():
            rows[indices] = np.arange(readable, readable + len(indices))
            kept[readable : readable + len(indices)] = pixels
            readable += len(indices)
        self._rows = rows
        self.faults.check_some()
        return torch.from_numpy(kept[:readable]).to(self.device)

    def _once(self) -> Iterator[tuple[Pixels, npt.NDArray[np.int64]]]:
        """The readable images: the first read by this process, the rest by workers (threads would be slower,
        because Pillow holds Python's lock around small pictures)."""
        everything = np.arange(len(self.images))
        until = time.monotonic() + ALONE_SECONDS
        begin = 0
        while begin < len(everything) and (self.workers < 2 or time.monotonic() < until):
            yield from self._readable(read_here(self._reader, [everything[begin : begin + 16]], 0))
            begin += 16
        batches = [everything[at : at + 512] for at in range(begin, len(everything), 512)]
        if batches:
            pool = ReadingPool(self._reader.fill, self.preprocess, 512, self.workers)
            try:
                yield from self._readable(pool.read(batches))
            finally:
                pool.close()

    def _streamed(
        self, batches: Iterable[npt.NDArray[np.int64]], epoch: int
    ) -> Iterator[tuple[Pixels, npt.NDArray[np.int64]]]:
        """The readable images of each batch; after a whole epoch, workers are kept for the next."""
        if not self.workers:
            yield from self._readable(read_here(self._reader, batches, epoch))
            return
        largest = 2 * math.ceil(self.batch_size / 2 / self.part[1])
        pool = self._pool or ReadingPool(self._reader.fill, self.preprocess, largest, self.workers)
        self._pool = None  # an epoch that begins before this one ends has its own
        try:
            yield from self._readable(pool.read(batches, epoch))
            self._pool = pool
        finally:
            if self._pool is not pool:
                pool.close()

    def _readable(
        self, read: Iterator[tuple[npt.NDArray[np.int64], Pixels, dict[int, str]]]
    ) -> Iterator[tuple[Pixels, npt.NDArray[np.int64]]]:
        """Leave out unreadable images, and note them."""
        for indices, pixels, faults in read:
            for row, reason in faults.items():
                index = int(indices[row]) % len(self.images)
                self._broken[index] = True
                if self._kept is not None:
                    self._unread[index] = False
                self.faults.add(str(self.images.sources[index]), reason)
            good = [row for row in range(len(indices)) if row not in faults]
            yield (pixels[good], indices[good]) if faults else (pixels, indices)


def seconds_to_read(images: ImageSet, preprocess: Preprocess, count: int = 32) -> float:
    """Seconds in which a process reads an image of a split, by the first of them; the first pass warms up."""
    reader, indices = ImageReader(images.sources, preprocess, None, 1.0), np.arange(min(count, len(images)))
    seconds = math.inf
    for _ in range(2):
        began = time.monotonic()
        for _ in read_here(reader, [indices], 0):
            seconds = (time.monotonic() - began) / len(indices)
    return seconds


def woven(orders: Sequence[npt.NDArray[np.int64]], batch_size: int) -> npt.NDArray[np.int64]:
    """One order, of which each batch has a part of each of several, one after the other, as machines cut it.

    At the end, where one of them has no whole part left, it has what is left of all of them.
    """
    parts = np.diff(even_cuts(batch_size, len(orders)))
    batches = min(len(order) // part for order, part in zip(orders, parts, strict=True))
    whole = [
        order[: batches * part].reshape(batches, part) for order, part in zip(orders, parts, strict=True)
    ]
    rest = [order[batches * part :] for order, part in zip(orders, parts, strict=True)]
    return np.concatenate([np.concatenate(whole, axis=1).ravel(), *rest])


def even_cuts(count: int, parts: int) -> list[int]:
    """Cuts of `count` images into parts of about the same size, at even places: parts + 1 numbers."""
    pairs = math.ceil(count / 2)
    return [min(2 * (pairs * part // parts), count) for part in range(parts + 1)]


_STREAM = 0x62616C61
"""Makes the choice of the images independent of their order, which is drawn from the same seed and epoch."""


def balanced_order(
    images: ImageSet, among: npt.NDArray[np.int64], seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """An epoch of len(among) places for the images `among` (indices), each class equally often: (n,).

    Each of the K classes gets n // K places, and n % K random ones get one more. The places of a class take
    its images in turn, in a random order: a small class has repetitions, a large one has images that are left
    out. The r-th repetition of an image, r from 1, has its index plus r len(images), so that random draws by
    index differ. Every class must have an image.
    """
    N, K, n = len(images), len(images.class_names), len(among)
    generator = np.random.default_rng([seed, epoch, _STREAM])
    places = np.full(K, n // K)
    places[generator.permutation(K)[: n % K]] += 1
    chosen = []
    for members, count in zip(images.truth.take(among).by_class(), places, strict=True):
        turn = np.arange(count)
        mixed = generator.permutation(among[members])
        chosen.append(mixed[turn % len(members)] + N * (turn // len(members)))
    drawn = np.concatenate(chosen)
    # In the set's own order: shards are read forward.
    return drawn[images.subset(images.name, drawn % N).order(seed, epoch)]
