"""The resize in the graph: Pillow's resize as matrix products."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.data import noise
from tests.models import law
from vitascope.deploy.export.resampling import Resize, WholePixels
from vitascope.models.preprocess import Preprocess

sides = st.integers(1, 90)


def resized(picture: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    pictures = torch.from_numpy(picture).permute(2, 0, 1)[None].float()
    return Resize(preprocess)(pictures)[0].numpy()


def distance(picture: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    found, wanted = resized(picture, preprocess), preprocess.pixels(picture).astype(np.float32)
    assert found.shape == wanted.shape
    return np.abs(found - wanted)


@law
@given(
    size=st.tuples(sides, sides),
    wanted=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    resize=st.sampled_from(["crop", "squash"]),
    crop_pct=st.sampled_from([1.0, 0.95, 0.875, 0.9, 0.5]),
    interpolation=st.sampled_from(["bilinear", "bicubic", "lanczos"]),
    seed=st.integers(0, 9),
)
def test_resize_of_any_size_matches_pillow(
    size: tuple[int, int],
    wanted: tuple[int, int],
    resize: str,
    crop_pct: float,
    interpolation: str,
    seed: int,
) -> None:
    fit = Preprocess(image_size=wanted, resize=resize, crop_pct=crop_pct, interpolation=interpolation)
    # Both axes are rounded. Where weights are simple fractions, many sums lie just between two levels.
    assert distance(noise(*size, seed=seed), fit).max() <= 2


@law
@given(
    size=st.tuples(sides, sides),
    wanted=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    resize_to=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    resize=st.sampled_from(["crop", "squash", "border"]),
    side_rounding=st.sampled_from(["down", "nearest"]),
    crop_rounding=st.sampled_from(["down", "even"]),
    interpolation=st.sampled_from(["bilinear", "bicubic", "lanczos"]),
)
def test_resize_to_whole_pixels_with_crop_matches_pillow(
    size: tuple[int, int], wanted: tuple[int, int], resize_to: tuple[int, int], **rule: str
) -> None:
    fit = Preprocess(image_size=wanted, resize_to=resize_to, mean=(0.2, 0.4, 0.6), **rule)
    assume(fit.resized_hw(*size) == in_integers(fit, *size))
    assert distance(noise(*size), fit).max() <= 2


def in_integers(fit: Preprocess, height: int, width: int) -> tuple[int, ...]:
    found = WholePixels(fit).resized_hw(torch.tensor(height), torch.tensor(width))
    return tuple(int(side) for side in found)


def test_resized_sizes_equal_timm_and_torchvision() -> None:
    generator = np.random.default_rng(0)
    for resize, side_rounding in (("crop", "down"), ("crop", "nearest"), ("border", "nearest")):
        sides = (256, 256) if side_rounding == "down" else (256, 192)
        fit = Preprocess(image_size=(224, 168), resize=resize, resize_to=sides, side_rounding=side_rounding)
        sizes = generator.integers(1, 5000, (500, 2)).tolist()
        assert sum(in_integers(fit, *size) != fit.resized_hw(*size) for size in sizes) <= 1


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(600, 400), (400, 600), (701, 33), (35, 1300), (224, 224), (7, 5)])
@pytest.mark.parametrize(
    "rule",
    [
        {"crop_pct": 0.9},
        {"resize": "squash"},
        {"resize_to": (110, 110), "crop_rounding": "down"},
        {"resize": "border", "resize_to": (110, 110), "crop_rounding": "down"},
    ],
    ids=str,
)
def test_resize_of_photographs_matches_pillow(size, rule, interpolation: str) -> None:
    fit = Preprocess(image_size=(96, 64), interpolation=interpolation, **rule)
    apart = distance(noise(*size), fit)
    if interpolation == "nearest":  # centres between two
        assert (apart > 0).mean() < 0.2
    else:
        assert apart.max() <= 1
        assert (apart > 0).mean() <= 0.05  # from 99 to 110 pixels, every tenth sum of "bilinear" is a tie
