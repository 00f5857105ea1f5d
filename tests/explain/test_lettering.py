"""Text of any script in figures: class names and file names."""

import logging
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.explain.figures import assert_shows_something, drawn, texts
from vitascope.explain import lettering, plots
from vitascope.explain.lettering import NOTE, short
from vitascope.explain.pictures import Picture
from vitascope.report.charts import draw_confusion

ODD_NAMES = [
    "$5 to $10",
    r"$\frac{$",
    "50% $x_1$",
    "собака",
    "\U0001f436 dog",
    "two\nlines",
    "\N{HIRAGANA LETTER NO}",
    "\udce9t\udce9",  # a folder whose name is not UTF-8
]


@pytest.fixture(autouse=True)
def no_warning(caplog: pytest.LogCaptureFixture):
    """Matplotlib has two ways to warn on the console; users should see neither."""
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="matplotlib"):
        warnings.simplefilter("error")
        yield
    assert caplog.records == []


def confusion(names: list[str], path: Path) -> str:
    """The texts in a drawn confusion matrix of these classes."""
    figure = draw_confusion(
        np.eye(len(names), dtype=np.int64),
        names,
        new=partial(plots.new_figure, title=f"test: all of {names[0]}"),
    )
    plots.save_figure(figure, path)
    return texts(figure)


def test_names_with_dollar_signs_and_other_scripts_are_drawn_literally(tmp_path: Path) -> None:
    written = confusion(ODD_NAMES, tmp_path / "confusion.png").splitlines()
    assert {*ODD_NAMES[:4], "\N{HIRAGANA LETTER NO}"} <= set(written)
    assert "test: all of $5 to $10" in written


def test_formula_is_not_typeset(tmp_path: Path) -> None:
    """Matplotlib would set text between two `$` in italics; here it has its normal width."""
    figure = plots.new_figure(4, 2)
    literal = figure.text(0.1, 0.5, "$ab$")
    plots.save_figure(figure, tmp_path / "literal.png")
    with_dollars = literal.get_window_extent().width
    literal.set_text("ab")
    assert with_dollars > 1.5 * literal.get_window_extent().width


def test_every_figure_accepts_unusual_class_names(tmp_path: Path) -> None:
    pictures = [np.zeros((8, 8), np.uint8)] * len(ODD_NAMES)
    figure = plots.draw_grid(
        pictures, [plots.caption(name, 0.5, name[::-1]) for name in ODD_NAMES], "$ and $"
    )
    assert_shows_something(drawn(figure, tmp_path))
    for name in ODD_NAMES:
        figure = plots.draw_explanation(Picture.whole(pictures[0]), np.eye(4), f"{name}: rollout")
        assert_shows_something(drawn(figure, tmp_path))


def test_missing_letters_are_drawn_in_another_installed_font(tmp_path: Path) -> None:
    letter = "\N{HIRAGANA LETTER NO}"  # in STIX, which matplotlib includes, and not in DejaVu Sans
    figure = plots.new_figure(4, 2, f"a {letter}")
    plots.save_figure(figure, tmp_path / "seen.png")
    assert letter in texts(figure)
    assert NOTE not in texts(figure)


@pytest.fixture
def no_cjk_font(monkeypatch: pytest.MonkeyPatch):
    """A machine without fonts for East Asian letters."""
    caches = (lettering._default_letters, lettering._families_with)
    monkeypatch.setattr(lettering, "_letters", lambda path: frozenset(range(0x2E80)))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_letters_without_a_font_are_drawn_as_code_points_with_a_note(no_cjk_font, tmp_path: Path) -> None:
    cat, dog = "\N{CJK UNIFIED IDEOGRAPH-732B}", "\N{CJK UNIFIED IDEOGRAPH-72D7}"
    written = confusion([cat, dog], tmp_path / "confusion.png").splitlines()
    assert {"U+732B", "U+72D7", "test: all of U+732B", NOTE} <= set(written)


def test_long_names_are_cut_and_short_ones_not() -> None:
    assert short("Appenzeller mountain dog", 10) == "Appenz…dog"
    assert short("dog", 10) == "dog"
    assert short("two\nlines\x1b[1m") == "two\ufffdlines\ufffd[1m"
