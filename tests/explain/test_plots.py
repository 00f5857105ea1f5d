"""Plots: the properties of the overlay, and the content of every figure."""

import logging
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.data import noise
from tests.explain.figures import assert_shows_something, drawn, texts
from tests.model import law
from vitascope.explain import plots
from vitascope.report.charts import draw_confusion

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


def test_overlay_is_brightest_at_the_heat() -> None:
    picture = np.full((32, 32, 3), 128, dtype=np.uint8)
    heat = np.zeros((4, 4))
    heat[1, 2] = 1
    brightness = plots.overlay(picture, heat).mean(axis=-1)
    row, column = np.unravel_index(brightness.argmax(), brightness.shape)
    assert 8 <= row < 16
    assert 16 <= column < 24
    assert brightness[:, :8].max() < 64


def test_overlay_of_an_oblong_grid_is_not_transposed() -> None:
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
    assert times == 1 or (times - 1) * min(shape[:2]) < side  # and no larger than necessary
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


@pytest.mark.parametrize(
    ("picture", "count"),
    [(noise(8, 8, 1), 1), (noise(8, 8, 1), 3), (noise(20, 50), 6), (noise(30, 20), 6)],
    ids=["grey 1", "grey 3", "wide 6", "tall 6"],
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


def test_framed_patch_is_at_its_row_and_column() -> None:
    figure = plots.draw_explanation(noise(8, 12), np.ones((2, 3)), "a title")
    plots.frame_patches(figure.axes[0], np.array([[False] * 3, [False, False, True]]), plots.INK)
    (frame,) = figure.axes[0].patches
    assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (7.5, 3.5, 4, 4)
    assert not figure.axes[1].patches


def test_figures_do_not_change_matplotlibs_global_state() -> None:
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


# --- figures of learned weights


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (3, 14), (1, 9)])
def test_position_similarity_has_a_tile_for_each_row_and_column(
    tmp_path: Path, grid: tuple[int, int]
) -> None:
    similarity = np.random.default_rng(0).uniform(-1, 1, (*grid, *grid))
    figure = plots.draw_position_similarity(similarity)
    assert_shows_something(drawn(figure, tmp_path))
    tiles = [image for axes in figure.axes for image in axes.images]
    tiles = [tile for tile in tiles if tile.get_array().shape == grid]
    assert len(tiles) == min(grid[0], 8) * min(grid[1], 8)
    assert all(tile.get_clim() == (-1, 1) for tile in tiles)
    np.testing.assert_array_equal(tiles[0].get_array(), similarity[0, 0])
    np.testing.assert_array_equal(tiles[-1].get_array(), similarity[-1, -1])
    written = texts(figure)
    for text in ("row of the patch", "column of the patch", "cosine similarity", str(grid[1] - 1)):
        assert text in written


@pytest.mark.parametrize("shape", [(16, 3, 8, 8), (9, 1, 2, 2), (1, 3, 4, 6)])
def test_patch_filters_show_every_component_on_its_own_scale(tmp_path: Path, shape: tuple[int, ...]) -> None:
    components = np.random.default_rng(0).standard_normal(shape)
    components[0] *= 100
    figure = plots.draw_patch_filters(components, np.full(shape[0], 0.5 / shape[0]))
    assert_shows_something(drawn(figure, tmp_path))
    tiles = [image.get_array() for axes in figure.axes for image in axes.images]
    assert len(tiles) == shape[0]
    for tile, component in zip(tiles, components, strict=True):
        assert tile.shape == (*shape[2:], 3) if shape[1] == 3 else shape[2:]
        middle = np.asarray(tile).reshape(*shape[2:], shape[1]).transpose(2, 0, 1) - 0.5
        np.testing.assert_allclose(middle / np.abs(middle).max(), component / np.abs(component).max())
        assert np.abs(middle).max() == pytest.approx(0.5)
    assert figure.get_label().endswith(f"first {shape[0]} principal components, 50% of the variance")


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (12, 12)])
def test_attention_distance_has_a_dot_per_head_and_a_line_of_means(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    distances = np.random.default_rng(0).uniform(1, 90, shape)
    figure = plots.draw_attention_distance(distances, uniform=60.0)
    assert_shows_something(drawn(figure, tmp_path))
    (axes,) = figure.axes
    lines = {line.get_label(): np.asarray(line.get_xydata()) for line in axes.get_lines()}
    assert list(lines) == ["uniform attention", "one head", "mean of the heads"]
    np.testing.assert_array_equal(lines["uniform attention"][:, 1], [60.0, 60.0])
    expected = [(layer, distance) for layer, row in enumerate(distances) for distance in row]
    np.testing.assert_array_equal(lines["one head"], expected)
    np.testing.assert_allclose(lines["mean of the heads"][:, 1], distances.mean(axis=1))
    low, high = axes.get_ylim()
    assert low == 0  # so that near and far are distinguishable
    assert high > max(60.0, distances.max())
    assert axes.get_xlabel() == "layer"
    assert "pixels" in axes.get_ylabel()
    assert all(label in texts(figure) for label in lines)


def test_heads_without_a_distance_are_excluded_from_the_means(tmp_path: Path) -> None:
    distances = np.array([[np.nan, 3.0], [np.nan, np.nan], [1.0, 2.0]])
    figure = plots.draw_attention_distance(distances, uniform=2.5)
    assert_shows_something(drawn(figure, tmp_path))
    means = figure.axes[0].get_lines()[2].get_ydata()
    np.testing.assert_array_equal(means, [3.0, np.nan, 1.5])


@pytest.mark.parametrize(
    ("picture", "tile", "shape"),
    [
        (noise(8, 8, 1), (96, 96), (1, 1)),
        (noise(8, 8, 1), (96, 96), (2, 5)),
        (noise(24, 48), (48, 96), (2, 5)),
        (noise(200, 100), (96, 48), (2, 5)),
    ],
    ids=["one head", "grey", "wide", "tall"],
)
def test_heads_are_laid_out_by_layer_and_head(
    tmp_path: Path, picture: np.ndarray, tile: tuple[int, int], shape: tuple[int, int]
) -> None:
    maps = np.random.default_rng(0).random((*shape, 2, 4))
    figure = plots.draw_heads(picture, maps)
    assert_shows_something(drawn(figure, tmp_path))
    (axes,) = figure.axes
    sheet = np.asarray(axes.images[0].get_array())
    (height, width), (depth, heads) = tile, shape
    down = np.array(axes.get_yticks())
    across = np.array(axes.get_xticks())
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(layer) for layer in range(depth)]
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(head) for head in range(heads)]
    small = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR))
    for layer in range(depth):
        for head in range(heads):
            top, left = int(down[layer] - height / 2), int(across[head] - width / 2)
            shown = sheet[top : top + height, left : left + width]
            np.testing.assert_array_equal(shown, plots.overlay(small, maps[layer, head]))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")


@pytest.mark.parametrize("count", [1, 3, 11])
def test_feature_colours_are_drawn_below_their_pictures(tmp_path: Path, count: int) -> None:
    pictures = [noise(8, 12, 1 if number % 2 else 3, seed=number) for number in range(count)]
    colours = np.random.default_rng(0).random((count, 2, 3, 3))
    figure = plots.draw_feature_colours(pictures, colours)
    assert_shows_something(drawn(figure, tmp_path))
    shown = [axes for axes in figure.axes if axes.images]
    assert len(shown) == 2 * count
    places = {axes: axes.get_position() for axes in shown}
    for picture, patches in zip(pictures, colours, strict=True):
        (upper,) = [axes for axes in shown if np.array_equal(axes.images[0].get_array(), picture)]
        (lower,) = [axes for axes in shown if np.array_equal(axes.images[0].get_array(), patches)]
        assert lower.images[0].get_extent() == [0, 12, 8, 0]
        assert places[upper].x0 == pytest.approx(places[lower].x0)
        assert places[upper].y0 > places[lower].y0
        low, high = places[lower].y0 + 1e-6, places[upper].y0 - 1e-6
        assert not [box for box in places.values() if low < box.y0 < high]


# --- text of any script

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
        figure = plots.draw_explanation(pictures[0], np.eye(4), f"{name}: rollout")
        assert_shows_something(drawn(figure, tmp_path))


def test_missing_letters_are_drawn_in_another_installed_font(tmp_path: Path) -> None:
    letter = "\N{HIRAGANA LETTER NO}"  # in STIX, which matplotlib includes, and not in DejaVu Sans
    figure = plots.new_figure(4, 2, f"a {letter}")
    plots.save_figure(figure, tmp_path / "seen.png")
    assert letter in texts(figure)
    assert plots.NOTE not in texts(figure)


@pytest.fixture
def no_cjk_font(monkeypatch: pytest.MonkeyPatch):
    """A machine without fonts for East Asian letters."""
    caches = (plots._default_letters, plots._families_with)
    monkeypatch.setattr(plots, "_letters", lambda path: frozenset(range(0x2E80)))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_letters_without_a_font_are_drawn_as_code_points_with_a_note(no_cjk_font, tmp_path: Path) -> None:
    cat, dog = "\N{CJK UNIFIED IDEOGRAPH-732B}", "\N{CJK UNIFIED IDEOGRAPH-72D7}"
    written = confusion([cat, dog], tmp_path / "confusion.png").splitlines()
    assert {"U+732B", "U+72D7", "test: all of U+732B", plots.NOTE} <= set(written)
