"""The report's sections about the run: result, training, curves, configuration, environment."""

from __future__ import annotations

import datetime
import shlex
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitascope.data.datasets import class_counts
from vitascope.data.splits import Splits
from vitascope.data.targets import ClassSets
from vitascope.formatting import counted, duration
from vitascope.model.vision_model import VisionModel
from vitascope.report.charts import curve_names, kept_place, plot_curve, values_of
from vitascope.report.svg import blank_figure, embed
from vitascope.run.environment import without_home
from vitascope.run.label_measures import LabelScore
from vitascope.run.measures import Score, calibration, wilson_interval
from vitascope.run.run import Run

MOST_CLASSES = 100
"""Rows of the table of images per class; with more classes there is a line instead."""


def header(run: Run, model: VisionModel | None) -> dict[str, Any]:
    """The result in one sentence, notes on it, and the most important numbers."""
    tests, score = run.records("test"), _score(run)
    return {
        "name": run.path.resolve().name,
        "result": _result(run),
        "resume": None if run.finished else f"{_command(run)} --resume {_quoted(run.path)}",
        "measured_on_val": bool(
            tests
            and tests[-1]["split"] == "val"
            and run.config.get("keep") != "last"
            and run.classifies
            and not run.probes
        ),
        "warning": "" if score is None else score.warning(run.better_start),
        "tiles": _tiles(run, model, score),
    }


def _command(run: Run) -> str:
    return f"vitascope {'train' if run.classifies else 'pretrain'}"


def _quoted(path: object) -> str:
    return shlex.quote(without_home(str(path)))


def _result(run: Run) -> str:
    epochs, tests = run.records("epoch"), run.records("test")
    data = without_home(str(run.config["data"]))
    what = f"A classifier of {data}" if run.classifies else f"A body, pre-trained by masked patches of {data}"
    if not run.finished or not tests:
        return f"{what}: trained for {epochs[-1]['epoch'] if epochs else 0:g} of {_planned_epochs(run)}."
    test = tests[-1]
    images = counted(test["images"], f"{test['split']} image")
    if not run.classifies:
        return f"{what}: loss {test['loss']:.3f} for hidden patches of {images}."
    score = _score(run)
    if isinstance(score, LabelScore):
        found = score.estimates["map"]
        return (
            f"{what}: mAP {found.value:.2%} of {images}. A constant answer would reach {found.constant:.2%}."
        )
    compared = (
        "" if score is None else f" Always guessing the most frequent class would reach {score.majority:.2%}."
    )
    return f"{what}: {test['accuracy']:.2%} of {images} correct.{compared}"


def _kept(run: Run) -> str:
    kept = run.records("kept")
    if kept:
        return f"those of epoch {kept[-1]['epoch']:g}: {kept[-1]['reason']}"
    words = {"best": "those of the lowest validation loss", "last": "the last ones"}  # of an older run
    return words.get(str(run.config.get("keep")), "not decided yet")


def _planned_epochs(run: Run) -> str:
    """The length of the run: "20 epochs"."""
    planned = run.planned_epochs
    if planned is None:
        return "an unknown number of epochs"
    return f"{planned:g} epoch{'' if planned == 1 else 's'}"


def _length(run: Run) -> str:
    """The length of the run, and what has set it if that was not a number of epochs."""
    config, epochs = run.config, _planned_epochs(run)
    if config.get("minutes"):
        return f"{epochs} in {config['minutes']:g} minutes"
    return f"{config['steps']:,} steps ({epochs})" if config.get("steps") else epochs


def _score(run: Run) -> Score | LabelScore | None:
    found = run.predictions if run.finished else None
    return None if found is None else found.score


def _tiles(run: Run, model: VisionModel | None, score: Score | LabelScore | None) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    tests, epochs = run.records("test"), run.records("epoch")
    if isinstance(score, LabelScore):
        found += _label_tiles(score)
    elif tests and run.classifies:
        test = tests[-1]
        low, high = wilson_interval(test["correct"], test["images"])
        meaning = f"{test['split']} accuracy; 95% interval {low:.1%} to {high:.1%}"
        found.append((f"{test['accuracy']:.2%}", meaning))
        if score is not None:
            found.append((f"{score.majority:.2%}", "accuracy of always guessing the most frequent class"))
            found.append((f"{score.balanced:.2%}", "balanced accuracy: mean recall of the classes"))
            found.append((f"{score.macro_f1:.2%}", "macro F1: mean over the classes"))
            if score.top5 is not None:
                found.append((f"{score.top5:.2%}", "top-5 accuracy: true class among the five most probable"))
        found.append((f"{test['loss']:.3f}", f"{test['split']} loss (cross-entropy, nats)"))
    elif tests:
        found.append((f"{tests[-1]['loss']:.3f}", f"{tests[-1]['split']} loss of hidden patches"))
        if "accuracy" in tests[-1]:
            found.append((f"{tests[-1]['accuracy']:.2%}", "of their colours correct"))
    if run.predictions is not None and not run.predictions.several:
        error = calibration(run.predictions.confidences, run.predictions.correct).error
        found.append((f"{error:.2%}", "expected calibration error (15 bins)"))
    if model is not None:
        found.append((f"{sum(p.numel() for p in model.parameters()) / 1e6:.3g} M", "parameters"))
    if epochs:
        done = f"{epochs[-1]['epoch']:g}"
        planned = "" if run.finished or run.planned_epochs is None else f" of {run.planned_epochs:g}"
        found.append((f"{done}{planned}", "epoch" if done == "1" and not planned else "epochs"))
    if tests:
        found.append((duration(tests[-1]["seconds"]), "training time, with validation"))
    return found


def _label_tiles(score: LabelScore) -> list[tuple[str, str]]:
    """The most important measures, each beside that of a constant answer."""
    words = {
        "map": "mAP: mean average precision of the classes",
        "micro_map": "micro mAP: of all images and classes together",
        "macro_f1_tuned": "macro F1 at the thresholds of the validation images",
        "micro_f1_tuned": "micro F1 at the same thresholds",
        "exact": "of the images with exactly their classes predicted",
    }
    found = {text: score.estimates[name] for name, text in words.items()}
    return [
        (f"{each.value:.2%}", f"{text}; constant answer {each.constant:.1%}") for text, each in found.items()
    ]


def training(
    run: Run, model: VisionModel | None, splits: Splits | None, gone: str, differs: str = ""
) -> dict[str, Any]:
    """Data, model and options of the training; `gone` and `differs` are about the data since then."""
    get = run.config.get
    task = "classification" if run.classifies else f"masked patch prediction ({get('target')})"
    if run.probes:
        task = "classification by a linear head on frozen features; probe.html compares it with others"
    rows: list[tuple[str, object]] = [("Task", task), ("Data", without_home(str(get("data"))))]
    names = _class_names(run, model, splits) if run.classifies else ()
    parts = [] if splits is None else [splits.train, splits.val, *([splits.test] if splits.test else [])]
    if parts:
        rows.append(("Images", ", ".join(f"{len(part):,} {part.name}" for part in parts)))
    if names:
        some = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        rows.append(("Classes", f"{len(names):,}: {some}"))
    if splits is not None and isinstance(splits.train.targets, ClassSets):
        own = splits.train.targets.labels.sum(axis=1)
        rows.append(
            ("Classes per image", f"{own.mean():.2f} on average, {own.min()} to {own.max()}, in train")
        )
    size = get("model") or "as the weights that training started from"
    rows.append(("Model", f"{size}: {model.config.summary}" if model is not None else size))
    if model is not None:
        rows.append(("Parameters", f"{sum(p.numel() for p in model.parameters()):,}"))
    start = without_home(str(get("weights"))) if get("weights") else f"random weights, seed {get('seed')}"
    rows.append(("Started from", start))
    if get("teacher"):
        rows.append(("Teacher", without_home(str(get("teacher")))))
    if not run.probes:
        options = (
            f"{_length(run)}, batches of {get('batch_size')}, {get('optimizer')}, learning rate "
            f"{get('lr')} ({get('schedule')}), weight decay {get('weight_decay')}"
        )
        rows.append(("Training", options))
    if chosen := run.plan.get("chosen"):
        rows.append(("Chosen by the data", f"{', '.join(chosen.values())}: for {run.plan['reason']}"))
    if stops := run.records("stop"):
        epoch, best = stops[-1]["epoch"], stops[-1]["best_epoch"]
        rows.append(
            ("Stopped early", f"after epoch {epoch}; the lowest validation loss was that of epoch {best}")
        )
    balanced = [name for name in ("class_weights", "sampling") if get(name) == "balanced"]
    if balanced:
        rows.append(("Balanced by", balanced[0].replace("_", " ")))
    if run.classifies and not run.probes:
        rows.append(("Weights kept", _kept(run)))
    if "started" in run.environment:
        rows.append(("Started", _date(run.environment["started"])))
    counts = [class_counts(part) for part in parts] if run.classifies and len(names) > 1 else []
    few = splits is not None and len(splits.train.class_names) <= MOST_CLASSES
    return {
        "rows": rows,
        "gone": gone,
        "differs": without_home(differs),
        "splits": [part.name for part in parts],
        "images_per_class": [
            (name, *(f"{count.get(name, 0):,}" for count in counts))
            for name in (splits.train.class_names if splits is not None and few and counts else ())
        ],
        "range": (min(counts[0].values()), max(counts[0].values())) if counts and not few else None,
    }


def _class_names(run: Run, model: VisionModel | None, splits: Splits | None) -> tuple[str, ...]:
    if run.predictions is not None:
        return run.predictions.class_names
    if splits is not None:
        return splits.train.class_names
    return model.config.class_names if model is not None else ()


def curves(run: Run) -> dict[str, Any] | None:
    """Loss, accuracy and learning rate by epoch; None before anything is recorded."""
    epochs, steps = run.records("epoch"), run.records("step")
    if not epochs and not steps:
        return None

    kept = kept_place(run, epochs)

    def draw(name: str) -> Figure:
        figure = blank_figure(4.4, 2.9)
        plot_curve(figure.subplots(), epochs, steps, name, kept)
        return figure

    meanings = {
        "loss": "Loss, lower is better.",
        "accuracy": "Accuracy." if run.classifies else "Share of correct colours.",
        "map": "Mean average precision over the classes.",
        "agree": "Agreement of the student with its teacher.",
        "lr": "Learning rate.",
    }
    figures, names = [], curve_names(epochs, steps)
    if "map" in names:
        meanings["accuracy"] = "Images with exactly their classes above 0.5."
    for name in names:
        best = ""
        if epochs and f"val_{name}" in epochs[0]:
            values = values_of(epochs, f"val_{name}")
            place = int(np.argmin(values) if name == "loss" else np.argmax(values))
            number = f"{values[place]:.3f}" if name == "loss" else f"{values[place]:.1%}"
            best = f"Best in validation: {number}, in epoch {epochs[place]['epoch']}."
        drawing = embed(partial(draw, name), f"curve-{name}", f"{name} by epoch")
        figures.append((drawing, (meanings[name], best)))
    return {"figures": figures}


def configuration(run: Run) -> dict[str, Any]:
    """Every option, and the command that repeats a training."""
    repeat = f"{_command(run)} --config {_quoted(run.config_file)} --run NEW"
    return {
        "command": "" if run.probes else repeat,
        "rows": [(name, without_home(option_text(value))) for name, value in run.config.items()],
    }


def environment(run: Run) -> dict[str, Any]:
    """The machine and the versions that the run was started with."""
    found = dict(run.environment)
    return {"found": found | {"started": _date(found["started"])} if "started" in found else found}


def _date(text: str) -> str:
    """A time in ISO 8601 as people write it."""
    return datetime.datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z")


def option_text(value: object) -> str:
    """The value of an option as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={option_text(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
