"""The report's page: `page.html`, with plain values that Jinja escapes, and with figures as vectors in the
page's font and in its light or dark colours.
"""

import functools
import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import matplotlib
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from vitascope._version import __version__
from vitascope.analysis.explain import plots
from vitascope.analysis.explain.lettering import lay_out
from vitascope.analysis.report.charts import TITLE
from vitascope.analysis.report.thumbnails import image_element
from vitascope.language import language, say, say_count


def render(header: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any] | None]) -> str:
    """The whole document; `page.html` shows the values of each section by its anchor, None leaves it out.
    Parts of names that are no Unicode, such as those of files in another encoding, are escaped."""
    return rendered(_template(), header=header, sections=defaultdict(lambda: None, sections))


def rendered(template: Template, **values: Any) -> str:
    """A page with the report's style, in the reader's language."""
    page = template.render(
        values,
        style=Markup(_read("style.css")),
        version=__version__,
        language={"en": "en", "zh": "zh-CN"}[language()],
    )
    return (page.strip() + "\n").encode("utf-8", "backslashreplace").decode("utf-8")


@functools.cache
def _template() -> Template:
    return jinja().from_string(_read("page.html"))


def jinja() -> Environment:
    """Jinja, with the page's filters, and with `_` and `trans` in the reader's language."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.i18n"],
    )
    environment.policies["ext.i18n.trimmed"] = True
    environment.install_gettext_callables(  # type: ignore[attr-defined]
        say, lambda one, several, count: say(one if count == 1 else several), newstyle=True
    )
    environment.filters |= {"percent": percent, "counted": say_count, "sure": sure, "image": image_element}
    return environment


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{share:.{digits}%}"


def sure(probability: float) -> str:
    """A probability as a percentage; 100% and 0% mean exactly that."""
    if 0.9995 <= probability < 1:
        return "> 99.9%"
    if 0 < probability < 0.0005:
        return "< 0.1%"
    return percent(float(probability))


COLOURS = {
    plots.INK: "--ink",
    "#000000": "--ink",
    "#ffffff": "--paper",
    plots.GREY: "--muted",
    "#b0b0b0": "--muted",  # of matplotlib's grid lines
    plots.SERIES[0]: "--blue",
    plots.SERIES[1]: "--orange",
    plots.RIGHT: "--green",
    plots.WRONG: "--red",
    "#7b4ba8": "--purple",
    "#0f8583": "--teal",
    "#86691b": "--olive",
    "#b83f86": "--pink",
}
"""The style sheet's variable for each colour of the figures."""

PAGE_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters: small, searchable, in the page's font
    "text.parse_math": False,  # a class may be called $x$
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.linewidth": 0.6,
}
"""Settings of figures that are drawn for the page."""
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def embedded(
    draw: Callable[[], Figure],
    name: str,
    alt: str,
    *,
    width: int | None = None,
    per_inch: int | None = None,
    least: float = 0.0,
) -> Markup:
    """A figure as `<svg>`, described by `alt`, at most `width` pixels wide, or `per_inch` times its width.

    On a narrow screen it shrinks to the share `least` of that, and is scrolled. The same figure gives the
    same text. Identifiers of figures with other names differ.
    """
    written = io.StringIO()
    with matplotlib.rc_context(PAGE_STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has its own fonts
        figure = draw()
        lay_out(figure)
        figure.savefig(written, format="svg", transparent=True, metadata=_NO_METADATA, dpi=144)
    text = re.sub(r"<!--.*?-->\s*", "", written.getvalue(), flags=re.DOTALL).strip()
    view = re.search(r'<svg [^>]*viewBox="([^"]+)"[^>]*>(.*)</svg>', text, flags=re.DOTALL)
    assert view is not None
    inside = re.sub(rf"<g id=([\"']){TITLE}(.*?)\1>", r"<g><title>\2</title>", view[2])
    referred = set(re.findall(r"#([\w-]+)", inside))
    inside = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referred else "", inside)
    inside = re.sub(r"(font: [\d.]+px) [^;\"]+", r"\1 var(--font)", inside)
    inside = re.sub(r">\s+<", "><", inside)
    for colour, variable in COLOURS.items():
        inside = inside.replace(colour, f"var({variable})")
    if per_inch is not None:
        width = round(per_inch * figure.get_figwidth())
    style = "" if width is None else f"max-width: {width}px"
    if width is not None and least:
        style += f"; min-width: {round(least * width)}px"
    return Markup('<svg viewBox="{}" role="img" aria-label="{}" style="{}">{}</svg>').format(
        view[1], alt, style, Markup(inside)
    )


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure for the page, of a size in inches: its letters need no installed font."""
    return Figure(figsize=(width, height), layout="constrained")
