"""Figures of what a network has learned: each shows what it is given."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import noise
from tests.explain.figures import assert_shows_something, drawn, texts
from vitascope.explain import model_plots, plots


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (3, 14), (1, 9)])
def test_position_similarity_has_a_tile_for_each_row_and_column(
    tmp_path: Path, grid: tuple[int, int]
) -> None:
    similarity = np.random.default_rng(0).uniform(-1, 1, (*grid, *grid))
    figure = model_plots.draw_position_similarity(similarity)
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
    figure = model_plots.draw_patch_filters(components, np.full(shape[0], 0.5 / shape[0]))
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
def test_attention_distance_has_a_dot_a_head_and_a_line_of_means(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    distances = np.random.default_rng(0).uniform(1, 90, shape)
    figure = model_plots.draw_attention_distance(distances, uniform=60.0)
    assert_shows_something(drawn(figure, tmp_path))
    (axes,) = figure.axes
    lines = {line.get_label(): np.asarray(line.get_xydata()) for line in axes.get_lines()}
    assert list(lines) == ["uniform attention", "one head", "mean of the heads"]
    np.testing.assert_array_equal(lines["uniform attention"][:, 1], [60.0, 60.0])
    expected = [(layer, distance) for layer, row in enumerate(distances) for distance in row]
    np.testing.assert_array_equal(lines["one head"], expected)
    np.testing.assert_allclose(lines["mean of the heads"][:, 1], distances.mean(axis=1))
    low, high = axes.get_ylim()
    assert low == 0  # so that near and far can be told apart
    assert high > max(60.0, distances.max())
    assert axes.get_xlabel() == "layer"
    assert "pixels" in axes.get_ylabel()
    assert all(label in texts(figure) for label in lines)


def test_heads_without_a_distance_are_left_out_of_the_means(tmp_path: Path) -> None:
    distances = np.array([[np.nan, 3.0], [np.nan, np.nan], [1.0, 2.0]])
    figure = model_plots.draw_attention_distance(distances, uniform=2.5)
    assert_shows_something(drawn(figure, tmp_path))
    means = figure.axes[0].get_lines()[2].get_ydata()
    np.testing.assert_array_equal(means, [3.0, np.nan, 1.5])


@pytest.mark.parametrize(
    ("picture", "tile"),
    [(noise(8, 8, 1), (96, 96)), (noise(24, 48), (48, 96)), (noise(200, 100), (96, 48))],
    ids=["grey", "wide", "tall"],
)
@pytest.mark.parametrize("shape", [(1, 1), (2, 5)])
def test_heads_are_laid_out_by_layer_and_head(
    tmp_path: Path, picture: np.ndarray, tile: tuple[int, int], shape: tuple[int, int]
) -> None:
    maps = np.random.default_rng(0).random((*shape, 2, 4))
    figure = model_plots.draw_heads(picture, maps)
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
def test_feature_colours_lie_below_their_pictures(tmp_path: Path, count: int) -> None:
    pictures = [noise(8, 12, 1 if number % 2 else 3, seed=number) for number in range(count)]
    colours = np.random.default_rng(0).random((count, 2, 3, 3))
    figure = model_plots.draw_feature_colours(pictures, colours)
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
