"""How far a classifier's confidence is to be believed."""

from __future__ import annotations

import numpy as np

from vitascope.report.charts import draw_calibration
from vitascope.report.html import Section, figure, folded, join, paragraph, table
from vitascope.report.measures import calibration
from vitascope.report.svg import embed
from vitascope.run.predictions import Predictions


def calibration_section(predictions: Predictions) -> Section:
    """How far its confidence is to be believed."""
    measured = calibration(predictions.confidences, predictions.correct)
    mean, accuracy = float(predictions.confidences.mean(dtype=np.float64)), float(predictions.correct.mean())
    gap = mean - accuracy
    verdict = "over-confident" if gap > 0 else "under-confident"
    text = (
        f"On average it is {mean:.1%} sure, and {accuracy:.1%} of its answers are right: {verdict} by "
        f"{abs(gap) * 100:.1f} points. The expected calibration error is {measured.error:.2%}: how far "
        "confidence and accuracy lie apart, over 15 bins of confidence (Guo et al. 2017)."
    )
    caption = (
        "A bar is the share of right answers among those of about the same confidence; the dot at its end, "
        "how sure the model was of them. A bar that ends below its dot is over-confidence, above it, "
        "under-confidence. Below: how many answers each bar stands for; with few, it says little."
    )
    edges = np.arange(len(measured.counts) + 1) / len(measured.counts)
    rows = [
        (
            f"{edges[m]:.1%} to {edges[m + 1]:.1%}",
            f"{measured.counts[m]:,}",
            f"{measured.confidences[m]:.1%}",
            f"{measured.accuracies[m]:.1%}",
        )
        for m in np.flatnonzero(measured.counts)
    ]
    head = ("confidence", "answers", "mean confidence", "right")
    chart = embed(draw_calibration(measured), "calibration", "reliability diagram", width=620)
    numbers = folded("The same in numbers", table(head, rows, numbers=(1, 2, 3)))
    return Section(
        "calibration",
        "How far to believe its confidence",
        join([paragraph(text), figure(chart, caption), numbers]),
    )
