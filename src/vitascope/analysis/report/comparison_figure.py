"""`compare`: several runs side by side, as a result, a text and a figure of their curves."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitascope.analysis.explain.lettering import short
from vitascope.analysis.explain.plots import new_figure, save_figure
from vitascope.analysis.report import charts
from vitascope.analysis.report.comparison import RunComparison, seed_group
from vitascope.arguments import checked
from vitascope.storage import explaining_failure, make_folder, replacing
from vitascope.training.run.run import Run

TEXT, FIGURE = "comparison.txt", "comparison.png"


@checked
def compare(
    runs: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None
) -> RunComparison:
    """Compare runs, as `vitascope compare` does.

    The result has the options that differ, the results of each run with their intervals, the mean of runs
    that differ in their seed only, and a paired test on the same images between the best classifier and each
    other one: McNemar's exact test or, where images may have several classes, the bootstrap of the mAPs.

    Args:
        runs: 2 to 24 run folders of one kind: pre-trainings, classifiers of one class per image, or of
            several; also unfinished ones.
        out: a folder for `comparison.txt`, the text of the command, and `comparison.png`, the validation
            curves; existing files are replaced. None writes nothing.

    Raises:
        UserError: a folder that is no run, or is given twice; a broken file; a place that cannot be written.
    """
    refs = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    comparison = RunComparison.of([Run.open(ref) for ref in refs])
    if out is not None:
        write_comparison(comparison, out)
    return comparison


def write_comparison(comparison: RunComparison, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the text and, if a run has an epoch, the figure, as `compare` does; returns the paths."""
    text, figure = Path(folder) / TEXT, Path(folder) / FIGURE
    make_folder(text.parent)
    curves = curves_of(comparison)
    with explaining_failure(text, "the comparison", "make room, or choose another place"):
        with replacing(text) as aside:
            aside.write_text(comparison.text() + "\n", encoding="utf-8")
        if not curves:
            return [text]
        with replacing(figure) as aside:
            save_figure(draw_comparison(curves), aside)
    return [text, figure]


def draw_comparison(curves: Sequence[charts.Curve]) -> Figure:
    """The validation curves of all runs: by epoch above, by training time or step below."""
    recorded = {name for curve in curves for name in curve.epochs[0]}
    measures = ("loss", "map" if "val_map" in recorded else "accuracy")
    names = [name for name in measures if f"val_{name}" in recorded]
    timed = all("seconds" in epoch for curve in curves for epoch in curve.epochs)
    rows = ["epoch", "seconds" if timed else "step"]
    figure = new_figure(4.8 * len(names), 3.2 * len(rows) + 0.5)
    grid = figure.subplots(len(rows), len(names), squeeze=False)
    for row, by in zip(grid, rows, strict=True):
        for axes, name in zip(row, names, strict=True):
            charts.plot_runs(axes, curves, name, by)
            axes.set_title(f"validation {charts.curve_title(name, names)}")
    kinds = {(curve.colour, curve.style): curve.label for curve in curves}
    lines = [Line2D([], [], color=colour, linestyle=style) for colour, style in kinds]
    labels = [f" {label}" for label in kinds.values()]  # one that begins with _ would be left out
    figure.legend(lines, labels, loc="outside lower center", ncols=min(4, len(kinds)), frameon=False)
    return figure


def curves_of(comparison: RunComparison) -> list[charts.Curve]:
    """The curves of the runs with at least one epoch; runs that differ in their seed only share a colour."""
    groups: dict[str, list[str]] = {}
    for run in comparison.runs:
        groups.setdefault(seed_group(run.run), []).append(run.name)
    curves = []
    for run in comparison.runs:
        key = seed_group(run.run)
        style, colour = divmod(list(groups).index(key), len(charts.RUN_COLOURS))
        if run.epochs:
            label, kept = short(", ".join(groups[key]), 40), charts.kept_place(run.run, run.epochs)
            curves.append(
                charts.Curve(label, run.epochs, kept, charts.RUN_COLOURS[colour], charts.RUN_STYLES[style])
            )
    return curves
