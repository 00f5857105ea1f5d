"""The report's words about a run: what came out, and what was trained on what."""

from __future__ import annotations

import datetime
import shlex

from vitascope.data.datasets import class_counts
from vitascope.data.splits import Splits
from vitascope.model.classifier import Classifier
from vitascope.report.html import (
    Markup,
    Section,
    code,
    definitions,
    element,
    folded,
    join,
    note,
    paragraph,
    table,
)
from vitascope.report.measures import Score, calibration, score_of, wilson_interval
from vitascope.report.provenance import date
from vitascope.report.wording import counted
from vitascope.run.environment import without_home
from vitascope.run.predictions import Predictions
from vitascope.run.run import Run


def name_of(run: Run) -> str:
    """What the page calls the run: its folder's name."""
    return run.path.resolve().name


def header(run: Run, model: Classifier | None) -> Markup:
    """The title, what came out in one sentence, and the numbers that one asks for first."""
    parts = [element("h1", name_of(run)), element("p", result(run), class_="lead")]
    if not run.finished:
        command = "train" if run.classifies else "pretrain"
        again = f"vitascope {command} --resume {shlex.quote(without_home(str(run.path)))}"
        parts.append(note("This run has not finished. ", code(again), " continues it."))
    tests = run.records("test")
    if tests and tests[-1]["split"] == "val" and run.config.get("keep") == "best" and run.classifies:
        parts.append(
            note(
                "The data have no test split. These are the validation images, which have also chosen the "
                "weights, so that on new images it will be somewhat worse."
            )
        )
    score = score_of_run(run) if run.finished else None
    warning = score.warning(from_scratch=not run.config.get("weights")) if score is not None else ""
    if warning:
        parts.append(note(f"This model is {warning}."))
    shown = tiles(run, model)
    if shown:
        boxes = (
            element("div", element("b", value), element("span", what), class_="tile") for value, what in shown
        )
        parts.append(element("div", *boxes, class_="tiles"))
    return join(parts)


def result(run: Run) -> str:
    """What came out, in one sentence."""
    epochs, tests = run.records("epoch"), run.records("test")
    what = "A classifier" if run.classifies else "A body, pre-trained by masked patch prediction,"
    data = without_home(str(run.config["data"]))
    if not run.finished or not tests:
        done = epochs[-1]["epoch"] if epochs else 0
        return f"{what} of {data}: trained for {done} of {epochs_of(run)}."
    test = tests[-1]
    if not run.classifies:
        return f"{what} of {data}: loss {test['loss']:.3f} for hidden patches of {test['images']:,} images."
    split = f"{test['split']} image"
    right = f"{what} of {data}: {test['accuracy']:.2%} of {counted(test['images'], split)} right."
    score = score_of_run(run)
    if score is None:
        return right
    return f"{right} Always naming the commonest class would be right in {score.majority:.2%}."


def epochs_of(run: Run) -> str:
    """How many epochs a run was to have."""
    planned = run.config.get("epochs")
    return counted(planned, "epoch") if isinstance(planned, int) else "? epochs"


def score_of_run(run: Run) -> Score | None:
    """A finished classifier's score; None where its answers are not recorded."""
    found = run.predictions
    return score_of(found.labels, found.classes) if found is not None and len(found.labels) else None


def tiles(run: Run, model: Classifier | None) -> list[tuple[str, str]]:
    """The numbers that one asks for first, each with what it is."""
    found: list[tuple[str, str]] = []
    tests, epochs = run.records("test"), run.records("epoch")
    if tests and run.classifies:
        test = tests[-1]
        low, high = wilson_interval(test["correct"], test["images"])
        share = f"{test['accuracy']:.2%}"
        found.append((share, f"{test['split']} accuracy; 95% interval {low:.1%} to {high:.1%}"))
        score = score_of_run(run)
        if score is not None:
            found.append((f"{score.majority:.2%}", "by always naming the commonest class"))
            found.append((f"{score.balanced:.2%}", "balanced accuracy: the mean over the classes"))
        found.append((f"{test['loss']:.3f}", f"{test['split']} loss (cross-entropy, nats)"))
    elif tests:
        found.append((f"{tests[-1]['loss']:.3f}", f"{tests[-1]['split']} loss of hidden patches"))
        if "accuracy" in tests[-1]:
            found.append((f"{tests[-1]['accuracy']:.2%}", "of their colours right"))
    if run.predictions is not None:
        measured = calibration(run.predictions.confidences, run.predictions.correct)
        found.append((f"{measured.error:.2%}", "expected calibration error (15 bins)"))
    if model is not None:
        found.append((in_short(sum(p.numel() for p in model.parameters())), "parameters"))
    if epochs:
        planned, _, unit = epochs_of(run).partition(" ")
        found.append((f"{epochs[-1]['epoch']} of {planned}", unit))
    if tests:
        found.append((duration(tests[-1]["seconds"]), "of training, validation included"))
    return found


def in_short(count: int) -> str:
    """A count as people say it: 86.6 M."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return str(datetime.timedelta(seconds=round(seconds)))


def trained_section(
    run: Run, model: Classifier | None, splits: Splits | None, gone: str, differs: str = ""
) -> Section:
    """What was trained on what; why there are no pictures, or what differs in the data since."""
    get = run.config.get
    rows: list[tuple[str, object]] = []
    task = "classification" if run.classifies else f"masked patch prediction ({get('target')})"
    rows.append(("Task", task))
    rows.append(("Data", without_home(str(get("data")))))
    names = _class_names(run.predictions, model, splits) if run.classifies else ()
    if splits is not None:
        parts = (splits.train, splits.val) if splits.test is None else (splits.train, splits.val, splits.test)
        rows.append(("Images", ", ".join(f"{len(part):,} {part.name}" for part in parts)))
    if names:
        some = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        rows.append(("Classes", f"{len(names):,}: {some}"))
    said = get("model") or "as the weights that it started from"
    rows.append(("Model", f"{said}: {model.config.summary}" if model is not None else said))
    if model is not None:
        rows.append(("Parameters", f"{sum(p.numel() for p in model.parameters()):,}"))
    start = get("weights")
    rows.append(
        ("Started from", without_home(str(start)) if start else f"random weights, seed {get('seed')}")
    )
    if get("teacher"):
        rows.append(("Teacher", without_home(str(get("teacher")))))
    rows.append(
        (
            "Training",
            f"{epochs_of(run)}, batches of {get('batch_size')}, {get('optimizer')}, learning rate "
            f"{get('lr')} ({get('schedule')}), weight decay {get('weight_decay')}",
        )
    )
    if run.classifies:
        kept = {"best": "of the lowest validation loss", "last": "of the last step"}
        rows.append(("Weights kept", kept.get(str(get("keep")), str(get("keep")))))
    if "started" in run.environment:
        rows.append(("Started", date(run.environment["started"])))
    parts_of_page = [definitions(rows)]
    if gone:
        parts_of_page.append(note(f"The pictures are not shown: {gone}"))
    elif differs:
        parts_of_page.append(note(f"{without_home(differs)}."))
    if splits is not None and run.classifies and len(names) > 1:
        parts_of_page.append(_class_table(splits))
    return Section("trained", "What was trained on what", join(parts_of_page))


def _class_names(
    predictions: Predictions | None, model: Classifier | None, splits: Splits | None
) -> tuple[str, ...]:
    if predictions is not None:
        return predictions.class_names
    if splits is not None:
        return splits.train.class_names
    return model.config.class_names if model is not None else ()


def _class_table(splits: Splits) -> Markup:
    parts = [part for part in (splits.train, splits.val, splits.test) if part is not None]
    counts = [class_counts(part) for part in parts]
    rows = [(name, *(f"{count.get(name, 0):,}" for count in counts)) for name in splits.train.class_names]
    if len(rows) > 100:
        return paragraph(
            f"Between {min(counts[0].values()):,} and {max(counts[0].values()):,} training images a class."
        )
    head = ("class", *(part.name for part in parts))
    return folded("Images of each class", table(head, rows, numbers=range(1, len(parts) + 1)))
