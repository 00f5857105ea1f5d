"""How a run's training went, in charts."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitascope.report import charts
from vitascope.report.html import Section, element, figure, join, paragraph
from vitascope.report.svg import embed
from vitascope.run.run import Run


def curves_section(run: Run) -> Section | None:
    """How training went; None before anything was recorded."""
    epochs, steps = run.records("epoch"), run.records("step")
    if not epochs and not steps:
        return None
    kept = None
    if run.config.get("keep") == "best" and epochs:
        kept = int(epochs[int(np.argmin(charts.of(epochs, "val_loss")))]["epoch"])
    meanings = {
        "loss": "Loss, lower is better. ",
        "accuracy": "Share of right answers. " if run.classifies else "Share of right colours. ",
        "agree": "How often the student says what its teacher says. ",
    }
    drawn = []
    for quantity, meaning in meanings.items():
        if quantity == "loss" or any(
            f"{part}_{quantity}" in epochs[0] for part in ("train", "val") if epochs
        ):
            name = f"{quantity} by epoch"
            chart = embed(charts.draw_curve(epochs, steps, quantity, kept), f"curve-{quantity}", name)
            drawn.append(figure(chart, join([element("b", meaning), _last(epochs, quantity)])))
    if len(steps) > 2:
        chart = embed(charts.draw_learning_rate(epochs, steps), "curve-lr", "learning rate by epoch")
        drawn.append(figure(chart, join([element("b", "Learning rate. "), "As scheduled."])))
    text = (
        "Training is measured while it learns, on augmented images; validation after each epoch, on images "
        "as they are. Training below validation in loss, with the gap still growing, is overfitting; both "
        "still falling at the end, that more epochs would help."
    )
    return Section(
        "curves", "How training went", join([paragraph(text), element("div", *drawn, class_="side-by-side")])
    )


def _last(epochs: list[dict[str, Any]], quantity: str) -> str:
    name = f"val_{quantity}"
    values = charts.of(epochs, name) if epochs and name in epochs[0] else np.array([])
    if not len(values):
        return ""
    best = int(np.argmin(values) if quantity == "loss" else np.argmax(values))
    number = f"{values[best]:.3f}" if quantity == "loss" else f"{values[best]:.1%}"
    return f"Best in validation: {number}, in epoch {epochs[best]['epoch']}."
