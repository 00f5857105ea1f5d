"""The report's sections about the run: result, training, curves, configuration, environment."""

import datetime
import math
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitascope.analysis.report.charts import curve_names, kept_place, plot_curve, values_of
from vitascope.analysis.report.page import blank_figure, embedded
from vitascope.data.datasets import class_counts
from vitascope.data.label_measures import LabelScore
from vitascope.data.measures import FEW, AccuracyScore, Score, calibration, wilson_interval
from vitascope.data.splits import ImageSet, Splits
from vitascope.formatting import duration
from vitascope.language import say, say_count
from vitascope.models.vision_model import VisionModel
from vitascope.training.run.environment import without_home
from vitascope.training.run.run import Run

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
        "warning": _warning(run, score),
        "tiles": _tiles(run, model, score),
    }


def _warning(run: Run, score: Score | None) -> str:
    """The `warning` of a score, in the reader's language."""
    if score is None or not score.no_better:
        return ""
    if isinstance(score, LabelScore):
        text = say(
            "This model is no better than the same answer for every image, as far as {total:,} images show",
            total=score.total,
        )
    else:
        text = say(
            "This model is no better than always guessing the most frequent class, as far as {total:,} "
            "images show",
            total=score.total,
        )
    return f"{text}; {run.better_start}" if run.better_start else text


def _command(run: Run) -> str:
    return f"vitascope {'train' if run.classifies else 'pretrain'}"


def _quoted(path: object) -> str:
    return shlex.quote(without_home(str(path)))


def _result(run: Run) -> str:
    epochs, tests = run.records("epoch"), run.records("test")
    data = without_home(str(run.config["data"]))
    if run.classifies:
        what = say("A classifier of {data}", data=data)
    else:
        what = say("A body, pre-trained by masked patches of {data}", data=data)
    if not run.finished or not tests:
        done = epochs[-1]["epoch"] if epochs else 0
        return say(
            "{what}: trained for {done:g} of {planned}.", what=what, done=done, planned=_planned_epochs(run)
        )
    test = tests[-1]
    images = say_count(test["images"], f"{test['split']} image")
    if not run.classifies:
        loss = test["loss"]
        return say(
            "{what}: loss {loss:.3f} for hidden patches of {images}.", what=what, loss=loss, images=images
        )
    score = _score(run)
    if isinstance(score, LabelScore):
        mean = score.estimates["map"]
        measured = say("{what}: mAP {map:.2%} of {images}.", what=what, map=mean.value, images=images)
        compared = say("A constant answer would reach {map:.2%}.", map=mean.constant)
        return f"{measured} {compared}"
    accuracy = test["accuracy"]
    measured = say("{what}: {accuracy:.2%} of {images} correct.", what=what, accuracy=accuracy, images=images)
    if score is None:
        return measured
    compared = say("Always guessing the most frequent class would reach {share:.2%}.", share=score.guessed)
    return f"{measured} {compared}"


def _kept(run: Run) -> str:
    kept = run.records("kept")
    if kept:
        return say("those of epoch {epoch:g}: {reason}", epoch=kept[-1]["epoch"], reason=kept[-1]["reason"])
    return say("not decided yet")


def _planned_epochs(run: Run) -> str:
    """The length of the run: "20 epochs"."""
    planned = run.planned_epochs
    if planned is None:
        return say("an unknown number of epochs")
    planned = planned if planned % 1 == 0 else float(f"{planned:.3g}")
    if run.members:
        return say("{number:g} epochs in each fold, on average", number=planned)
    return say("{number:g} epoch", number=1) if planned == 1 else say("{number:g} epochs", number=planned)


def _length(run: Run) -> str:
    """The length of the run, and what has set it if that was not a number of epochs."""
    config, epochs = run.config, _planned_epochs(run)
    if config.get("minutes") and run.finished and (tests := run.records("test")):
        return say(
            "{epochs} in {seconds:,.0f} s of training, of {minutes:g} min in all",
            epochs=epochs,
            seconds=tests[-1]["seconds"],
            minutes=config["minutes"],
        )
    if config.get("minutes"):
        return say("{epochs} in {minutes:g} min", epochs=epochs, minutes=config["minutes"])
    steps = config.get("steps")
    return say("{steps:,} steps ({epochs})", steps=steps, epochs=epochs) if steps else epochs


def _score(run: Run) -> Score | None:
    predictions = run.predictions if run.finished else None
    return None if predictions is None else predictions.score


def _tiles(run: Run, model: VisionModel | None, score: Score | None) -> list[tuple[str, str]]:
    tiles: list[tuple[str, str]] = []
    tests, epochs = run.records("test"), run.records("epoch")
    if isinstance(score, LabelScore):
        tiles += _label_tiles(score)
    elif tests and run.classifies:
        test = tests[-1]
        low, high = wilson_interval(test["correct"], test["images"])
        values = {"split": say(test["split"]), "low": low, "high": high, "images": test["images"]}
        meaning = (
            say("{split} accuracy of only {images} images; 95% interval {low:.1%} to {high:.1%}", **values)
            if test["images"] < FEW
            else say("{split} accuracy; 95% interval {low:.1%} to {high:.1%}", **values)
        )
        tiles.append((f"{test['accuracy']:.2%}", meaning))
        if isinstance(score, AccuracyScore):
            tiles.append(
                (f"{score.majority:.2%}", say("accuracy of always guessing the most frequent class"))
            )
            tiles.append((f"{score.balanced:.2%}", say("balanced accuracy: mean recall of the classes")))
            tiles.append((f"{score.macro_f1:.2%}", say("macro F1: mean over the classes")))
            if score.top5 is not None:
                tiles.append(
                    (f"{score.top5:.2%}", say("top-5 accuracy: true class among the five most probable"))
                )
        tiles.append(
            (f"{test['loss']:.3f}", say("{split} loss (cross-entropy, nats)", split=say(test["split"])))
        )
    elif tests:
        split = say(tests[-1]["split"])
        tiles.append((f"{tests[-1]['loss']:.3f}", say("{split} loss of hidden patches", split=split)))
        if "accuracy" in tests[-1]:
            tiles.append((f"{tests[-1]['accuracy']:.2%}", say("of their colours correct")))
    if run.predictions is not None and run.predictions.targets.trusted and len(run.predictions.labels) >= FEW:
        error = calibration(run.predictions.confidences, run.predictions.correct).error
        tiles.append((f"{error:.2%}", say("expected calibration error (15 bins)")))
    if model is not None:
        tiles.append((f"{sum(p.numel() for p in model.parameters()) / 1e6:.3g} M", say("parameters")))
    if epochs:
        done = f"{epochs[-1]['epoch']:g}"
        if not run.finished and run.planned_epochs is not None:
            done = say("{done} of {planned:g}", done=done, planned=run.planned_epochs)
        tiles.append((done, say("epoch") if done == "1" else say("epochs")))
    if tests:
        tiles.append((duration(tests[-1]["seconds"]), say("training time, with validation")))
    return tiles


def _label_tiles(score: LabelScore) -> list[tuple[str, str]]:
    """The most important measures, each beside the value of a constant answer."""
    words = {
        "map": say("mAP: mean average precision of the classes"),
        "micro_map": say("micro mAP: of all images and classes together"),
        "macro_f1_tuned": say("macro F1 at the thresholds of the validation images"),
        "micro_f1_tuned": say("micro F1 at the same thresholds"),
        "exact": say("of the images with exactly their classes predicted"),
    }
    return [
        (
            f"{score.estimates[name].value:.2%}",
            say("{measure}; constant answer {value:.1%}", measure=text, value=score.estimates[name].constant),
        )
        for name, text in words.items()
    ]


def training(
    run: Run, model: VisionModel | None, splits: Splits | None, gone: str, differs: str = ""
) -> dict[str, Any]:
    """Data, model and options of the training; `gone` and `differs` are about the data since then."""
    every = () if splits is None else (splits.train, splits.val, splits.test)
    parts = [part for part in every if part is not None and len(part)]  # with folds, there is no `val`
    names = _class_names(run, model, splits) if run.classifies else ()
    counts = [class_counts(part) for part in parts] if len(names) > 1 else []
    few = splits is not None and len(splits.train.class_names) <= MOST_CLASSES
    return {
        "rows": [*_data_rows(run, parts, names), *_model_rows(run, model), *_course_rows(run)],
        "gone": gone,
        "differs": without_home(differs),
        "splits": [part.name for part in parts],
        "images_per_class": [
            (name, *(f"{count.get(name, 0):,}" for count in counts))
            for name in (splits.train.class_names if splits is not None and few and counts else ())
        ],
        "range": (min(counts[0].values()), max(counts[0].values())) if counts and not few else None,
    }


def _data_rows(run: Run, parts: Sequence[ImageSet], names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """The task, the images, of which `train` comes first, and the classes."""
    if run.probes:
        task = say("classification by a linear head on frozen features; probe.html compares it with others")
    elif run.classifies:
        task = say("classification")
    else:
        task = say("masked patch prediction ({target})", target=run.config.get("target"))
    yield say("Task"), task
    yield say("Data"), without_home(str(run.config.get("data")))
    if parts:
        counts = [f"{len(part):,} {part.name}" for part in parts]
        if run.members:
            counts[0] = say("{count:,} in {folds} folds", count=len(parts[0]), folds=len(run.members))
        yield say("Images"), ", ".join(counts)
    if names:
        some = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        yield say("Classes"), f"{len(names):,}: {some}"
    if parts and parts[0].targets is not None and parts[0].targets.strata is None:
        classes = parts[0].targets.labels.sum(axis=1)
        numbers = {"mean": classes.mean(), "least": classes.min(), "most": classes.max()}
        yield (
            say("Classes per image"),
            say("{mean:.2f} on average, {least} to {most}, in train", **numbers),
        )


def _model_rows(run: Run, model: VisionModel | None) -> Iterator[tuple[str, object]]:
    """The model, the weights that it started from, and its teacher."""
    get = run.config.get
    size = get("model") or say("as the weights that training started from")
    yield say("Model"), f"{size}: {model.config.summary}" if model is not None else size
    if model is not None:
        yield say("Parameters"), f"{sum(p.numel() for p in model.parameters()):,}"
    yield (
        say("Started from"),
        without_home(str(get("weights")))
        if get("weights")
        else say("random weights, seed {seed}", seed=get("seed")),
    )
    if get("teacher"):
        yield say("Teacher"), without_home(str(get("teacher")))


def _course_rows(run: Run) -> Iterator[tuple[str, object]]:
    """The options, what was decided by the data and by the course of the run, and its start."""
    get = run.config.get
    if not run.probes:
        options = say(
            "{length}, batches of {batch_size}, {optimizer}, learning rate {lr} ({schedule}), weight decay "
            "{weight_decay}",
            length=_length(run),
            **{name: get(name) for name in ("batch_size", "optimizer", "lr", "schedule", "weight_decay")},
        )
        yield say("Training"), options
    if start := run.plan.get("start"):
        yield say("Chosen by comparison"), "; ".join(start)
    if chosen := run.plan.get("chosen"):
        choices = ", ".join(chosen.values())
        yield (
            say("Chosen by the data"),
            say("{names}: for {reason}", names=choices, reason=run.plan["reason"]),
        )
    stops, epochs = run.records("stop"), run.records("epoch")
    if stops and stops[-1]["step"] >= epochs[-1]["step"]:  # not before the run got more epochs
        text = say(
            "after epoch {epoch}; the lowest validation loss was that of epoch {best}",
            epoch=stops[-1]["epoch"],
            best=stops[-1]["best_epoch"],
        )
        yield say("Stopped early"), text
    if weights := get("class_weights"):
        yield say("Class weights"), " ".join(weights)
    if get("sampling") == "balanced":
        yield say("Balanced by"), "sampling"
    if folds := run.records("fold"):
        values = [record["map" if "map" in record else "accuracy"] for record in folds]
        numbers = {"count": len(folds), "low": min(values), "high": max(values)}
        text = say("{count} runs, {low:.2%} to {high:.2%}; the model is the ensemble of theirs", **numbers)
        yield say("Folds"), text
        whole = run.records("out_of_fold")[-1]
        value = whole["map" if "map" in whole else "accuracy"]
        text = say("{value:.2%} of {count:,} images", value=value, count=whole["images"])
        if copies := whole.get("copies_across", 0):
            text += say("; too good, because {count:,} have a copy in another fold", count=copies)
        yield say("Out of fold"), text
    elif run.classifies and not run.probes:
        yield say("Weights kept"), _kept(run)
    if "started" in run.environment:
        yield say("Started"), _date(run.environment["started"])


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
        "loss": say("Loss, lower is better."),
        "accuracy": say("Accuracy.") if run.classifies else say("Share of correct colours."),
        "map": say("Mean average precision over the classes."),
        "agree": say("Agreement of the student with its teacher."),
        "lr": say("Learning rate."),
    }
    figures, names = [], curve_names(epochs, steps)
    if "map" in names:
        meanings["accuracy"] = say("Images with exactly their classes above 0.5.")
    for name in names:
        best = ""
        if epochs and f"val_{name}" in epochs[0]:
            values = values_of(epochs, f"val_{name}")
            place = int(np.argmin(values) if name == "loss" else np.argmax(values))
            number = f"{values[place]:.3f}" if name == "loss" else f"{values[place]:.1%}"
            epoch = epochs[place]["epoch"]
            best = say("Best in validation: {number}, in epoch {epoch}.", number=number, epoch=epoch)
        drawing = embedded(partial(draw, name), f"curve-{name}", f"{name} by epoch")
        figures.append((drawing, (meanings[name], best)))
    return {"figures": figures, "floor": _smoothed_floor(run)}


def _smoothed_floor(run: Run) -> float:
    """The lowest cross-entropy with label smoothing, the entropy of its targets, nats; 0 for another loss."""
    share = float(run.config.get("label_smoothing") or 0.0)
    predictions = run.predictions if run.classifies and not run.probes else None
    if (
        not share
        or predictions is None
        or not predictions.targets.trusted
        or run.config.get("loss") in ("bce", "focal")
    ):
        return 0.0
    K = len(predictions.class_names)
    own, other = 1 - share + share / K, share / K
    return -own * math.log(own) - (K - 1) * other * math.log(other)


def configuration_section(run: Run) -> dict[str, Any]:
    """Every option, and the command that repeats a training."""
    repeat = f"{_command(run)} --config {_quoted(run.config_file)} --run NEW"
    return {
        "command": "" if run.probes else repeat,
        "rows": [(name, without_home(option_text(value))) for name, value in run.config.items()],
    }


def environment_section(run: Run) -> dict[str, Any]:
    """The machine and the versions that the run was started with."""
    records = dict(run.environment)
    if "started" in records:
        records["started"] = _date(records["started"])
    return {"found": records}


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
