"""The report's section about the course of training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitascope.report.charts import Records, curve_names, draw_curves, plot_curve, values_of
from vitascope.report.svg import blank_figure, embed
from vitascope.run.run import Run


def curves(run: Run) -> dict[str, Any] | None:
    """Loss, accuracy and learning rate by epoch; None before anything is recorded."""
    epochs, steps = run.records("epoch"), run.records("step")
    if not epochs and not steps:
        return None
    kept = _kept_epoch(run, epochs)

    def draw(name: str) -> Figure:
        figure = blank_figure(4.4, 2.9)
        plot_curve(figure.subplots(), epochs, steps, name, kept)
        return figure

    meanings = {
        "loss": "Loss, lower is better.",
        "accuracy": "Accuracy." if run.classifies else "Share of correct colours.",
        "agree": "Agreement of the student with its teacher.",
        "lr": "Learning rate.",
    }
    names = curve_names(epochs, steps)
    drawings = [embed(partial(draw, name), f"curve-{name}", f"{name} by epoch") for name in names]
    captions = [(meanings[name], _best(epochs, name)) for name in names]
    return {"figures": list(zip(drawings, captions, strict=True))}


def draw_run_curves(run: Run) -> Figure:
    """All curves of a run in one figure."""
    epochs = run.records("epoch")
    return draw_curves(epochs, run.records("step"), _kept_epoch(run, epochs))


def _kept_epoch(run: Run, epochs: Records) -> int | None:
    if run.config.get("keep") != "best" or not epochs:
        return None
    return int(epochs[int(np.argmin(values_of(epochs, "val_loss")))]["epoch"])


def _best(epochs: Sequence[dict[str, Any]], name: str) -> str:
    """The best value in validation and its epoch, in a sentence."""
    if not epochs or f"val_{name}" not in epochs[0]:
        return ""
    values = values_of(epochs, f"val_{name}")
    best = int(np.argmin(values) if name == "loss" else np.argmax(values))
    number = f"{values[best]:.3f}" if name == "loss" else f"{values[best]:.1%}"
    return f"Best in validation: {number}, in epoch {epochs[best]['epoch']}."
