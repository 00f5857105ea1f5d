"""Compare the measured cost of axial attention with its formula, and with global attention and windows.

    .venv/bin/python benchmarks/axial.py --out --docs docs/options.md
    .venv/bin/python benchmarks/axial.py --docs docs/options.md

The script measures time and peak memory of the attention step alone (random queries, keys and values; one
image, one class token, 3 heads of 64) on growing grids, without and with the backward pass. The formula is
`ViTConfig.attended_pairs`: for a square grid of side s about s^4 pairs in global attention, 2 s^3 in axial,
65 s^2 in windows of 8x8. The first command measures, writes benchmarks/results/<date>-axial.md, the raw
numbers beside it and docs/images/axial.png, and fills in the page. The second only fills in the page from the
newest raw numbers. It takes one thread, about 4 minutes on an idle core, and 4 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch.nn.attention import SDPBackend, sdpa_kernel

from conditions import Conditions
from contest import (
    Step,
    Timing,
    options,
    timing_of,
)
from reports import Numbers, fill_in, markdown_table, note, publish
from vitascope.explain.plots import GREY, RIGHT, SERIES, new_figure, plain, save_figure
from vitascope.model.config import ViTConfig
from vitascope.model.encoder import Block
from vitascope.model.hardware import reuse_freed_memory
from vitascope.model.relations import position_embedding

Grid = tuple[int, int]

HEADS, HEAD_DIM, WINDOW = 3, 64, 8
LIMITS = {"global": (4, 2), "axial": (3, 2), "window": (2, 1)}
"""Limits of the exponent of the number of pairs: in the side of a square, and in the width of a strip."""
COLOURS = dict(zip(LIMITS, (*SERIES, RIGHT), strict=True))
SQUARES = tuple((side, side) for side in (8, 16, 24, 32, 48, 64, 96, 128, 192))
STRIPS = tuple((16, width) for width in (16, 32, 64, 128, 192, 256))
LARGEST_GLOBAL = 96 * 96
"""Patches. With more, global attention would take minutes, and its weights tens of gigabytes."""
FITTED_FROM = 2_000
"""The least number of patches for fitting exponents. On smaller grids, fixed costs per call weigh too much,
and global attention trains by matrix products instead of the fused kernel."""
COMPARED: Grid = (96, 96)
LINE: dict[str, Any] = {"linewidth": 1.0}
DOTS: dict[str, Any] = {"marker": "o", "linestyle": ""}
HOLLOW: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "linestyle": ":"}
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "axial.png"


@dataclasses.dataclass(frozen=True)
class Point:
    """A kind of attention on a grid."""

    attention: str
    grid: Grid
    backward: bool
    """Whether to run the backward pass too."""

    def config(self) -> ViTConfig:
        """A model with this attention on this grid."""
        config = ViTConfig(
            image_size=self.grid, patch_size=1, embed_dim=HEADS * HEAD_DIM, num_heads=HEADS, depth=1
        )
        return config.replace(attention=self.attention, window=WINDOW, positions="none")

    def multiply_adds(self) -> int:
        """Multiply-adds of scores and values by the formula; a backward pass has twice as many."""
        return 2 * self.config().attended_pairs() * HEADS * HEAD_DIM * (3 if self.backward else 1)

    def weights_mib(self) -> float:
        """One fp32 number per pair and head."""
        return self.config().attended_pairs() * HEADS * 4 / 2**20


def attention_step(point: Point, *, materialized: bool = False) -> Step:
    """The measured step: `mix` of the attention module, with the kernels that it chooses.

    Args:
        point: the kind of attention and the grid.
        materialized: disable PyTorch's fused kernels, which never hold all weights at once.
    """
    config = point.config()
    with torch.device("meta"):  # the layers around the step do not run
        module = Block(config, drop_path=0.0).attention
    layout = position_embedding(config).layout(config.grid, torch.device("cpu"))
    qkv = torch.randn(1, config.num_tokens, 3, HEADS, HEAD_DIM, requires_grad=point.backward)
    gradient = torch.randn(1, config.num_tokens, HEADS * HEAD_DIM)

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH) if materialized else nullcontext():
            mixed = module.mix(qkv, layout, slice(None), 0.0)
            if point.backward:
                mixed.backward(gradient)
                qkv.grad = None

    return step


@dataclasses.dataclass(frozen=True)
class Result:
    """Time and memory of a point."""

    point: Point
    seconds: list[float]
    """Per round."""
    fused_mib: float
    """Peak memory beyond the input, with the kernels that `mix` chooses."""
    materialized_mib: float
    """The same without fused kernels, so that all weights are in memory."""

    @property
    def time(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)

    @property
    def speed(self) -> float:
        """The formula's multiply-adds per second."""
        return self.point.multiply_adds() / self.time


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All results and the conditions of the measurement, as stored in the JSON file."""

    method: str
    results: list[Result]

    name = "axial"

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        results = []
        for result in values["results"]:
            point = Point(**result.pop("point"))
            results.append(Result(dataclasses.replace(point, grid=(point.grid[0], point.grid[1])), **result))
        return cls(**values | {"results": results})

    def series(self, grids: Sequence[Grid], attention: str, backward: bool) -> list[Result]:
        """The results of one kind of attention, in the order of the grids."""
        found = {result.point: result for result in self.results}
        points = (Point(attention, grid, backward) for grid in grids)
        return [found[point] for point in points if point in found]

    def for_docs(self) -> str:
        """The text for docs/options.md."""
        return (
            "![time and memory of attention by the side of the grid](images/axial.png)\n\n"
            f"{exponents_table(self, SQUARES)}\n\n{EXPONENTS_NOTES}\n\n"
            f"On a grid of {COMPARED[0]}x{COMPARED[1]}:\n\n{comparison_table(self)}\n\n{COMPARISON_NOTES}\n\n"
            f"One image, {HEADS} heads of {HEAD_DIM}, fp32, one thread; {self.machine}; {self.date}."
        )

    def report(self) -> str:
        """The text for benchmarks/results."""
        return (
            f"{self.heading('The cost of axial attention', method=self.method)}\n\n"
            f"## Square grids\n\n{exponents_table(self, SQUARES)}\n\n{EXPONENTS_NOTES}\n\n"
            f"## Grids of 16 rows and growing width\n\n{exponents_table(self, STRIPS)}\n\n"
            f"## Compared with global attention, {COMPARED[0]}x{COMPARED[1]}\n\n"
            f"{comparison_table(self)}\n\n{COMPARISON_NOTES}\n\n"
            f"## Every point\n\n{points_table(self)}\n\n{POINTS_NOTES}"
        )


EXPONENTS_HEADER = (
    "attention",
    "in the limit",
    "formula",
    "time, forward",
    "time, with backward",
    "memory, unfused, with backward",
    "memory, fused, with backward",
)
EXPONENTS_NOTES = f"""\
Exponents of the cost in the grid's side: the slope of a line through the logarithms, over grids of at least
{FITTED_FROM:,} patches. "formula": the exponent of `ViTConfig.attended_pairs` on the same grids.
"unfused": peak memory without PyTorch's fused kernels, so that all attention weights are in memory.
"fused": with the kernels that the model uses on such grids. They hold a small part of the weights at a time,
so memory grows with the number of tokens. Axial attention also copies patches into rows and columns. The time
and memory of the copies grow with the number of tokens too, which keeps its exponents below the formula's."""

COMPARISON_NOTES = """\
The cost of global attention divided by that of the others; below 1, they cost more. "formula": the ratio of
pairs. The measured ratios are lower because of short rows and windows, and because patches are copied into
them."""

POINTS_NOTES = """\
"formula": multiply-adds by `ViTConfig.attended_pairs`, three times as many with the backward pass. "time /
formula": relative to the largest grid of the kind; 1 everywhere if time follows the formula. "weights": one
number per pair and head. Memory is the peak in MiB beyond queries, keys and values. With the backward pass,
global attention uses plain matrix products, and keeps its weights, while they fit in 16 MiB
(`model/attention.py`)."""


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent of costs in sizes: the least-squares slope of the logarithms."""
    line = statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, costs)))
    return line.slope


def exponents_table(measured: Measurement, grids: Sequence[Grid]) -> str:
    """Exponents of formula and measurement, one row per kind."""
    rows = []
    fitted = [grid for grid in grids if math.prod(grid) >= FITTED_FROM]
    for attention, limits in LIMITS.items():
        forward, both = (measured.series(fitted, attention, backward) for backward in (False, True))
        costs: list[tuple[list[Result], Callable[[Result], float]]] = [
            (forward, lambda result: result.point.multiply_adds()),
            (forward, lambda result: result.time),
            (both, lambda result: result.time),
            (both, lambda result: result.materialized_mib),
            (both, lambda result: result.fused_mib),
        ]
        slopes = [
            slope([r.point.grid[1] for r in series], [*map(cost_of, series)]) for series, cost_of in costs
        ]
        limit = limits[0] if grids is SQUARES else limits[1]
        rows.append((attention, str(limit), *(f"{exponent:.2f}" for exponent in slopes)))
    return markdown_table(EXPONENTS_HEADER, rows)


def comparison_table(measured: Measurement) -> str:
    """The costs of global attention divided by those of the others."""
    ((forward,), (both,)) = (measured.series([COMPARED], "global", backward) for backward in (False, True))
    rows = []
    for attention in ("axial", "window"):
        ((ours,), (ours_both,)) = (
            measured.series([COMPARED], attention, backward) for backward in (False, True)
        )
        ratios = (
            forward.point.multiply_adds() / ours.point.multiply_adds(),
            forward.time / ours.time,
            both.time / ours_both.time,
            both.materialized_mib / ours_both.materialized_mib,
            both.fused_mib / ours_both.fused_mib,
        )
        rows.append((attention, *(f"{ratio:.1f}" for ratio in ratios)))
    return markdown_table((EXPONENTS_HEADER[0], *EXPONENTS_HEADER[2:]), rows)


def points_table(measured: Measurement) -> str:
    """One row per kind, grid and pass."""
    rows = []
    for grids in (SQUARES, STRIPS):
        for attention in LIMITS:
            for backward in (False, True):
                series = measured.series(grids, attention, backward)
                rows += [
                    (
                        f"{attention}, {result.point.grid[0]}x{result.point.grid[1]}",
                        "both" if backward else "forward",
                        f"{result.point.multiply_adds() / 1e6:,.1f} M",
                        f"{1e3 * result.time:.2f} ms",
                        f"{series[-1].speed / result.speed:.2f}",
                        f"{result.point.weights_mib():.1f}",
                        f"{result.materialized_mib:.1f}",
                        f"{result.fused_mib:.1f}",
                    )
                    for result in series
                ]
    return markdown_table(
        (
            "attention, grid",
            "pass",
            "formula",
            "time",
            "time / formula",
            "weights",
            "memory, unfused",
            "memory, fused",
        ),
        rows,
    )


def draw(measured: Measurement) -> Figure:
    """Plot time and memory over the side of square grids, with the formula scaled to the largest grid."""
    figure = new_figure(12, 4.6, "The attention step on a grid of s x s patches")
    panels = figure.subplots(1, 3)
    for attention in LIMITS:
        forward, both = (measured.series(SQUARES, attention, backward) for backward in (False, True))
        draw_series(panels[0], forward, lambda result: 1e3 * result.time)
        draw_series(panels[1], both, lambda result: 1e3 * result.time)
        draw_series(panels[2], both, lambda result: result.materialized_mib)
        panels[2].plot(*sides_and(both, lambda result: result.fused_mib), **HOLLOW, color=COLOURS[attention])
    titles = ("forward", "forward and backward", "peak memory, forward and backward")
    for axes, title, unit in zip(panels, titles, ("ms", "ms", "MiB"), strict=True):
        plain(axes, title=title, xlabel="side s, patches", ylabel=unit, xscale="log", yscale="log")
        axes.set_xticks([side for side, _ in SQUARES if side in (8, 16, 32, 64, 96, 192)])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")  # the figure's texts are literal, without formulas
        axes.minorticks_off()
    panels[2].set_ylim(bottom=1)
    kinds = [Patch(color=COLOURS[kind], label=f"{kind}, s^{power}") for kind, (power, _) in LIMITS.items()]
    signs = [
        Line2D([], [], **LINE, color=GREY, label="formula, scaled to the largest grid"),
        Line2D([], [], **DOTS, color=GREY, label="measured (memory: unfused)"),
        Line2D([], [], **HOLLOW, color=GREY, label="measured memory, fused"),
    ]
    rows = [handle for column in zip(kinds, signs, strict=True) for handle in column]
    figure.legend(handles=rows, loc="outside lower center", ncols=len(kinds), frameon=False)
    return figure


def draw_series(axes: Axes, series: Sequence[Result], cost_of: Callable[[Result], float]) -> None:
    """Draw the measured points, and the formula's line scaled to the largest grid."""
    last, colour = series[-1], COLOURS[series[-1].point.attention]
    scale = cost_of(last) / last.point.multiply_adds()
    axes.plot(*sides_and(series, lambda result: scale * result.point.multiply_adds()), **LINE, color=colour)
    axes.plot(*sides_and(series, cost_of), **DOTS, color=colour)


def sides_and(series: Sequence[Result], cost_of: Callable[[Result], float]) -> tuple[list[int], list[float]]:
    """Sides and costs to plot, without costs of 0: memory too small to measure has no logarithm."""
    costs = [(result.point.grid[1], cost_of(result)) for result in series]
    return [side for side, cost in costs if cost > 0], [cost for _, cost in costs if cost > 0]


def points() -> list[Point]:
    """All measured points."""
    grids = dict.fromkeys((*SQUARES, *STRIPS))  # 16x16 is in both
    return [
        Point(attention, grid, backward)
        for backward in (False, True)
        for grid in grids
        for attention in LIMITS
        if attention != "global" or math.prod(grid) <= LARGEST_GLOBAL
    ]


def peak_mib(point: Point, *, materialized: bool) -> float:
    """Measure the peak memory of a step beyond its input, in a process of its own.

    The process is forked from one that has only imported modules. It runs the step on the smallest grid, to
    load the code and buffers of any step. Then it makes the input and runs the step once. The growth of its
    peak resident memory is the step's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vitascope.training.loop"])  # imports nearly all modules used here
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send_peak, args=(theirs, point, materialized))
    process.start()
    theirs.close()
    peak = ours.recv()
    process.join()
    return peak


def send_peak(connection: Connection, point: Point, materialized: bool) -> None:
    """Run by `peak_mib` in the new process."""
    torch.set_num_threads(1)
    attention_step(dataclasses.replace(point, grid=SQUARES[0]), materialized=materialized)()
    step = attention_step(point, materialized=materialized)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    connection.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit / 2**20)


def measure_times(measured: Sequence[Point], rounds: int, timing: Timing) -> list[list[float]]:
    """Time each point in interleaved rounds; returns seconds by point and round."""
    reuse_freed_memory()  # as `vitascope` does
    seconds: list[list[float]] = [[] for _ in measured]
    for number in range(1, rounds + 1):
        note(f"time, round {number}/{rounds}")
        for point, times in zip(measured, seconds, strict=True):
            times.append(timing.median(attention_step(point)))
    return seconds


def measure(arguments: argparse.Namespace) -> Measurement:
    """Measure memory, then time."""
    torch.set_num_threads(1)
    conditions = Conditions.now()  # before this script puts load on it
    measured = points()
    peaks = []
    for count, point in enumerate(measured, 1):
        fused, materialized = (peak_mib(point, materialized=choice) for choice in (False, True))
        peaks.append((fused, materialized))
        note(f"memory {count}/{len(measured)}: {point} {fused:.1f} and {materialized:.1f} MiB")
    seconds = measure_times(measured, arguments.rounds, timing_of(arguments))
    return Measurement(
        **dataclasses.asdict(conditions),
        method=(
            f"fp32, one thread; time: interleaved rounds: {arguments.rounds}; warm-up steps per round: "
            f"{arguments.warmup}; timed steps per round: at least {arguments.steps} and "
            f"{arguments.seconds:g} s; medians; memory: the growth of the peak resident memory of a fresh "
            "process by one step, without its input"
        ),
        results=[
            Result(point, times, *peak) for point, times, peak in zip(measured, seconds, peaks, strict=True)
        ],
    )


def parse() -> argparse.Namespace:
    parser = options(__doc__, rounds=5, warmup=1, steps=3)
    parser.set_defaults(seconds=0.05)
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="fill in this page; without --out, from the newest numbers"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.out or not arguments.docs:
        measured = measure(arguments)
        publish("axial", measured.report(), arguments)
        if arguments.out:
            measured.write()
            save_figure(draw(measured), PICTURE)
    if arguments.docs:
        fill_in(arguments.docs, "axial", Measurement.newest().for_docs())


if __name__ == "__main__":
    main()
