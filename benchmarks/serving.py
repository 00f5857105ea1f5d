"""Measure `vitascope serve` under load: the gain of batching at capacity, and overload at three times that.

    python benchmarks/serving.py                            # digits, CIFAR-10's size, ViT-Ti/16 and ViT-B/16
    python benchmarks/serving.py --models runs/photos --picture cat.jpg

A closed loop measures capacity with two servers, one that computes images one at a time and one that computes
batches, in interleaved rounds; both run throughout. The overload is an open loop (`load.py`) on a third
server with default limits: evenly spaced requests at the rate of the capacity, and at three times that.
Goodput is the rate of answers with status 200, relative to that at 1x. Client and server share the machine.
The client is bound to the last core, and the table shows its share of that core. The servers may use all
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, note, publish
from vitascope.models.config import ViTConfig
from vitascope.models.sizes import named_config
from vitascope.models.vision_model import build
from vitascope.models.weights.loading import save_pretrained

PATIENCE_MS = 600_000
"""The deadline for measuring capacity, so long that no request is rejected."""
DEADLINE_MS = 2000
"""The deadline of the overload, the server's default."""
OVERLOAD = 3
CAPACITY_HEADER = ("model", "one at a time", "batches", "slowest to fastest round", "gain", "client lateness")
OVERLOAD_HEADER = (
    *("model", "load", "requests/s", "answers/s", "goodput", "200", "429", "504", "other"),
    *("p50 ms", "p99 ms", "p99 ms of 429", "RSS before, peak MiB", "recovery s"),
    *("client lateness", "client CPU"),
)


@dataclasses.dataclass(frozen=True)
class Served:
    """A measured model."""

    name: str
    ref: str
    picture: Path


class Server:
    """`vitascope serve` in a process of its own."""

    def __init__(self, ref: str, *options: str) -> None:
        command = [sys.executable, "-m", "vitascope.cli", "serve", ref, "--port", "0", "--no-access-log"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().partition(" at ")[2].partition(" ")[0]
        while not self.answers("/readyz"):
            if self._process.poll() is not None:
                raise RuntimeError("the server has ended; its error is above")
            time.sleep(0.1)

    def answers(self, path: str) -> bool:
        """Whether the answer for a path has status 200."""
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return urllib.request.urlopen(self.url + path).status == 200
        return False

    def rss(self, field: str) -> float:
        """Memory in MiB: `VmRSS`, or `VmHWM` for the peak so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition(f"{field}:")[2].split()[0]) / 1024

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def serving(ref: str, *options: str) -> Iterator[Server]:
    """A running server; stops it at the end."""
    server = Server(ref, *options)
    try:
        yield server
    finally:
        server.close()


def load(server: Server, picture: Path, *options: str) -> dict[str, Any]:
    """Run a load from a process on the last core; returns its numbers."""
    cores = sorted(os.sched_getaffinity(0))
    script = str(Path(__file__).with_name("load.py"))
    command = [sys.executable, script, f"{server.url}/v1/predict?top_k=1", str(picture), *options]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores[-1:]),
    )
    return json.loads(done.stdout)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Images per second in each round."""

    alone: tuple[float, ...]
    batched: tuple[float, ...]
    lateness_ms: float

    @property
    def gain(self) -> float:
        """The median throughput of batches over that of one image at a time."""
        return statistics.median(self.batched) / statistics.median(self.alone)


def measure_capacity(served: Served, given: argparse.Namespace) -> Capacity:
    """Run closed loops on a server that computes one image at a time, and on one that computes batches."""
    patient = ("--deadline-ms", str(PATIENCE_MS), "--queue", str(2 * given.concurrency))
    alone: list[float] = []
    batched: list[float] = []
    late = [0.0]
    closed = ("--concurrency", str(given.concurrency), "--seconds", str(given.seconds))
    with (
        serving(served.ref, *patient, "--max-batch", "1") as single,
        serving(served.ref, *patient, "--max-batch", str(given.max_batch)) as batching,
    ):
        for number in range(given.rounds):
            for server, rates in ((single, alone), (batching, batched)):
                numbers = load(server, served.picture, *closed)
                rates.append(numbers["accepted_per_second"])
                late.append(numbers["own_lateness_p99_ms"])
            note(f"{served.name}, round {number + 1}: {alone[-1]:.0f} and {batched[-1]:.0f} images/s")
    return Capacity(tuple(alone), tuple(batched), max(late))


def measure_overload(served: Served, rate: float, given: argparse.Namespace) -> list[tuple[str, ...]]:
    """Run open loops at the capacity and at three times that; returns the table's rows."""
    rows: list[tuple[str, ...]] = []
    at_capacity = 0.0
    limits = ("--deadline-ms", str(DEADLINE_MS), "--max-batch", str(given.max_batch))
    with serving(served.ref, *limits) as server:
        load(server, served.picture, "--concurrency", "8", "--seconds", "2")  # warm-up, for a stable RSS
        for times in (1, OVERLOAD):
            before = server.rss("VmRSS")
            asked = times * rate
            numbers = load(
                server, served.picture, "--rate", str(asked), "--seconds", str(given.overload_seconds)
            )
            recovered = seconds_until_ready(server)
            note(f"{served.name}, {times} times its capacity: {numbers}")
            good = numbers["accepted_per_second"]
            at_capacity = at_capacity or good
            cells = overload_cells(numbers, asked, good / at_capacity, before, server, recovered)
            rows.append((served.name, f"{times}x", *cells))
    return rows


def overload_cells(
    numbers: dict[str, Any],
    asked: float,
    goodput: float,
    before: float,
    server: Server,
    recovered: float,
) -> tuple[str, ...]:
    """A row's cells after the model and the load."""
    counts = {name: numbers.get(f"status_{name}", 0) for name in (200, 429, 504)}
    others = numbers["requests"] - sum(counts.values())
    return (
        f"{asked:.0f}",
        f"{numbers['accepted_per_second']:.0f}",
        f"{goodput:.2f}",
        *(str(count) for count in counts.values()),
        str(others),
        *(f"{numbers[name]:.0f}" for name in ("p50_ms", "p99_ms", "refused_p99_ms")),
        f"{before:.0f}, {server.rss('VmHWM'):.0f}",
        f"{recovered:.1f}",
        f"{numbers['own_lateness_p99_ms']:.0f} ms",
        f"{numbers['own_cpu']:.2f}",
    )


def seconds_until_ready(server: Server) -> float:
    """Wait until the server reports that it is ready; returns seconds."""
    start = time.perf_counter()
    while not server.answers("/readyz"):
        time.sleep(0.05)
    return time.perf_counter() - start


def own_models(folder: Path) -> list[Served]:
    """Write models of usual sizes with random weights, and an image for each."""
    cifar = {"patch_size": 4, "embed_dim": 128, "depth": 8, "num_heads": 4, "num_classes": 10}
    digits = {"patch_size": 8, "embed_dim": 96, "depth": 3, "num_heads": 6, "num_classes": 10}
    configs = {
        "digits (32 px, 17 tokens, 96 wide, 3 layers)": ViTConfig.from_dict({"image_size": 32, **digits}),
        "CIFAR-10 (32 px, 65 tokens, 128 wide, 8 layers)": ViTConfig.from_dict({"image_size": 32, **cifar}),
        "ViT-Ti/16 (224 px)": named_config("vit_ti16"),
        "ViT-B/16 (224 px)": named_config("vit_b16"),
    }
    models = []
    for number, (name, config) in enumerate(configs.items()):
        ref = save_pretrained(build(config), folder / f"model-{number}")
        models.append(Served(name, str(ref), made_picture(folder / f"{number}.jpg", config.image_hw)))
    return models


def made_picture(path: Path, size: tuple[int, int]) -> Path:
    """Write a smooth JPEG: small models get their own size, models of 224 pixels twice that."""
    height, width = (side if side < 64 else 2 * side for side in size)
    coarse = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)
    return path


def report(given: argparse.Namespace, heading: str, models: Sequence[Served]) -> str:
    """Measure all models and return the report."""
    capacity_rows, overload_rows = [], []
    for served in models:
        capacity = measure_capacity(served, given)
        rate = statistics.median(capacity.batched)
        capacity_rows.append(
            (
                served.name,
                f"{statistics.median(capacity.alone):.0f}",
                f"{rate:.0f}",
                f"{min(capacity.batched):.0f} to {max(capacity.batched):.0f}",
                f"{capacity.gain:.2f}",
                f"{capacity.lateness_ms:.0f} ms",
            )
        )
        overload_rows += measure_overload(served, rate, given)
    return (
        f"{heading}\n\n## At capacity, images per second\n\n"
        f"{markdown_table(CAPACITY_HEADER, capacity_rows)}\n\n"
        f"## At capacity and at {OVERLOAD} times that\n\n{markdown_table(OVERLOAD_HEADER, overload_rows)}"
    )


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=[], help="MODEL arguments; default: usual sizes")
    parser.add_argument("--only", nargs="+", type=int, help="only these of the usual sizes, counted from 0")
    parser.add_argument("--picture", type=Path, help="the image to send to --models")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per closed loop and round")
    parser.add_argument("--overload-seconds", type=float, default=20.0, help="seconds per open loop")
    parser.add_argument(
        "--concurrency", type=positive, default=64, help="concurrent requests of a closed loop"
    )
    parser.add_argument("--max-batch", type=positive, default=32)
    given = parser.parse_args(argv)
    if given.models and given.picture is None:
        parser.error("--models needs a --picture to send")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    given = options(argv)
    method = (
        f"the client is bound to one core, which the server uses too; at capacity: "
        f"{given.concurrency} concurrent requests, {given.rounds} interleaved rounds of {given.seconds:g} s, "
        f"medians; overload: an open loop of {given.overload_seconds:g} s, evenly spaced, latency from the "
        f"scheduled time of a request; deadline {DEADLINE_MS} ms, batches of at most {given.max_batch}"
    )
    heading = Conditions.now().heading("`vitascope serve` under load", method=method)
    with tempfile.TemporaryDirectory() as folder:
        if given.models:
            models = [Served(ref, ref, given.picture) for ref in given.models]
        else:
            models = own_models(Path(folder))
            models = [models[number] for number in given.only] if given.only else models
        publish("serving", report(given, heading, models), given)


if __name__ == "__main__":
    main()
