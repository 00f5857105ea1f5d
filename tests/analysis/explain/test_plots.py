"""Plots: the content of every figure."""

from pathlib import Path

import numpy as np
import pytest

from tests.analysis.explain.figures import assert_shows_something, drawn, texts
from tests.data import noise
from vitascope.analysis.explain import plots
from vitascope.analysis.explain.pictures import Picture, overlay


@pytest.mark.parametrize("count", [1, 3, 32])
def test_predictions_show_every_picture_and_the_truth_of_mistakes(tmp_path: Path, count: int) -> None:
    pictures = [noise(8, 8, 1 if number % 2 else 3, seed=number) for number in range(count)]
    guesses = [f"guess{number}" for number in range(count)]
    truths = [f"truth{number}" if number == 0 else guesses[number] for number in range(count)]
    figure = plots.draw_grid(pictures, list(map(plots.Caption, guesses, [0.25] * count, truths)), "a title")
    assert_shows_something(drawn(figure, tmp_path))
    assert sum(len(axes.images) for axes in figure.axes) == count
    written = texts(figure)
    assert "is truth0" in written
    assert written.count("is ") == 1
    assert all(f"{guess} 25%" in written for guess in guesses)


@pytest.mark.parametrize(
    ("picture", "count"),
    [(noise(8, 8, 1), 1), (noise(8, 8, 1), 3), (noise(20, 50), 6), (noise(30, 20), 6)],
    ids=["grey 1", "grey 3", "wide 6", "tall 6"],
)
def test_explanations_show_the_picture_and_each_method_under_its_name(tmp_path, picture, count) -> None:
    heatmaps = {f"method {number}": np.random.default_rng(number).random((4, 6)) for number in range(count)}
    figure = plots.draw_explanations(Picture.whole(picture), heatmaps, "a title")
    assert_shows_something(drawn(figure, tmp_path))
    assert "a title" in texts(figure)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["picture", *heatmaps]
    assert not any(axes.axison for axes in figure.axes)  # nor where a row has a gap
    assert len(figure.axes) - len(panels) <= 1  # rows are about as long as each other
    np.testing.assert_array_equal(panels[0].images[0].get_array(), picture)
    for axes, heatmap in zip(panels[1:], heatmaps.values(), strict=True):
        expected = overlay(Picture.whole(picture).enlarged(), heatmap)
        np.testing.assert_array_equal(axes.images[0].get_array(), expected)


def test_framed_patch_is_at_its_row_and_column() -> None:
    figure = plots.draw_explanation(Picture.whole(noise(8, 12)), np.ones((2, 3)), "a title")
    plots.frame_patches(figure.axes[0], np.array([[False] * 3, [False, False, True]]), plots.INK)
    (frame,) = figure.axes[0].patches
    assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (7.5, 3.5, 4, 4)
    assert not figure.axes[1].patches


@pytest.mark.parametrize(
    "title",
    [
        "Samoyed, a white and rather fluffy dog (87%): integrated gradients of Samoyed, not of Husky",
        "\u963f\u62c9\u65af\u52a0\u96ea\u6a47\u72ac" * 10 + " (87%): rollout",
    ],
    ids=["English", "Chinese"],
)
def test_title_wider_than_the_figure_takes_several_lines(title: str, tmp_path: Path) -> None:
    figure = plots.draw_explanation(Picture.whole(noise(16, 16)), np.eye(4), title)
    shown = figure._suptitle
    assert "".join(shown.get_text().split()) == "".join(title.split())
    plots.save_figure(figure, tmp_path / "seen.png")
    box = shown.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


@pytest.mark.parametrize("count", [1, 7, 25])
def test_similar_pictures_are_beside_the_picture_without_overlap(count: int, tmp_path: Path) -> None:
    shapes = [(30, 60), (60, 30), (40, 40)]
    tiles = [noise(*shapes[number % 3], seed=number) for number in range(count)]
    name = "Felis silvestris catus $x$ \u732b, a name that is much longer than its picture is wide"
    figure = plots.draw_similar(noise(50, 20), name, tiles, [("0.123", name)] * count, "a title")
    assert_shows_something(drawn(figure, tmp_path))
    (axes,) = figure.axes
    assert len(axes.images) == count + 1
    for image, tile in zip(axes.images[1:], tiles, strict=True):
        left, right, bottom, top = image.get_extent()
        assert (right - left) / (bottom - top) == pytest.approx(tile.shape[1] / tile.shape[0])
    figure.canvas.draw()
    boxes = [each.get_window_extent() for each in (*axes.texts, *axes.images)]
    overlapping = [
        (one, other) for number, one in enumerate(boxes) for other in boxes[:number] if one.overlaps(other)
    ]
    assert not overlapping
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 for box in boxes)


def test_picture_that_is_missing_leaves_its_place_empty() -> None:
    captions = [("0.500", "a"), ("0.400", "b")]
    for tiles in ([noise(8, 8), None], [None, None]):
        figure = plots.draw_similar(noise(8, 8), "asked", tiles, captions, "a title")
        (axes,) = figure.axes
        missing = sum(tile is None for tile in tiles)
        assert len(axes.images) == 3 - missing
        assert [text.get_text() for text in axes.texts].count("no picture") == missing
        assert axes.get_aspect() == 1


# --- figures of learned weights


@pytest.mark.parametrize("grid", [(1, 1), (3, 14)])
def test_position_similarity_has_a_tile_for_each_row_and_column(tmp_path, grid: tuple[int, int]) -> None:
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


@pytest.mark.parametrize("shape", [(9, 1, 2, 2), (1, 3, 4, 6)])
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


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
def test_attention_distance_has_a_dot_per_head_and_a_line_of_means(tmp_path, shape: tuple[int, int]) -> None:
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
        (noise(24, 48), (48, 96), (2, 5)),
        (noise(200, 100), (96, 48), (2, 5)),
    ],
    ids=["one head", "wide", "tall"],
)
def test_heads_are_laid_out_by_layer_and_head(tmp_path, picture, tile, shape) -> None:
    maps = np.random.default_rng(0).random((*shape, 2, 4))
    figure = plots.draw_heads(Picture.whole(picture), maps)
    assert_shows_something(drawn(figure, tmp_path))
    (axes,) = figure.axes
    sheet = np.asarray(axes.images[0].get_array())
    (height, width), (depth, heads) = tile, shape
    down = np.array(axes.get_yticks())
    across = np.array(axes.get_xticks())
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(layer) for layer in range(depth)]
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(head) for head in range(heads)]
    small = Picture.whole(picture).resized(height, width)
    for layer in range(depth):
        for head in range(heads):
            top, left = int(down[layer] - height / 2), int(across[head] - width / 2)
            shown = sheet[top : top + height, left : left + width]
            np.testing.assert_array_equal(shown, overlay(small, maps[layer, head]))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")


@pytest.mark.parametrize("count", [1, 3, 11])
def test_feature_colours_are_drawn_below_their_pictures(tmp_path: Path, count: int) -> None:
    pictures = [noise(8, 12, 1 if number % 2 else 3, seed=number) for number in range(count)]
    colours = np.random.default_rng(0).random((count, 2, 3, 3))
    figure = plots.draw_feature_colours(list(map(Picture.whole, pictures)), colours)
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
