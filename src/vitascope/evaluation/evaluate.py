"""`evaluate`: the accuracy of any model on labelled images."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from vitascope.arguments import checked
from vitascope.data.datasets import open_for_evaluation
from vitascope.data.frames import DataFrame, data_place
from vitascope.data.splits import ImageSet, UnknownClassesError
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError
from vitascope.evaluation.images import without_training_images
from vitascope.evaluation.measure import Evaluation, batches_of, measure
from vitascope.model.hardware import reuse_freed_memory
from vitascope.model.vision_model import VisionModel, left_as_it_was
from vitascope.predict.compute import BatchSize
from vitascope.predict.engine import Engine
from vitascope.predict.runtimes import as_engine
from vitascope.run.run import Run
from vitascope.weights.stored_model import local_model

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
) -> Evaluation:
    """Evaluate a classifier, as `vitascope evaluate` does.

    Images that a run was trained on are left out, with a warning.

    Args:
        model: a MODEL (run folder, model folder or file, hub id), an exported model, a model, or an `Engine`.
        data: a DATA argument with the classes of the model, or a DataFrame; None for the test images of a
            run.
        rename: the model's names of classes that have other names in `data`: `{"birds": "bird"}`. Class
            folders of a run's own data are recognized by their contents.
        table: how a table is read.
        batch_size: images per batch; by default 128, and on a GPU as many as keep it busy.
        precision: `auto`, `fp32` or `bf16`.
        device: `auto`, or a torch device.

    Raises:
        UserError: no such model or data, no classes, unknown classes, or no data for a model that is no run.
    """
    reuse_freed_memory()
    ref = Path(local_model(model)) if isinstance(model, str | os.PathLike) else None
    with left_as_it_was(model):
        engine = as_engine(model, precision=precision, device=device)
        engine.check_classes()
        names = engine.class_names
        trained_on, changes = 0, None
        if rename and data is None:
            raise UserError("rename is about the classes of other data: set data")
        if table.given and data is None:
            raise UserError(f"{table.given[0]} is about a table: set data")
        if data is not None:
            name = "the DataFrame" if isinstance(data, DataFrame) else os.fspath(data)
            with data_place(data, table) as place:
                tested = _labelled_images(place, names, rename, table)
                if ref is not None:
                    tested, trained_on = without_training_images(tested, name, ref)
        elif ref is None or not Run(ref).exists:
            raise UserError(f"{ref or 'the model'} is not a run folder with test images of its own: set data")
        else:
            opened = Run(ref).open_data()
            if opened.note:
                log.warning("%s", opened.note)
            tested = opened.test_images(names)
            changes = opened.restored.counts()
        evaluation = measure(engine, batches_of(engine, tested, batch_size))
    return dataclasses.replace(evaluation, trained_on=trained_on, changes=changes)


def _labelled_images(
    data: str, class_names: tuple[str, ...], rename: Mapping[str, str] | None, table: TableOptions
) -> ImageSet:
    try:
        return open_for_evaluation(data, class_names, rename, table=table)
    except UnknownClassesError as error:
        raise UserError(
            f"{error}; if {error.first} is one of them under another name, add --rename {error.first}=CLASS"
        ) from error
