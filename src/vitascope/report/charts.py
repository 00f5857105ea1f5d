"""The report's charts: how training went, and how far its confidence is to be believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitascope.explain.plots import GREY, INK, SERIES, plain
from vitascope.report.measures import Calibration
from vitascope.report.svg import DRAWING

SIZE = (4.4, 2.9)
MAX_POINTS = 300
"""Of a line; of longer ones, means of neighbours are drawn."""


def new_chart(width: float = SIZE[0], height: float = SIZE[1]) -> Figure:
    """An empty figure of a size in inches, whose text is readable on a phone."""
    return Figure(figsize=(width, height), layout="constrained")


@matplotlib.rc_context(DRAWING)
def draw_curve(
    epochs: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], quantity: str, kept: int | None = None
) -> Figure:
    """A quantity of training and validation by epoch.

    Args:
        epochs: the records of epochs.
        steps: the records of steps, drawn faintly where they have the quantity.
        quantity: `loss`, `accuracy` or `agree`, as in the records.
        kept: the epoch whose weights were kept, which is marked.
    """
    figure = new_chart()
    axes = figure.subplots()
    if steps and quantity in steps[0]:
        each = steps_per_epoch(epochs)
        x, y = (thinned(values) for values in ([step["step"] / each for step in steps], of(steps, quantity)))
        axes.plot(x, y, color=SERIES[0], alpha=0.3, linewidth=0.8, label="train, single steps")
    x = np.array([record["epoch"] for record in epochs])
    for part, colour in zip(("train", "val"), SERIES, strict=True):
        if epochs and f"{part}_{quantity}" in epochs[0]:
            y = of(epochs, f"{part}_{quantity}")
            label = f"{part}, last {y[-1]:.1%}" if quantity != "loss" else f"{part}, last {y[-1]:.3f}"
            axes.plot(x, y, color=colour, linewidth=1.6, label=label, marker="o" if len(x) == 1 else "")
    if quantity == "accuracy" and epochs and "val_majority" in epochs[-1]:
        share = epochs[-1]["val_majority"]
        label = f"val, commonest class {share:.1%}"
        axes.axhline(share, color=GREY, linestyle="--", linewidth=1, label=label)
    if kept is not None:
        axes.axvline(kept, color=GREY, linestyle=":", linewidth=1, label=f"kept, epoch {kept}")
    plain(axes, xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if quantity != "loss":
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(frameon=False, fontsize=8)
    return figure


@matplotlib.rc_context(DRAWING)
def draw_learning_rate(epochs: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> Figure:
    """The learning rate by epoch, from the records of epochs and steps."""
    figure = new_chart()
    axes = figure.subplots()
    each = steps_per_epoch(epochs)
    axes.plot(
        thinned([step["step"] / each for step in steps]),
        thinned(of(steps, "lr")),
        color=SERIES[0],
        linewidth=1.6,
    )
    plain(axes, xlabel="epoch" if epochs else "step")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    return figure


def steps_per_epoch(epochs: Sequence[dict[str, Any]]) -> float:
    """From the last record of an epoch; 1 while there is none, so that steps count themselves."""
    return float(epochs[-1]["step"] / epochs[-1]["epoch"]) if epochs else 1.0


def of(records: Sequence[dict[str, Any]], name: str) -> npt.NDArray[np.float64]:
    """A value of each record; not a number where a record lacks it."""
    return np.array([record.get(name, np.nan) for record in records], dtype=np.float64)


def thinned(values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """At most `MAX_POINTS` numbers: of more, means of neighbours."""
    values = np.asarray(values, dtype=np.float64)
    return np.array([part.mean() for part in np.array_split(values, min(len(values), MAX_POINTS))])


@matplotlib.rc_context(DRAWING)
def draw_calibration(measured: Calibration) -> Figure:
    """A reliability diagram, over how many answers each of its bars stands for."""
    bins = len(measured.counts)
    centres, width, full = (np.arange(bins) + 0.5) / bins, 0.9 / bins, measured.counts > 0
    figure = new_chart(4.8, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    upper.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="as sure as right")
    upper.bar(
        centres[full],
        measured.accuracies[full],
        width,
        color=SERIES[0],
        alpha=0.75,
        label="share of right answers",
    )
    upper.plot(
        measured.confidences[full],
        measured.confidences[full],
        "o",
        color=SERIES[1],
        markersize=4,
        label="mean confidence",
    )
    upper.vlines(
        measured.confidences[full],
        measured.accuracies[full],
        measured.confidences[full],
        color=SERIES[1],
        linewidth=1.2,
    )
    plain(upper, ylabel="right")
    upper.set(xlim=(0, 1), ylim=(0, 1.02))
    upper.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    upper.legend(frameon=False, fontsize=8, loc="upper left")
    lower.bar(centres, measured.counts, width, color=GREY, alpha=0.6)
    for centre, count in zip(centres[full], measured.counts[full], strict=True):
        lower.text(centre, count, f"{count:,}", ha="center", va="bottom", fontsize=6.5, color=INK)
    plain(lower, ylabel="answers", xlabel="confidence")
    lower.margins(y=0.25)
    lower.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    lower.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    return figure
