"""What a classifier got right and wrong, class by class and pair by pair."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from vitascope.data.splits import ImageSet
from vitascope.explain import plots
from vitascope.report.confusion import MAX_CLASSES, draw_confusion
from vitascope.report.figures import to_picture
from vitascope.report.html import (
    Markup,
    Section,
    element,
    figure,
    folded,
    join,
    paragraph,
    table,
)
from vitascope.report.measures import (
    Pair,
    confusion_matrix,
    surest_mistakes,
    wilson_interval,
    worst_pairs,
)
from vitascope.report.pictures import Picture, image
from vitascope.run.predictions import Predictions

MISTAKES = 24
PAIRS, OF_PAIR, RIGHTLY = 5, 4, 2
"""Pairs of classes with pictures; pictures of each, and of the other class, rightly recognized."""
MORE_PAIRS = 20
WORST_CLASSES = 20


@dataclasses.dataclass(frozen=True)
class Shown:
    """The pictures that the page shows, by their place in `Predictions`.

    Attributes:
        images: the split; None where it is not to be had.
        pixels: (C, H, W), as the model gets them.
        attention: the same under attention rollout, (H, W, 3); none of a ResNet.
    """

    images: ImageSet | None
    pixels: dict[int, npt.NDArray[np.uint8]]
    attention: dict[int, Picture]


def places_wanted(predictions: Predictions) -> tuple[list[int], list[int]]:
    """Places in `Predictions` of all pictures that these sections show, and of those that need attention."""
    mistakes = surest_mistakes(predictions.confidences, predictions.correct, MISTAKES).tolist()
    paired = [
        place
        for pair in pairs_of(predictions)[:PAIRS]
        for places in pictures_of(pair, predictions)
        for place in places
    ]
    return list(dict.fromkeys([*mistakes, *paired])), mistakes


def pairs_of(predictions: Predictions) -> list[Pair]:
    """The pairs of classes that are confused most."""
    K = len(predictions.class_names)
    return worst_pairs(confusion_matrix(predictions.labels, predictions.classes, K), MORE_PAIRS)


def pictures_of(pair: Pair, predictions: Predictions) -> tuple[list[int], list[int]]:
    """Places of a pair's surest mistakes, and of the other class's surest right answers."""

    def surest(of: npt.NDArray[np.bool_], count: int) -> list[int]:
        places = np.flatnonzero(of & (predictions.classes == pair.taken_for))
        return places[np.argsort(-predictions.confidences[places], kind="stable")][:count].tolist()

    return surest(predictions.labels == pair.true, OF_PAIR), surest(predictions.correct, RIGHTLY)


def classes_section(predictions: Predictions) -> Section:
    """How good each class is recognized, the worst first."""
    K, names = len(predictions.class_names), predictions.class_names
    confusion = confusion_matrix(predictions.labels, predictions.classes, K)
    totals, rights = confusion.sum(axis=1), confusion.diagonal()
    claimed = confusion.sum(axis=0)
    rows = []
    present = np.flatnonzero(totals)
    for k in present[np.argsort(rights[present] / totals[present], kind="stable")]:
        low, high = wilson_interval(int(rights[k]), int(totals[k]))
        others = confusion[k].copy()
        others[k] = 0
        worst = int(others.argmax())
        precision = f"{rights[k] / claimed[k]:.1%}" if claimed[k] else "never said"
        rows.append(
            (
                names[k],
                f"{totals[k]:,}",
                f"{rights[k] / totals[k]:.1%}",
                f"{low:.0%} to {high:.0%}",
                precision,
                f"{names[worst]} ({others[worst]})" if others[worst] else "",
            )
        )
    head = ("class", "images", "recognized", "95% interval", "right when said", "most often taken for")
    text = (
        "The worst come first. “Recognized” is the share of a class's images that get its name (recall); "
        "“right when said”, the share of answers with that name that are right (precision). The interval "
        "(Wilson's) is wide where there are few images."
    )
    parts = [paragraph(text), table(head, rows[:WORST_CLASSES], numbers=(1, 2, 3, 4))]
    if len(rows) > WORST_CLASSES:
        rest = rows[WORST_CLASSES:]
        parts.append(folded(f"The other {len(rest):,} classes", table(head, rest, numbers=(1, 2, 3, 4))))
    if predictions.unreadable:
        listed = element("ul", *(element("li", reason) for reason in predictions.unreadable[:20]))
        parts.append(folded(f"{len(predictions.unreadable):,} images could not be read", listed))
    return Section("classes", "Class by class", join(parts))


def confusion_section(predictions: Predictions, shown: Shown) -> Section:
    """Which classes are taken for which, with pictures of the worst pairs."""
    K, names = len(predictions.class_names), predictions.class_names
    confusion = confusion_matrix(predictions.labels, predictions.classes, K)
    pairs = pairs_of(predictions)
    parts = []
    if K <= MAX_CLASSES:
        text = (
            "Each row is a true class, each column what the model said. Blue is right, red are mistakes; the "
            "stronger the colour, the larger the share of the true class."
        )
        parts += [paragraph(text), draw_confusion(confusion, names)]
    else:
        parts.append(paragraph(f"A matrix of {K:,} classes is too large to read; these are its worst pairs."))
    if not pairs:
        parts.append(paragraph("No class was ever taken for another."))
    for pair in pairs[:PAIRS]:
        parts.append(_pair(pair, predictions, shown))
    if len(pairs) > PAIRS:
        rows = [
            (names[pair.true], names[pair.taken_for], f"{pair.count:,}", f"{pair.count / pair.total:.1%}")
            for pair in pairs[PAIRS:]
        ]
        head = ("is", "taken for", "images", "of the class")
        parts.append(folded("More pairs", table(head, rows, numbers=(2, 3))))
    return Section("confusion", "What is taken for what", join(parts))


def _pair(pair: Pair, predictions: Predictions, shown: Shown) -> Markup:
    names = predictions.class_names
    title = f"Is {names[pair.true]}, taken for {names[pair.taken_for]}: {pair.count:,} of {pair.total:,}"
    wrong, right = pictures_of(pair, predictions)
    cards = []
    for place in [*wrong, *right]:
        if place not in shown.pixels:
            continue
        is_wrong = place in wrong
        truth, confidence = names[predictions.labels[place]], predictions.confidences[place]
        said = names[predictions.classes[place]]
        alt = f"a picture of {truth}, " + (f"taken for {said}" if is_wrong else "recognized")
        caption = f"{sure(confidence)} sure" if is_wrong else f"rightly {plots.short(said)}"
        cards.append(
            figure(
                image(to_picture(shown.pixels[place]), alt),
                caption,
                class_="picture" if is_wrong else "picture example",
            )
        )
    below = element("div", *cards, class_="pair") if cards else ""
    return element("div", element("h3", title), below, class_="together")


def sure(probability: float) -> str:
    """A probability as a percentage that is 100% or 0% only where it is."""
    percent = float(probability) * 100
    if 99.95 <= percent < 100:
        return "> 99.9%"
    if 0 < percent < 0.05:
        return "< 0.1%"
    return f"{percent:.1f}%"
