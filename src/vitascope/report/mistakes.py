"""The mistakes that a classifier is surest of, and where it looked."""

from __future__ import annotations

from collections.abc import Iterable

from vitascope.report.answers import MISTAKES, Shown, sure
from vitascope.report.figures import to_picture
from vitascope.report.html import Markup, Section, element, figure, join, note, paragraph, table
from vitascope.report.measures import surest_mistakes
from vitascope.report.pictures import image, place_of
from vitascope.run.predictions import Predictions


def mistakes_section(predictions: Predictions, shown: Shown) -> Section | None:
    """The mistakes that it is surest of; None where nothing is wrong."""
    places = surest_mistakes(predictions.confidences, predictions.correct, MISTAKES)
    if not len(places):
        return None
    wrong = int((~predictions.correct).sum())
    most = (
        f"The {len(places)} surest of {wrong:,} mistakes" if wrong > len(places) else f"All {wrong} mistakes"
    )
    text = (
        f"{most}, surest first, as the model sees them. Look here for wrong labels, pictures of two things, "
        "and what a class lacks in training."
    )
    if shown.attention:
        text += (
            " Beside each picture, where it looked (attention rollout): bright is much attention. "
            "Attention outside the object hints at a shortcut in the background."
        )
    if shown.images is None:
        return Section(
            "mistakes", "The surest mistakes", join([paragraph(text), _listed(places, predictions)])
        )
    cards = [_mistake(int(place), predictions, shown) for place in places if int(place) in shown.pixels]
    double = " double" if shown.attention else ""
    parts = [paragraph(text), element("div", *cards, class_=f"pictures{double}")]
    if len(cards) < len(places):
        parts.append(note(f"{len(places) - len(cards)} of the pictures cannot be read any more."))
    return Section("mistakes", "The surest mistakes", join(parts))


def _mistake(place: int, predictions: Predictions, shown: Shown) -> Markup:
    assert shown.images is not None
    names = predictions.class_names
    truth, said = names[predictions.labels[place]], names[predictions.classes[place]]
    views = [image(to_picture(shown.pixels[place]), f"a picture of {truth}, taken for {said}")]
    if place in shown.attention:
        views.append(image(shown.attention[place], "the same picture under its attention"))
    chance = predictions.probabilities[place, predictions.labels[place]]
    caption = join(
        [
            element("span", f"said {said} ({sure(predictions.confidences[place])})", class_="wrong"),
            f", is {truth} ({sure(chance)})",
            element("span", place_of(shown.images, int(predictions.indices[place])), class_="small"),
        ]
    )
    return figure(element("div", *views, class_="row"), caption, class_="picture")


def _listed(places: Iterable[int], predictions: Predictions) -> Markup:
    names = predictions.class_names
    rows = [
        (
            f"{predictions.split} image {predictions.indices[place]}",
            names[predictions.classes[place]],
            sure(predictions.confidences[place]),
            names[predictions.labels[place]],
        )
        for place in places
    ]
    return table(("image", "said", "confidence", "is"), rows, numbers=(2,))
