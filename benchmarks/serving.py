"""`vitascope serve` under load: what batching gains at capacity, and what becomes of three times as much.

    python benchmarks/serving.py                            # digits, CIFAR-10's size, ViT-Ti/16 and ViT-B/16
    python benchmarks/serving.py --models runs/photos --picture cat.jpg

Capacity is measured in a closed loop, pictures one at a time beside batches, in interleaved rounds against
two servers that both live throughout. The overload is an open loop (`load.py`) on a third server with its
default limits: the requests of the capacity, and of three times it, evenly spaced. Goodput is the answers of
status 200 per second beside those at 1x. Client and server share the machine: the client is bound to the last
core, and the table says which share of that core it takes. The servers may use all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import shlex
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

from contest import describe_machine, describe_versions, positive
from reports import markdown_table, note, publish
from vitascope.model.classifier import build
from vitascope.model.config import ViTConfig
from vitascope.model.sizes import named_config
from vitascope.weights.saving import save_pretrained

PATIENCE_MS = 600_000
"""The deadline where capacity is measured: nothing is refused."""
DEADLINE_MS = 2000
"""The deadline of the overload, the server's default."""
OVERLOAD = 3
CAPACITY_HEADER = ("model", "one at a time", "batches", "slowest to fastest round", "gain", "client late by")
OVERLOAD_HEADER = (
    *("model", "load", "asked/s", "200s/s", "goodput", "200", "429", "504", "other"),
    *("p50 ms", "p99 ms", "429's p99 ms", "RSS before, peak MiB", "recovered s"),
    *("client late by", "client's CPU"),
)


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is measured."""

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
                raise RuntimeError("the server has ended; it has said why above")
            time.sleep(0.1)

    def answers(self, path: str) -> bool:
        """Whether a path answers 200."""
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return urllib.request.urlopen(self.url + path).status == 200
        return False

    def rss(self, field: str) -> float:
        """MiB of memory: `VmRSS`, or `VmHWM` for the most so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition(f"{field}:")[2].split()[0]) / 1024

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def serving(ref: str, *options: str) -> Iterator[Server]:
    """A server, stopped at the end."""
    server = Server(ref, *options)
    try:
        yield server
    finally:
        server.close()


def load(server: Server, picture: Path, *options: str) -> dict[str, Any]:
    """Make a load from a process on the last core; its numbers."""
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
    """Pictures a second, in each round."""

    alone: tuple[float, ...]
    batched: tuple[float, ...]
    lateness_ms: float

    @property
    def gain(self) -> float:
        """How many times the throughput of one at a time, by the medians."""
        return statistics.median(self.batched) / statistics.median(self.alone)


def measure_capacity(served: Served, given: argparse.Namespace) -> Capacity:
    """Closed loops against a server that computes one picture at a time, and one that makes batches."""
    patient = ("--deadline-ms", str(PATIENCE_MS), "--queue", str(2 * given.concurrency))
    alone, batched, late = [], [], [0.0]
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
            note(f"{served.name}, round {number + 1}: {alone[-1]:.0f} and {batched[-1]:.0f} a second")
    return Capacity(tuple(alone), tuple(batched), max(late))


def measure_overload(served: Served, rate: float, given: argparse.Namespace) -> list[tuple[str, ...]]:
    """Rows of the table: the capacity, and three times it, as an open loop."""
    rows: list[tuple[str, ...]] = []
    at_capacity = 0.0
    limits = ("--deadline-ms", str(DEADLINE_MS), "--max-batch", str(given.max_batch))
    with serving(served.ref, *limits) as server:
        load(server, served.picture, "--concurrency", "8", "--seconds", "2")  # its memory, warm
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
    """What a row says after the model and the load."""
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
    """Seconds from now until the server says that it is ready again."""
    start = time.perf_counter()
    while not server.answers("/readyz"):
        time.sleep(0.05)
    return time.perf_counter() - start


def own_models(folder: Path) -> list[Served]:
    """Models of usual sizes with random weights, as fast as trained ones, and a picture for each."""
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
        models.append(Served(name, str(ref), made_picture(folder / f"{number}.jpg", config.image_size)))
    return models


def made_picture(path: Path, size: tuple[int, int]) -> Path:
    """A JPEG that is smooth, as photos are, and twice as large as a model of 224 pixels takes it."""
    height, width = (side if side < 64 else 2 * side for side in size)
    coarse = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)
    return path


def report(given: argparse.Namespace, heading: str, models: Sequence[Served]) -> str:
    """Measure, and write it down."""
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
        f"{heading}\n\n## At capacity, pictures a second\n\n"
        f"{markdown_table(CAPACITY_HEADER, capacity_rows)}\n\n"
        f"## At its capacity and at {OVERLOAD} times it\n\n{markdown_table(OVERLOAD_HEADER, overload_rows)}"
    )


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[], help="MODEL arguments; default: usual sizes")
    parser.add_argument("--only", nargs="+", type=int, help="of the usual sizes only these, from 0")
    parser.add_argument("--picture", type=Path, help="what is sent to --models")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a closed loop in a round")
    parser.add_argument("--overload-seconds", type=float, default=20.0, help="of each open loop")
    parser.add_argument(
        "--concurrency", type=positive, default=64, help="requests at a time in a closed loop"
    )
    parser.add_argument("--max-batch", type=positive, default=32)
    parser.add_argument("--out", action="store_true", help="write the report to benchmarks/results too")
    given = parser.parse_args(argv)
    if given.models and given.picture is None:
        parser.error("--models needs a --picture to send")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    given = options(argv)
    heading = (
        f"# `vitascope serve` under load\n\n- machine: {describe_machine()}\n"
        f"- versions: {describe_versions()}\n"
        f"- date: {datetime.date.today().isoformat()}\n- command: `{shlex.join(['python', *sys.argv])}`\n"
        f"- method: the client is bound to one core, which the server uses too; at capacity "
        f"{given.concurrency} requests at a time, {given.rounds} interleaved rounds of {given.seconds:g} s, "
        f"medians; overload: an open loop of {given.overload_seconds:g} s, evenly spaced, latency from the "
        f"time at which a request was to be sent; deadline {DEADLINE_MS} ms, "
        f"batches of {given.max_batch} at most"
    )
    with tempfile.TemporaryDirectory() as folder:
        if given.models:
            models = [Served(ref, ref, given.picture) for ref in given.models]
        else:
            models = own_models(Path(folder))
            models = [models[number] for number in given.only] if given.only else models
        publish("serving", report(given, heading, models), given)


if __name__ == "__main__":
    main()
