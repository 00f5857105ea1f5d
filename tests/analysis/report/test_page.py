"""The page is escaped and complete."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.report import Reader
from tests.data import noise
from tests.models import law
from vitascope.analysis.report.page import render, sure
from vitascope.analysis.report.thumbnails import image_element

HEADER = {"result": "It works.", "resume": None, "measured_on_val": False, "warning": ""}
plain = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1).filter(str.strip)


def page(title: str = "title", **sections: dict[str, object]) -> Reader:
    read = Reader(render({**HEADER, "name": title, "tiles": [("1", "one")]}, sections))
    assert read.open == []
    return read


def shown(text: str) -> dict[str, dict[str, object]]:
    return {"environment": {"found": {"cpu": text, "command": text}}}


@law
@given(text=plain)
def test_values_are_escaped_and_unchanged(text: str) -> None:
    read = page(text, **shown(text))
    assert read.text.count(text) >= 3
    assert {name for name, _ in read.elements} == {name for name, _ in page(**shown("text")).elements}


def test_tables_escape_their_cells() -> None:
    rows = [('<b>&"', "1", "2", "3", "4", "<i>")]
    read = page(classes={"rows": rows, "rest": [], "unreadable": ("<u>: broken",)})
    assert '<b>&"' in read.text
    assert "1 image could not be read" in read.text
    assert "<u>: broken" in read.text
    assert any(attributes.get("class") == "number" for tag, attributes in read.elements if tag == "td")


def test_image_descriptions_are_escaped_and_unchanged() -> None:
    text = 'a "<b>" & more'
    read = Reader(image_element(np.zeros((8, 8, 3), np.uint8), text))
    ((name, attributes),) = read.elements
    assert (name, attributes["alt"], attributes["class"]) == ("img", text, "coarse")


def test_large_pictures_become_small_files() -> None:
    """Noise compresses worst."""
    assert len(image_element(noise(320, 320), "noise")) < 30_000


def test_page_is_complete_and_lists_its_sections_in_order() -> None:
    rows: list[tuple[str, str]] = []
    sections = {
        "environment": {"found": {}},
        "trained": None,
        "configuration": {"command": "c", "rows": rows},
    }
    read = page(**sections)
    elements = dict(read.elements)
    assert elements["html"] == {"lang": "en"}
    assert {"title", "style", "main", "nav", "h1", "h2"} <= elements.keys()
    links = [attributes["href"] for name, attributes in read.elements if name == "a"]
    anchors = [attributes["id"] for name, attributes in read.elements if name == "section"]
    assert links == [f"#{anchor}" for anchor in anchors] == ["#configuration", "#environment"]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in read.elements


def test_only_a_probability_of_one_is_100_percent() -> None:
    assert [sure(share) for share in (1, 0.99996, 0.9994, 0.5, 0.0001, 0)] == [
        "100.0%",
        "> 99.9%",
        "99.9%",
        "50.0%",
        "< 0.1%",
        "0.0%",
    ]
