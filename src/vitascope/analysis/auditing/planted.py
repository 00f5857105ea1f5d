"""How much an audit notices: errors that are planted into a copy of the data, and looked for."""

import dataclasses
import io
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitascope.analysis.auditing.labels import held_out_probabilities, wrong_labels
from vitascope.analysis.auditing.quality import LISTED, grey_is_rare, quality_scores
from vitascope.analysis.auditing.topics import off_topic_scores
from vitascope.data.duplicates import near_duplicates
from vitascope.data.finding import Issue
from vitascope.data.folds import Division
from vitascope.data.looks import Looks, look_at
from vitascope.data.measures import wilson_interval
from vitascope.data.targets import Targets
from vitascope.language import say
from vitascope.models.decoding import ImageSource, read_image
from vitascope.training.linear.classifiers import Features

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
        kinds: of pictures of several kinds, how many of each are noticed, in words.
    """

    issue: Issue
    count: int
    noticed: int
    listed: int
    kinds: str = ""

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
        text = say(
            "In a copy with planted faults, this check lists {noticed} of {count} {what} ({share:.0%}, "
            "{low:.0%} to {high:.0%}) among {listed}.",
            **{"count": f"{self.count:,}", "noticed": f"{self.noticed:,}", "listed": f"{self.listed:,}"},
            **{"what": what[self.issue], "share": self.share, "low": low, "high": high},
        )
        return f"{text} {say('By kind: {kinds}.', kinds=self.kinds)}" if self.kinds else text


def _recompressed(image: Image.Image, random: np.random.Generator) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=int(random.integers(40, 80)))
    return Image.open(file)


def _cropped(image: Image.Image, random: np.random.Generator) -> Image.Image:
    width, height = (max(1, round(side * random.uniform(0.8, 0.92))) for side in image.size)
    left, top = random.integers(0, (image.width - width + 1, image.height - height + 1)).tolist()
    return image.crop((left, top, left + width, top + height))


NEAR_COPIES: Sequence[Change] = (
    lambda image, random: ImageOps.scale(image, random.uniform(0.6, 0.9)),
    _recompressed,
    _cropped,
    lambda image, random: ImageOps.mirror(image),
    lambda image, random: image.rotate(90 * int(random.integers(1, 4)), expand=True),
    lambda image, random: ImageEnhance.Brightness(image).enhance(random.choice([0.7, 1.35])),
    lambda image, random: ImageOps.expand(image, max(1, round(0.05 * min(image.size))), fill="white"),
)
FAULTS: Mapping[Issue, Change] = {
    "dark": lambda image, random: ImageEnhance.Brightness(image).enhance(0.06),
    "bright": lambda image, random: Image.blend(image, Image.new(image.mode, image.size, "white"), 0.93),
    "blurred": lambda image, _: image.filter(ImageFilter.GaussianBlur(max(1.5, 0.025 * min(image.size)))),
    "empty": lambda image, random: Image.new("RGB", image.size, tuple(random.integers(40, 216, 3).tolist())),
    "grey": lambda image, random: image.convert("L").convert(image.mode),
}


def sample_of(count: int, seed: int) -> npt.NDArray[np.int64]:
    """At most `SAMPLE` of so many images, in order."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:SAMPLE])


def wrong_labels_noticed(bodies: Sequence[Features], division: Division, seed: int) -> list[Planted]:
    """Change labels at random, and list wrong ones from probabilities that are computed again; empty for
    fewer than two classes with more than `FEW` images."""
    random, targets = np.random.default_rng(seed), division.targets
    classes = np.flatnonzero(targets.counts > FEW)  # the folds need some images of each
    rows = np.flatnonzero(targets.members[:, classes].any(axis=1))
    flipped = random.permutation(rows)[: round(FLIPPED * len(rows))]
    if len(classes) < 2 or not len(flipped):
        return []
    labels, K = targets.labels.copy(), len(classes)
    if targets.strata is not None:
        places = np.searchsorted(classes, labels[flipped]) + random.integers(1, K, len(flipped))
        labels[flipped] = classes[places % K]
    else:
        chosen = random.choice(classes, len(flipped))
        labels[flipped, chosen] = ~labels[flipped, chosen]
    wrong: Targets = dataclasses.replace(targets, labels=labels)
    probabilities = held_out_probabilities(bodies, dataclasses.replace(division, targets=wrong), seed)
    listed = {finding.image for finding in wrong_labels(wrong, probabilities)}
    return [Planted("label", len(flipped), len(listed & set(flipped.tolist())), len(listed))]


def pictures_noticed(
    sources: Sequence[ImageSource],
    looks: Looks,
    features: Features,
    *,
    kinds: Mapping[str, Sequence[ImageSource]],
    listed: Mapping[Issue, int],
    embed: Embed,
    seed: int,
) -> list[Planted]:
    """Add near-copies of some of n images, pictures of other kinds, and dark, bright, ... ones; none to one.

    Args:
        looks: of the images, (n,).
        features: of the images, (n, D).
        kinds: from `other_kinds`.
        listed: how many of the images themselves each check of quality lists.
    """
    if len(sources) < 2:
        return []
    rows, random = sample_of(len(sources), seed), np.random.default_rng(seed)
    looks, features, order = looks[rows], features[rows], random.permutation(rows).tolist()
    chosen = order[: EACH * len(NEAR_COPIES)]
    copies = [
        change(read_image(sources[index]).convert("RGB"), random)
        for index, change in zip(chosen, itertools.cycle(NEAR_COPIES), strict=False)
    ]
    everything = np.concatenate([looks, look_at(copies)])
    ends = {pair[:2] for pair in near_duplicates(everything, np.concatenate([features, embed(copies)]))}
    pairs = {(place, len(rows) + n) for n, place in enumerate(np.searchsorted(rows, chosen).tolist())}
    experiments = [Planted("near-duplicate", len(pairs), len(ends & pairs), len(ends))]

    count = min(PICTURES, max(3, round(FOREIGN * len(rows))))
    turns = itertools.zip_longest(*([(kind, picture) for picture in some] for kind, some in kinds.items()))
    foreign = [pair for turn in turns for pair in turn if pair is not None][:count]
    vectors = np.concatenate([features, embed([picture for _, picture in foreign])])
    above = off_topic_scores(vectors) >= LISTED
    every, seen = (
        Counter(kind for (kind, _), one in zip(foreign, some, strict=True) if one)
        for some in ([True] * count, above[len(rows) :])
    )
    words = ", ".join(f"{kind} {seen[kind]} of {number}" for kind, number in every.items())
    experiments.append(Planted("off-topic", count, seen.total(), int(above.sum()), words))

    originals = [read_image(sources[index]).convert("RGB") for index in order[:PICTURES]]
    for issue, change in FAULTS.items():
        if issue == "grey" and not grey_is_rare(looks):
            continue  # nothing is listed
        changed = look_at([change(image, random) for image in originals])
        noticed = int((quality_scores(changed, looks)[issue] >= LISTED).sum())
        experiments.append(Planted(issue, len(originals), noticed, noticed + listed.get(issue, 0)))
    return experiments
