"""The report's page: `page.html` filled with plain values, which Jinja escapes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from vitascope._version import __version__
from vitascope.language import counted, language, say
from vitascope.report.thumbnails import image_element


def render(header: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any] | None]) -> str:
    """The whole document; `page.html` shows the values of each section by its anchor, None leaves it out.
    Parts of names that are no Unicode, such as those of files in another encoding, are escaped."""
    values = {
        "style": Markup(_read("style.css")),
        "version": __version__,
        "header": header,
        "language": {"en": "en", "zh": "zh-CN"}[language()],
    }
    page = _template().render(values, sections=defaultdict(lambda: None, sections)).lstrip() + "\n"
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


@functools.cache
def _template() -> Template:
    return environment().from_string(_read("page.html"))


def environment() -> Environment:
    """Jinja, with the page's filters, and with `_` and `trans` in the reader's language."""
    found = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.i18n"],
    )
    found.policies["ext.i18n.trimmed"] = True
    found.install_gettext_callables(  # type: ignore[attr-defined]
        say, lambda one, several, count: say(one if count == 1 else several), newstyle=True
    )
    found.filters |= {"percent": percent, "counted": counted, "sure": sure, "image": image_element}
    return found


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
