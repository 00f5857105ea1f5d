"""`compare`: several runs side by side, as a result, on one page and in a figure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitascope.arguments import checked
from vitascope.explain.lettering import short
from vitascope.explain.plots import new_figure, save_figure
from vitascope.language import say
from vitascope.report.charts import RUN_COLOURS, RUN_STYLES, Curve, curve_title, kept_place, plot_runs
from vitascope.report.comparison import RunComparison, seed_group
from vitascope.report.page import COLOURS, blank_figure, embedded, render
from vitascope.run.run import Run
from vitascope.storage import explaining_failure, make_folder, replacing

PAGE = "comparison.html"
BY = {"epoch": "epoch", "step": "step", "seconds": "training time"}
"""What curves are drawn by, in words."""


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
        out: a folder for `comparison.html` and `comparison.png`, or the name of the page, `NAME.html`, with
            `NAME.png` beside it; existing files are replaced. None writes nothing.

    Raises:
        UserError: a folder that is no run, or is given twice; a broken file; a place that cannot be written.
    """
    refs = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    comparison = RunComparison.of([Run.open(ref) for ref in refs])
    if out is not None:
        write_comparison(comparison, out)
    return comparison


def write_comparison(comparison: RunComparison, out: str | os.PathLike[str]) -> list[Path]:
    """Write the page and, if a run has an epoch, the figure, as `compare` does; returns the paths."""
    page = Path(out) if Path(out).suffix == ".html" else Path(out) / PAGE
    figure = page.with_suffix(".png")
    make_folder(page.parent)
    curves = curves_of(comparison)
    with explaining_failure(page, "the comparison", "make room, or choose another place"):
        with replacing(page) as aside:
            aside.write_text(_page(comparison, curves), encoding="utf-8")
        if not curves:
            return [page]
        with replacing(figure) as aside:
            save_figure(draw_comparison(curves), aside)
    return [page, figure]


def draw_comparison(curves: Sequence[Curve]) -> Figure:
    """The validation curves of all runs: by epoch above, by training time or step below."""
    names, rows = _quantities(curves), _abscissas(curves)
    figure = new_figure(4.8 * len(names), 3.2 * len(rows) + 0.5)
    grid = figure.subplots(len(rows), len(names), squeeze=False)
    for row, by in zip(grid, rows, strict=True):
        for axes, name in zip(row, names, strict=True):
            plot_runs(axes, curves, name, by)
            axes.set_title(f"validation {curve_title(name, names)}")
    kinds = {(curve.colour, curve.style): curve.label for curve in curves}
    lines = [Line2D([], [], color=colour, linestyle=style) for colour, style in kinds]
    labels = [f" {label}" for label in kinds.values()]  # one that begins with _ would be left out
    figure.legend(lines, labels, loc="outside lower center", ncols=min(4, len(kinds)), frameon=False)
    return figure


def curves_of(comparison: RunComparison) -> list[Curve]:
    """The curves of the runs with at least one epoch; runs that differ in their seed only share a colour."""
    groups: dict[str, list[str]] = {}
    for run in comparison.runs:
        groups.setdefault(seed_group(run.run), []).append(run.name)
    order = list(groups)
    found = []
    for run in comparison.runs:
        key = seed_group(run.run)
        style, colour = divmod(order.index(key), len(RUN_COLOURS))
        if run.epochs:
            found.append(
                Curve(
                    name=run.name,
                    label=short(", ".join(groups[key]), 40),
                    epochs=run.epochs,
                    kept=kept_place(run.run, run.epochs),
                    colour=RUN_COLOURS[colour],
                    style=RUN_STYLES[style],
                )
            )
    return found


def _quantities(curves: Sequence[Curve]) -> list[str]:
    recorded = {name for curve in curves for name in curve.epochs[0]}
    names = ("loss", "map" if "val_map" in recorded else "accuracy")
    return [name for name in names if f"val_{name}" in recorded]


def _abscissas(curves: Sequence[Curve]) -> list[str]:
    """Epochs, and the training time if every epoch has it, otherwise steps."""
    timed = all("seconds" in epoch for curve in curves for epoch in curve.epochs)
    return ["epoch", "seconds" if timed else "step"]


def _page(comparison: RunComparison, curves: Sequence[Curve]) -> str:
    header: dict[str, Any] = {
        "name": say("Comparison of {number} runs", number=len(comparison.runs)),
        "result": comparison.summary,
        "resume": None,
        "measured_on_val": False,
        "warning": "",
        "tiles": [],
    }
    names = {curve.name: _entry(curve, curve.name) for curve in curves}
    head, *rows = comparison.results()
    sections: dict[str, dict[str, Any] | None] = {
        "results": {
            "head": list(map(say, head)),
            "rows": [
                (names.get(name, name), *(cell.replace(" to ", say(" to ")) for cell in rest))
                for name, *rest in rows
            ],
            "groups": comparison.groups,
            "notes": comparison.notes(),
        },
        "together": _together(curves) if curves else None,
        "paired": {
            "best": comparison.leaders[0],
            "measure": comparison.measure,
            "head": _paired_head(comparison),
            "rows": [(*test.cells()[:-1], say(test.verdict)) for test in comparison.paired],
        }
        if comparison.paired
        else None,
        "differences": {
            "names": [run.name for run in comparison.runs],
            "rows": comparison.difference_rows(),
        },
    }
    return render(header, sections)


def _paired_head(comparison: RunComparison) -> list[str]:
    """The columns of the tests, in the reader's language."""
    best, head = comparison.leaders[0], list(map(say, comparison.paired_head))
    if comparison.measure == "mAP":
        head[2] = say("mAP less that of {best}", best=best)
    else:
        head[2] = say("only {best} right", best=best)
    return head


def _together(curves: Sequence[Curve]) -> dict[str, Any]:
    """The charts, each with its caption, and the legend that they share."""

    def draw(name: str, by: str) -> Figure:
        figure = blank_figure(4.4, 2.9)
        plot_runs(figure.subplots(), curves, name, by)
        return figure

    names = _quantities(curves)
    figures = []
    for by in _abscissas(curves):
        for name in names:
            title = curve_title(name, names)
            alt = f"validation {title} of all runs by {BY[by]}"
            drawing = embedded(partial(draw, name, by), f"runs-{name}-{by}", alt)
            caption = say("Validation {title} by {by}.", title=say(title), by=say(BY[by]))
            figures.append((drawing, caption))
    legend = {(curve.colour, curve.style): _entry(curve, curve.label) for curve in curves}
    return {
        "figures": figures,
        "legend": list(legend.values()),
        "kept": any(curve.kept is not None for curve in curves),
        "grouped": len(legend) < len(curves),
    }


def _entry(curve: Curve, name: str) -> Markup:
    """A name beside a piece of the curve, as in a legend."""
    line = f"3px {curve.style} var({COLOURS[curve.colour]})"
    entry = '<span class="entry"><span class="swatch" style="border-top: {}"></span>{}</span>'
    return Markup(entry).format(line, name)
