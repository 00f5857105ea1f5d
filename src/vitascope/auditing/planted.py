"""How much an audit notices: errors that are planted into a copy of the data, and looked for."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitascope.auditing.duplicates import near_duplicates
from vitascope.auditing.finding import Issue
from vitascope.auditing.labels import held_out_probabilities, wrong_labels
from vitascope.auditing.looks import Looks, look_at
from vitascope.auditing.quality import LISTED, quality_scores
from vitascope.auditing.topics import off_topic_scores
from vitascope.data.decoding import ImageSource, read_image
from vitascope.data.targets import Targets
from vitascope.language import say
from vitascope.probing.classifiers import Features
from vitascope.probing.folds import Division
from vitascope.run.measures import wilson_interval

SAMPLE = 5000
"""Images at most that errors are planted into."""
FLIPPED = 0.05
"""The share of labels that are changed."""
FEW = 10
"""Images of a class up to which its labels are not changed."""
EACH = 8
"""Near-copies of each kind."""
PICTURES = 50
"""Dark, bright, blurred, ... pictures of each kind."""
FOREIGN = 0.05
"""Foreign pictures, as a share of the images; at most `PICTURES`, and at least three."""
LITTLE = 0.3
"""A check that notices less than this share notices little."""


Embed = Callable[[Sequence[ImageSource]], Features]
"""Pictures to their features (n, D)."""
Change = Callable[[Image.Image, np.random.Generator], Image.Image]


@dataclasses.dataclass(frozen=True)
class Planted:
    """Errors that were planted, and how many of them a check notices.

    Attributes:
        count: how many were planted.
        noticed: how many of these are in the list of the check.
        listed: how long that list is, with the errors that the data have themselves.
    """

    issue: Issue
    count: int
    noticed: int
    listed: int

    @property
    def share(self) -> float:
        """The share that is noticed."""
        return self.noticed / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95% interval."""
        return wilson_interval(self.noticed, self.count)

    @property
    def little(self) -> bool:
        """Whether the check notices so little that its list means little."""
        return self.share < LITTLE

    def __str__(self) -> str:
        low, high = self.interval
        what = {
            "near-duplicate": say("near-copies"),
            "label": say("wrong labels"),
            "off-topic": say("foreign pictures"),
            "dark": say("dark pictures"),
            "bright": say("bright pictures"),
            "blurred": say("blurred pictures"),
            "empty": say("pictures of one colour"),
            "grey": say("grey pictures"),
        }
        return say(
            "Of {count} planted {what}, {noticed} ({share:.0%}, {low:.0%} to {high:.0%}) are among the "
            "{listed} that it lists.",
            **{"count": f"{self.count:,}", "what": what[self.issue], "noticed": f"{self.noticed:,}"},
            **{"share": self.share, "low": low, "high": high, "listed": f"{self.listed:,}"},
        )


def _encoded(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=quality)
    return Image.open(file)


def _cropped(image: Image.Image, random: np.random.Generator) -> Image.Image:
    width, height = (max(1, round(side * random.uniform(0.8, 0.92))) for side in image.size)
    left, top = (
        int(random.integers(0, side - part + 1))
        for side, part in zip(image.size, (width, height), strict=True)
    )
    return image.crop((left, top, left + width, top + height))


def _framed(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return ImageOps.expand(image, max(1, round(0.05 * min(image.size))), fill="white")


def _scaled(image: Image.Image, factor: float) -> Image.Image:
    width, height = (max(1, round(side * factor)) for side in image.size)
    return image.resize((width, height))


def _blurred(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(max(1.5, 0.025 * min(image.size))))


NEAR_COPIES: Mapping[str, Change] = {
    "resized": lambda image, random: _scaled(image, random.uniform(0.6, 0.9)),
    "recompressed": lambda image, random: _encoded(image, int(random.integers(40, 80))),
    "cropped": _cropped,
    "mirrored": lambda image, random: ImageOps.mirror(image),
    "turned": lambda image, random: image.rotate(90 * int(random.integers(1, 4)), expand=True),
    "brighter or darker": lambda image, random: ImageEnhance.Brightness(image).enhance(
        float(random.choice([0.7, 1.35]))
    ),
    "framed": _framed,
}
"""The seven kinds of near-copies."""
FAULTS: Mapping[Issue, Change] = {
    "dark": lambda image, random: ImageEnhance.Brightness(image).enhance(0.06),
    "bright": lambda image, random: Image.blend(image, Image.new(image.mode, image.size, "white"), 0.93),
    "blurred": _blurred,
    "empty": lambda image, random: Image.new("RGB", image.size, tuple(random.integers(40, 216, 3).tolist())),
    "grey": lambda image, random: image.convert("L").convert(image.mode),
}


def sample_of(count: int, seed: int) -> npt.NDArray[np.int64]:
    """At most `SAMPLE` of so many images, in order."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:SAMPLE])


def wrong_labels_noticed(bodies: Sequence[Features], division: Division, seed: int) -> Planted | None:
    """Change labels at random, and list wrong ones from probabilities that are computed again; None for fewer
    than two classes with more than `FEW` images."""
    random, targets = np.random.default_rng(seed), division.targets
    classes = np.flatnonzero(targets.counts > FEW)  # the folds need some images of each
    rows = np.flatnonzero(targets.members[:, classes].any(axis=1))
    flipped = random.permutation(rows)[: round(FLIPPED * len(rows))]
    if len(classes) < 2 or not len(flipped):
        return None
    labels, K = targets.labels.copy(), len(classes)
    if targets.exclusive:
        places = np.searchsorted(classes, labels[flipped]) + random.integers(1, K, len(flipped))
        labels[flipped] = classes[places % K]
    else:
        chosen = random.choice(classes, len(flipped))
        labels[flipped, chosen] = ~labels[flipped, chosen]
    wrong: Targets = dataclasses.replace(targets, labels=labels)
    probabilities = held_out_probabilities(bodies, dataclasses.replace(division, targets=wrong), seed)
    listed = {finding.image for finding in wrong_labels(wrong, probabilities)}
    return Planted("label", len(flipped), len(listed & set(flipped.tolist())), len(listed))


def near_copies_noticed(
    sources: Sequence[ImageSource], looks: Looks, features: Features, embed: Embed, seed: int
) -> Planted:
    """Add changed copies of some of the images, and look for the pairs."""
    random = np.random.default_rng(seed)
    chosen = random.permutation(len(sources))[: EACH * len(NEAR_COPIES)]
    changes = [list(NEAR_COPIES.values())[number % len(NEAR_COPIES)] for number in range(len(chosen))]
    copies = [
        change(read_image(sources[index]).convert("RGB"), random)
        for index, change in zip(chosen.tolist(), changes, strict=True)
    ]
    pairs = near_duplicates(looks.joined(look_at(copies)), np.concatenate([features, embed(copies)]))
    ends = {(pair.first, pair.second) for pair in pairs}
    planted = {(int(index), len(sources) + number) for number, index in enumerate(chosen)}
    return Planted("near-duplicate", len(planted), len(ends & planted), len(ends))


def foreign_noticed(features: Features, kinds: Mapping[str, Sequence[ImageSource]], embed: Embed) -> Planted:
    """Add pictures of other kinds, and list those that are off-topic."""
    count = min(PICTURES, max(3, round(FOREIGN * len(features))))
    each = itertools.zip_longest(*kinds.values())
    pictures = [picture for row in each for picture in row if picture is not None][:count]
    foreign = embed(pictures)
    listed = off_topic_scores(np.concatenate([features, foreign])) >= LISTED
    return Planted("off-topic", len(foreign), int(listed[len(features) :].sum()), int(listed.sum()))


def faults_noticed(
    sources: Sequence[ImageSource], looks: Looks, listed: Mapping[Issue, int], seed: int
) -> list[Planted]:
    """Add dark, bright, blurred, empty and grey copies of some of the images.

    `listed` is how many of the images themselves each check lists.
    """
    random, planted = np.random.default_rng(seed), []
    chosen = random.permutation(len(sources))[:PICTURES].tolist()
    originals = [read_image(sources[index]).convert("RGB") for index in chosen]
    for issue, change in FAULTS.items():
        scores: dict[Issue, Any] = quality_scores(
            look_at([change(image, random) for image in originals]), looks
        )
        if issue in scores:
            noticed = int((scores[issue] >= LISTED).sum())
            planted.append(Planted(issue, len(chosen), noticed, noticed + listed.get(issue, 0)))
    return planted
