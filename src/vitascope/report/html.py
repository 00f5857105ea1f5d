"""HTML from plain values: every text is escaped unless it is `Markup` already."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from importlib.resources import files

EMPTY_ELEMENTS = {"meta", "img"}


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page under a heading of its own.

    Attributes:
        anchor: its name in the page's address.
        title: its heading, also in the table of contents.
        body: what follows.
    """

    anchor: str
    title: str
    body: Markup


def element(name: str, /, *content: object, **attributes: object) -> Markup:
    """`<name ...>content</name>`.

    Args:
        name: the element's.
        *content: joined; what is not `Markup` is escaped.
        **attributes: `class_` and `for_` stand for `class` and `for`, other `_` for `-`; None is left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in EMPTY_ELEMENTS:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(content: Iterable[object], between: str = "") -> Markup:
    """Parts in a row; what is not `Markup` is escaped."""
    parts = [part if isinstance(part, Markup) else html.escape(str(part)) for part in content]
    return Markup(between.join(parts))


def paragraph(*content: object) -> Markup:
    """A paragraph."""
    return element("p", *content)


def note(*content: object) -> Markup:
    """A paragraph in the place of something that cannot be shown."""
    return element("p", *content, class_="note")


def code(text: object) -> Markup:
    """A command, an option or a path."""
    return element("code", text)


def definitions(values: Iterable[tuple[str, object]]) -> Markup:
    """Names and what they stand for, in two columns."""
    return element("dl", *(join([element("dt", name), element("dd", value)]) for name, value in values))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = ()) -> Markup:
    """A table in a box that scrolls by itself where it is too wide.

    Args:
        head: the columns' names.
        rows: cells.
        numbers: columns of numbers, which are set flush right.
    """
    right = set(numbers)

    def cells(name: str, row: Sequence[object]) -> Markup:
        return element(
            "tr",
            *(
                element(name, cell, class_="number" if column in right else None)
                for column, cell in enumerate(row)
            ),
        )

    body = element("tbody", *(cells("td", row) for row in rows))
    return scrolling(element("table", element("thead", cells("th", head)), body))


def scrolling(content: Markup) -> Markup:
    """A box that scrolls by itself where its content is too wide for the page."""
    return element("div", content, class_="scroll", tabindex="0")


def folded(title: object, *content: object) -> Markup:
    """Content that is shown on a click, and in print."""
    return element("details", element("summary", title), *content)


def figure(content: Markup, caption: object = "", *, class_: str | None = None) -> Markup:
    """A picture or a drawing with what it shows below it."""
    below = element("figcaption", caption) if caption else ""
    return element("figure", content, below, class_=class_)


def page(title: str, header: Markup, sections: Sequence[Section], footer: Markup) -> str:
    """A whole document, which needs nothing but itself."""
    contents = [element("li", element("a", part.title, href=f"#{part.anchor}")) for part in sections]
    parts = [
        element("section", element("h2", part.title), part.body, id=part.anchor, class_="part")
        for part in sections
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(files(__package__).joinpath("style.css").read_text(encoding="utf-8"))),
    )
    body = element(
        "body",
        element("header", header),
        element("nav", element("ol", *contents), aria_label="Contents"),
        element("main", *parts),
        element("footer", footer),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"
