"""Compare the throughput of reading JPEGs for training at 224 pixels: vitascope and torchvision.

All entrants deliver the same: batches of normalized floats, cropped at random (8% to 100% of the area,
bilinear, antialiased) and flipped with probability 1/2, in an order that is shuffled for every epoch. Each
entrant runs in a process of its own with its workers. The rounds, an epoch each, are interleaved (A B C, A B
C, ...), so a change in the machine's speed affects all entrants. Ratios are to torchvision with the same
number of workers.

    python benchmarks/reading.py                  # generated, photo-like images
    python benchmarks/reading.py --data FOLDER    # FOLDER/<class>/*.jpg
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from conditions import Conditions
from contest import missing_peers, positive, rate
from reports import command_line, markdown_table, note, publish
from vitascope.data.augment import Augmentation
from vitascope.data.datasets import read_data, sampled_sizes
from vitascope.data.loading import Loader
from vitascope.data.pack import pack
from vitascope.data.preprocess import Preprocess
from vitascope.data.splits import ImageSet
from vitascope.model.hardware import reuse_freed_memory

SIZE = 224
SMALLEST = 0.08
"""The least share of the area that a crop keeps."""
PACKED_SIZE = 256
"""The shorter side of images from `vitascope pack --image-size`: a usual choice for training at 224."""
PREPROCESS = Preprocess(image_size=(SIZE, SIZE), interpolation="bilinear")

NOTES = f"""\
All entrants deliver batches of normalized floats: images cropped at random ({SMALLEST:.0%} to 100% of the
area, bilinear) and flipped with probability 1/2. torchvision runs ImageFolder, RandomResizedCrop,
RandomHorizontalFlip, ToTensor and Normalize in the persistent workers of a DataLoader. Shards contain the
bytes of the files. Shards of {PACKED_SIZE} pixels contain images resized to a shorter side of {PACKED_SIZE}
(`vitascope pack --image-size {PACKED_SIZE}`): fewer pixels to decode, but less sharp crops."""

Epoch = Callable[[int], Iterator[Tensor]]
"""Maps the number of an epoch to its batches, float32 (B, 3, H, W)."""
PEER = "torchvision"


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A way to read a folder, and its number of workers."""

    name: str
    build: Callable[[int, int], Epoch]
    """Builds epochs from the batch size and the number of workers."""
    workers: int


def torchvision_epochs(folder: Path, batch_size: int, workers: int) -> Epoch:
    """ImageFolder and DataLoader with the transforms of torchvision's reference training."""
    from contestants import make_torchvision_importable

    make_torchvision_importable()
    from torchvision import datasets, transforms

    steps = [
        transforms.RandomResizedCrop(SIZE, scale=(SMALLEST, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(PREPROCESS.mean, PREPROCESS.std),
    ]
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(str(folder), transforms.Compose(steps)),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def epoch(number: int) -> Iterator[Tensor]:
        del number  # its order comes from torch's generator
        for images, _ in loader:
            yield images

    return epoch


def folder_epochs(folder: Path, batch_size: int, workers: int) -> Epoch:
    """Our loader on the same files."""
    return our_epochs(read_data(str(folder)).by_name["all"], batch_size, workers)


def shard_epochs(folder: Path, batch_size: int, workers: int) -> Epoch:
    """Our loader on tar shards."""
    return our_epochs(read_data(str(folder)).by_name["train"], batch_size, workers)


def our_epochs(images: ImageSet, batch_size: int, workers: int) -> Epoch:
    """The data path of `vitascope train` before the model, with its allocator setting."""
    reuse_freed_memory()
    loader = Loader(
        images, PREPROCESS, batch_size, seed=0, workers=workers, memory_budget=0, crop_scale=SMALLEST
    )
    augmentation = Augmentation(flip=0.5)

    def epoch(number: int) -> Iterator[Tensor]:
        for batch in loader.epoch(number):
            varied = augmentation(batch.pixels, batch.indices, seed=0, epoch=number)
            yield PREPROCESS.normalize_(varied)

    return epoch


def serve(connection: Connection, build: Callable[[], Epoch]) -> None:
    """Read one epoch per received number, send its images and seconds; the main function of a process."""
    torch.set_num_threads(1)  # the same cores for all entrants: one for the batches and one per worker
    epoch = build()
    while (number := connection.recv()) is not None:
        start = time.perf_counter()
        images = 0
        for batch in epoch(number):
            assert batch.shape[1:] == (3, SIZE, SIZE), batch.shape
            assert batch.dtype == torch.float32, batch.dtype
            images += len(batch)
        connection.send((images, time.perf_counter() - start))


class Process:
    """An entrant's process. It is not a daemon, because daemons cannot have workers."""

    def __init__(self, entrant: Entrant, batch_size: int) -> None:
        self._connection, far_end = multiprocessing.Pipe()
        build = partial(entrant.build, batch_size, entrant.workers)
        self._process = multiprocessing.Process(target=serve, args=(far_end, build))
        self._process.start()
        far_end.close()

    def read(self, epoch: int) -> float:
        """Read an epoch; returns images per second."""
        self._connection.send(epoch)
        images, seconds = self._connection.recv()
        return images / seconds

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(ConnectionError):  # it has failed and printed its traceback
            self._connection.send(None)
        self._process.join()


def measure(entrants: list[Entrant], batch_size: int, rounds: int) -> list[list[float]]:
    """Measure images per second of each entrant in each round, after an epoch that fills the caches."""
    processes = [Process(entrant, batch_size) for entrant in entrants]
    try:
        rates: list[list[float]] = [[] for _ in entrants]
        for number in range(rounds + 1):
            for process, entrant, found in zip(processes, entrants, rates, strict=True):
                value = process.read(number)
                note(f"round {number}/{rounds}: {entrant.name}, {entrant.workers} workers: {value:.0f} img/s")
                if number:
                    found.append(value)
    finally:
        for process in processes:
            process.close()
    return rates


def make_photographs(root: Path, count: int) -> Path:
    """Write photo-like JPEGs of 500 x 375, quality 90, in two classes: smooth random fields with grain."""
    rng = np.random.default_rng(0)
    for number in range(count):
        width, height = (500, 375) if number % 3 else (375, 500)
        field = np.zeros((height, width, 3))
        for octave, strength in ((6, 60), (20, 40), (70, 25), (200, 14)):  # energy falls as in photographs
            coarse = rng.normal(size=(octave * height // width + 1, octave, 3)).astype(np.float32)
            for channel in range(3):
                band = Image.fromarray(coarse[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
                field[..., channel] += strength * np.asarray(band)
        field += rng.normal(scale=5, size=(height, width, 1))
        path = root / f"class{number % 2}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(field + 128, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path, quality=90)
    return root


def entrants_of(folder: Path, scratch: Path, workers: list[int]) -> list[Entrant]:
    """All available entrants, by number of workers; packs the shards into `scratch`."""
    builds: dict[str, Callable[[int, int], Epoch]] = {
        "vitascope, folder": partial(folder_epochs, folder),
        "vitascope, shards": partial(shard_epochs, pack(str(folder), scratch / "shards").folder),
        f"vitascope, shards of {PACKED_SIZE} pixels": partial(
            shard_epochs, pack(str(folder), scratch / "small", image_size=PACKED_SIZE).folder
        ),
    }
    if importlib.util.find_spec(PEER) is not None:
        builds = {PEER: partial(torchvision_epochs, folder), **builds}
    return [Entrant(name, build, count) for count in workers for name, build in builds.items()]


def table(entrants: list[Entrant], rates: list[list[float]]) -> str:
    """Medians over the rounds; ratios to torchvision are medians of the ratios within the rounds."""
    theirs = {e.workers: found for e, found in zip(entrants, rates, strict=True) if e.name == PEER}
    rows = []
    for entrant, found in zip(entrants, rates, strict=True):
        share = "-"
        if entrant.workers in theirs:
            pairs = zip(found, theirs[entrant.workers], strict=True)
            share = f"{statistics.median(ours / peer for ours, peer in pairs):.2f}"
        spread = f"{rate(min(found))} to {rate(max(found))}"
        rows.append((entrant.name, str(entrant.workers), rate(statistics.median(found)), spread, share))
    header = ("entrant", "workers", "img/s", "slowest to fastest round", "of torchvision")
    return markdown_table(header, rows)


def describe_pictures(folder: Path) -> str:
    """The number of images and their median size."""
    images = read_data(str(folder)).by_name["all"]
    height, width = map(int, np.median(sampled_sizes(images), axis=0))
    size = statistics.median(Path(str(source)).stat().st_size for source in images.sources)
    return f"{len(images):,} images, median {width} x {height} pixels and {size / 1e3:.0f} kB"


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of <class>/*.jpg (default: generated images)")
    parser.add_argument(
        "--images", type=positive, default=512, help="number of generated images (default 512)"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--batch-size", type=positive, default=64, help="default 64")
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default 5)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    conditions = Conditions.now()  # before this script puts load on it
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.data or make_photographs(Path(scratch) / "pictures", arguments.images)
        entrants = entrants_of(folder, Path(scratch), arguments.workers)
        pictures = describe_pictures(folder)
        rates = measure(entrants, arguments.batch_size, arguments.rounds)
    head = conditions.heading(
        f"Reading JPEGs for training at {SIZE} pixels",
        images=pictures + ("" if arguments.data else ", generated: smooth random fields with grain"),
        method=f"interleaved rounds: {arguments.rounds}, an epoch each, after an untimed epoch; "
        f"batch {arguments.batch_size}; one thread per process; medians",
    )
    publish("reading", f"{head}\n\n{table(entrants, rates)}\n\n{missing_peers((PEER,))}{NOTES}", arguments)


if __name__ == "__main__":
    main()
