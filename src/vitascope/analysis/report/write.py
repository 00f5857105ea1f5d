"""Writing a run's report: one HTML page that needs no other file."""

import logging
from pathlib import Path
from typing import Any

from vitascope.analysis.report import internals, overview
from vitascope.analysis.report.classification import classification, noticed
from vitascope.analysis.report.figures import draw_figures
from vitascope.analysis.report.labels import labels
from vitascope.analysis.report.page import render
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.models.decoding import ImageError
from vitascope.models.weights.loading import from_pretrained
from vitascope.storage import explaining_failure, replacing
from vitascope.training.run.run import Run

log = logging.getLogger(__name__)


def write_report(
    run: Run, *, splits: Splits | None = None, gone: str = "", differs: str = "", device: str = "auto"
) -> Path:
    """Write `report.html` from a run folder; returns its path.

    Sections without content are left out: a ResNet has no attention, pre-training no classes, an unfinished
    run no predictions. `splits` are the run's data, if they are open already; `gone` is the reason if their
    images cannot be shown, `differs` their differences from those in training.
    """
    run = Run.open(run.path)
    model = from_pretrained(run.path, device=device) if run.finished else None
    if splits is None and not gone:
        splits, gone, differs = _open_data(run)
    images = splits.measured if splits is not None and not gone else None
    sections: dict[str, dict[str, Any] | None] = {
        "trained": overview.training(run, model, splits, gone, differs),
        "curves": overview.curves(run),
        "masked": internals.masked(run),
        "configuration": overview.configuration_section(run),
        "environment": overview.environment_section(run),
    }
    if model is not None:
        sections |= {
            "attention": internals.attention_section(model, images),
            "learned": internals.learned(model),
        }
        if run.classifies and run.predictions is not None:
            about = labels if run.predictions.several else classification
            sections |= about(run.predictions, model, images)
            if (trust := sections.get("trust")) is not None:
                trust["novelty"] = noticed(run)
    text = render(overview.header(run, model), sections)
    with replacing(run.report) as aside:
        aside.write_text(text, encoding="utf-8")
    return run.report


def rewrite_report(run: Run, *, data: str | None = None, device: str = "auto") -> tuple[Path, str]:
    """Draw a run's figures and write its report again, as `vitascope report` does.

    `data` is where the run's data are now; None for where they were. Returns the report's path, and the
    reason if something could not be drawn, else "". Without the images, existing figures stay, and so does an
    existing report of a finished run, with a `UserError`.
    """
    splits, gone, differs = _open_data(run, data)
    if gone and (data is not None or (run.finished and run.report.is_file())):
        raise UserError(
            f"{'' if data is None else f'{data}: '}{gone}; nothing was written, because without the images a "
            f"report has no pictures: give their place as data, or name none and remove {run.report}"
        )
    with explaining_failure(run.path, "figures or report", "make room, then run the same command again"):
        missing = f"the report has no pictures: {gone}" if gone else ""
        if splits is not None and not gone and run.finished and run.predictions is not None:
            try:
                measured = splits.measured.subset(run.predictions.split, run.predictions.indices)
                draw_figures(run, from_pretrained(run.path, device=device), measured, run.predictions)
            except ImageError as error:
                missing = f"the figures were not drawn again: {error}"
        report = write_report(run, splits=splits, gone=gone, differs=differs, device=device)
        return report, missing


def _open_data(run: Run, data: str | None = None) -> tuple[Splits | None, str, str]:
    """The run's splits, the reason if they cannot be shown, and their differences from those in training."""
    run.config  # noqa: B018 - a broken file, which is no reason to look for the images
    try:
        opened = run.open_data(data)
    except UserError as error:
        return None, str(error), ""
    places = opened.restored.found[opened.restored.record.measured]
    if not (places >= 0).any():
        gone = f"none of the {len(places):,} images that the model was measured on exists: {opened.note}"
        return None, gone, ""
    if opened.note:
        log.warning("%s", opened.note)
    final, predictions = opened.splits.measured, run.predictions
    if predictions is None:
        return opened.splits, "", opened.note
    indices = predictions.indices
    fits = final.name == predictions.split and int(indices.max()) < len(final)
    if fits and final.truth.take(indices) == predictions.targets:
        return opened.splits, "", opened.note
    gone = (
        f"the data have changed: {len(final):,} {final.name} images, whose classes are not those of the "
        f"{len(indices):,} {predictions.split} images that the model was measured on"
    )
    return opened.splits, gone, opened.note
