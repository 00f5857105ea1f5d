"""The report's sections about predictions of images that may have several classes."""

from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitascope.analysis.report.charts import EXTREMES, PAIR_WORDS, draw_precision_recall, extreme_classes
from vitascope.analysis.report.classification import WORST_CLASSES, calibrated, pictured, pictures_of
from vitascope.analysis.report.page import blank_figure, embedded, sure
from vitascope.data import label_measures
from vitascope.data.measures import surest
from vitascope.data.splits import ImageSet
from vitascope.language import say
from vitascope.models.vision_model import VisionModel
from vitascope.training.run.predictions import Predictions

Kind = Literal["wrong", "missed"]

SHOWN = 12
"""Images with wrong classes, and images with missed ones."""
PAIRS = 10
"""Rows of each table of pairs."""
NAMED = 5
"""Classes in the caption of an image."""


def labels(
    predictions: Predictions, model: VisionModel, images: ImageSet | None
) -> dict[str, dict[str, Any] | None]:
    """Values of the sections by anchor; `images` is the split of the predictions, if it is found."""
    score, labelled = predictions.score, predictions.targets.rows >= 0
    assert isinstance(score, label_measures.LabelScore)
    return {
        "measures": {
            "head": list(map(say, label_measures.ESTIMATES_HEAD)),
            "rows": [_said((say(name), *cells)) for name, *cells in score.rows()],
            "fitted": predictions.fitted,
        },
        "labels": _classes(predictions, score),
        "precision_recall": _precision_recall(predictions, score),
        "pairs": _pairs(predictions),
        "pair_calibration": calibrated(predictions.scored[labelled], predictions.labels[labelled], PAIR_WORDS)
        | {"fitted": predictions.fitted},
        "wrong_labels": _mistakes(predictions, "wrong", model, images),
        "missed_labels": _mistakes(predictions, "missed", model, images),
    }


def _classes(predictions: Predictions, score: label_measures.LabelScore) -> dict[str, Any]:
    """The measures of each class, the lowest average precision first."""
    rows = list(map(_said, score.class_rows(predictions.class_names)))
    absent = len(predictions.class_names) - len(rows)
    return {
        "head": list(map(say, label_measures.CLASSES_HEAD)),
        "rows": rows[:WORST_CLASSES],
        "rest": rows[WORST_CLASSES:],
        "absent": absent,
        "split": predictions.split,
        "unreadable": predictions.unreadable,
    }


def _said(row: tuple[str, ...]) -> tuple[str, ...]:
    """A row with its intervals in the reader's language."""
    return row[0], *(cell.replace(" to ", say(" to ")) for cell in row[1:])


def _precision_recall(predictions: Predictions, score: label_measures.LabelScore) -> dict[str, Any]:
    """The curves of the worst and the best classes."""
    draw = partial(draw_precision_recall, predictions, score, new=blank_figure)
    _, best = extreme_classes(score)
    return {
        "drawing": embedded(draw, "precision-recall", "precision by recall", width=680),
        "extremes": EXTREMES if best else 0,
    }


def _pairs(predictions: Predictions) -> dict[str, Any]:
    """Classes that occur together, and classes that are predicted in place of others."""
    names, truths, answers = predictions.class_names, predictions.labels, predictions.answers
    N, totals = len(truths), truths.sum(axis=0)
    together = []
    for pair in label_measures.pairs_together(truths, PAIRS):
        i, j = pair.first, pair.second
        by_chance = totals[i] * totals[j] / N
        predicted = int((answers[:, i] & answers[:, j]).sum())
        cells = f"{pair.count:,}", f"{by_chance:,.1f}", f"{pair.count / by_chance:.2f}", f"{predicted:,}"
        together.append((f"{names[i]}, {names[j]}", *cells))
    confused = [
        (
            names[pair.first],
            names[pair.second],
            f"{pair.count:,}",
            f"{pair.count / totals[pair.first]:.1%}",
        )
        for pair in label_measures.pairs_confused(truths, answers, PAIRS)
    ]
    return {"together": together, "confused": confused}


def _mistakes(
    predictions: Predictions, kind: Kind, model: VisionModel, images: ImageSet | None
) -> dict[str, Any] | None:
    """The images with the most confident wrong, or missed, classes; None if there are none."""
    truths, answers, probabilities = predictions.labels, predictions.answers, predictions.scored
    mistakes = ~truths & answers if kind == "wrong" else truths & ~answers
    mistaken = mistakes.any(axis=1)
    if not mistaken.any():
        return None
    confidences = label_measures.mistake_confidences(
        truths, np.where(mistakes, answers, truths), probabilities
    )
    places = surest(confidences, mistaken, SHOWN).tolist()
    pictures = pictures_of(predictions, places, model, images)
    section = pictured(predictions, places, model, images, pictures)
    for place, entry in zip(places, section["listed"], strict=True):
        entry |= {
            "mistakes": _named(predictions, place, mistakes[place], lowest=kind == "missed"),
            "true": _named(predictions, place, truths[place]),
            "predicted": _named(predictions, place, answers[place]),
        }
    return section | {"total": int(mistakes.sum()), "images": int(mistaken.sum())}


def _named(
    predictions: Predictions, place: int, which: npt.NDArray[np.bool_], *, lowest: bool = False
) -> str:
    """Some classes (K,) of an image and their probabilities, the most, or least, probable first."""
    probabilities, some = predictions.probabilities[place], np.flatnonzero(which)
    order = some[np.argsort(probabilities[some] if lowest else -probabilities[some], kind="stable")]
    named = [f"{predictions.class_names[k]} ({sure(probabilities[k])})" for k in order[:NAMED]]
    more = [say("{count} more", count=len(order) - NAMED)] if len(order) > NAMED else []
    return ", ".join([*named, *more]) or say("no class")
