"""`quantize`: an exported model with 8-bit layers, and proof that it is still as accurate.

Layers with weights compute in int8: weights in one range per output channel, activations in one range per
layer, from the user's own pictures. Preprocessing, the patch embedding, attention's own products, softmax,
norms and activation functions stay in float: the patch embedding is a hundredth of the work and suffers most
from rounding, and the others gain nothing. The int8 file is measured against its source on labelled images
and gets its name only if it loses no more accuracy than allowed; a warning tells if the images are too few to
be sure. If it loses more, it is written again with an eighth and then a quarter of the layers in float: those
whose inputs' channels lose the largest shares of their energy to rounding.
"""

import dataclasses
import functools
import json
import logging
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch

from vitascope.analysis.evaluate import MAX_DROP, splits_of_data, splits_of_run
from vitascope.arguments import Range, checked
from vitascope.data.datasets import open_data, open_for_evaluation
from vitascope.data.measures import PairedMeasure
from vitascope.data.splits import ImageSet
from vitascope.data.stored import as_pictures
from vitascope.deploy.export.export import default_path, export
from vitascope.deploy.export.formats import FORMATS, check_path, move_beside
from vitascope.deploy.export.int8 import calibration_batches, write_onnx_int8, write_openvino_int8
from vitascope.deploy.export.throughput import take_turns
from vitascope.errors import UserError, check_choice
from vitascope.formatting import counted
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.runtimes import Batch, ExportedEngine, InputMode, files_of, open_exported
from vitascope.models.vision_model import VisionModel
from vitascope.storage import check_room, make_folder, temporary_folder
from vitascope.training.evaluation.measure import Evaluation, batches_of, measure
from vitascope.training.run.predictions import paired
from vitascope.training.run.run import Run, load_with_run

CALIBRATION_IMAGES = 300
TIMED_ROUNDS = 15
FLOAT_SHARES = (0.0, 1 / 8, 1 / 4)
"""The shares of the layers left in float, tried in this order until the accuracy is kept."""

log = logging.getLogger(__name__)

Writer = Callable[[Path, Path, Sequence[Batch], Collection[str], Mapping[str, str]], dict[str, float]]
"""Writes the int8 file of a file; returns the rounding error of each int8 layer's input."""
WRITERS: dict[str, Writer] = {".onnx": write_onnx_int8, ".xml": write_openvino_int8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One exported model."""

    precision: str
    """`fp32` or `int8`."""
    size: int
    """Bytes of its files."""
    seconds: float
    """Median time of one image in a batch of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileComparison:
    """An exported model and the one made from it, on the same images."""

    paired: PairedMeasure
    """The accuracy of both on the readable images; with several classes each, mean average precision."""
    same: int
    """Images for which both predict the same class, or exactly the same classes."""
    before: Measured
    after: Measured
    unreadable: tuple[str, ...]
    """The images left out, each with the reason."""

    @property
    def agreement(self) -> float:
        """`same` as a share of the images."""
        return self.same / self.paired.total


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantizationResult:
    """The files of an int8 model, and how it compares with its source."""

    files: list[Path]
    """The file to open first."""
    calibration_images: int
    """Pictures that the ranges come from."""
    layers: int
    """Layers with weights."""
    float_layers: tuple[str, ...]
    """Layers left in float, by their names in the graph."""
    attempts: tuple[FileComparison, ...]
    """The comparison of every attempt; the last is that of the file."""
    measured_on: str
    """Name of the images that accuracies are measured on."""

    @property
    def comparison(self) -> FileComparison:
        """The comparison of the file."""
        return self.attempts[-1]

    def __repr__(self) -> str:
        found = self.comparison
        (before, _), (after, _) = found.paired.rows()
        return (
            f"QuantizationResult({self.files[0]}: {found.paired.name} {after}, in fp32 {before}, "
            f"{found.before.size / found.after.size:.1f} times smaller)"
        )


@checked
def quantize(
    model: VisionModel | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    format: str = "onnx",
    input: InputMode = "pictures",
    dynamic_resolution: bool = False,
    data: str | os.PathLike[str] | None = None,
    calibration: str | os.PathLike[str] | None = None,
    calibration_images: Annotated[int, Range(ge=1)] = CALIBRATION_IMAGES,
    max_drop: Annotated[float, Range(ge=0, le=1)] = MAX_DROP,
) -> QuantizationResult:
    """Export a model in int8, and compare it with fp32 on labelled images.

    Args:
        model: a classifier, or a MODEL reference.
        path: a new file with the format's suffix; by default as for `export`, with `-int8` in its name.
        format: `onnx` or `openvino`.
        input: as for `export`.
        dynamic_resolution: as for `export`.
        data: DATA with the model's classes, to measure accuracy on; by default the run's test images and, if
            these are few, its validation images.
        calibration: DATA that ranges are computed from, without labels; by default the run's training images,
            or without a run the training part of `data`.
        calibration_images: how many of them to use.
        max_drop: the accuracy that may be lost, as measured, or the mean average precision if images have
            several classes; a warning is logged if its 95% interval ends above this.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: as `export` and `quantize_file`; neither a run whose data exist nor `data`.
    """
    check_choice("format", format, [name for name in FORMATS if FORMATS[name].suffix in WRITERS])
    kind = FORMATS[format]
    path = default_path(model, f"-int8{kind.suffix}") if path is None else Path(path)
    check_path(path, kind.suffix, *kind.beside)
    model, run = load_with_run(model)
    if not model.config.gives_classes:
        raise UserError("int8 is measured by the accuracy of classes, and this model has no head for classes")
    places = (None if place is None else os.fspath(place) for place in (data, calibration))
    pictures, test = calibration_and_test(run, model.config.class_names, *places)
    make_folder(path.parent)
    with temporary_folder(path.parent) as aside:
        fp32 = aside / path.name
        export(model, fp32, format=format, input=input, dynamic_resolution=dynamic_resolution)
        return quantize_file(
            fp32,
            path,
            calibration=pictures,
            test=test,
            calibration_images=calibration_images,
            max_drop=max_drop,
        )


def calibration_and_test(
    run: Run | None, class_names: tuple[str, ...], data: str | None, calibration: str | None
) -> tuple[Sequence[ImageSource], ImageSet]:
    """Pictures to calibrate with, and labelled ones to measure on, which have none in common."""
    if run is None and data is None:
        raise UserError(
            "int8 is calibrated and measured on labelled images, and the model is not a run, whose images "
            "could be used: give data, a folder with one folder per class"
        )
    train: ImageSet | None = None
    if data is None:
        assert run is not None
        train, test = splits_of_run(run, class_names)
    elif run is None and calibration is None:
        train, test = splits_of_data(data, class_names)
    else:
        test = open_for_evaluation(data, class_names)
    if calibration is not None:
        train = open_data(calibration, labelled=False).train
    elif train is None:
        assert run is not None
        train = run.open_data().splits.train
    return train.sources, test


def quantize_file(
    source: Path,
    target: Path,
    *,
    calibration: ImageSource | Iterable[ImageSource],
    test: ImageSet,
    calibration_images: int = CALIBRATION_IMAGES,
    max_drop: float = MAX_DROP,
) -> QuantizationResult:
    """Write the int8 file of an exported model in fp32, and measure both on `test`, labelled images.

    `calibration_images` of the pictures in `calibration`, which needs no labels, give the ranges.
    """
    write = WRITERS[source.suffix]
    plain = open_exported(source, precision="fp32")
    pictures = calibration_batches(plain, as_pictures(calibration), calibration_images, seed=0)
    metadata = plain.metadata | {
        "precision": json.dumps("int8"),
        "calibration_images": json.dumps(len(pictures)),
    }
    attempts: list[FileComparison] = []
    if plain.class_names:
        test = test.in_classes(plain.class_names, f"the {test.noun}s")
    exact = measure(plain, batches_of(plain, test))
    make_folder(target.parent)
    check_room(target, exported_size(plain))  # an ONNX file is written once more in fp32
    with temporary_folder(target.parent) as aside:
        losses: dict[str, float] = {}
        for share in FLOAT_SHARES:
            folder = aside / f"{len(attempts)}"
            folder.mkdir()
            in_float = worst(losses, share)
            found = write(source, folder / target.name, pictures, in_float, metadata)
            losses = losses or found
            attempts.append(compare_files(plain, open_exported(folder / target.name), test, exact))
            lost = attempts[-1].paired
            if lost.drop <= max_drop:
                if doubt := lost.doubt(max_drop, test.noun):
                    log.warning("%s", doubt)
                return QuantizationResult(
                    files=move_beside(folder, target),
                    calibration_images=len(pictures),
                    layers=len(losses),
                    float_layers=in_float,
                    attempts=tuple(attempts),
                    measured_on=test.name,
                )
    tried = ", ".join(f"{attempt.paired.drop:.2%}" for attempt in attempts)
    low, high = lost.interval
    raise UserError(
        f"{target.name} is not kept: on {counted(lost.total, test.noun)} int8 loses {tried} of the "
        f"{lost.name} with 0, 1/8 and 1/4 of the layers in float (95% interval of the last: {low:.2%} to "
        f"{high:.2%}), and {max_drop:.2%} are allowed; calibrate with more pictures, or with typical ones, "
        "measure on more, or allow a larger drop"
    )


def worst(losses: Mapping[str, float], share: float) -> tuple[str, ...]:
    """The share of the layers that lose most, in the graph's order."""
    count = -(-len(losses) * share // 1)  # rounded up
    ranked = sorted(losses, key=lambda name: losses[name], reverse=True)[: int(count)]
    return tuple(name for name in losses if name in ranked)


def compare_files(
    before: ExportedEngine, after: ExportedEngine, images: ImageSet, exact: Evaluation
) -> FileComparison:
    """Compare two exported models that take the same pixels; `exact` is the first one's evaluation."""
    rounded = measure(after, batches_of(after, images))
    example = torch.from_numpy(before.pixels(images.sources[int(exact.indices[0])]))[None]  # (1, C, H, W)
    engines = (before, after)
    times = take_turns(
        [functools.partial(engine.answers, example) for engine in engines], rounds=TIMED_ROUNDS
    )
    first, second = (
        Measured(
            precision=engine.stored_precision,
            size=exported_size(engine),
            seconds=statistics.median(seconds),
        )
        for engine, seconds in zip(engines, times, strict=True)
    )
    answers = dataclasses.replace(exact.targets, labels=exact.answers)
    return FileComparison(
        paired=paired(exact, rounded),
        same=int(answers.correct(rounded.answers).sum()),
        before=first,
        after=second,
        unreadable=exact.unreadable,
    )


def exported_size(engine: ExportedEngine) -> int:
    """Bytes of an exported model's files."""
    return sum(file.stat().st_size for file in files_of(engine.path))
