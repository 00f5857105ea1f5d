"""Reading a report as a browser does, and reports without drawings."""

from html.parser import HTMLParser
from types import ModuleType

import pytest
from markupsafe import Markup


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def leave_empty(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Replace the drawings of some of the report's modules, which take most time, by their descriptions."""
    for module in modules:
        monkeypatch.setattr(
            module, "embedded", lambda _, __, alt, **___: Markup('<svg aria-label="{}"></svg>').format(alt)
        )
