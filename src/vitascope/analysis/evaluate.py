"""`evaluate`: the accuracy of any model on labelled images, and the images that it is measured on."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitascope import layout
from vitascope.arguments import checked
from vitascope.data.datasets import open_data, open_for_evaluation
from vitascope.data.frames import DataFrame, data_place
from vitascope.data.leaks import leaked
from vitascope.data.splits import OUT_OF_FOLD, ImageSet, UnknownClassesError
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError
from vitascope.models.engines.compute import BatchSize, Views
from vitascope.models.engines.engine import Engine
from vitascope.models.engines.runtimes import as_engine
from vitascope.models.hardware import reuse_freed_memory
from vitascope.models.vision_model import VisionModel, left_as_it_was
from vitascope.models.weights.stored_model import local_model
from vitascope.training.evaluation.measure import Evaluation, batches_of, measure
from vitascope.training.run.run import Run

FEW = 1000
"""Test images below which the validation images are measured too: neither are trained on."""

MAX_DROP = 0.01
"""The accuracy that a smaller model may lose."""

log = logging.getLogger(__name__)


@checked
def evaluate(
    model: Engine | VisionModel | str | os.PathLike[str],
    data: DataFrame | str | os.PathLike[str] | None = None,
    *,
    rename: Mapping[str, str] | None = None,
    table: TableOptions = AS_RECOGNIZED,
    batch_size: BatchSize = None,
    precision: str = "auto",
    device: str = "auto",
    views: Views = 1,
) -> Evaluation:
    """Evaluate a classifier, as `vitascope evaluate` does.

    Images that a run was trained on are left out, with a warning.

    Args:
        model: a MODEL (run folder, model folder or file, hub id), an exported model, a model, or an `Engine`.
        data: a DATA argument with the classes of the model, or a DataFrame; None for the test images of a
            run.
        rename: the model's names of classes that have other names in `data`: `{"birds": "bird"}`.
        table: how a table is read.
        batch_size: images per batch; by default 128, and on a GPU as many as keep it busy.
        precision: `auto`, `fp32` or `bf16`.
        device: `auto`, or a torch device.
        views: above 1, the mean of as many views of each image is measured too, see `Predictor`.

    Raises:
        UserError: no such model or data, no classes, unknown classes, or no data for a model that is no run;
            views of an exported model or an engine.
    """
    reuse_freed_memory()
    ref = Path(local_model(model)) if isinstance(model, str | os.PathLike) else None
    with left_as_it_was(model):
        engine = as_engine(model, precision=precision, device=device)
        engine.check_classes()
        averaging = as_engine(model, precision=precision, device=device, views=views) if views > 1 else None
        names = engine.class_names
        trained_on, validated, changes, near_copies = 0, None, None, None
        if rename and data is None:
            raise UserError("rename is about the classes of other data: set data")
        if table != AS_RECOGNIZED and data is None:
            about = "a table" if table.given else "other data"
            raise UserError(f"{(*table.given, *table.about_images)[0]} is about {about}: set data")
        if data is not None:
            name = "the DataFrame" if isinstance(data, DataFrame) else os.fspath(data)
            with data_place(data, table) as place:
                try:
                    tested = open_for_evaluation(place, names, rename, table=table)
                except UnknownClassesError as error:
                    advice = f"if {error.first} is one of them under another name, add --rename"
                    raise UserError(f"{error}; {advice} {error.first}=CLASS") from error
                if ref is not None:
                    tested, trained_on = without_training_images(tested, name, ref)
                    if (run := Run.of_model(ref)) is not None:
                        validated = run.split_record().among(tested, "val")
        elif ref is None or not Run(ref).exists:
            raise UserError(f"{ref or 'the model'} is not a run folder with test images of its own: set data")
        else:
            opened = Run(ref).open_data()
            if opened.splits.measured.name == OUT_OF_FOLD:
                raise UserError(
                    f"{ref}: its models have seen all images between them; {layout.REPORT} has the result of "
                    "each image out of fold; to measure the ensemble on others, set data"
                )
            if opened.note:
                log.warning("%s", opened.note)
            tested = opened.test_images(names)
            validated = np.full(len(tested), tested.name == "val")
            near_copies = next(iter(leaked(opened.splits.train, tested)), None)
            changes = opened.restored.counts()
        evaluation = measure(engine, batches_of(engine, tested, batch_size))
        averaged = (
            None if averaging is None else measure(averaging, batches_of(averaging, tested, batch_size))
        )
    mask = None if near_copies is None else near_copies[evaluation.indices]
    fitted_to = 0 if validated is None else int(validated[evaluation.indices].sum())
    known: dict[str, Any] = {"trained_on": trained_on, "fitted_to": fitted_to, "changes": changes}
    return dataclasses.replace(evaluation, **known, leaked=mask, averaged=averaged)


def splits_of_run(run: Run, class_names: tuple[str, ...]) -> tuple[ImageSet, ImageSet]:
    """The training images of a run, and the images to measure on; logs how the data differ."""
    opened = run.open_data(check=("val", "test"))
    if opened.note:
        log.warning("%s", opened.note)
    test, train, val = opened.test_images(class_names), opened.splits.train, opened.splits.val
    exists = (opened.restored.found["val"] >= 0).any()
    val = opened.restored.present("val", class_names) if exists else test
    return train, _with_few(test, val, class_names, str(run.config["data"]))


def splits_of_data(data: str, class_names: tuple[str, ...], *, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """The training images of DATA, and the images to measure on, in the classes of a model."""
    splits = open_data(data, seed=seed)
    train = splits.train.in_classes(class_names, data)
    return train, _with_few(splits.measured, splits.val, class_names, data)


def _with_few(test: ImageSet, val: ImageSet, class_names: tuple[str, ...], where: str) -> ImageSet:
    """The test images and, while these are few, the validation images, if they are others."""
    test = test.in_classes(class_names, where)
    if len(test) >= FEW or val.name == test.name:
        return test
    val = val.in_classes(class_names, where)
    return test.followed_by(val)


def without_training_images(images: ImageSet, data: str, ref: Path) -> tuple[ImageSet, int]:
    """Leave out the images that a run was trained on, unless they are all; also returns their number."""
    run = Run.of_model(ref)
    if run is None:
        return images, 0
    known = run.split_record().trained_on(images)
    count, total = int(known.sum()), len(images)
    trained = f"{data}: {run.path} was trained on"
    if count == total:
        log.warning(
            "%s all %s of these images: the accuracy does not hold for other images", trained, f"{count:,}"
        )
    elif count:
        counts = (f"{number:,}" for number in (count, total, total - count))
        log.warning("%s %s of these %s images, which are left out; %s remain", trained, *counts)
        images = images.subset(images.name, np.flatnonzero(~known))
    return images, count
