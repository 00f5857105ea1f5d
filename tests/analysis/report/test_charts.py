"""Charts of a run."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analysis.explain.figures import assert_shows_something, drawn, texts
from tests.analysis.report import Reader
from vitascope.analysis.explain import plots
from vitascope.analysis.explain.lettering import text_width
from vitascope.analysis.report.charts import LONGEST_NAME, Curve, draw_confusion, draw_curves, plot_runs
from vitascope.analysis.report.page import blank_figure, embedded


def epochs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "kind": "epoch",
            "step": 10 * n,
            "epoch": n,
            "train_loss": 2 / n,
            "val_loss": 2.5 / n,
            "train_accuracy": 1 - 0.5 / n,
            "val_accuracy": 1 - 0.6 / n,
        }
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_curves_show_both_losses_and_accuracies(tmp_path: Path, count: int) -> None:
    figure = draw_curves(epochs(count), [], None)
    assert_shows_something(drawn(figure, tmp_path))
    lines = [line.get_ydata() for axes in figure.axes for line in axes.get_lines()]
    expected = [
        [record[name] for record in epochs(count)]
        for name in ("train_loss", "val_loss", "train_accuracy", "val_accuracy")
    ]
    np.testing.assert_allclose(lines, expected)
    assert all(float(tick).is_integer() for axes in figure.axes for tick in axes.get_xticks())


def test_axis_of_a_perfect_accuracy_ends_at_100_percent() -> None:
    records = [record | {"train_accuracy": 1.0, "val_accuracy": 1.0} for record in epochs(3)]
    _, single = draw_curves(records, [], None).axes
    several = blank_figure(3, 3).subplots()
    plot_runs(several, [Curve("run", records, 0, "black", "-")], "accuracy", "epoch")
    for axes in (single, several):
        assert [tick for tick in axes.get_yticks() if 1 < tick <= axes.get_ylim()[1]] == []
        assert axes.get_ylim()[1] > 1


@pytest.mark.parametrize(("gap", "drawn_too"), [(0.2, True), (0.01, False)])
def test_balanced_accuracy_is_drawn_where_it_differs_from_the_accuracy(gap: float, drawn_too: bool) -> None:
    records = [record | {"val_balanced_accuracy": record["val_accuracy"] - gap} for record in epochs(3)]
    (accuracy,) = (axes for axes in draw_curves(records, [], None).axes if axes.get_title() == "accuracy")
    labels = accuracy.get_legend_handles_labels()[1]
    assert (f"val, balanced, last {0.8 - gap:.1%}" in labels) == drawn_too


@pytest.mark.filterwarnings("error")
def test_curves_without_epochs_are_empty_axes(tmp_path: Path) -> None:
    figure = draw_curves([], [], None)
    assert [axes.get_title() for axes in figure.axes] == ["loss"]
    assert not figure.axes[0].get_lines()
    plots.save_figure(figure, tmp_path / "curves.png")


@pytest.mark.parametrize("K", [2, 10, 70])
def test_confusion_shows_counts_and_names(tmp_path: Path, K: int) -> None:
    confusion = np.random.default_rng(0).integers(0, 900, (K, K))
    confusion[0] = 0  # a class without an image
    names = [f"class{number}" for number in range(K)]
    figure = draw_confusion(confusion, names, new=partial(plots.new_figure, title="a title"))
    assert_shows_something(drawn(figure, tmp_path))
    assert "a title" in texts(figure)
    if K <= 10:
        for name in names:
            assert name in texts(figure)
        for count in confusion[1:].ravel():
            assert str(count) in texts(figure)


def test_long_names_that_begin_alike_stay_different_in_the_confusion_matrix(tmp_path: Path) -> None:
    names = [f"a_very_long_name_of_a_folder_with_pictures_of_kind_{number}" * 3 for number in range(3)]
    figure = draw_confusion(np.eye(3, dtype=np.int64), names)
    plots.save_figure(figure, tmp_path / "confusion.png")
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(labels)) == 3
    assert all(text_width(label, 9) <= LONGEST_NAME for label in labels)
    assert axes.get_position().width > 0.4  # the names leave room for the matrix


def test_selected_epoch_and_learning_rate_are_drawn() -> None:
    steps = [{"kind": "step", "step": step, "loss": 1.0, "lr": step / 30} for step in range(1, 31)]
    loss, accuracy, rate = draw_curves(epochs(3), steps, 1).axes
    assert [axes.get_title() for axes in (loss, accuracy, rate)] == ["loss", "accuracy", "learning rate"]
    assert "kept, epoch 2" in [text.get_text() for text in loss.get_legend().get_texts()]
    (line,) = rate.get_lines()
    np.testing.assert_allclose(line.get_ydata(), [step["lr"] for step in steps])
    np.testing.assert_allclose(line.get_xdata(), [step["step"] / 10 for step in steps])


def test_confusion_cells_name_classes_in_any_script() -> None:
    names = ['<b>&"', "\N{CJK UNIFIED IDEOGRAPH-732B}", "$x$"]
    confusion = np.array([[3, 1, 0], [0, 2, 0], [0, 0, 1]])
    drawing = [
        embedded(partial(draw_confusion, confusion, names, new=blank_figure), "c", "a matrix") for _ in "ab"
    ]
    assert drawing[0] == drawing[1]
    read = Reader(str(drawing[0]))
    assert read.open == []
    for text in (*names, f"1 of 4 {names[0]}: predicted {names[1]}", f"2 of 2 {names[1]}: correct"):
        assert text in read.text
    assert "var(--blue)" in drawing[0]
    assert "#3457a6" not in drawing[0]
