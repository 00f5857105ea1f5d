"""Images to evaluate on: those that a run was not trained on, and those to compare a smaller model on."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from vitascope.data.datasets import open_data
from vitascope.data.splits import ImageSet
from vitascope.run.run import Run

FEW = 1000
"""Test images below which the validation images are measured too: neither are trained on."""

MAX_DROP = 0.01
"""The accuracy that a smaller model may lose."""

log = logging.getLogger(__name__)


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
