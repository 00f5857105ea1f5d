"""Writing a run's report: one HTML page that needs no other file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vitascope.data.decoding import ImageError
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.model.classifier import Classifier
from vitascope.report import internals, overview
from vitascope.report.classification import classification
from vitascope.report.curves import curves
from vitascope.report.figures import draw_figures
from vitascope.report.page import render
from vitascope.run.predictions import Predictions
from vitascope.run.run import Run
from vitascope.storage import explaining_failure, replacing
from vitascope.weights.loading import from_pretrained

log = logging.getLogger(__name__)


def write_report(run: Run, *, splits: Splits | None = None, differs: str = "", device: str = "auto") -> Path:
    """Write `report.html` from a run folder; returns its path.

    Sections without content are left out: a ResNet has no attention, pre-training no classes, an unfinished
    run no predictions. If the data cannot be found, the report contains the reason instead of the images.

    Args:
        run: the run.
        splits: the run's data, if they are open already; None opens them.
        differs: how `splits` differ from the data in training.
        device: where the model computes attention: `auto`, or a torch device.

    Raises:
        UserError: not a run folder, or one whose files are broken.
        OSError: the report cannot be written; an older one stays.
    """
    run = Run.open(run.path)
    model = from_pretrained(run.path, device=device) if run.finished else None
    gone = ""
    if splits is None:
        splits, gone, differs = _open_data(run)
    gone = gone or _mismatch(run.predictions, splits)
    images = splits.final if splits is not None and not gone else None
    sections: dict[str, dict[str, Any] | None] = {
        "trained": overview.training(run, model, splits, gone, differs),
        "curves": curves(run),
        "masked": internals.masked(run),
        "configuration": overview.configuration(run),
        "environment": overview.environment(run),
    }
    if model is not None:
        sections |= {
            "attention": internals.attention(model, images),
            "learned": internals.learned(model),
        }
        if run.classifies:
            sections |= (
                {"unrecorded": {"run": overview.name_of(run)}}
                if run.predictions is None
                else classification(run.predictions, model, images)
            )
    text = render(f"{overview.name_of(run)}: vitascope report", overview.header(run, model), sections)
    with replacing(run.report) as aside:
        aside.write_text(text, encoding="utf-8")
    return run.report


def rewrite_report(run: Run, *, data: str | None = None, device: str = "auto") -> tuple[Path, str]:
    """Draw a run's figures and write its report again; what `vitascope report` calls.

    Without the images, existing figures stay, and so does an existing report of a finished run.

    Args:
        run: the run.
        data: where the run's data are now; None for where they were.
        device: as for `write_report`.

    Returns:
        The report's path, and the reason for what could not be drawn; empty if everything was.

    Raises:
        UserError: as `write_report`; the images are not found, or have changed, and there is a report
            already; a file cannot be written.
    """
    splits, gone, differs = _open_data(run, data)
    gone = gone or _mismatch(run.predictions, splits)
    if gone and data is not None:
        raise UserError(f"{data}: {gone}; nothing was written")
    if gone and run.finished and run.report.is_file():
        raise UserError(
            f"{gone}; without the images a new report has no pictures, so {run.report} is kept: give the "
            "place of the images as data, or remove the report to write one without pictures"
        )
    with explaining_failure(run.path, "figures or report", "make room, then run the same command again"):
        missing = f"the report has no pictures: {gone}" if gone else ""
        if splits is not None and not gone and run.finished and run.predictions is not None:
            try:
                redraw_figures(run, run.predictions, splits, device)
            except ImageError as error:
                missing = f"the figures were not drawn again: {error}"
        return write_report(run, splits=splits, differs=differs, device=device), missing


def redraw_figures(run: Run, predictions: Predictions, splits: Splits, device: str) -> None:
    """Draw the figures of a finished classifier from its recorded predictions."""
    model: Classifier = from_pretrained(run.path, device=device)
    measured = splits.final.subset(predictions.split, predictions.indices)
    draw_figures(run, model, measured, predictions.probabilities)


def _open_data(run: Run, data: str | None = None) -> tuple[Splits | None, str, str]:
    """The run's splits, why they cannot be opened, and how they differ from those in training."""
    try:
        opened = run.open_data(data)
    except UserError as error:
        return None, str(error), ""
    found = opened.restored.found[opened.restored.record.final] if opened.restored is not None else None
    if found is not None and not (found >= 0).any():
        gone = f"none of the {len(found):,} images that the model was measured on is there: {opened.note}"
        return None, gone, ""
    if opened.note:
        log.warning("%s", opened.note)
    return opened.splits, "", opened.note


def _mismatch(predictions: Predictions | None, splits: Splits | None) -> str:
    """Why the images and the predictions do not belong together; empty if they do."""
    if predictions is None or splits is None:
        return ""
    labels, indices = splits.final.labels, predictions.indices
    fits = splits.final.name == predictions.split and (not len(indices) or int(indices.max()) < len(labels))
    if fits and (labels[indices] == predictions.labels).all():
        return ""
    return (
        f"the data have changed: {len(labels):,} {splits.final.name} images, whose labels are not those of "
        f"the {len(indices):,} {predictions.split} images that the model was measured on"
    )
