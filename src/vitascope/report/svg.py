"""Drawings that become part of the page: vectors, the page's own font, and colours of its light or dark."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from vitascope.explain import plots
from vitascope.report.html import Markup, element

COLOURS = {
    plots.INK: "--ink",
    "#000000": "--ink",
    plots.GREY: "--muted",
    "#b0b0b0": "--muted",
    plots.SERIES[0]: "--blue",
    plots.SERIES[1]: "--orange",
    plots.RIGHT: "--green",
    plots.WRONG: "--red",
}
"""The style sheet's colours of those that drawings are made with; two are matplotlib's own."""

DRAWING: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters: small, searchable, in the page's font
    "text.parse_math": False,  # a class may be called $x$
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.linewidth": 0.6,
}
_LEFT_OUT = {"Date": None, "Creator": None, "Format": None, "Type": None}


def embed(figure: Figure, name: str, alt: str, *, width: int | None = None) -> Markup:
    """A matplotlib figure as `<svg>`.

    Args:
        figure: drawn under `matplotlib.rc_context(DRAWING)`, or with its own settings.
        name: of the drawing; its identifiers are apart from those of drawings with other names.
        alt: what it shows, for those who do not see it.
        width: pixels that it is not to be larger than; None lets it fill its place.
    """
    written = io.StringIO()
    with matplotlib.rc_context(DRAWING | {"svg.hashsalt": name}):
        figure.savefig(written, format="svg", transparent=True, metadata=_LEFT_OUT, dpi=144)
    text = re.sub(r"^.*?<svg", "<svg", written.getvalue(), flags=re.DOTALL).strip()
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None
    inside = text[text.index(">") + 1 : text.rindex("</svg>")]
    referred = set(re.findall(r"#([\w-]+)", inside))
    inside = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referred else "", inside)
    inside = re.sub(r"(font: [\d.]+px) [^;\"]+", r"\1 var(--font)", inside)
    inside = re.sub(r">\s+<", "><", inside)
    for colour, variable in COLOURS.items():
        inside = inside.replace(colour, f"var({variable})")
    style = None if width is None else f"max-width: {width}px"
    return element("svg", Markup(inside), viewBox=view[1], role="img", aria_label=alt, style=style)
