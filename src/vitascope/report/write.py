"""A run's report: one HTML page that holds everything that it shows."""

from __future__ import annotations

import logging
from pathlib import Path

from vitascope._version import __version__
from vitascope.data.decoding import ImageError
from vitascope.data.splits import ImageSet, Splits
from vitascope.errors import UserError
from vitascope.model.classifier import Classifier
from vitascope.report import answers, inside, overview
from vitascope.report.answers import Shown
from vitascope.report.confidence import calibration_section
from vitascope.report.figures import draw_figures
from vitascope.report.html import Section, element, note, page
from vitascope.report.mistakes import mistakes_section
from vitascope.report.pictures import attention_over, read_pixels
from vitascope.report.progress import curves_section
from vitascope.report.provenance import configuration_section, environment_section
from vitascope.run.predictions import Predictions
from vitascope.run.run import Run
from vitascope.storage import explaining_failure, replacing
from vitascope.weights.loading import from_pretrained
from vitascope.weights.preprocess import preprocess_of

log = logging.getLogger(__name__)


def write_report(run: Run, *, splits: Splits | None = None, differs: str = "", device: str = "auto") -> Path:
    """Write a run's `report.html` from what is in its folder; returns its path.

    What a run does not have is left out: a ResNet has no attention, pre-training no classes, an unfinished
    run no answers. Where the data are gone, the report says so in their place.

    Args:
        run: the run.
        splits: the data of the run where they are open already; None opens them.
        differs: what differs in `splits` since training, in words.
        device: where the model looks at pictures: `auto`, or a torch device.

    Raises:
        UserError: not a run folder, or one whose files are broken.
        OSError: the report cannot be written; the one before stays.
    """
    run = Run.open(run.path)
    model = from_pretrained(run.path, device=device) if run.finished else None
    gone = ""
    if splits is None:
        splits, gone, differs = open_again(run)
    gone = gone or changed(run.predictions, splits)
    images = splits.final if splits is not None and not gone else None
    sections = [
        overview.trained_section(run, model, splits, gone, differs),
        curves_section(run),
        *answer_sections(run, model, images),
        inside.masked_section(run),
        *inside_sections(model, images),
        configuration_section(run),
        environment_section(run),
    ]
    text = page(
        f"{overview.name_of(run)}: vitascope report",
        overview.header(run, model),
        [section for section in sections if section is not None],
        element("p", f"Made by vitascope {__version__} from the files of the run folder."),
    )
    with replacing(run.report) as aside:
        aside.write_text(text, encoding="utf-8")
    return run.report


def write_again(run: Run, *, data: str | None = None, device: str = "auto") -> tuple[Path, str]:
    """Draw a run's figures and write its report again; what `vitascope report` calls.

    Without the images, the figures stay as they are, and a report of a finished run is not replaced by one
    without pictures.

    Args:
        run: the run.
        data: where the run's data are now; None for where they were.
        device: as for `write_report`.

    Returns:
        The report's path, and what could not be drawn and why; empty where all was.

    Raises:
        UserError: as `write_report`; the images are not found, or have changed, and there is a report
            already; a file cannot be written.
    """
    splits, gone, differs = open_again(run, data)
    gone = gone or changed(run.predictions, splits)
    report = run.report
    if gone and data is not None:
        raise UserError(f"--data {data}: {gone}; nothing was written")
    if gone and run.finished and report.is_file():
        raise UserError(
            f"{gone}; without the images a new report has no pictures, so {report} is kept: say where the "
            "images are with --data, or remove it to write one without pictures"
        )
    with explaining_failure(run.path, "figures or report", "make room, then run the same command again"):
        missing = f"the report has no pictures: {gone}" if gone else ""
        if not gone and run.finished and run.predictions is not None:
            assert splits is not None
            try:
                draw_again(run, run.predictions, splits.final, device)
            except ImageError as error:
                missing = f"the figures were not drawn again: {error}"
        return write_report(run, splits=splits, differs=differs, device=device), missing


def open_again(run: Run, data: str | None = None) -> tuple[Splits | None, str, str]:
    """The data of a run, split as they were in training.

    Args:
        run: the run.
        data: where its data are now; None for where they were, or as far from the run as they were.

    Returns:
        The splits, why they cannot be opened, and what differs in them since; texts are empty where there is
        nothing to say.
    """
    try:
        opened = run.open_data(data)
    except UserError as error:
        return None, str(error), ""
    found = opened.restored.found[opened.restored.record.final] if opened.restored is not None else None
    if found is not None and not (found >= 0).any():
        return (
            None,
            f"none of the {len(found):,} images that the model was measured on is there: {opened.note}",
            "",
        )
    if opened.note:
        log.warning("%s", opened.note)
    return opened.splits, "", opened.note


def draw_again(run: Run, predictions: Predictions, images: ImageSet, device: str) -> None:
    """Draw the figures of a finished classifier from its recorded answers."""
    model = from_pretrained(run.path, device=device)
    measured = images.subset(predictions.split, predictions.indices)
    draw_figures(run, model, preprocess_of(model), measured, predictions.probabilities)


def changed(predictions: Predictions | None, splits: Splits | None) -> str:
    """Why pictures and answers do not belong together any more; empty where they do."""
    if predictions is None or splits is None:
        return ""
    labels, indices = splits.final.labels, predictions.indices
    fits = splits.final.name == predictions.split and (not len(indices) or int(indices.max()) < len(labels))
    if fits and (labels[indices] == predictions.labels).all():
        return ""
    return (
        f"the data are others by now: {len(labels):,} {splits.final.name} images, whose labels are not those "
        f"of the {len(indices):,} {predictions.split} images that the model was measured on"
    )


def answer_sections(run: Run, model: Classifier | None, images: ImageSet | None) -> list[Section | None]:
    """The sections about what a finished classifier says; a line instead where it was not recorded."""
    if model is None or not run.classifies:
        return []
    predictions = run.predictions
    if predictions is None:
        text = (
            "This run's answers are not recorded: it is older than such records. So there are no confusions, "
            "no calibration and no mistakes to show; "
        )
        command = element("code", f"vitascope evaluate {overview.name_of(run)}")
        return [Section("answers", "Its answers", note(text, command, " measures the model again."))]
    shown = shown_pictures(predictions, model, images)
    return [
        answers.classes_section(predictions),
        answers.confusion_section(predictions, shown),
        calibration_section(predictions),
        mistakes_section(predictions, shown),
    ]


def shown_pictures(predictions: Predictions, model: Classifier, images: ImageSet | None) -> Shown:
    """The pictures of the sections about answers."""
    if images is None:
        return Shown(None, {}, {})
    places, looked_at = answers.places_wanted(predictions)
    indices = {place: int(predictions.indices[place]) for place in places}
    pixels = read_pixels(images, indices.values(), preprocess_of(model))
    by_place = {place: pixels[index] for place, index in indices.items() if index in pixels}
    mistakes = {place: by_place[place] for place in looked_at if place in by_place}
    return Shown(images, by_place, attention_over(model, preprocess_of(model), mistakes))


def inside_sections(model: Classifier | None, images: ImageSet | None) -> list[Section | None]:
    """The sections about what the finished model looks at and has learned."""
    if model is None:
        return []
    return [
        inside.attention_section(model, preprocess_of(model), images),
        inside.learned_section(model),
    ]
