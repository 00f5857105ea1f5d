"""Typical and untypical images of each class, labels that may be wrong, classes that are confused.

All of it is read from out-of-fold probabilities (N, K): no image is judged by a classifier that saw it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from vitascope.data.targets import Targets
from vitascope.model.options import EVEN
from vitascope.run.label_measures import ClassPair, pairs_confused
from vitascope.run.measures import predicted, worst_pairs

Probabilities = npt.NDArray[np.floating]


@dataclasses.dataclass(frozen=True, eq=False)
class ClassExamples:
    """Images of one class by the probability of this class: indices, the most extreme first."""

    name: str
    most: npt.NDArray[np.int64]
    least: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A label that may be wrong.

    Attributes:
        image: its index.
        given: the class that the image has; None where a class seems to be missing.
        suggested: the class that the classifier finds; None where a class seems to be too much.
        margin: how much more probable the suggestion is, in (0, 1].
    """

    image: int
    given: str | None
    suggested: str | None
    margin: float


def class_examples(targets: Targets, probabilities: Probabilities, count: int = 5) -> list[ClassExamples]:
    """The most and the least typical images of each class that has any: those with the highest and the lowest
    probability of the class, at most `count` of each, and none in both."""
    found = []
    for k, images in enumerate(targets.by_class()):
        order = images[np.argsort(-probabilities[images, k], kind="stable")]
        few = min(count, len(order) // 2)
        if len(order):
            most, least = order[: max(few, 1)], order[::-1][:few]
            found.append(ClassExamples(targets.class_names[k], most, least))
    return found


def suspects(targets: Targets, probabilities: Probabilities, count: int = 20) -> list[Suspect]:
    """At most `count` labels that the classifier contradicts with confidence, the largest margin first.

    The rule is that of confident learning (Northcutt et al. 2021): another class is at least as probable as
    it is for the images that have it, on average, and more probable than the given class. Where images have
    several classes, a class is missing if it is as probable as for the images that have it, and too much if
    it is as improbable as for those that do not.
    """
    labels = targets.members
    names = targets.class_names
    with np.errstate(invalid="ignore"):
        own = np.where(labels, probabilities, 0).sum(axis=0) / labels.sum(axis=0)  # (K,); NaN without images
        others = np.where(labels, 0, probabilities).sum(axis=0) / (~labels).sum(axis=0)
    found = []
    if targets.exclusive:
        rows = np.arange(len(targets))
        confident = np.where((probabilities >= own) & ~labels, probabilities, -1.0)
        best = confident.argmax(axis=1)
        margins = confident[rows, best] - probabilities[rows, targets.labels]
        for image in np.flatnonzero(margins > 0):
            given, suggested = names[targets.labels[image]], names[best[image]]
            found.append(Suspect(int(image), given, suggested, float(margins[image])))
    else:
        for image, k in np.argwhere(~labels & (probabilities >= own) & (probabilities > EVEN)):
            margin = 2 * float(probabilities[image, k]) - 1
            found.append(Suspect(int(image), None, names[k], margin))
        for image, k in np.argwhere(labels & (probabilities <= others) & (probabilities < EVEN)):
            margin = 1 - 2 * float(probabilities[image, k])
            found.append(Suspect(int(image), names[k], None, margin))
    return sorted(found, key=lambda each: -each.margin)[:count]


def confused(targets: Targets, probabilities: Probabilities, count: int = 10) -> list[ClassPair]:
    """At most `count` pairs of a class of images and the class that is predicted instead, the most frequent
    first."""
    if targets.exclusive:
        pairs = worst_pairs(targets.confusion(predicted(probabilities)), count)
        return [ClassPair(pair.true, pair.predicted, pair.count) for pair in pairs]
    return pairs_confused(targets.labels, probabilities >= EVEN, count)
