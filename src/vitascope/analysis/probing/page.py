"""`probe.html`: the comparison of a probe, its learning curve, and what is hard, on one page."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from vitascope.analysis.explain.plots import GREY, SERIES, plain
from vitascope.analysis.probing.curve import TIMES, LearningCurve
from vitascope.analysis.probing.label_errors import Probabilities, Suspect, suspects
from vitascope.analysis.report.page import blank_figure, embedded, render, sure
from vitascope.analysis.report.thumbnails import name_of_image, read_pictures
from vitascope.data.measures import ClassPair, Z
from vitascope.data.splits import ImageSet
from vitascope.data.targets import Targets
from vitascope.language import say, say_count
from vitascope.models.preprocess import Framed
from vitascope.models.vision_model import VisionModel
from vitascope.storage import replacing
from vitascope.training.evaluation.calibration import sharpness
from vitascope.training.linear.classifiers import Floats
from vitascope.training.linear.selection import SCORES_HEAD, ProbeSelection, in_words
from vitascope.training.run.environment import without_home
from vitascope.training.run.run import Run

ROWS = 12
"""Rows of the table that are not folded."""
CLASSES, EXAMPLES = 12, 4
"""Classes with pictures, those with the most mistakes; typical and untypical pictures of each."""
SUSPECTS, PAIRS = 24, 10


def write_page(
    run: Run,
    selection: ProbeSelection,
    curve: LearningCurve,
    known: ImageSet,
    model: VisionModel,
    lines: Sequence[str],
) -> Path:
    """Write the page of a probe into its run; returns its path.

    Args:
        known: the images to fit on, in the order of the selection's.
        model: whose preprocessing frames the pictures.
        lines: one about each body.
    """
    targets, best = selection.train.targets, selection.best
    factor = sharpness(targets, targets.logits(best.held_out))
    held_out = targets.sharpened(best.held_out, factor)  # (N, K)
    doubtful = suspects(targets, held_out, SUSPECTS)
    examples = _hardest(targets, held_out)
    wanted = [each.image for each in doubtful]
    wanted += [index for example in examples for index in (*example.most.tolist(), *example.least.tolist())]
    pictures = read_pictures(known, wanted, model)
    rows = selection.rows()
    sections: dict[str, dict[str, Any] | None] = {
        "scores": {
            "head": list(map(say, SCORES_HEAD)),
            "rows": rows[:ROWS],
            "rest": rows[ROWS:],
            "measure": targets.measure,
            "folds": int(selection.folds.max()) + 1,
            "bodies": lines,
        },
        "more": _more(selection, curve),
        "hard": _hard(selection),
        "typical": {
            "examples": [
                {
                    "name": example.name,
                    "most": _cards(known, example.most, pictures, held_out[:, k]),
                    "least": _cards(known, example.least, pictures, held_out[:, k]),
                }
                for example in examples
                for k in [targets.class_names.index(example.name)]
            ],
            "others": int((targets.counts > 0).sum()) - len(examples),
        },
        "doubtful": {
            "listed": [_card(known, each.image, pictures) | {"words": _in_words(each)} for each in doubtful]
        }
        if doubtful
        else None,
    }
    with replacing(run.probe) as aside:
        aside.write_text(render(_header(run, selection, curve), sections), encoding="utf-8")
    return run.probe


def _header(run: Run, selection: ProbeSelection, curve: LearningCurve) -> dict[str, Any]:
    best, measure = selection.best, selection.train.targets.measure
    value, low, high = best.tested.value_and_limits
    tested = say(
        "test {measure}; 95% interval {low:.1%} to {high:.1%}", measure=say(measure), low=low, high=high
    )
    tiles = [(f"{value:.1%}", tested)]
    if curve.forecasts:
        tiles.append((f"{curve.now:.1%}", say("cross-validated {measure} now", measure=say(measure))))
    for forecast in curve.forecasts:
        values = {"times": say(TIMES[forecast.factor]), "low": forecast.low, "high": forecast.high}
        tiles.append(
            (f"{forecast.value:.1%}", say("with {times}: {low:.1%} to {high:.1%}", **values))
            if forecast.low > curve.now
            else ("±0", say("with {times}: no gain can be shown ({low:.1%} to {high:.1%})", **values))
        )
    tiles.append((f"{len(selection.train.targets):,}", say("images to fit and select on")))
    tiles.append((f"{len(selection.test):,}", say("images to test on")))
    data = without_home(str(run.config["data"]))
    return {
        "name": say("Probe of {data}", data=Path(data).name or data),
        "result": say(
            "The best of {classifiers} is {name} on {place}: {measure} {value} on the test images.",
            classifiers=say_count(len(selection.scores), "classifier"),
            name=best.name,
            place=best.candidate.place,
            measure=say(measure),
            value=in_words(best.tested),
        ),
        "resume": None,
        "measured_on_val": False,
        "warning": say("This model is {doubt}", doubt=selection.doubt) if selection.doubt else "",
        "tiles": tiles,
    }


def _more(selection: ProbeSelection, curve: LearningCurve) -> dict[str, Any]:
    measure = selection.train.targets.measure
    alt = f"cross-validated {measure} by the number of training images: {'; '.join(curve.lines())}"
    drawing = embedded(partial(draw_curve, curve, measure), "learning-curve", alt, width=620)
    return {"drawing": drawing, "lines": curve.lines(), "measure": measure, "forecast": bool(curve.forecasts)}


def draw_curve(curve: LearningCurve, measure: str) -> Figure:
    """The measured values with 95% intervals, and the forecasts."""
    figure = blank_figure(6.2, 3.2)
    axes = figure.subplots()
    bars: dict[str, Any] = {"capsize": 2, "linewidth": 1.6, "elinewidth": 1, "marker": "o", "markersize": 3.5}
    error = Z * curve.deviations
    ends = np.minimum(error, curve.values), np.minimum(error, 1 - curve.values)  # within 0 and 1
    axes.errorbar(curve.sizes, curve.values, ends, color=SERIES[0], label="cross-validated", **bars)
    if curve.forecasts:
        images = [forecast.factor * curve.images for forecast in curve.forecasts]
        values = np.array([forecast.value for forecast in curve.forecasts])
        below = values - [forecast.low for forecast in curve.forecasts]
        above = [forecast.high for forecast in curve.forecasts] - values
        bars |= {"linestyle": "none", "marker": "D"}
        axes.errorbar(images, values, [below, above], color=SERIES[1], label="forecast", **bars)
    axes.axvline(curve.images, color=GREY, linestyle=":", linewidth=1, label=f"all {curve.images:,} images")
    plain(axes, xlabel="training images", ylabel=measure)
    axes.set_xscale("log", base=2)
    ticks = sorted({int(size) for size in curve.sizes} | {f.factor * curve.images for f in curve.forecasts})
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(fontsize=8, facecolor="white", edgecolor="none", framealpha=0.75, loc="lower right")
    return figure


def _hard(selection: ProbeSelection) -> dict[str, Any] | None:
    """The classes that are confused; None without mistakes."""
    targets = selection.train.targets
    pairs = confused(targets, selection.best.held_out, PAIRS)
    if not pairs:
        return None
    names, counts = targets.class_names, targets.counts
    return {
        "rows": [
            (names[p.first], names[p.second], f"{p.count:,}", f"{p.count / counts[p.first]:.1%}")
            for p in pairs
        ],
        "several": targets.strata is None,
    }


def _hardest(targets: Targets, held_out: Floats) -> "list[ClassExamples]":
    """The examples of the classes whose images have the lowest mean probability of their class."""
    means = {
        targets.class_names[k]: held_out[images, k].mean()
        for k, images in enumerate(targets.by_class())
        if len(images)
    }
    found = class_examples(targets, held_out, EXAMPLES)
    return sorted(found, key=lambda each: float(means[each.name]))[:CLASSES]


def _card(known: ImageSet, index: int, pictures: Mapping[int, Framed]) -> dict[str, Any]:
    return {"picture": pictures.get(index), "name": name_of_image(known, index)}


def _cards(
    known: ImageSet, indices: npt.NDArray[np.int64], pictures: Mapping[int, Framed], probabilities: Floats
) -> list[dict[str, Any]]:
    return [
        _card(known, index, pictures) | {"probability": sure(float(probabilities[index]))}
        for index in indices.tolist()
    ]


def _in_words(suspect: Suspect) -> dict[str, str | None]:
    return {"given": suspect.given, "suggested": suspect.suggested, "margin": f"{suspect.margin:.0%}"}


# --- from out-of-fold probabilities (N, K): no image is judged by a classifier that saw it


@dataclasses.dataclass(frozen=True, eq=False)
class ClassExamples:
    """Images of one class by the probability of this class: indices, the most extreme first."""

    name: str
    most: npt.NDArray[np.int64]
    least: npt.NDArray[np.int64]


def class_examples(targets: Targets, probabilities: Probabilities, count: int = 5) -> list[ClassExamples]:
    """The most and the least typical images of each class that has any: those with the highest and the lowest
    probability of the class, at most `count` of each, and none in both."""
    found = []
    for k, images in enumerate(targets.by_class()):
        order = images[np.argsort(-probabilities[images, k], kind="stable")]
        few = min(count, len(order) // 2)
        if len(order):
            most, least = order[: max(few, 1)], order[::-1][:few]
            found.append(ClassExamples(targets.class_names[k], most, least))
    return found


def confused(targets: Targets, probabilities: Probabilities, count: int = 10) -> list[ClassPair]:
    """At most `count` pairs of a class and one that is predicted instead, the most frequent first."""
    return targets.confused(targets.answers(probabilities), count)
