"""Text of any script in figures: class names and file names."""

import functools
import itertools
import logging
import shutil
import warnings
from functools import partial
from pathlib import Path

import matplotlib.text
import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from tests.analysis.explain.figures import assert_shows_something, drawn, texts
from vitascope.analysis.explain import lettering, plots
from vitascope.analysis.explain.lettering import fitted, short
from vitascope.analysis.explain.pictures import Picture
from vitascope.analysis.report.charts import draw_confusion

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
        warnings.filterwarnings("ignore", message=plots.MISSING)
        yield
    assert caplog.records == []


def confusion(names: list[str], path: Path) -> str:
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
        pictures, [plots.Caption(name, 0.5, name[::-1]) for name in ODD_NAMES], "$ and $"
    )
    assert_shows_something(drawn(figure, tmp_path))
    for name in ODD_NAMES:
        figure = plots.draw_explanation(Picture.whole(pictures[0]), np.eye(4), f"{name}: rollout")
        assert_shows_something(drawn(figure, tmp_path))


def families(figure: Figure) -> set[str]:
    return {name for text in figure.findobj(matplotlib.text.Text) for name in text.get_fontfamily()}


def test_letters_without_any_font_are_boxes_and_one_line_names_the_fonts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lettering, "_installed", list)
    plots._tell_of_boxes.cache_clear()
    for name in ("first.png", "second.png"):
        confusion(["\N{CJK UNIFIED IDEOGRAPH-732B}", "b"], tmp_path / name)
    assert capfd.readouterr().err.count("apt install fonts-noto-cjk") == 1


def test_font_that_was_installed_after_matplotlib_listed_the_fonts_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = font_manager.fontManager.ttflist
    new = next(Path(font.fname) for font in listed if Path(font.fname).name == "STIXGeneral.ttf")
    installed = Path(shutil.copy(new, tmp_path / "new.ttf"))
    monkeypatch.setattr(
        font_manager.fontManager, "ttflist", [font for font in listed if font.name == "DejaVu Sans"]
    )
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(installed)])
    monkeypatch.setattr(lettering, "_installed", functools.cache(lettering._installed.__wrapped__))
    plots._tell_of_boxes.cache_clear()
    figure = plots.new_figure(4, 2, "a \N{HIRAGANA LETTER NO}")  # in STIX, not in DejaVu Sans
    plots.save_figure(figure, tmp_path / "seen.png")
    assert "STIXGeneral" in families(figure)
    assert capfd.readouterr().err == ""


# --- room for long names

LONG = [f"the {place} subspecies of the greater sandhill crane, {place} colour" for place in "abcdefghij"]
WIDE = ["\u963f\u62c9\u65af\u52a0\u96ea\u6a47\u72ac" * 3 + place for place in "abcdefghij"]
ARABIC = ["\u0627\u0644\u0643\u0644\u0628 " * 10 + place for place in "abcdefghij"]
NAMES = {"long": LONG, "Chinese": WIDE, "Arabic": ARABIC, "capitals": ["W" * 60] * 10}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_captions_of_neighbours_do_not_overlap(names: list[str], tmp_path: Path) -> None:
    captions = [plots.Caption(name, 0.87, names[place - 1]) for place, name in enumerate(names)]
    figure = plots.draw_grid([np.zeros((8, 8, 3), np.uint8)] * 10, captions, "predictions")
    plots.save_figure(figure, tmp_path / "seen.png")
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    for before, after in itertools.pairwise(boxes):
        assert before.x1 < after.x0 or before.y0 > after.y1  # beside it, or in the next row
    for box, image in zip(boxes, axes.images, strict=True):
        assert box.y0 >= image.get_window_extent().y1 - 1


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_confusion_matrix_stays_large_and_its_names_inside_the_figure(names: list[str], tmp_path) -> None:
    new = partial(plots.new_figure, title="test: 87.50% of 200 correct (most frequent class: 10.00%)")
    figure = draw_confusion(np.eye(10, dtype=np.int64), names, new=new)
    plots.save_figure(figure, tmp_path / "seen.png")
    (axes,) = figure.axes
    assert axes.get_window_extent().width == pytest.approx(10 * 0.5 * figure.dpi)
    outside = [
        text.get_text()
        for text in figure.findobj(matplotlib.text.Text)
        if text.get_text() and not _within(text.get_window_extent(), figure.bbox)
    ]
    assert outside == []


def _within(box: Bbox, around: Bbox) -> bool:
    return bool(around.x0 <= box.x0 and around.y0 <= box.y0 and box.x1 <= around.x1 and box.y1 <= around.y1)


def test_fitted_name_uses_the_room_and_not_more() -> None:
    assert fitted("dog", 1, 9) == "dog"
    cut = fitted("W" * 60, 1, 9)
    assert "…" in cut
    assert 0.8 < lettering.text_width(cut, 9) <= 1
    assert len(fitted("i" * 60, 1, 9)) > 2 * len(cut)


def test_long_names_are_cut_and_short_ones_not() -> None:
    assert short("Appenzeller mountain dog", 10) == "Appenz…dog"
    assert short("dog", 10) == "dog"
    assert short("two\nlines\x1b[1m") == "two\ufffdlines\ufffd[1m"
