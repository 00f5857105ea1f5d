"""Contests of speed: every entrant runs in a process of its own, one at a time, in several rounds.

The rounds are interleaved (A B C, A B C, ...), so a change in the machine's speed affects all entrants. An
entrant's time in a round is the median of its steps. Its result is the median over the rounds, with the
slowest and the fastest round. The processes live from the first round to the last, so they keep memory
between steps, as in normal use.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection

import torch

from conditions import Conditions, installed_peers
from reports import command_line, markdown_table, note

Step = Callable[[], object]
"""The function that is timed."""
Preparation = Callable[[], AbstractContextManager[Step]]
"""Builds a step in the entrant's process; the context ends before the process builds another. Picklable."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISION_OF = {dtype: name for name, dtype in DTYPES.items()}

MATMUL_SHAPES = ((2048, 2048, 2048), (8320, 768, 3072))
"""Rows, inner size, columns: a cube, and the first layer of ViT-B's MLP over 128 images of 65 tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """A competitor: its precision, its step and the size of a step."""

    name: str
    precision: str
    """The requested precision: fp32, bf16 or auto."""
    dtype: torch.dtype
    """The dtype of its computation."""
    prepare: Preparation
    images: int
    """Images per step."""
    flops: int
    """Floating-point operations per step; a multiply-add counts as 2."""

    @property
    def precision_label(self) -> str:
        """The requested precision, with the choice of `auto`."""
        return f"auto: {PRECISION_OF[self.dtype]}" if self.precision == "auto" else self.precision


@dataclasses.dataclass(frozen=True)
class Result:
    """An entrant's seconds per step in each round."""

    entrant: Entrant
    seconds: tuple[float, ...]

    @property
    def images_per_second(self) -> float:
        """In the median round."""
        return self.entrant.images / statistics.median(self.seconds)

    @property
    def flops_per_second(self) -> float:
        """In the median round."""
        return self.entrant.flops / statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """Images per second of the slowest and of the fastest round."""
        rates = [self.entrant.images / seconds for seconds in self.seconds]
        return f"{rate(min(rates))} to {rate(max(rates))}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The length of an entrant's turn in a round."""

    warmup: int
    steps: int
    """Least number of timed steps."""
    seconds: float
    """Least total seconds of timed steps."""

    def median(self, step: Step) -> float:
        """Return the median seconds per step, after the warm-up."""
        for _ in range(self.warmup):
            step()
        times: list[float] = []
        while len(times) < self.steps or sum(times) < self.seconds:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


class Process:
    """An entrant's process, which ends when this end of the connection closes for any reason."""

    def __init__(self, name: str) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit this process's memory
        self.name = name
        self._connection, far_end = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(far_end,), daemon=True)
        self._process.start()
        far_end.close()

    def send(self, request: Preparation | Timing) -> None:
        """Request that a step is built or timed."""
        self._connection.send(request)

    def answer(self) -> float:
        """Wait for the answer to a request: the seconds per step, or 0 after building.

        Raises:
            RuntimeError: the process has ended; its traceback is on stderr.
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
    """Build and time steps on request; the main function of an entrant's process."""
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
                step = None  # frees the previous model before the next is built
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
        """Measure entrants in interleaved rounds; a known entrant keeps its process."""
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
                note(f"{title}, round {number}/{self.rounds}: {process.name} {times[-1]:.4f} s per step")
        return [Result(entrant, tuple(times)) for entrant, times in zip(entrants, seconds, strict=True)]

    def _process(self, entrant: Entrant) -> Process:
        name = f"{entrant.name} {entrant.precision}"
        if name not in self._processes:
            self._processes[name] = Process(name)
        return self._processes[name]


@contextmanager
def matmul(shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Step]:
    """One matrix product into a preallocated output; that of int8 has int32 sums, by oneDNN through torch."""
    rows, inner, columns = shape
    if dtype == torch.int8:
        factors = (torch.randint(-128, 128, size, dtype=dtype) for size in ((rows, inner), (inner, columns)))
        yield partial(torch._int_mm, *factors)
        return
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    product = torch.empty(rows, columns, dtype=dtype)
    yield partial(torch.mm, a, b, out=product)


def matmul_entrants(dtypes: Mapping[str, torch.dtype] = DTYPES) -> list[Entrant]:
    """Matrix products, which measure the machine itself."""
    return [
        Entrant(
            name=f"matmul {'x'.join(map(str, shape))}",
            precision=precision,
            dtype=dtype,
            prepare=partial(matmul, shape, dtype),
            images=0,
            flops=2 * shape[0] * shape[1] * shape[2],
        )
        for precision, dtype in dtypes.items()
        for shape in MATMUL_SHAPES
    ]


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """The speed of the machine's matrix products, measured in the same rounds as the entrants."""

    results: tuple[Result, ...]

    @classmethod
    def among(cls, results: Sequence[Result]) -> Ceiling:
        """Select the results of `matmul_entrants` among others."""
        return cls(tuple(result for result in results if result.entrant.images == 0))

    def share(self, result: Result) -> str:
        """A result's speed in percent of the fastest matrix product in its dtype."""
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
    """Compare entrants with timm in the same dtype; `results` contains those of `matmul_entrants`."""
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
    """Format with three digits, or with all digits before the point."""
    decimals = max(0, 3 - len(str(int(images_per_second))))
    return f"{images_per_second:,.{decimals}f}"


def ratio(value: float, reference: float | None) -> str:
    """Format the ratio of a value to a reference, or a dash without a reference."""
    return "-" if reference is None else f"{value / reference:.2f}"


def missing_peers(compared: Sequence[str]) -> str:
    """A line that names the peers that are not installed, empty if there are none."""
    missing = [peer for peer in compared if peer not in installed_peers()]
    return f"Not installed, so left out: {', '.join(missing)}.\n\n" if missing else ""


def options(description: str | None, *, rounds: int, warmup: int, steps: int) -> argparse.ArgumentParser:
    """A parser with the options of every contest and the given defaults."""
    parser = command_line(description)
    parser.add_argument(
        "--rounds", type=positive, default=rounds, help=f"interleaved rounds (default {rounds})"
    )
    parser.add_argument(
        "--warmup", type=positive, default=warmup, help=f"untimed steps per round (default {warmup})"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=steps,
        help=f"least number of timed steps per round (default {steps})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help="least seconds of timed steps per round (default %(default)s)",
    )
    return parser


def positive(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def timing_of(arguments: argparse.Namespace) -> Timing:
    """The timing from the options."""
    return Timing(warmup=arguments.warmup, steps=arguments.steps, seconds=arguments.seconds)


def heading(title: str, arguments: argparse.Namespace) -> str:
    """The head of a contest's report. Call it before any load."""
    method = (
        f"one process per entrant; interleaved rounds: {arguments.rounds}; warm-up steps per "
        f"round: {arguments.warmup}; timed steps per round: at least {arguments.steps} and "
        f"{arguments.seconds:g} s; medians"
    )
    return Conditions.now().heading(title, method=method)
