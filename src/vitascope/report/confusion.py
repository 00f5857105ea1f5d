"""The confusion matrix as a drawing: letters of any script, and the names of a cell under the pointer."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vitascope.explain.plots import short
from vitascope.report.html import Markup, element, join, scrolling

MAX_CLASSES = 60
"""Beyond this a matrix says less than its worst pairs."""
WITH_COUNTS = 30
"""Classes up to which the cells have their counts in them."""


def draw_confusion(confusion: npt.NDArray[np.int64], class_names: Sequence[str]) -> Markup:
    """Counts (K, K), true class down and predicted class across, as `<svg>` in a box that scrolls.

    The diagonal is blue, mistakes are red; the stronger, the larger the share of the true class. Shares of
    mistakes are drawn as their square roots: most are small, and are to be seen.
    """
    K = len(class_names)
    side = 56 if K <= 6 else 34 if K <= WITH_COUNTS else 17
    names = [short(name, 16) for name in class_names]
    longest = max(width_of(name) for name in names)
    left, top = 30 + longest, 38 if longest < side else 30 + longest
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    parts = [
        _text("predicted", left + side * K / 2, 12, anchor="middle", muted=True),
        _text("true", 12, top + side * K / 2, anchor="middle", muted=True, turned=True),
    ]
    for index, name in enumerate(names):
        across, down = left + side * (index + 0.5), top + side * (index + 0.5)
        parts.append(_text(name, left - 6, down + 4, anchor="end"))
        parts.append(
            _text(name, across, top - 6, anchor="middle")
            if longest < side
            else _text(name, across + 4, top - 6, turned=True)
        )
    for true, guess in zip(*np.nonzero(confusion), strict=True):
        said = f"{confusion[true, guess]} of {confusion[true].sum()} {class_names[true]}"
        said += ": right" if true == guess else f": taken for {class_names[guess]}"
        place = (left + side * guess, top + side * true)
        count = confusion[true, guess] if K <= WITH_COUNTS else None
        parts.append(_cell(place, side, float(shares[true, guess]), true == guess, count, said))
    right, bottom = left + side * K, top + side * K
    for index in range(K + 1):
        x, y = left + side * index, top + side * index
        for ends in ((x, top, x, bottom), (left, y, right, y)):
            parts.append(
                element(
                    "line",
                    **dict(zip(("x1", "y1", "x2", "y2"), ends, strict=True)),
                    stroke="var(--line)",
                    stroke_width=1,
                )
            )
    width, height = math.ceil(right + 2), math.ceil(bottom + 2)
    alt = f"Confusion matrix of {K} classes: {np.trace(confusion)} of {confusion.sum()} right"
    least = round(width * (22 if K <= WITH_COUNTS else 12) / side)
    return scrolling(
        element(
            "svg",
            join(parts),
            viewBox=f"0 0 {width} {height}",
            role="img",
            aria_label=alt,
            style=f"max-width: {width}px; min-width: {least}px",
        )
    )


def _cell(
    place: tuple[float, float], side: int, share: float, right: bool, count: int | None, said: str
) -> Markup:
    opacity = share if right else math.sqrt(share)
    box = element(
        "rect",
        x=place[0],
        y=place[1],
        width=side,
        height=side,
        fill=f"var({'--blue' if right else '--red'})",
        fill_opacity=f"{0.08 + 0.82 * opacity:.2f}",
    )
    parts = [element("title", said), box]
    if count is not None:
        parts.append(
            element(
                "text",
                count,
                x=place[0] + side / 2,
                y=place[1] + side / 2 + 4,
                text_anchor="middle",
                font_size=12 if count < 1000 else 9,
                style="fill: var(--paper)" if opacity > 0.5 else None,
            )
        )
    return element("g", *parts)


def _text(
    text: str, x: float, y: float, *, anchor: str = "start", muted: bool = False, turned: bool = False
) -> Markup:
    return element(
        "text",
        text,
        x=x,
        y=y,
        text_anchor=anchor,
        font_size=12,
        style="fill: var(--muted)" if muted else None,
        transform=f"rotate(-90 {x} {y})" if turned else None,
    )


def width_of(name: str) -> float:
    """About how wide a name is in letters of 12 pixels; those of East Asian scripts are wider."""
    return sum(12.5 if unicodedata.east_asian_width(letter) in "WF" else 7.2 for letter in name)
