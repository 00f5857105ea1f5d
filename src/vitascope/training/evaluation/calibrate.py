"""`calibrate`: from a classifier and images that it was not trained on to answers that can be trusted."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.arguments import checked
from vitascope.data.datasets import open_data
from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.trust import PredictionSets, Trust, class_distances, nearest_class
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.storage import check_new_folder, new_folder
from vitascope.training.evaluation import novelty
from vitascope.training.evaluation.calibration import Temperature, class_gaussians, familiarity_of
from vitascope.training.evaluation.measure import BATCH_SIZE, features_of_images, measure

KNOWN = 5000
"""Training images by which a model knows what is familiar, at most."""


@dataclasses.dataclass(frozen=True, eq=False)
class Likeness:
    """How near images, which a classifier was not fitted to, are to its training images.

    Attributes:
        gaussians: of the training images, see `class_gaussians`.
        classes: of the K' means, int64 (K',).
        distances: `class_distances` of the images, float32 (n, K').
        labels: their classes, (n,).
    """

    gaussians: Mapping[str, Tensor]
    classes: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    @property
    def nearest(self) -> npt.NDArray[np.float32]:
        """The distance of each image to the nearest class, (n,)."""
        return self.distances.min(axis=1)

    @property
    def differs(self) -> bool:
        """Whether some images are nearer than others; otherwise all are equally usual. NaN is not nearer."""
        return len(self.labels) > 1 and bool(np.ptp(self.nearest) > 0)


@dataclasses.dataclass(frozen=True, eq=False)
class CalibrationResult:
    """What is known about the answers of a classifier.

    Attributes:
        temperature: of its head.
        lacks: lines about what the images were too few for.
        novelties: how often it notices what it was not taught; none where that is not known.
    """

    temperature: Temperature
    lacks: Sequence[str] = ()
    novelties: Sequence[novelty.Novelty] = ()

    def lines(self) -> list[str]:
        """What is known in words."""
        return [str(self.temperature), *self.lacks, *filter(None, [novelty.novelty_in_words(self.novelties)])]


def images_to_know(images: ImageSet) -> npt.NDArray[np.int64]:
    """The indices of at most `KNOWN` of the training images, from all parts of the set."""
    return np.array(images.spread(KNOWN), dtype=np.int64)


def calibrate_model(
    model: VisionModel,
    engine: Callable[[], TorchEngine],
    val: Loader,
    known: Callable[[], Loader],
    gather: Callable[[Any], list[Any]] = lambda part: [part],
) -> CalibrationResult:
    """Set the temperature of a model, in its head; and where one class applies `model.trust`, else the
    thresholds of the highest F1.

    Args:
        model: a classifier.
        engine: makes an engine of it, as it is then.
        val: images that the model was not trained on.
        known: training images, see `images_to_know`.
        gather: as of `measure`.
    """
    measured = measure(engine(), val, gather)
    targets = measured.targets
    temperature = Temperature.of(targets, targets.logits(measured.probabilities))
    temperature.apply(model)
    probabilities = targets.sharpened(measured.probabilities, 1 / temperature.values)
    if thresholds := targets.tuned_thresholds(probabilities):
        model.config = model.config.replace(thresholds=thresholds)
        return CalibrationResult(temperature)
    features, labels = features_of_images(engine(), known(), gather)
    likeness = None
    if len(labels) > 1:
        gaussians = class_gaussians(features, labels)
        held_out, truth = features_of_images(engine(), val, gather)
        distances = class_distances(held_out, **gaussians).numpy()
        likeness = Likeness(gaussians, np.unique(labels), distances, truth)
    model.trust = trust_of(temperature, probabilities, measured.labels, likeness)
    return CalibrationResult(temperature, model.trust.lacks(), novelties_of(engine(), likeness))


def cross_fitted(features: Tensor, labels: npt.NDArray[np.int64], folds: npt.NDArray[np.int64]) -> Likeness:
    """The likeness of images with features (n, D), classes (n,) and folds (n,), each to the other folds."""
    classes = np.unique(labels)
    distances = np.full((len(labels), len(classes)), np.inf, dtype=np.float32)
    for fold in np.unique(folds):
        rest = folds != fold
        columns = np.searchsorted(classes, np.unique(labels[rest]))
        gaussians = class_gaussians(features[rest], labels[rest])
        distances[np.ix_(~rest, columns)] = class_distances(features[~rest], **gaussians)
    return Likeness(class_gaussians(features, labels), classes, distances, labels)


def trust_of(
    temperature: Temperature,
    probabilities: npt.NDArray[np.floating],
    labels: npt.NDArray[np.int64],
    likeness: Likeness | None,
) -> Trust:
    """What n images say about a classifier that was not fitted to them.

    Args:
        temperature: of its head.
        probabilities: of the images with the temperature, (n, K).
        labels: their classes, (n,).
        likeness: of the images, or of some of them; None if it is not known.
    """
    familiarity = None
    if likeness is not None and likeness.differs:
        familiarity = familiarity_of(likeness.gaussians, torch.from_numpy(likeness.nearest))
    sets = PredictionSets.fitted(torch.from_numpy(probabilities), torch.from_numpy(labels))
    return Trust(temperature=float(temperature.values[0]), sets=sets, familiarity=familiarity)


def novelties_of(engine: TorchEngine, likeness: Likeness | None) -> list[novelty.Novelty]:
    """How often left-out classes and other kinds of pictures are unfamiliar; none for too few images."""
    if likeness is None or not likeness.differs or not novelty.enough_usual(len(likeness.labels)):
        return []
    names, usual = engine.class_names, likeness.nearest
    novelties = novelty.classes_left_out(likeness.distances, likeness.labels, likeness.classes, names)
    for kind, pictures in novelty.other_kinds(names, engine.preprocess.channels).items():
        features = engine.features_of_pictures(list(map(engine.pixels, pictures)))[0].cpu()
        unusual = nearest_class(features, **likeness.gaussians)
        novelties.append(novelty.Novelty.of(kind, usual, unusual.numpy()))
    return novelties


@checked
def calibrate(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    device: str = "auto",
) -> CalibrationResult:
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

    calibration = calibrate_model(
        loaded,
        lambda: TorchEngine(loaded, precision="fp32", device=device),
        batches(val),
        lambda: batches(train.subset(train.name, images_to_know(train))),
    )
    with new_folder(folder):
        save_pretrained(loaded.cpu(), folder)
    return calibration
