"""Labels that may be wrong, from out-of-fold probabilities: confident learning (Northcutt et al. 2021)."""

import dataclasses

import numpy as np
import numpy.typing as npt

from vitascope.data.targets import Targets
from vitascope.models.options import EVEN

Probabilities = npt.NDArray[np.floating]


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A label that may be wrong.

    Attributes:
        image: its index.
        given: the class that the image has; None where a class seems to be missing.
        suggested: the class that the classifier finds; None where a class seems to be too much.
        margin: how much more probable the suggestion is, in (0, 1].
        confidence: the probability of the label as it is, in [0, 1].
    """

    image: int
    given: str | None
    suggested: str | None
    margin: float
    confidence: float


def suspects(targets: Targets, probabilities: Probabilities, count: int | None = None) -> list[Suspect]:
    """The labels that may be wrong, the least probable one first; at most `count`.

    Confident learning tells their number: another class is at least as probable as it is on average for the
    images that have it, and more probable than all others together. Where images have several classes, a
    class is missing if it is as probable as for the images that have it, and too much if it is as improbable
    as for those that do not. The least probable labels are listed, which are more often wrong than the
    images counted.

    Args:
        targets: the labels of N images.
        probabilities: (N, K), each by a classifier that did not see the image, calibrated.
        count: all without it.
    """
    labels, names = targets.members, targets.class_names
    with np.errstate(invalid="ignore"):
        own = np.where(labels, probabilities, 0).sum(axis=0) / labels.sum(axis=0)  # (K,); NaN without images
        others = np.where(labels, 0, probabilities).sum(axis=0) / (~labels).sum(axis=0)
    missing = ~labels & (probabilities >= own) & (probabilities > EVEN)  # (N, K)
    alone = targets.strata is None  # each class is right or wrong by itself
    if not alone:
        number = int(missing.any(axis=1).sum())
    else:
        number = int((missing | labels & (probabilities <= others) & (probabilities < EVEN)).sum())
    confidence = targets.self_confidence(probabilities)
    order = np.argsort(confidence, axis=None, kind="stable")[:number][:count]
    listed = []
    for image, k in zip(*np.unravel_index(order, confidence.shape), strict=True):
        sure = float(confidence[image, k])
        given: str | None
        suggested: str | None
        if not alone:
            rest = np.where(labels[image], -1, probabilities[image])
            given, suggested = names[int(labels[image].argmax())], names[int(rest.argmax())]
            margin = float(rest.max()) - sure
        else:
            given, suggested = (names[k], None) if labels[image, k] else (None, names[k])
            margin = 1 - 2 * sure
        if margin > 0:
            listed.append(Suspect(int(image), given, suggested, margin, sure))
    return listed
