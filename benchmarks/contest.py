"""A contest of speed: every entrant in a process of its own, one computing at a time, in several rounds.

The rounds are interleaved (A B C, A B C, ...), so that a machine that changes its speed changes it for all.
A step is what is timed; an entrant's time in a round is the median of its steps, and its result the median
over the rounds, with the slowest and the fastest round beside it. The processes live from the first round
to the last: what a process keeps between steps, such as its memory, it keeps here as it does with its users.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from reports import markdown_table, note
from vitascope.model.hardware import bf16_units

Step = Callable[[], object]
"""What is timed."""
Preparation = Callable[[], AbstractContextManager[Step]]
"""Builds a step in the entrant's process; the context ends when the process is given another. Picklable."""

PEERS = ("timm", "transformers", "torchvision")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISION_OF = {dtype: name for name, dtype in DTYPES.items()}

MATMUL_SHAPES = ((2048, 2048, 2048), (8320, 768, 3072))
"""Rows, inner size, columns: a cube, and the first layer of ViT-B's MLP over 128 images of 65 tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """Who competes, and how."""

    name: str
    precision: str
    """As it was asked for: fp32, bf16 or auto."""
    dtype: torch.dtype
    """What it computes in."""
    prepare: Preparation
    images: int
    """Images in a step."""
    flops: int
    """Floating-point operations of a step; a multiply-add counts as 2."""

    @property
    def precision_label(self) -> str:
        """The precision as asked for, and what `auto` chose."""
        return f"auto: {PRECISION_OF[self.dtype]}" if self.precision == "auto" else self.precision


@dataclasses.dataclass(frozen=True)
class Result:
    """An entrant's time for a step, in seconds, in each round."""

    entrant: Entrant
    seconds: tuple[float, ...]

    @property
    def images_per_second(self) -> float:
        """Of the median round."""
        return self.entrant.images / statistics.median(self.seconds)

    @property
    def flops_per_second(self) -> float:
        """Of the median round."""
        return self.entrant.flops / statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """Images per second of the slowest and of the fastest round."""
        rates = [self.entrant.images / seconds for seconds in self.seconds]
        return f"{rate(min(rates))} to {rate(max(rates))}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """How long an entrant computes in a round."""

    warmup: int
    steps: int
    """Timed steps, at least."""
    seconds: float
    """Seconds of timed steps, at least."""

    def median(self, step: Step) -> float:
        """Seconds that a step takes, after the warm-up."""
        for _ in range(self.warmup):
            step()
        times: list[float] = []
        while len(times) < self.steps or sum(times) < self.seconds:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


class Process:
    """An entrant's process; it ends when this end of the connection closes, however that happens."""

    def __init__(self, name: str) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit this process's memory
        self.name = name
        self._connection, far_end = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(far_end,), daemon=True)
        self._process.start()
        far_end.close()

    def send(self, request: Preparation | Timing) -> None:
        """Ask for a step to be built, or to be timed."""
        self._connection.send(request)

    def answer(self) -> float:
        """Wait for what was asked; a building answers 0.

        Raises:
            RuntimeError: the process has ended; it has said why on stderr.
        """
        try:
            return self._connection.recv()
        except EOFError as error:
            raise RuntimeError(f"the process of {self.name} has failed; its traceback is above") from error

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def serve(connection: Connection) -> None:
    """What an entrant's process does: build each step that is sent, and time it whenever told to."""
    step: Step | None = None
    with ExitStack() as context:
        while True:
            try:
                request: Preparation | Timing = connection.recv()
            except EOFError:
                return
            if isinstance(request, Timing):
                assert step is not None
                connection.send(request.median(step))
            else:
                context.close()
                step = None  # the model before goes before the next is built
                step = context.enter_context(request())
                connection.send(0.0)


class Contest:
    """The processes of the entrants, and the rounds; a context manager that ends the processes."""

    def __init__(self, rounds: int, timing: Timing) -> None:
        self.rounds = rounds
        self.timing = timing
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes.values():
            process.close()

    def run(self, title: str, entrants: Sequence[Entrant]) -> list[Result]:
        """Measure entrants against each other; an entrant met before computes in the process it had."""
        processes = [self._process(entrant) for entrant in entrants]
        for process, entrant in zip(processes, entrants, strict=True):
            process.send(entrant.prepare)
        for process in processes:
            process.answer()
        seconds: list[list[float]] = [[] for _ in entrants]
        for number in range(1, self.rounds + 1):
            for process, times in zip(processes, seconds, strict=True):
                process.send(self.timing)
                times.append(process.answer())
                note(f"{title}, round {number}/{self.rounds}: {process.name} {times[-1]:.4f} s a step")
        return [Result(entrant, tuple(times)) for entrant, times in zip(entrants, seconds, strict=True)]

    def _process(self, entrant: Entrant) -> Process:
        name = f"{entrant.name} {entrant.precision}"
        if name not in self._processes:
            self._processes[name] = Process(name)
        return self._processes[name]


@contextmanager
def matmul(shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Step]:
    """One matrix product, its output allocated beforehand."""
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    product = torch.empty(rows, columns, dtype=dtype)
    yield partial(torch.mm, a, b, out=product)


def matmul_entrants() -> list[Entrant]:
    """The machine itself: what its matrix products reach."""
    return [
        Entrant(
            name=f"matmul {'x'.join(map(str, shape))}",
            precision=precision,
            dtype=dtype,
            prepare=partial(matmul, shape, dtype),
            images=0,
            flops=2 * shape[0] * shape[1] * shape[2],
        )
        for precision, dtype in DTYPES.items()
        for shape in MATMUL_SHAPES
    ]


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """What the machine's matrix products reach, measured in the same rounds as the entrants."""

    results: tuple[Result, ...]

    @classmethod
    def among(cls, results: Sequence[Result]) -> Ceiling:
        """From the results of `matmul_entrants`, which may stand among others."""
        return cls(tuple(result for result in results if result.entrant.images == 0))

    def share(self, result: Result) -> str:
        """A result's share, in percent, of the fastest matrix product in its dtype."""
        same = [r.flops_per_second for r in self.results if r.entrant.dtype == result.entrant.dtype]
        return f"{result.flops_per_second / max(same):.0%}"

    def describe(self) -> str:
        """The measured TFLOP/s of each product."""
        return "; ".join(
            f"{result.entrant.precision} {result.entrant.name.removeprefix('matmul ')} "
            f"{result.flops_per_second / 1e12:.2f} TFLOP/s"
            for result in self.results
        )


COMPARISON_HEADER = ("entrant", "precision", "img/s", "slowest to fastest round", "of timm", "of the ceiling")


def comparison_table(results: Sequence[Result]) -> str:
    """Entrants beside timm in the same dtype; `results` hold those of `matmul_entrants` too."""
    ceiling = Ceiling.among(results)
    models = [result for result in results if result.entrant.images]
    timm = {r.entrant.dtype: r.images_per_second for r in models if r.entrant.name == "timm"}
    rows = [
        (
            result.entrant.name,
            result.entrant.precision_label,
            rate(result.images_per_second),
            result.spread,
            ratio(result.images_per_second, timm.get(result.entrant.dtype)),
            ceiling.share(result),
        )
        for result in models
    ]
    return f"{markdown_table(COMPARISON_HEADER, rows)}\n\nMatmul ceiling: {ceiling.describe()}."


def rate(images_per_second: float) -> str:
    """Three digits, or all before the point."""
    decimals = max(0, 3 - len(str(int(images_per_second))))
    return f"{images_per_second:,.{decimals}f}"


def ratio(value: float, reference: float | None) -> str:
    """How many times the reference; a dash without one."""
    return "-" if reference is None else f"{value / reference:.2f}"


def installed_peers() -> list[str]:
    """The libraries to compare with that can be imported here."""
    return [peer for peer in PEERS if importlib.util.find_spec(peer) is not None]


def missing_peers(compared: Sequence[str]) -> str:
    """A line that says who could not take part; empty where all did."""
    missing = [peer for peer in compared if peer not in installed_peers()]
    return f"Left out, not installed: {', '.join(missing)}.\n\n" if missing else ""


def describe_machine() -> str:
    """The CPU, what torch uses of it, and how busy it is with other work."""
    load = f", load average {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return (
        f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{bf16_units() or 'no bf16 units'}{load}"
    )


def cpu_name() -> str:
    """The processor as Linux names it; elsewhere what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_versions() -> str:
    """Python's, torch's, ours and the peers'."""
    names = ("vitascope", "torch", *installed_peers())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"Python {platform.python_version()}, {versions}"


def options(description: str | None, *, rounds: int, warmup: int, steps: int) -> argparse.ArgumentParser:
    """The options that every benchmark has, with its own defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=positive, default=rounds, help=f"interleaved rounds (default {rounds})"
    )
    parser.add_argument(
        "--warmup", type=positive, default=warmup, help=f"untimed steps in a round (default {warmup})"
    )
    parser.add_argument(
        "--steps", type=positive, default=steps, help=f"timed steps in a round, at least (default {steps})"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help="seconds of timed steps in a round, at least (default %(default)s)",
    )
    parser.add_argument("--out", action="store_true", help="write the report to benchmarks/results too")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def timing_of(arguments: argparse.Namespace) -> Timing:
    """What the options say about a round."""
    return Timing(warmup=arguments.warmup, steps=arguments.steps, seconds=arguments.seconds)


def heading(title: str, arguments: argparse.Namespace) -> str:
    """What was measured where, when and how; made before the measuring, while the machine is as found."""
    return (
        f"# {title}\n\n"
        f"- machine: {describe_machine()}\n"
        f"- versions: {describe_versions()}\n"
        f"- date: {datetime.date.today().isoformat()}\n"
        f"- command: `{shlex.join(['python', *sys.argv])}`\n"
        f"- method: a process for each entrant; interleaved rounds: {arguments.rounds}; in a round, steps to "
        f"warm up: {arguments.warmup}, then timed: at least {arguments.steps} and {arguments.seconds:g} s; "
        f"medians"
    )
