"""`calibrate`: from a classifier and images that it was not trained on to answers that can be trusted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitascope.arguments import checked
from vitascope.data.datasets import open_data
from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.evaluation.calibration import Temperature, as_logits, class_gaussians, sharpened, trust_of
from vitascope.evaluation.measure import BATCH_SIZE, features_of_images, measure, pooled_features
from vitascope.model.vision_model import VisionModel
from vitascope.predict.engine import TorchEngine
from vitascope.run.label_measures import best_thresholds
from vitascope.storage import check_new_folder
from vitascope.weights.loading import from_pretrained, save_pretrained

KNOWN = 5000
"""Training images by which a model knows what is familiar, at most."""


def images_to_know(images: ImageSet) -> npt.NDArray[np.int64]:
    """The indices of at most `KNOWN` of the training images, from all parts of the set."""
    return np.array(images.spread(KNOWN), dtype=np.int64)


def calibrate_model(
    model: VisionModel,
    engine: Callable[[], TorchEngine],
    val: Loader,
    known: Callable[[], Loader],
    embed: Callable[[TorchEngine, Tensor], Tensor] = pooled_features,
    gather: Callable[[Any], list[Any]] = lambda part: [part],
) -> Temperature:
    """Set the temperature of a model, in its head; and where one class applies `model.trust`, else the
    thresholds of the highest F1.

    Args:
        model: a classifier.
        engine: makes an engine of it, as it is then.
        val: images that the model was not trained on.
        known: training images, see `images_to_know`.
        embed: from the pixels of these to features, on any device.
        gather: as of `measure`.
    """
    measured = measure(engine(), val, gather)
    exclusive = not measured.several
    temperature = Temperature.of(measured.targets, as_logits(measured.probabilities, exclusive=exclusive))
    temperature.apply(model)
    probabilities = sharpened(measured.probabilities, 1 / temperature.values, exclusive=exclusive)
    if not exclusive:
        thresholds = best_thresholds(measured.labels, probabilities).tolist()
        model.config = model.config.replace(thresholds=thresholds)
        return temperature
    features, labels = features_of_images(engine(), known(), embed, gather)
    gaussians = class_gaussians(features, labels) if len(labels) > 1 else None
    held_out, _ = features_of_images(engine(), val, pooled_features, gather)
    model.trust = trust_of(temperature, probabilities, measured.labels, gaussians, held_out)
    return temperature


@checked
def calibrate(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    device: str = "auto",
) -> Temperature:
    """Calibrate the classifier of a MODEL reference with DATA, as `vitascope calibrate` does.

    Args:
        model: a MODEL reference.
        data: a DATA argument with the classes of the model: the temperature and the sets are of its
            validation images, and what is familiar is as its training images.
        out: a new model folder for the calibrated model.
        device: `auto`, or a torch device.

    Raises:
        UserError: no such model or data, a model without classes, other classes, or a folder that exists.
    """
    folder, place = Path(out), os.fspath(data)
    check_new_folder(folder)
    loaded = from_pretrained(model)
    engine = TorchEngine(loaded, precision="fp32", device=device)
    engine.check_classes()
    splits = open_data(place)
    train, val = (each.in_classes(engine.class_names, place) for each in (splits.train, splits.val))

    def batches(images: ImageSet) -> Loader:
        return Loader(images, engine.preprocess, engine.batch_size(None, BATCH_SIZE), device=engine.device)

    temperature = calibrate_model(
        loaded,
        lambda: TorchEngine(loaded, precision="fp32", device=device),
        batches(val),
        lambda: batches(train.subset(train.name, images_to_know(train))),
    )
    save_pretrained(loaded.cpu(), folder)
    return temperature
