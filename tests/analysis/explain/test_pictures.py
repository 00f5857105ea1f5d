"""Pictures to look at: the overlay's properties, and what the crop leaves out."""

import numpy as np
import pytest
from matplotlib import colormaps

from tests.data import noise
from vitascope.analysis.explain.pictures import Picture, dimmed, overlay, to_picture


def test_overlay_is_dark_where_the_heat_is_zero_and_keeps_the_colours() -> None:
    picture = noise(16, 16)
    mixed = overlay(Picture.whole(picture), np.zeros((4, 4)))
    assert (mixed <= picture // 2).all()
    np.testing.assert_allclose(mixed, picture * 0.35, atol=0.51)
    full = overlay(Picture.whole(picture), np.array([[1.0, 1, 0, 0]]))[:, :6]
    colour = np.array(colormaps["inferno"](1.0)[:3]) * 255
    np.testing.assert_allclose(full, 0.4 * picture[:, :6] + 0.6 * colour, atol=0.51)


def test_overlay_of_an_oblong_grid_is_not_transposed() -> None:
    heat = np.zeros((2, 6))
    heat[0, 5] = 1
    brightness = overlay(Picture.whole(np.full((20, 60, 3), 128, dtype=np.uint8)), heat).mean(axis=-1)
    row, column = np.unravel_index(brightness.argmax(), brightness.shape)
    assert row < 10
    assert column >= 50


def test_overlay_shows_a_heatmap_from_its_smallest_to_its_largest_value() -> None:
    picture, heat = noise(16, 16), np.random.default_rng(0).random((4, 4))
    narrow = overlay(Picture.whole(picture), 0.9 + 0.1 * heat).astype(int)
    np.testing.assert_allclose(narrow, overlay(Picture.whole(picture), heat), atol=1)


@pytest.mark.parametrize(("shape", "side"), [((8, 8), 256), ((10, 30, 3), 96), ((300, 280, 3), 256)])
def test_enlarged_is_at_least_the_side_in_whole_multiples(shape: tuple[int, ...], side: int) -> None:
    picture = noise(shape[0], shape[1], 3 if len(shape) == 3 else 1)
    large = Picture.whole(picture).enlarged(side).pixels
    times = large.shape[0] // shape[0]
    assert min(large.shape[:2]) >= side
    assert times == 1 or (times - 1) * min(shape[:2]) < side  # and no larger than necessary
    np.testing.assert_array_equal(large[::times, ::times], picture)
    assert large.shape[2:] == shape[2:]


def test_heat_covers_exactly_the_models_part_and_the_rest_is_dark_grey() -> None:
    photo = Picture(noise(40, 60), (12, 4, 44, 36))
    heat = np.array([[0.0, 1.0], [0.0, 0.0]])
    drawn = overlay(photo, heat)
    inside = photo.pixels[4:36, 12:44]
    np.testing.assert_array_equal(drawn[4:36, 12:44], overlay(Picture.whole(inside), heat))
    outside = np.ones((40, 60), dtype=bool)
    outside[3:37, 11:45] = False  # without the line around the model's part
    assert (np.ptp(drawn[outside], axis=-1) == 0).all()
    assert drawn[outside].max() <= 0.3 * 255 + 1
    looked_at = dimmed(photo)
    np.testing.assert_array_equal(looked_at[4:36, 12:44], inside)
    np.testing.assert_array_equal(looked_at[outside], drawn[outside])


def test_the_models_part_stays_where_it_is_in_another_number_of_pixels() -> None:
    photo = Picture(noise(40, 60), (12, 4, 44, 36))
    assert photo.enlarged(80).box == (24, 8, 88, 72)
    assert photo.resized(20, 30).box == (6, 2, 22, 18)
    assert (photo.shrunk(30).height, photo.shrunk(30).width) == (20, 30)
    assert photo.shrunk(100) is photo


def test_pictures_have_matplotlib_layout() -> None:
    pixels = noise(4, 6).transpose(2, 0, 1)
    np.testing.assert_array_equal(to_picture(pixels), pixels.transpose(1, 2, 0))
    np.testing.assert_array_equal(to_picture(pixels[:1]), pixels[0])
