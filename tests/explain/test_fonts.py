"""Names in figures: drawn as they are written, by whichever font has their letters, without a warning."""

import logging
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.explain.figures import texts
from vitascope.explain import fonts, plots
from vitascope.report.charts import draw_confusion

ODD_NAMES = [
    "$5 to $10",
    r"$\frac{$",
    "50% $x_1$",
    "собака",
    "\U0001f436 dog",
    "two\nlines",
    "\N{HIRAGANA LETTER NO}",
    "\udce9t\udce9",  # a folder whose name is no UTF-8
]


@pytest.fixture(autouse=True)
def no_warning(caplog: pytest.LogCaptureFixture):
    """Matplotlib warns on the console in two ways; neither is for a user."""
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="matplotlib"):
        warnings.simplefilter("error")
        yield
    assert caplog.records == []


def confusion(names: list[str], path: Path) -> str:
    """What is written in a confusion matrix of these classes, after it was drawn."""
    figure = draw_confusion(
        np.eye(len(names), dtype=np.int64),
        names,
        new=partial(plots.new_figure, title=f"test: all of {names[0]}"),
    )
    plots.save_figure(figure, path)
    return texts(figure)


def test_names_with_dollars_signs_and_other_scripts_are_drawn_literally(tmp_path: Path) -> None:
    written = confusion(ODD_NAMES, tmp_path / "confusion.png").splitlines()
    assert {*ODD_NAMES[:4], "\N{HIRAGANA LETTER NO}"} <= set(written)
    assert "test: all of $5 to $10" in written


def test_formula_is_not_typeset(tmp_path: Path) -> None:
    """Between two `$` matplotlib would set letters in italics: here they take the room of any letters."""
    figure = plots.new_figure(4, 2)
    literal = figure.text(0.1, 0.5, "$ab$")
    plots.save_figure(figure, tmp_path / "literal.png")
    with_dollars = literal.get_window_extent().width
    literal.set_text("ab")
    assert with_dollars > 1.5 * literal.get_window_extent().width


def test_every_figure_with_class_names_takes_odd_ones(tmp_path: Path) -> None:
    pictures = [np.zeros((8, 8), np.uint8)] * len(ODD_NAMES)
    figure = plots.draw_grid(
        pictures, [plots.caption(name, 0.5, name[::-1]) for name in ODD_NAMES], "$ and $"
    )
    plots.save_figure(figure, tmp_path / "predictions.png")
    for name in ODD_NAMES:
        figure = plots.draw_explanation(pictures[0], np.eye(4), f"{name}: rollout")
        plots.save_figure(figure, tmp_path / "seen.png")


def test_letters_that_the_default_font_lacks_come_from_another_that_is_installed(tmp_path: Path) -> None:
    letter = "\N{HIRAGANA LETTER NO}"  # in STIX, which comes with matplotlib, and not in DejaVu Sans
    figure = plots.new_figure(4, 2, f"a {letter}")
    plots.save_figure(figure, tmp_path / "seen.png")
    assert letter in texts(figure)
    assert fonts.NOTE not in texts(figure)


@pytest.fixture
def no_cjk_font(monkeypatch: pytest.MonkeyPatch):
    """A machine whose fonts end before the letters of East Asia."""
    caches = (fonts._default_letters, fonts._families_with)
    monkeypatch.setattr(fonts, "_letters", lambda path: frozenset(range(0x2E80)))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_letters_of_no_font_are_code_points_under_a_note(no_cjk_font, tmp_path: Path) -> None:
    cat, dog = "\N{CJK UNIFIED IDEOGRAPH-732B}", "\N{CJK UNIFIED IDEOGRAPH-72D7}"
    written = confusion([cat, dog], tmp_path / "confusion.png").splitlines()
    assert {"U+732B", "U+72D7", "test: all of U+732B", fonts.NOTE} <= set(written)
