"""Compare reading the pictures of shards over HTTP, with a warm cache, with reading them from the disk.

Another process of this machine serves the shards. Pictures are read one after the other in the order of an
epoch, encoded (nothing but reading is measured), and decoded, as training reads them. Rounds are interleaved
(disk, cache, disk, cache, ...), and the share is computed within each round, so a change in the machine's
speed affects both. Then the shards are read with a cache that is smaller than they are.

    python benchmarks/remote_shards.py SHARDS --out        # SHARDS of `vitascope pack`; a file in results/
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import reports
from conditions import Conditions
from vitascope.data.datasets import read_data
from vitascope.data.splits import ImageSet
from vitascope.models.decoding import Encoded, ImageSource, read_image
from vitascope.remote import cache

ROUNDS = 40
PER_ROUND = {"encoded": 2000, "decoded": 200}
"""Pictures in a round, by what is done with them."""
READS: dict[str, Callable[[ImageSource], object]] = {
    "encoded": lambda source: cast("Encoded", source).read_bytes(),
    "decoded": read_image,
}


def serve(folder: str, sending: Any) -> None:
    """Serve a folder until the process ends."""
    from tests.stores import files_of, serving

    with serving(files_of(Path(folder))) as server:
        sending.send(server.url)
        time.sleep(1e6)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a folder, while another process serves it."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=serve, args=(str(folder), sending), daemon=True)
    process.start()
    try:
        yield receiving.recv()
    finally:
        process.terminate()
        process.join()


def images_of(place: str) -> ImageSet:
    """The training images of shards, or all."""
    found = read_data(place).by_name
    return found.get("train") or found["all"]


def seconds(images: ImageSet, indices: list[int], read: Callable[[ImageSource], object]) -> float:
    """Time to read some images."""
    began = time.perf_counter()
    for index in indices:
        read(images.sources[index])
    return time.perf_counter() - began


def compared(local: ImageSet, remote: ImageSet, kind: str) -> list[str]:
    """A row of the table: pictures per second of both, and the share with its range, in the median."""
    order, count = local.order(0, 0).tolist(), PER_ROUND[kind]
    rates: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        begin = number * count % (len(order) - count)
        indices = order[begin : begin + count]
        disk, cached = (count / seconds(images, indices, READS[kind]) for images in (local, remote))
        rates.append((disk, cached))
    shares = sorted(cached / disk for disk, cached in rates)
    low, high = shares[ROUNDS // 4], shares[-ROUNDS // 4]
    numbers = [f"{statistics.median(each):,.0f}" for each in zip(*rates, strict=True)]
    return [kind, *numbers, f"{statistics.median(shares):.2f}", f"{low:.2f} to {high:.2f}"]


def main() -> None:
    parser = reports.command_line(__doc__)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--small-cache-gb", type=float, default=0.07)
    options = parser.parse_args()
    conditions = Conditions.now()
    size = sum(path.stat().st_size for path in options.shards.rglob("*.tar")) / 1e6
    with tempfile.TemporaryDirectory() as folder, served(options.shards) as url:
        os.environ["VITASCOPE_CACHE"] = folder
        local = images_of(str(options.shards))
        began = time.perf_counter()
        remote = images_of(url)
        opened = time.perf_counter() - began
        began = time.perf_counter()
        images_of(url)
        again = time.perf_counter() - began
        rows = [compared(local, remote, kind) for kind in READS]
        whole = cache.size_on_disk() / 1e6
        os.environ |= {
            "VITASCOPE_CACHE": f"{folder}/small",
            "VITASCOPE_REMOTE_GB": str(options.small_cache_gb),
        }
        remote = images_of(url)
        order = remote.order(0, 0).tolist()
        small = len(order) / seconds(remote, order, READS["encoded"])
        largest = cache.size_on_disk() / 1e6
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    head = ["pictures", "disk, per s", "warm cache, per s", "share", "middle half of the rounds"]
    report = "\n".join(
        [
            conditions.heading(
                "Reading shards over HTTP",
                shards=f"{size:,.0f} MB, {len(order):,} pictures, median of {ROUNDS} interleaved rounds",
            ),
            "",
            reports.markdown_table(head, rows),
            "",
            f"- opening: {opened:.1f} s with an empty cache (all shards are fetched), {again:.2f} s again",
            f"- cache: {whole:,.0f} MB",
            f"- an epoch with a cache of at most {options.small_cache_gb * 1e3:,.0f} MB: {small:,.0f} "
            f"encoded pictures per s, {largest:,.0f} MB on the disk afterwards",
            f"- memory of the process, at most: {memory:,.0f} MB",
        ]
    )
    reports.publish("remote_shards", report, options)


if __name__ == "__main__":
    main()
