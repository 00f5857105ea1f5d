"""Reading pictures of shards over HTTP against reading them from the disk, with the cache cold and warm.

    python -m benchmarks.remote_shards SHARDS [--images 20000] [--cache-gb 1] [--out FILE]

SHARDS is a folder of `vitascope pack`. A web server of this machine serves it in another process. Pictures are
read in the order of two epochs, encoded and undecoded, so that nothing but reading is measured; then in one
process with decoding, as training does. Prints the memory of the reading process and the size of the cache, and
repeats it with a cache that is smaller than the shards.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitascope.data.datasets import read_data
from vitascope.data.decoding import Encoded, read_image
from vitascope.data.splits import ImageSet
from vitascope.remote import cache

REPEATS = 3
"""Measurements of what can be repeated; the median counts."""


def serve(folder: str, sending: Any) -> None:
    """Serve a folder until the process ends."""
    from tests.stores import files_of, serving

    with serving(files_of(Path(folder))) as server:
        sending.send(server.url)
        time.sleep(1e9)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a folder, while another process serves it."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(str(folder), sending), daemon=True
    )
    process.start()
    try:
        yield receiving.recv()
    finally:
        process.terminate()
        process.join()


def encoded_per_second(images: ImageSet, count: int, epoch: int) -> float:
    """Pictures read per second, in the order of an epoch."""
    order = images.order(0, epoch)[:count].tolist()
    began = time.perf_counter()
    for index in order:
        source = images.sources[index]
        assert isinstance(source, Encoded)
        source.read_bytes()
    return len(order) / (time.perf_counter() - began)


def decoded_per_second(images: ImageSet, count: int) -> float:
    """Pictures read and decoded per second, in the order of an epoch."""
    order = images.order(0, 0)[:count].tolist()
    began = time.perf_counter()
    for index in order:
        read_image(images.sources[index])
    return len(order) / (time.perf_counter() - began)


def images_of(place: str) -> ImageSet:
    """The training images of shards, or all."""
    found = read_data(place).by_name
    return found.get("train") or found["all"]


def measured(local: ImageSet, remote: ImageSet, count: int) -> dict[str, float]:
    """Rates of both; their measurements alternate, so that both see the same load of the machine."""
    rates: dict[str, list[float]] = {}
    for epoch in range(REPEATS):
        for name, images in (("local", local), ("warm", remote)):
            rates.setdefault(f"{name}, encoded", []).append(encoded_per_second(images, count, epoch))
            rates.setdefault(f"{name}, decoded", []).append(decoded_per_second(images, count // 10))
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--small-cache-gb", type=float, default=0.08)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(options.shards) as url:
        os.environ["VITASCOPE_CACHE"] = folder
        result: dict[str, Any] = {"images": options.images}
        result["shards_mb"] = sum(path.stat().st_size for path in options.shards.rglob("*.tar")) / 1e6
        local = images_of(str(options.shards))
        began = time.perf_counter()
        remote = images_of(url)
        result["seconds to open, nothing cached"] = time.perf_counter() - began
        began = time.perf_counter()
        images_of(url)
        result["seconds to open, cached"] = time.perf_counter() - began
        encoded_per_second(remote, len(remote), 0)  # everything is in the cache
        result["images per second"] = measured(local, remote, options.images)
        result["cache_mb"] = cache.size_on_disk() / 1e6
        rates = result["images per second"]
        for kind in ("encoded", "decoded"):
            result[f"warm / local, {kind}"] = rates[f"warm, {kind}"] / rates[f"local, {kind}"]
        os.environ["VITASCOPE_REMOTE_GB"] = str(options.small_cache_gb)
        os.environ["VITASCOPE_CACHE"] = f"{folder}/small"
        result["small_cache"] = {
            "limit_mb": options.small_cache_gb * 1e3,
            "images per second, encoded": encoded_per_second(remote, options.images, 1),
            "cache_mb": cache.size_on_disk() / 1e6,
        }
        result["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
