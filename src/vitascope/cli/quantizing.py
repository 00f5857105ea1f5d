"""What `vitascope export --int8` does: find the pictures, write the int8 file, print how it compares."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vitascope.errors import UserError
from vitascope.report.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitascope.data.decoding import ImageSource
    from vitascope.data.splits import ImageSet
    from vitascope.deploy.export.accuracy import Comparison, Measured
    from vitascope.deploy.export.quantize import Quantization
    from vitascope.deploy.predict.exported_model import InputMode
    from vitascope.model.classifier import Classifier


def export_int8(
    model: Classifier,
    out: Path,
    pictures: tuple[Sequence[ImageSource], ImageSet],
    *,
    format: str,
    takes: InputMode,
    dynamic_resolution: bool,
    calibration_images: int,
    max_drop: float,
) -> Quantization:
    """Export a model, and make the int8 file of it; the file that it is made of goes.

    Args:
        model: the model.
        out: the new file.
        pictures: to calibrate with, and labelled ones to measure on, as from `pictures_for_int8`.
        format: `onnx` or `openvino`.
        takes: as `deploy.export.export`.
        dynamic_resolution: likewise.
        calibration_images: pictures to draw.
        max_drop: the share of the pictures by which the accuracy may drop.

    Raises:
        UserError: as `deploy.export.export` and `deploy.quantize.quantize`.
    """
    from vitascope.deploy.export.export import export
    from vitascope.deploy.export.formats import FORMATS, check_path
    from vitascope.deploy.export.quantize import quantize

    check_path(out, FORMATS[format])
    calibration, test = pictures
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fp32-", dir=out.parent) as aside:
        plain = export(
            model,
            Path(aside) / out.name,
            format=format,
            takes=takes,
            dynamic_resolution=dynamic_resolution,
        )
        return quantize(
            plain.path,
            out,
            calibration=calibration,
            test=test,
            calibration_images=calibration_images,
            max_drop=max_drop,
        )


def pictures_for_int8(
    ref: str, class_names: tuple[str, ...], data: str | None, calibration: str | None
) -> tuple[Sequence[ImageSource], ImageSet]:
    """Pictures to calibrate with, and labelled ones to measure on, no picture in both.

    Without `calibration`, what the run was trained on, else the training part of `data`. Without `data`, the
    run's own test images.

    Raises:
        UserError: neither a run whose data are there nor DATA to take them from.
    """
    from vitascope.data.datasets import open_data, open_for_evaluation
    from vitascope.run.run import Run
    from vitascope.training.evaluate import data_of_run

    is_run = Run(Path(ref)).exists
    if not is_run and data is None:
        raise UserError(
            f"{ref} is not a run folder, so say which labelled pictures int8 is calibrated and measured on: "
            "--data FOLDER, with a folder for each class"
        )
    if is_run and (data is None or calibration is None):
        own = data_of_run(Path(ref))
        test = own.test_images(class_names) if data is None else open_for_evaluation(data, class_names)
        return (own.splits.train.sources if calibration is None else calibrating(calibration)), test
    assert data is not None
    if calibration is not None:
        return calibrating(calibration), open_for_evaluation(data, class_names)
    splits = open_data(data)
    return splits.train.sources, splits.final.in_classes(class_names, data)


def calibrating(data: str) -> Sequence[ImageSource]:
    """The training part of a DATA argument that needs no labels."""
    from vitascope.data.datasets import open_data

    return open_data(data, labelled=False).train.sources


def report(done: Quantization, test: str) -> str:
    """What was made, in lines and a table."""
    found = done.comparison
    lines = [f"{file}  {file.stat().st_size:,} bytes" for file in done.files]
    in_float = len(done.float_layers)
    for attempt, share in zip(done.attempts[:-1], ("every layer", "7/8 of the layers"), strict=False):
        lines.append(f"{share} in int8: {attempt.drop:.2%} of the accuracy lost, too much; tried again")
    which = f"{counted(done.layers, 'layer')} in int8"
    if in_float:
        which += f", {in_float} that rounding hurts most left in float"
    lines.append(f"{which}; ranges from {counted(done.calibration_images, 'picture')}")
    for reason in found.unreadable.values():
        lines.append(f"left out: {reason}")
    rows = [
        ("", "accuracy", "bytes", "images/s at batch 1"),
        row(found.before, found),
        row(found.after, found),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in rows]
    faster = found.before.seconds / found.after.seconds
    lines.append(
        f"agreement: the same answer on {found.same} of {counted(found.images, f'{test} image')}, "
        f"{found.agreement:.2%}; "
        f"{found.before.size / found.after.size:.1f} times smaller, {faster:.1f} times as fast"
    )
    return "\n".join(lines)


def row(measured: Measured, found: Comparison) -> tuple[str, ...]:
    """A file's line of the table."""
    return (
        measured.precision,
        f"{measured.correct / found.images:.2%} of {found.images}",
        f"{measured.size:,}",
        f"{1 / measured.seconds:,.1f}",
    )
