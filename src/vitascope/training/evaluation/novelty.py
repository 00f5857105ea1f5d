"""How often a classifier notices what it was not taught: pictures of another kind, and classes left out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from vitascope.data.formats.digits import Digits
from vitascope.data.measures import wilson_interval
from vitascope.data.samples import PHOTOS, SYNONYMS
from vitascope.intervals import Interval
from vitascope.models.decoding import ImageSource
from vitascope.models.trust import FAMILIAR, PredictionSets

PICTURES = 100
"""Of each other kind, at most."""
LEAST = 10
"""Images of a class from which on it is left out."""


@dataclasses.dataclass(frozen=True)
class Novelty:
    """How often pictures of one kind, which a classifier was not taught, are unfamiliar to it.

    Attributes:
        name: of the kind, or of the class that was left out.
        is_class: whether it is a class.
        images: the number of these pictures, at least 1.
        noticed: of these, the number whose familiarity is below that of `FAMILIAR` of the usual pictures.
        area: the area under the ROC curve: how probably one of them is less familiar than a usual one.
    """

    name: str
    is_class: bool
    images: int
    noticed: int
    area: float

    @classmethod
    def of(
        cls, name: str, usual: npt.NDArray[Any], unusual: npt.NDArray[Any], *, is_class: bool = False
    ) -> Self:
        """That of pictures at distances (m,), where usual ones are at distances (n,).

        The limit is the ceil((n + 1) FAMILIAR)-th of the usual distances, as in `PredictionSets.limits`.
        """
        ordered, n = np.sort(usual), len(usual)
        limit = ordered[int(np.ceil((n + 1) * FAMILIAR - 1e-9)) - 1]
        below, up_to = (np.searchsorted(ordered, unusual, side) for side in ("left", "right"))
        area = float((below + up_to).mean() / (2 * n))
        return cls(name, is_class, len(unusual), int((unusual > limit).sum()), area)

    @property
    def share(self) -> float:
        """The share that is noticed."""
        return self.noticed / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95% interval."""
        return wilson_interval(self.noticed, self.images)

    def to_dict(self) -> dict[str, Any]:
        """The values as a record of a run's metrics."""
        kind = "class" if self.is_class else "pictures"
        return {kind: self.name, "images": self.images, "noticed": self.noticed, "area": self.area}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        name = record.get("class", record.get("pictures"))
        return cls(name, "class" in record, record["images"], record["noticed"], record["area"])


def classes_left_out(
    distances: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    classes: npt.NDArray[np.int64],
    class_names: Sequence[str],
) -> list[Novelty]:
    """The novelty of each class of n images to a classifier of the others; none of fewer than three classes.

    Without a class, its mean is none of those that are near. The covariance stays: one class more or less
    changes little of what all have in common.

    Args:
        distances: of the images to the means of classes, (n, K').
        labels: their classes, (n,).
        classes: of the means, (K',).
        class_names: of all classes.
    """
    novelties = []
    for place, k in enumerate(classes if len(classes) > 2 else []):
        unusual = labels == k
        if unusual.sum() < LEAST or not enough_usual(int((~unusual).sum())):
            continue
        nearest = np.delete(distances, place, axis=1).min(axis=1)
        novelties.append(Novelty.of(class_names[k], nearest[~unusual], nearest[unusual], is_class=True))
    return novelties


def enough_usual(images: int) -> bool:
    """Whether so many usual pictures can say what is unfamiliar."""
    return images >= PredictionSets.needed(FAMILIAR)


def drawing(random: np.random.Generator) -> Image.Image:
    """Boxes and lines on white, 64x64 pixels."""
    image = Image.new("RGB", (64, 64), "white")
    canvas = ImageDraw.Draw(image)
    for _ in range(6):
        colour = tuple(random.integers(0, 200, 3).tolist())
        left, top, right, bottom = sorted(random.integers(0, 32, 2)) + sorted(random.integers(32, 64, 2))
        canvas.rectangle((left, top, right, bottom), outline=colour, width=int(random.integers(1, 4)))
        canvas.line((left, bottom, right, top), fill=colour, width=2)
    return image


def other_kinds(class_names: Sequence[str], channels: int) -> dict[str, list[ImageSource]]:
    """Pictures of kinds that are none of the classes: digits, drawings, photographs and noise."""
    kinds: dict[str, list[ImageSource]] = {}
    mode, words = "RGB" if channels == 3 else "L", {name.lower() for name in class_names}
    if not words & set("0123456789"):
        train = Digits().read("digits").by_name["train"]
        kinds["digits"] = [
            Image.fromarray(np.asarray(train.sources[index])).resize((32, 32)).convert(mode)
            for index in range(PICTURES)
        ]
    photos = [path for name, path in PHOTOS.items() if not words & {*SYNONYMS[name]}]
    if photos and channels == 3:
        kinds["photographs"] = list(photos)
    random = np.random.default_rng(0)
    kinds["drawings"] = [drawing(random).convert(mode) for _ in range(PICTURES)]
    shape = (PICTURES, 32, 32, 3)[: 4 if channels == 3 else 3]
    kinds["noise"] = list(random.integers(0, 256, shape, dtype=np.uint8))
    return kinds


def share_of_classes(novelties: Sequence[Novelty]) -> tuple[float, float, float] | None:
    """The mean share of the classes that are left out, and its 95% interval over them; None for none."""
    shares = [novelty.share for novelty in novelties if novelty.is_class]
    if not shares:
        return None
    interval = Interval.of(shares)
    half = 0.0 if interval.half_width is None else interval.half_width
    return interval.mean, max(0.0, interval.mean - half), min(1.0, interval.mean + half)


def novelty_in_words(novelties: Sequence[Novelty]) -> str:
    """What is noticed at the usual rate of false alarms; empty if nothing is known."""
    parts = [
        f"{novelty.noticed} of {novelty.images} {novelty.name}"
        if novelty.images < LEAST
        else f"{novelty.share:.0%} of {novelty.name}"
        for novelty in novelties
        if not novelty.is_class
    ]
    if (mean := share_of_classes(novelties)) is not None:
        parts.insert(0, "{:.0%} ({:.0%} to {:.0%}) of a class that is left out".format(*mean))
    rate = f"at {1 - FAMILIAR:.0%} false alarms"
    return f"unfamiliar {rate}: {', '.join(parts)}" if parts else ""
