"""HTML from plain values."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from tests.model import law
from vitascope.report.html import Markup, Section, element, join, page, table


class Reader(HTMLParser):
    """Names of elements, attributes and text, as a browser reads them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


plain = st.text(st.characters(blacklist_categories=["Cs", "Cc"]))


@law
@given(text=plain, value=plain)
def test_text_and_attributes_are_read_as_they_were_given(text: str, value: str) -> None:
    read = Reader(element("p", text, title=value))
    assert read.elements == [("p", {"title": value})]
    assert read.text == text


def test_markup_is_not_escaped_again() -> None:
    inner = element("b", "<")
    assert element("p", inner, "<") == "<p><b>&lt;</b>&lt;</p>"
    assert join([inner, "&"], " ") == "<b>&lt;</b> &amp;"
    assert isinstance(join(["a"]), Markup)


def test_attributes_that_are_none_are_left_out_and_reserved_words_have_an_underline() -> None:
    assert (
        element("img", src="a", class_="c", aria_label="d", alt=None)
        == '<img src="a" class="c" aria-label="d">'
    )


def test_tables_escape_cells_and_heads() -> None:
    read = Reader(table(("<i>", "b"), [('<b>&"', 1)], numbers=(1,)))
    assert read.text == '<i>b<b>&"1'
    assert ("td", {"class": "number"}) in read.elements


def test_a_page_is_whole() -> None:
    parts = [Section("one", "First & last", element("p", "text")), Section("two", "Second", Markup(""))]
    read = Reader(page("<t>", element("h1", "h"), parts, Markup("")))
    assert read.open == []
    elements = dict(read.elements)
    assert elements["html"] == {"lang": "en"}
    assert {"title", "style", "main", "nav", "h1", "h2"} <= elements.keys()
    links = [attributes["href"] for name, attributes in read.elements if name == "a"]
    anchors = [attributes["id"] for name, attributes in read.elements if name == "section"]
    assert links == [f"#{anchor}" for anchor in anchors] == ["#one", "#two"]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in read.elements
