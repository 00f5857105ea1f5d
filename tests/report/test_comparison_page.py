"""The page and the figure of several runs."""

from pathlib import Path

import numpy as np
import pytest

import vitascope as vs
from tests.explain.figures import assert_shows_something, coarse, drawn, texts
from tests.report import Reader, leave_empty
from tests.report.runs import write_run
from vitascope.errors import UserError
from vitascope.report import comparison_page
from vitascope.report.charts import RUN_COLOURS
from vitascope.report.comparison import MAX_RUNS, RunComparison
from vitascope.report.comparison_page import curves_of, draw_comparison, write_comparison
from vitascope.report.page import COLOURS
from vitascope.run.run import Run


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two runs of the same options."""
    return [write_run(tmp_path / name).path for name in ("one", "two")]


def compared(*runs: Run) -> RunComparison:
    return RunComparison.of(runs)


def read(page: Path) -> Reader:
    reader = Reader(page.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("new/folder", ["new/folder/comparison.html", "new/folder/comparison.png"]),
        ("new/page.html", ["new/page.html", "new/page.png"]),
    ],
)
def test_page_and_figure_are_written_to_a_folder_or_beside_a_name(
    two: list[Path], tmp_path: Path, monkeypatch, out: str, expected: list[str]
) -> None:
    leave_empty(monkeypatch, comparison_page)
    monkeypatch.setattr(comparison_page, "save_figure", lambda figure, path: path.touch())
    found = vs.compare([two[0], str(two[1])], out=tmp_path / out)
    assert isinstance(found, RunComparison)
    written = [str(path.relative_to(tmp_path)) for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert sorted(written) == expected


def test_without_a_place_nothing_is_written(two: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert repr(vs.compare(two)) == "RunComparison(one, two; best: one, two)"
    assert sorted(tmp_path.rglob("*")) == before


def test_page_has_every_section_and_needs_no_other_file(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "one", seed=1), write_run(tmp_path / "two", keep="last"))
    with coarse():
        page, _ = write_comparison(found, tmp_path / "out")
    reader = read(page)
    sections = [attributes["id"] for name, attributes in reader.elements if name == "section"]
    assert sections == ["results", "together", "paired", "differences"]
    assert [name for name, _ in reader.elements].count("svg") == 4
    assert not {"script", "link", "img", "iframe"} & {name for name, _ in reader.elements}
    text = page.read_text()
    assert "http" not in text
    for shown in ("Comparison of 2 runs", "75.00%", "A dot marks the epoch", "keep", "seed"):
        assert shown in reader.text, shown


def test_same_runs_give_the_same_files(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, task="masked").path for name in ("one", "two")]  # fewer charts
    with coarse():
        for out in ("first", "second"):
            vs.compare(runs, out=tmp_path / out)
    for name in ("comparison.html", "comparison.png"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_names_are_escaped_on_the_page_and_literal_in_the_figure(tmp_path: Path, monkeypatch) -> None:
    leave_empty(monkeypatch, comparison_page)
    monkeypatch.setattr(comparison_page, "save_figure", lambda figure, path: path.touch())
    names = ("<b>&'", "_$x$")
    found = compared(*(write_run(tmp_path / name, depth=depth) for depth, name in enumerate(names, 1)))
    page, _ = write_comparison(found, tmp_path / "out")
    reader = read(page)
    assert all(reader.text.count(name) >= 3 for name in names)
    assert "b" not in {name for name, _ in reader.elements}
    figure = draw_comparison(curves_of(found))
    for name in names:
        assert name in texts(figure)


def test_curves_are_drawn_by_epoch_and_by_training_time(tmp_path: Path) -> None:
    found = compared(
        write_run(tmp_path / "one"), write_run(tmp_path / "two", lr=0.1, seconds=200.0, epochs=3)
    )
    figure = draw_comparison(curves_of(found))
    assert_shows_something(drawn(figure, tmp_path))
    assert [axes.get_xlabel() for axes in figure.axes] == [*["epoch"] * 2, *["training time, minutes"] * 2]
    loss, accuracy, *_, late = figure.axes
    lines = [line for line in accuracy.get_lines() if len(line.get_xdata()) > 1]
    np.testing.assert_allclose(lines[1].get_ydata(), [0.3, 0.6, 0.9])
    np.testing.assert_allclose(lines[1].get_xdata(), [1, 2, 3])
    timed = [line for line in late.get_lines() if len(line.get_xdata()) > 1]
    np.testing.assert_allclose(timed[1].get_xdata(), np.array([200, 400, 600]) / 60)
    assert lines[0].get_color() != lines[1].get_color()
    kept = [line.get_xdata() for line in loss.get_lines() if len(line.get_xdata()) == 1]
    np.testing.assert_allclose(np.ravel(kept), [2, 3])  # the lowest losses


def test_without_times_the_curves_are_drawn_by_step(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "one"), write_run(tmp_path / "two", seconds=None))
    labels = [axes.get_xlabel() for axes in draw_comparison(curves_of(found)).axes]
    assert labels == ["epoch", "epoch", "step", "step"]


def test_seeds_of_the_same_options_share_a_colour(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"s{seed}", seed=seed) for seed in (0, 1)]
    one, two, other = curves_of(compared(*runs, write_run(tmp_path / "other", lr=0.1)))
    assert (one.colour, one.style, one.label) == (two.colour, two.style, "s0, s1")
    assert other.colour != one.colour


def test_every_curve_of_the_most_runs_looks_different(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{n}", None, depth=n + 1, epochs=1) for n in range(MAX_RUNS)]
    curves = curves_of(compared(*runs))
    assert len({(curve.colour, curve.style) for curve in curves}) == MAX_RUNS
    assert set(RUN_COLOURS) <= set(COLOURS)


def test_runs_without_an_epoch_have_a_page_without_curves(tmp_path: Path) -> None:
    found = compared(*(write_run(tmp_path / name, None, epochs=0) for name in ("one", "two")))
    (page,) = write_comparison(found, tmp_path / "out")
    sections = {attributes["id"] for name, attributes in read(page).elements if name == "section"}
    assert sections == {"results", "differences"}
    assert not (tmp_path / "out" / "comparison.png").exists()


def test_places_that_cannot_be_written_or_read_and_a_single_path_are_rejected(
    two: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: cannot write there: a file, not a folder"):
        vs.compare(two, out=tmp_path / "file")
    with pytest.raises(UserError, match="not 1"):
        vs.compare(str(two[0]))
    with pytest.raises(UserError, match="nowhere: not a run folder"):
        vs.compare([two[0], tmp_path / "nowhere"])
