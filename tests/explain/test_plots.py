"""Pictures: the overlay's laws, and that every figure shows what it is given."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import noise
from tests.explain.figures import assert_shows_something, drawn, texts
from tests.model import law
from vitascope.explain import plots

# --- overlay


@law
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    grid=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    grey=st.booleans(),
)
def test_overlay_is_rgb_of_the_picture_size(
    height: int, width: int, grid: tuple[int, int], grey: bool
) -> None:
    picture = noise(height, width, 1 if grey else 3)
    heat = np.random.default_rng(0).random(grid)
    mixed = plots.overlay(picture, heat)
    assert mixed.shape == (height, width, 3)
    assert mixed.dtype == np.uint8


def test_overlay_is_dark_where_the_heat_is_zero_and_keeps_the_colours() -> None:
    picture = noise(16, 16)
    mixed = plots.overlay(picture, np.zeros((4, 4)))
    assert (mixed <= picture // 2).all()
    np.testing.assert_allclose(mixed, picture * 0.35, atol=0.51)


def test_overlay_is_light_where_the_heat_is() -> None:
    picture = np.full((32, 32, 3), 128, dtype=np.uint8)
    heat = np.zeros((4, 4))
    heat[1, 2] = 1
    brightness = plots.overlay(picture, heat).mean(axis=-1)
    row, column = np.unravel_index(brightness.argmax(), brightness.shape)
    assert 8 <= row < 16
    assert 16 <= column < 24
    assert brightness[:, :8].max() < 64


def test_overlay_of_an_oblong_grid_is_not_turned() -> None:
    heat = np.zeros((2, 6))
    heat[0, 5] = 1
    brightness = plots.overlay(np.full((20, 60, 3), 128, dtype=np.uint8), heat).mean(axis=-1)
    row, column = np.unravel_index(brightness.argmax(), brightness.shape)
    assert row < 10
    assert column >= 50


def test_overlay_without_strength_keeps_the_picture_where_the_heat_is_full() -> None:
    picture, heat = noise(16, 16), np.array([[1.0, 1, 0, 0]])
    mixed = plots.overlay(picture, heat, strength=0.0)
    np.testing.assert_array_equal(mixed[:, :6], picture[:, :6])
    np.testing.assert_allclose(mixed[:, 10:], picture[:, 10:] * 0.35, atol=0.51)


def test_overlay_shows_a_heatmap_from_its_smallest_to_its_largest_value() -> None:
    picture, heat = noise(16, 16), np.random.default_rng(0).random((4, 4))
    narrow = plots.overlay(picture, 0.9 + 0.1 * heat).astype(int)
    np.testing.assert_allclose(narrow, plots.overlay(picture, heat), atol=1)


def test_grey_and_equal_colours_give_the_same_overlay() -> None:
    grey, heat = noise(8, 8, 1), np.random.default_rng(0).random((2, 2))
    np.testing.assert_array_equal(plots.overlay(grey, heat), plots.overlay(np.dstack([grey] * 3), heat))


@pytest.mark.parametrize(("shape", "side"), [((8, 8), 256), ((10, 30, 3), 96), ((300, 280, 3), 256)])
def test_enlarged_is_at_least_the_side_in_whole_multiples(shape: tuple[int, ...], side: int) -> None:
    picture = noise(shape[0], shape[1], 3 if len(shape) == 3 else 1)
    large = plots.enlarged(picture, side)
    times = large.shape[0] // shape[0]
    assert min(large.shape[:2]) >= side
    assert times == 1 or (times - 1) * min(shape[:2]) < side  # and no larger than that takes
    np.testing.assert_array_equal(large[::times, ::times], picture)
    assert large.shape[2:] == shape[2:]


# --- figures


@pytest.mark.parametrize("count", [1, 3, 8, 11, 32])
def test_predictions_show_every_picture_and_the_truth_of_mistakes(tmp_path: Path, count: int) -> None:
    pictures = [noise(8, 8, 1 if number % 2 else 3, seed=number) for number in range(count)]
    guesses = [f"guess{number}" for number in range(count)]
    truths = [f"truth{number}" if number == 0 else guesses[number] for number in range(count)]
    figure = plots.draw_grid(pictures, list(map(plots.caption, guesses, [0.25] * count, truths)), "a title")
    assert_shows_something(drawn(figure, tmp_path))
    assert sum(len(axes.images) for axes in figure.axes) == count
    written = texts(figure)
    assert "is truth0" in written
    assert written.count("is ") == 1
    assert all(f"{guess} 25%" in written for guess in guesses)


@pytest.mark.parametrize(
    "picture", [noise(8, 8, 1), noise(20, 50), noise(300, 260)], ids=lambda picture: str(picture.shape)
)
def test_explanation_shows_the_picture_beside_its_heatmap(tmp_path: Path, picture: np.ndarray) -> None:
    heat = np.random.default_rng(0).random((4, 4))
    figure = plots.draw_explanation(picture, heat, "a title")
    assert_shows_something(drawn(figure, tmp_path))
    assert "a title" in texts(figure)
    left, right = (axes.images[0].get_array() for axes in figure.axes)
    np.testing.assert_array_equal(left, picture)
    np.testing.assert_array_equal(right, plots.overlay(plots.enlarged(picture), heat))


@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize(
    "picture", [noise(8, 8, 1), noise(20, 50), noise(30, 20)], ids=lambda picture: str(picture.shape)
)
def test_explanations_show_the_picture_and_each_method_under_its_name(
    tmp_path: Path, picture: np.ndarray, count: int
) -> None:
    heatmaps = {f"method {number}": np.random.default_rng(number).random((4, 6)) for number in range(count)}
    figure = plots.draw_explanations(picture, heatmaps, "a title")
    assert_shows_something(drawn(figure, tmp_path))
    assert "a title" in texts(figure)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["picture", *heatmaps]
    assert not any(axes.axison for axes in figure.axes)  # nor where a row has a gap
    assert len(figure.axes) - len(panels) <= 1  # rows are about as long as each other
    np.testing.assert_array_equal(panels[0].images[0].get_array(), picture)
    for axes, heatmap in zip(panels[1:], heatmaps.values(), strict=True):
        expected = plots.overlay(plots.enlarged(picture), heatmap)
        np.testing.assert_array_equal(axes.images[0].get_array(), expected)


def test_pictures_have_matplotlib_layout() -> None:
    pixels = noise(4, 6).transpose(2, 0, 1)
    np.testing.assert_array_equal(plots.to_picture(pixels), pixels.transpose(1, 2, 0))
    np.testing.assert_array_equal(plots.to_picture(pixels[:1]), pixels[0])


def test_framed_patch_is_that_of_its_row_and_column() -> None:
    figure = plots.draw_explanation(noise(8, 12), np.ones((2, 3)), "a title")
    plots.frame_patch(figure.axes[0], (2, 3), (1, 2))
    (frame,) = figure.axes[0].patches
    assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (7.5, 3.5, 4, 4)
    assert not figure.axes[1].patches


def test_figures_leave_matplotlib_global_state_alone() -> None:
    import sys

    plots.draw_explanation(noise(8, 8), np.eye(4), "a title")
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_long_names_are_cut_and_short_ones_not() -> None:
    assert plots.short("Appenzeller mountain dog", 10) == "Appenz…dog"
    assert plots.short("dog", 10) == "dog"
    assert plots.short("two\nlines\x1b[1m") == "two\ufffdlines\ufffd[1m"


def test_title_wider_than_the_figure_takes_several_lines(tmp_path: Path) -> None:
    title = "Samoyed, a white and rather fluffy dog (87%): integrated gradients of Samoyed, not of Husky"
    figure = plots.draw_explanation(noise(16, 16), np.eye(4), title)
    plots.save_figure(figure, tmp_path / "seen.png")
    (shown,) = [text for text in figure.texts if "Samoyed" in text.get_text()]
    assert shown.get_text().replace("\n", " ") == title
    box = shown.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


@pytest.mark.parametrize("count", [1, 5, 32])
def test_picture_beside_its_heatmap_under_its_caption(count: int, tmp_path: Path) -> None:
    pairs = [plots.beside_itself(noise(16, 16, 1), np.eye(4)) for _ in range(count)]
    assert pairs[0].shape == (96, 96 + 4 + 96, 3)
    np.testing.assert_array_equal(pairs[0][:, :96, 0], plots.enlarged(noise(16, 16, 1), 96))
    figure = plots.draw_grid(pairs, [plots.caption("cat", 0.5, "dog")] * count, "attention")
    assert_shows_something(drawn(figure, tmp_path))
    (axes,) = figure.axes
    assert len(axes.images) == count
    assert [text.get_text() for text in axes.texts] == ["cat 50%\nis dog"] * count
    columns = {round(image.get_extent()[0], 3) for image in axes.images}
    assert len(columns) == min(4, count)
