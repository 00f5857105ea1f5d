"""The text and the figure of several runs."""

from pathlib import Path

import numpy as np
import pytest

import vitascope as vs
from tests.analysis.explain.figures import assert_shows_something, coarse, drawn, texts
from tests.analysis.report.runs import write_run
from vitascope.analysis.report.charts import RUN_COLOURS
from vitascope.analysis.report.comparison import MAX_RUNS, RunComparison
from vitascope.analysis.report.comparison_figure import curves_of, draw_comparison, write_comparison
from vitascope.analysis.report.page import COLOURS
from vitascope.errors import UserError
from vitascope.training.run.run import Run


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / name).path for name in ("one", "two")]


def compared(*runs: Run) -> RunComparison:
    return RunComparison.of(runs)


def test_text_and_figure_are_written_to_a_folder(two: list[Path], tmp_path: Path) -> None:
    with coarse():
        found = vs.compare([two[0], str(two[1])], out=tmp_path / "new" / "folder")
    assert isinstance(found, RunComparison)
    written = sorted((tmp_path / "new" / "folder").iterdir())
    assert [path.name for path in written] == ["comparison.png", "comparison.txt"]
    assert written[1].read_text(encoding="utf-8") == found.text() + "\n"


def test_without_a_place_nothing_is_written(two: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert repr(vs.compare(two)) == "RunComparison(one, two; best: one)"
    assert sorted(tmp_path.rglob("*")) == before


def test_same_runs_give_the_same_files(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, task="masked").path for name in ("one", "two")]  # fewer charts
    with coarse():
        for out in ("first", "second"):
            vs.compare(runs, out=tmp_path / out)
    for name in ("comparison.txt", "comparison.png"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_names_are_literal_in_the_figure(tmp_path: Path) -> None:
    names = ("<b>&'", "_$x$")
    found = compared(*(write_run(tmp_path / name, depth=depth) for depth, name in enumerate(names, 1)))
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


def test_runs_without_an_epoch_have_a_text_alone(tmp_path: Path) -> None:
    found = compared(*(write_run(tmp_path / name, None, epochs=0) for name in ("one", "two")))
    assert write_comparison(found, tmp_path / "out") == [tmp_path / "out" / "comparison.txt"]
    assert not (tmp_path / "out" / "comparison.png").exists()


def test_places_that_cannot_be_written_or_read_and_a_single_path_are_rejected(two, tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: cannot write there: a file, not a folder"):
        vs.compare(two, out=tmp_path / "file")
    with pytest.raises(UserError, match="2 to 24 different runs"):
        vs.compare(str(two[0]))
    with pytest.raises(UserError, match="nowhere: not a run folder"):
        vs.compare([two[0], tmp_path / "nowhere"])
