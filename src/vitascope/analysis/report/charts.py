"""Charts of a run: curves, confusion matrix, calibration; for PNGs and for the page alike."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitascope.analysis.explain.lettering import fitted, text_width
from vitascope.analysis.explain.plots import GREY, INK, RIGHT, SERIES, WRONG, new_figure, plain
from vitascope.data.average_precision import precision_recall
from vitascope.data.label_measures import LabelScore
from vitascope.data.measures import Calibration, RiskCoverage
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.run import Run

MAX_POINTS = 300
"""Points of a curve; neighbours of longer ones are averaged."""
MAX_CLASSES = 60
"""Classes of a confusion matrix in the page; with more, the most confused pairs are easier to read."""
WITH_COUNTS = 30
"""Classes up to which the cells show their counts."""
BALANCED_GAP = 0.05
"""Difference of accuracy and balanced accuracy above which the latter has a curve of its own."""
LONGEST_NAME = 2.2
"""Inches of a class name beside the confusion matrix; the middle of a longer one is cut."""
EXTREMES = 3
"""Worst and best classes with a curve of precision and recall, each."""
LEGEND_NAME = 1.2
"""Inches of a class name in a legend of two columns."""
LineStyle = Literal["solid", "dashed", "dotted"]
RUN_COLOURS = (*SERIES, "#0f8583", "#7b4ba8", "#b83f86", "#86691b", RIGHT, WRONG)
"""Colours of several runs; the ninth begins again with the next of `RUN_STYLES`."""
RUN_STYLES: tuple[LineStyle, ...] = ("solid", "dashed", "dotted")
TITLE = "title:"
"""Prefix of the gid of a shape whose rest the page shows under the pointer."""


Records = Sequence[Mapping[str, Any]]
NewFigure = Callable[[float, float], Figure]


def curve_names(epochs: Records, steps: Records) -> list[str]:
    """The recorded curves, among `loss`, `accuracy`, `map`, `agree` and `lr`, in this order."""
    names, recorded = ("loss", "accuracy", "map", "agree"), epochs[0] if epochs else {}
    curves = [name for name in names if {f"train_{name}", f"val_{name}"} & recorded.keys()] or ["loss"]
    return [*curves, "lr"] if len(steps) > 2 else curves


def draw_curves(epochs: Records, steps: Records, kept: int | None) -> Figure:
    """All recorded curves side by side."""
    names = curve_names(epochs, steps)
    figure = new_figure(4.5 * len(names), 3.4)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        plot_curve(axes, epochs, steps, name, kept)
        axes.set_title(curve_title(name, names))
    return figure


def curve_title(name: str, names: Collection[str]) -> str:
    """The title of a recorded curve; `names` are all curves of the run."""
    if name == "accuracy" and "map" in names:
        return "exact matches"
    return {"lr": "learning rate", "map": "mAP"}.get(name, name)


def kept_place(run: Run, epochs: Records) -> int | None:
    """The place of the best validation among the epochs, if the run kept its weights."""
    kept = run.records("kept")[-1:]
    if not kept or kept[0]["weights"] != "best":
        return None
    return next((place for place, epoch in enumerate(epochs) if epoch["epoch"] == kept[0]["epoch"]), None)


def plot_curve(axes: Axes, epochs: Records, steps: Records, name: str, kept: int | None) -> None:
    """A quantity of training and validation by epoch.

    Values of single steps are drawn faintly. The epoch at the place `kept`, whose weights were kept, is
    marked.
    """
    per_epoch = epochs[-1]["step"] / epochs[-1]["epoch"] if epochs else 1.0
    if steps and name in steps[0]:
        x, y = thinned([step["step"] / per_epoch for step in steps]), thinned(values_of(steps, name))
        faint: dict[str, Any] = {"alpha": 0.5, "linewidth": 0.8, "label": "train, single steps"}
        axes.plot(x, y, color=SERIES[0], **({"linewidth": 1.6} if name == "lr" else faint))
    plain(axes, xlabel="epoch" if epochs else "step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if name == "lr":
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        return
    x = values_of(epochs, "epoch")
    for part, colour in zip(("train", "val"), SERIES, strict=True):
        if epochs and f"{part}_{name}" in epochs[0]:
            y = values_of(epochs, f"{part}_{name}")
            label = f"{part}, last {y[-1]:.3f}" if name == "loss" else f"{part}, last {y[-1]:.1%}"
            axes.plot(x, y, color=colour, linewidth=1.6, label=label, marker="o" if len(x) == 1 else "")
    if name == "accuracy" and "val_balanced_accuracy" in epochs[-1]:
        balanced = values_of(epochs, "val_balanced_accuracy")
        if np.abs(balanced - values_of(epochs, "val_accuracy")).max() > BALANCED_GAP:
            axes.plot(
                x,
                balanced,
                color=SERIES[1],
                linewidth=1,
                linestyle="--",
                label=f"val, balanced, last {balanced[-1]:.1%}",
            )
    if name == "accuracy" and "val_majority" in epochs[-1]:
        share = epochs[-1]["val_majority"]
        label = f"val, most frequent class {share:.1%}"
        axes.axhline(share, color=GREY, linestyle="--", linewidth=1, label=label)
    if kept is not None:
        epoch = epochs[kept]["epoch"]
        axes.axvline(epoch, color=GREY, linestyle=":", linewidth=1, label=f"kept, epoch {epoch:g}")
    if name != "loss":
        as_percentages(axes, decimals=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, facecolor="white", edgecolor="none", framealpha=0.75)  # legible over a curve


def as_percentages(axes: Axes, decimals: int | None = None) -> None:
    """Make the y axis one of percentages, which ends at 100% whatever is drawn on it."""
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=decimals))
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.005))


def values_of(records: Records, name: str) -> npt.NDArray[np.float64]:
    """A value of each record; NaN where a record lacks it."""
    return np.array([record.get(name, np.nan) for record in records], dtype=np.float64)


def thinned(values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """At most `MAX_POINTS` numbers, means of neighbours."""
    values = np.asarray(values, dtype=np.float64)
    return np.array([part.mean() for part in np.array_split(values, min(len(values), MAX_POINTS))])


@dataclasses.dataclass(frozen=True)
class Curve:
    """The epochs of a run, and its colour and style in charts of several runs."""

    label: str
    """The same for runs with the same colour and style."""
    epochs: Records
    kept: int | None
    """The place among them of the epoch whose weights were kept; None for the last step."""
    colour: str
    style: LineStyle


def plot_runs(axes: Axes, curves: Sequence[Curve], name: str, by: str) -> None:
    """A validated quantity, `loss`, `accuracy` or `map`, of several runs by `epoch`, `step` or `seconds`.

    A dot marks the epoch whose weights were kept.
    """
    divisor, label = 1, by
    if by == "seconds":
        longest = max(epoch[by] for curve in curves for epoch in curve.epochs)
        divisor, unit = (
            (1, "s") if longest <= 180 else (60, "minutes") if longest <= 10_800 else (3600, "hours")
        )
        label = f"training time, {unit}"
    for curve in curves:
        x, y = values_of(curve.epochs, by) / divisor, values_of(curve.epochs, f"val_{name}")
        marker = "o" if len(x) == 1 else ""
        axes.plot(
            *(thinned(values) for values in (x, y)),
            color=curve.colour,
            linestyle=curve.style,
            linewidth=1.6,
            marker=marker,
            label=curve.label,
        )
        if curve.kept is not None:
            axes.plot(x[curve.kept], y[curve.kept], "o", color=curve.colour, markersize=4)
    plain(axes, xlabel=label)
    if by != "seconds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if name != "loss":
        as_percentages(axes)


def draw_confusion(
    confusion: npt.NDArray[np.int64], class_names: Sequence[str], *, new: NewFigure = new_figure
) -> Figure:
    """Counts (K, K), true class down and predicted class across: correct ones blue, mistakes red.

    Stronger colours are larger shares of the true class; of mistakes, their square roots, as most are small.
    """
    K = len(class_names)
    figure, axes = _matrix_axes(class_names, new)
    totals = confusion.sum(axis=1)
    shares = confusion / np.maximum(totals, 1)[:, None]
    strengths = np.where(np.eye(K, dtype=bool), shares, np.sqrt(shares))
    opacities = np.where(confusion > 0, 0.08 + 0.82 * strengths, 0)
    if K > MAX_CLASSES:  # an image is faster than many cells
        colours = np.where(np.eye(K, dtype=bool)[..., None], to_rgb(SERIES[0]), to_rgb(WRONG))
        axes.imshow(np.dstack([colours, opacities]))
    for true, guess in zip(*np.nonzero(confusion), strict=True) if K <= MAX_CLASSES else ():
        colour, note = (SERIES[0], "correct") if true == guess else (WRONG, f"predicted {class_names[guess]}")
        cell = Rectangle(
            (guess - 0.5, true - 0.5), 1, 1, color=colour, alpha=opacities[true, guess], linewidth=0
        )
        cell.set_gid(f"{TITLE}{confusion[true, guess]} of {totals[true]} {class_names[true]}: {note}")
        axes.add_patch(cell)
        if K <= WITH_COUNTS:
            count, ink = str(confusion[true, guess]), "white" if strengths[true, guess] > 0.8 else INK
            axes.text(guess, true, count, ha="center", va="center", color=ink, fontsize=9)
    axes.set(xlim=(-0.5, K - 0.5), ylim=(K - 0.5, -0.5))
    axes.hlines(np.arange(K + 1) - 0.5, -0.5, K - 0.5, color=GREY, linewidth=0.3, clip_on=False)
    axes.vlines(np.arange(K + 1) - 0.5, -0.5, K - 0.5, color=GREY, linewidth=0.3, clip_on=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _matrix_axes(class_names: Sequence[str], new: NewFigure) -> tuple[Figure, Axes]:
    """A figure, and square axes in it with the names on both sides, for which it has room.

    The names are measured here, because matplotlib would take their width from the matrix, and because the
    browser writes the page's in another font.
    """
    K = len(class_names)
    named, size = K <= MAX_CLASSES, 9 if K <= WITH_COUNTS else 6
    names = [fitted(name, LONGEST_NAME, size) for name in class_names] if named else []
    widest = max((text_width(name, size) for name in names), default=0.0)
    is_turned = max(map(len, names), default=0) > 2
    side = min(10.5, max(2.5, 0.5 * K))
    left, right = widest + 0.45, 0.15
    width = left + side + right
    below = 0.45 + (math.sqrt(0.5) * widest + 0.1 if is_turned else 0.15)
    figure = new(width, below + side)
    height = below + side + 0.15 + 0.25 * len(figure.get_suptitle().splitlines())
    figure.set_layout_engine("none")
    figure.set_size_inches(width, height)
    axes = figure.add_axes((left / width, below / height, side / width, side / height))
    if named:
        turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(K), names, fontsize=size, **(turned if is_turned else {}))
        axes.set_yticks(range(K), names, fontsize=size)
    across, down = (left + side / 2) / width, (below + side / 2) / height
    figure.text(across, 0.1 / height, "predicted", ha="center", va="bottom", fontsize=10)
    figure.text(0.1 / width, down, "true", ha="left", va="center", rotation=90, fontsize=10)
    return figure, axes


@dataclasses.dataclass(frozen=True)
class CalibrationWords:
    """The terms of a reliability diagram, by default for one class per image."""

    confidence: str = "confidence"
    accuracy: str = "accuracy"
    counted: str = "images"


PAIR_WORDS = CalibrationWords("probability", "share with the class", "pairs")
"""The terms for pairs of an image and a class, of which any may apply."""


def draw_calibration(
    measured: Calibration, words: CalibrationWords = CalibrationWords(), *, new: NewFigure = new_figure
) -> Figure:
    """A reliability diagram above the number of predictions in each bin."""
    bins = len(measured.counts)
    centres, width, full = (np.arange(bins) + 0.5) / bins, 0.9 / bins, measured.counts > 0
    x, accuracies, confidences = centres[full], measured.accuracies[full], measured.confidences[full]
    figure = new(4.8, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    upper.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="perfect calibration")
    upper.bar(x, accuracies, width, color=SERIES[0], alpha=0.75, label=words.accuracy)
    upper.plot(confidences, confidences, "o", color=SERIES[1], markersize=4, label=f"mean {words.confidence}")
    upper.vlines(confidences, accuracies, confidences, color=SERIES[1], linewidth=1.2)
    plain(upper, ylabel=words.accuracy)
    upper.set(xlim=(0, 1), ylim=(0, 1.02))
    upper.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    upper.legend(frameon=False, fontsize=8, loc="upper left")
    lower.bar(centres, measured.counts, width, color=GREY, alpha=0.6)
    for centre, count in zip(x, measured.counts[full], strict=True):
        lower.text(centre, count, f"{count:,}", ha="center", va="bottom", fontsize=6.5, color=INK)
    plain(lower, ylabel=words.counted, xlabel=words.confidence)
    lower.margins(y=0.25)
    lower.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    lower.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    return figure


def draw_risk_coverage(measured: RiskCoverage, *, new: NewFigure = new_figure) -> Figure:
    """The share of wrong answers, by the share of images that are answered, the surest first."""
    figure = new(4.8, 3.2)
    axes = figure.subplots()
    shown = np.unique(np.linspace(0, len(measured.risk) - 1, min(len(measured.risk), MAX_POINTS)).astype(int))
    axes.plot(measured.coverage[shown], measured.risk[shown], color=SERIES[0], linewidth=1.6)
    plain(axes, xlabel="answered, the surest first", ylabel="of these wrong")
    axes.set(xlim=(0, 1.01), ylim=(0, None))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def extreme_classes(score: LabelScore) -> tuple[list[int], list[int]]:
    """The classes of the lowest and of the highest average precision, `EXTREMES` each; if few, the former."""
    ascending = score.ascending.tolist()
    if len(ascending) <= 2 * EXTREMES:
        return ascending, []
    return ascending[:EXTREMES], ascending[-EXTREMES:]


def draw_precision_recall(
    predictions: Predictions, score: LabelScore, *, new: NewFigure = new_figure
) -> Figure:
    """Precision by recall of the classes of `extreme_classes`: the worst solid, the best dashed.

    The area under a curve is the class's average precision.
    """
    names = predictions.class_names
    worst, best = extreme_classes(score)
    figure = new(5.2, 4.4)
    axes = figure.subplots()
    for place, k in enumerate([*worst, *best]):
        recall, precision = precision_recall(predictions.labels[:, k], predictions.scored[:, k])
        shown = np.unique(np.linspace(0, len(recall) - 1, min(len(recall), MAX_POINTS)).astype(int))
        axes.step(
            np.concatenate([[0], recall[shown]]),
            np.concatenate([precision[:1], precision[shown]]),
            where="pre",
            color=RUN_COLOURS[place],
            linestyle="solid" if place < len(worst) else "dashed",
            linewidth=1.6,
            label=f" {fitted(names[k], LEGEND_NAME, 8)}, AP {score.ap[k]:.1%}",
        )
    plain(axes, xlabel="recall", ylabel="precision")
    axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
