"""The report's sections about a classifier's predictions: classes, confusion, calibration, mistakes."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.analysis.explain.lettering import short
from vitascope.analysis.report import charts, thumbnails
from vitascope.analysis.report.page import blank_figure, embedded, sure
from vitascope.data.measures import FEW, ClassPair, calibration, surest, wilson_interval, worst_pairs
from vitascope.data.splits import OUT_OF_FOLD, ImageSet
from vitascope.language import say
from vitascope.models.preprocess import Framed
from vitascope.models.trust import FAMILIAR, Trust
from vitascope.models.vision_model import VisionModel
from vitascope.training.evaluation.novelty import Novelty, share_of_classes
from vitascope.training.evaluation.reliability import Reliability
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.run import Run

MISTAKES = 24
"""Mistakes with their images."""
PAIRS, PER_PAIR, EXAMPLES = 5, 4, 2
"""Pairs of classes with images; mistakes of each pair, and correct examples of the predicted class."""
MORE_PAIRS = 20
WORST_CLASSES = 20
"""Rows of the table of classes that are not folded."""


def classification(
    predictions: Predictions, model: VisionModel, images: ImageSet | None
) -> dict[str, dict[str, Any] | None]:
    """Values of the four sections by anchor; `images` is the split of the predictions, if it is found."""
    confusion = predictions.confusion
    pairs = worst_pairs(confusion, MORE_PAIRS)
    mistakes = surest(predictions.confidences, ~predictions.correct, MISTAKES).tolist()
    paired = [_images_of(pair, predictions) for pair in pairs[:PAIRS]]
    wanted = dict.fromkeys([*mistakes, *(place for wrong, right in paired for place in [*wrong, *right])])
    pictures = pictures_of(predictions, wanted, model, images)
    return {
        "classes": _classes(predictions, confusion),
        "confusion": _confusion(predictions, confusion, pairs, paired, pictures),
        "calibration": calibrated(predictions.confidences, predictions.correct, charts.CalibrationWords())
        | {"fitted": predictions.fitted}
        if len(predictions.labels) >= FEW
        else None,
        # Out of fold, the sets were fitted to these very predictions.
        "trust": _trust(predictions, None if predictions.split == OUT_OF_FOLD else model.trust)
        if len(predictions.labels) >= FEW
        else None,
        "mistakes": _mistakes(predictions, mistakes, model, images, pictures) if mistakes else None,
    }


def pictures_of(
    predictions: Predictions, places: Iterable[int], model: VisionModel, images: ImageSet | None
) -> dict[int, Framed]:
    """The pictures at some places of the predictions, by place, as far as they are found."""
    if images is None:
        return {}
    indices = {place: int(predictions.indices[place]) for place in places}
    pictures = thumbnails.read_pictures(images, indices.values(), model)
    return {place: pictures[index] for place, index in indices.items() if index in pictures}


def pictured(
    predictions: Predictions,
    places: Sequence[int],
    model: VisionModel,
    images: ImageSet | None,
    pictures: Mapping[int, Framed],
    classes: Mapping[str, npt.NDArray[np.int64]] | None = None,
) -> dict[str, Any]:
    """The part that sections of single images share: the images' names, and pictures beside the same pictures
    under attention, or under the evidence for `classes`, one per prediction, by their description."""
    shown = {place: pictures[place] for place in places if place in pictures}
    maps: dict[str, dict[int, thumbnails.Pixels]] = {
        text: thumbnails.evidence_over(model, shown, {place: int(indices[place]) for place in shown})
        for text, indices in (classes or {}).items()
    }
    if classes is None:
        maps[say("the same image under its attention")] = thumbnails.attention_over(model, shown)
    listed = [
        {
            "name": thumbnails.name_of_image(images, int(predictions.indices[place]))
            if images is not None
            else say("{split} image {number}", split=predictions.split, number=predictions.indices[place]),
            "picture": pictures.get(place),
            "maps": [(over[place], text) for text, over in maps.items() if place in over],
        }
        for place in places
    ]
    return {
        "listed": listed,
        "with_images": images is not None,
        "with_attention": classes is None and any(maps.values()),
        "row": 1 + sum(map(bool, maps.values())),
        "missing": len(listed) - len(pictures.keys() & set(places)),
    }


def _images_of(pair: ClassPair, predictions: Predictions) -> tuple[list[int], list[int]]:
    """Places of a pair's surest mistakes, and of the surest correct images of the predicted class."""
    alike = predictions.classes == pair.second
    wrong = surest(predictions.confidences, alike & (predictions.labels == pair.first), PER_PAIR)
    right = surest(predictions.confidences, alike & predictions.correct, EXAMPLES)
    return wrong.tolist(), right.tolist()


def _classes(predictions: Predictions, confusion: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Recall, precision and F1 of each class, the worst recall first."""
    names = predictions.class_names
    totals, correct, predicted = confusion.sum(axis=1), confusion.diagonal(), confusion.sum(axis=0)
    present = np.flatnonzero(totals)
    rows = []
    for k in present[np.argsort(correct[present] / totals[present], kind="stable")]:
        low, high = wilson_interval(int(correct[k]), int(totals[k]))
        others = confusion[k].copy()
        others[k] = 0
        worst = int(others.argmax())
        rows.append(
            (
                names[k],
                f"{totals[k]:,}",
                f"{correct[k] / totals[k]:.1%}",
                say("{low:.0%} to {high:.0%}", low=low, high=high),
                f"{correct[k] / predicted[k]:.1%}" if predicted[k] else say("never predicted"),
                f"{2 * correct[k] / (totals[k] + predicted[k]):.1%}",
                f"{names[worst]} ({others[worst]})" if others[worst] else "",
            )
        )
    return {
        "rows": rows[:WORST_CLASSES],
        "rest": rows[WORST_CLASSES:],
        "unreadable": predictions.unreadable,
    }


def _confusion(
    predictions: Predictions,
    confusion: npt.NDArray[np.int64],
    pairs: list[ClassPair],
    paired: list[tuple[list[int], list[int]]],
    pictures: dict[int, Framed],
) -> dict[str, Any]:
    """The matrix, and images of the most confused pairs."""
    names, K, totals = predictions.class_names, len(predictions.class_names), confusion.sum(axis=1)
    matrix = None
    if K <= charts.MAX_CLASSES:
        alt = f"Confusion matrix of {K} classes: {np.trace(confusion)} of {confusion.sum()} correct"
        draw = partial(charts.draw_confusion, confusion, names, new=blank_figure)
        matrix = embedded(draw, "confusion", alt, per_inch=88, least=0.75)
    cards = []
    for pair, (wrong, right) in zip(pairs, paired, strict=False):
        card: dict[str, Any] = {"true": names[pair.first], "predicted": names[pair.second]}
        card |= {"count": f"{pair.count:,}", "total": f"{totals[pair.first]:,}"}
        card["images"] = [
            {
                "picture": pictures[place],
                "true": names[predictions.labels[place]],
                "wrong": place in wrong,
                "confidence": predictions.confidences[place],
                "short": short(names[pair.second]),
            }
            for place in [*wrong, *right]
            if place in pictures
        ]
        cards.append(card)
    more = [
        (names[p.first], names[p.second], f"{p.count:,}", f"{p.count / totals[p.first]:.1%}")
        for p in pairs[PAIRS:]
    ]
    return {"K": K, "matrix": matrix, "pairs": cards, "more": more}


def _trust(predictions: Predictions, trust: Trust | None) -> dict[str, Any]:
    """What is wrong of the surest answers, and of a calibrated model how its sets and its familiarity do."""
    sets = None if trust is None else trust.sets
    labels, probabilities = predictions.labels, predictions.probabilities
    measured = Reliability.of(labels, probabilities, sets, predictions.familiarity)
    section: dict[str, Any] = {
        "measured": measured,
        "fitted": predictions.fitted,
        "drawing": embedded(
            partial(charts.draw_risk_coverage, measured.risk, new=blank_figure),
            "risk",
            "wrong answers",
            width=620,
        ),
        "familiar": FAMILIAR,
        "temperature": None,
        "novelty": None,
    }
    if trust is not None and trust.temperature != 1:
        before = predictions.targets.sharpened(probabilities, trust.temperature)
        section |= {
            "temperature": trust.temperature,
            "before": calibration(before.max(axis=1), before.argmax(axis=1) == labels).error,
        }
    if measured.sets is not None:
        held, counts = measured.sets.held, measured.sets.counts
        present = np.flatnonzero(counts)
        order = present[np.argsort(held[present] / counts[present], kind="stable")]
        rows = [(predictions.class_names[k], int(counts[k]), *_share(held[k], counts[k])) for k in order]
        head = [say("class"), say("images"), say("in the set"), say("95% interval")]
        section |= {"head": head, "rows": rows[:WORST_CLASSES], "rest": rows[WORST_CLASSES:]}
    return section


def noticed(run: Run) -> dict[str, Any] | None:
    """How often a run's classifier notices what it was not taught; None where that is not known."""
    novelties = [Novelty.of_record(record) for record in run.records("novelty")]
    if not novelties:
        return None
    kinds = {"digits": say("digits"), "photographs": say("photographs"), "drawings": say("drawings")}
    kinds["noise"] = say("noise")
    ordered = sorted(novelties, key=lambda novelty: (novelty.is_class, novelty.share))
    return {
        "mean": share_of_classes(novelties),
        "alarms": 1 - FAMILIAR,
        "frozen": run.config.get("task") == "probe",
        "head": [say("not taught"), say("images"), say("unfamiliar"), say("95% interval"), "AUROC"],
        "rows": [
            (
                novelty.name if novelty.is_class else kinds.get(novelty.name, novelty.name),
                f"{novelty.images:,}",
                *_share(novelty.noticed, novelty.images),
                f"{novelty.area:.3f}",
            )
            for novelty in ordered
        ],
    }


def _share(part: int | np.int64, total: int | np.int64) -> tuple[str, str]:
    """A share of images, and its interval."""
    low, high = wilson_interval(int(part), int(total))
    return f"{part / total:.1%}", say("{low:.0%} to {high:.0%}", low=low, high=high)


def calibrated(
    confidences: npt.NDArray[np.floating], right: npt.NDArray[np.bool_], words: charts.CalibrationWords
) -> dict[str, Any]:
    """Confidences (n,) beside the share that is right, (n,), in all and by bins."""
    measured = calibration(confidences, right)
    draw = partial(charts.draw_calibration, measured, words, new=blank_figure)
    return {
        "words": words,
        "confidence": float(confidences.mean(dtype=np.float64)),
        "accuracy": float(right.mean()),
        "error": measured.error,
        "drawing": embedded(draw, "calibration", "reliability diagram", width=620),
        "measured": measured,
        "full": np.flatnonzero(measured.counts).tolist(),
    }


def _mistakes(
    predictions: Predictions,
    places: Sequence[int],
    model: VisionModel,
    images: ImageSet | None,
    pictures: Mapping[int, Framed],
) -> dict[str, Any]:
    """The mistakes of the highest confidence, beside the evidence for the predicted and the true class."""
    names = predictions.class_names
    classes = {
        say("the evidence for the predicted class"): predictions.classes,
        say("the evidence for the true class"): predictions.labels,
    }
    section = pictured(predictions, places, model, images, pictures, classes)
    for place, entry in zip(places, section["listed"], strict=True):
        entry |= {
            "predicted": names[predictions.classes[place]],
            "confidence": sure(predictions.confidences[place]),
            "true": names[predictions.labels[place]],
            "probability": sure(predictions.probabilities[place, predictions.labels[place]]),
        }
    return section | {"total": int((~predictions.correct).sum())}
