from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from scipy.ndimage import gaussian_filter

from tests.models import law
from vitascope.data.augment import Augmentation
from vitascope.data.changes import apply_changes
from vitascope.data.randaugment import (
    DEVIATIONS,
    DRAWS,
    OPERATIONS,
    RandAugment,
    operation_arguments,
    operation_changes,
    three_augment,
)
from vitascope.data.randomness import uniform
from vitascope.errors import UserError

PAPER = (
    "Identity AutoContrast Equalize Rotate Solarize Color Posterize Contrast Brightness Sharpness "
    "ShearX ShearY TranslateX TranslateY"
)
FACTORS = [0.1, 0.19, 0.55, 1.0, 1.4, 1.81, 1.9]
ENHANCED = {
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Brightness": ImageEnhance.Brightness,
    "Sharpness": ImageEnhance.Sharpness,
}


def pictures(channels: int = 3, height: int = 19, width: int = 26, seed: int = 0) -> torch.Tensor:
    """Pictures as levels: noise, a narrow range, a gradient, few levels, one colour, almost one colour."""
    generator = np.random.default_rng(seed)
    shape = (channels, height, width)
    noise = generator.integers(0, 256, shape)
    narrow = generator.integers(90, 140, shape)
    gradient = (np.linspace(20, 230, width) + 20 * generator.random(shape)).astype(np.int64)
    few = generator.choice([3, 77, 200, 255], shape)
    flat = np.full(shape, 131)
    almost = flat.copy()
    almost[0, 4, 5] = 9
    return torch.from_numpy(np.stack([noise, narrow, gradient, few, flat, almost])).float()


def picture_of(levels: torch.Tensor) -> Image.Image:
    pixels = levels.to(torch.uint8).numpy()
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def levels_of(picture: Image.Image) -> torch.Tensor:
    pixels = np.asarray(picture)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1).copy()).float()


def changed(levels: torch.Tensor, operations: np.ndarray, arguments: np.ndarray) -> torch.Tensor:
    """Levels after one operation per image."""
    return apply_changes(levels, operation_changes([(operations, arguments)], levels.shape))


def applied(name: str, levels: torch.Tensor, argument: float = 0.0) -> torch.Tensor:
    count = len(levels)
    return changed(levels, np.full(count, OPERATIONS.index(name)), np.full(count, argument))


def by_pil(levels: torch.Tensor, operation: Callable[[Image.Image], Image.Image]) -> torch.Tensor:
    return torch.stack([levels_of(operation(picture_of(one))) for one in levels])


@pytest.mark.parametrize("channels", [1, 3])
def test_enhancements_equal_pil(channels: int) -> None:
    levels = pictures(channels)
    for name, enhancer in ENHANCED.items():
        for factor in FACTORS:
            expected = by_pil(levels, lambda one, of=enhancer, by=factor: of(one).enhance(by))
            assert torch.equal(applied(name, levels, factor), expected), (name, factor)
    for side in (9, 19, 60):
        levels = pictures(channels, side)
        assert torch.equal(applied("Equalize", levels), by_pil(levels, ImageOps.equalize))


@pytest.mark.parametrize("channels", [1, 3])
def test_auto_contrast_equals_pil_without_its_rounding_errors(channels: int) -> None:
    levels = pictures(channels)
    difference = applied("AutoContrast", levels) - by_pil(levels, ImageOps.autocontrast)
    assert difference.min() >= 0  # PIL's scale is inexact and it rounds down, at times white to 254
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.05


def test_solarize_and_posterize_equal_pil() -> None:
    levels = pictures()
    for name, operation, arguments in (
        ("Solarize", ImageOps.solarize, (0, 1, 26, 128, 255, 256)),
        ("Posterize", ImageOps.posterize, (1, 2, 3, 4, 8)),
    ):
        for argument in arguments:
            expected = by_pil(levels, lambda one, of=operation, by=argument: of(one, by))
            assert torch.equal(applied(name, levels, argument), expected), (name, argument)


def affine(name: str, argument: float, width: int, height: int) -> tuple[float, ...]:
    return {
        "ShearX": (1, argument, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, argument, 1, 0),
        "TranslateX": (1, 0, argument * width, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, argument * height),
    }[name]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("name", "argument"),
    [("Rotate", 27.0), ("ShearX", 0.27), ("ShearY", 0.27), ("TranslateX", 0.4), ("TranslateY", 0.37)],
)
def test_geometry_equals_pil_inside_and_is_grey_outside(name: str, argument: float, sign: int) -> None:
    levels, argument = pictures(), sign * argument
    height, width = levels.shape[-2:]

    def moved(one: Image.Image) -> Image.Image:
        if name == "Rotate":
            return one.rotate(argument, Image.Resampling.BILINEAR, fillcolor=(128, 128, 128))
        data = affine(name, argument, width, height)
        how = Image.Resampling.BILINEAR
        return one.transform(one.size, Image.Transform.AFFINE, data, how, fillcolor=(128, 128, 128))

    found, expected = applied(name, levels, argument), by_pil(levels, moved)
    inside = by_pil(torch.full_like(levels, 255), moved).eq(255) & applied(name, levels * 0, argument).eq(0)
    outside = applied(name, levels * 0, argument).eq(128)
    assert inside.float().mean() > 0.4
    assert (found - expected)[inside].abs().max() <= 1  # PIL rounds down, halves up
    assert outside.float().mean() > 0.02
    assert torch.equal(found[outside], expected[outside])


@law
@given(
    operations=st.lists(st.integers(0, 13), min_size=1, max_size=9),
    seed=st.integers(0, 2**31),
    channels=st.sampled_from([1, 3]),
)
def test_operations_on_a_batch_equal_those_on_single_images(operations, seed, channels) -> None:
    count = len(operations)
    levels = pictures(channels, 9, 14, seed)[torch.arange(count) % 6]
    generator = np.random.default_rng(seed)
    signs = np.where(generator.random(count) < 0.5, -1.0, 1.0)
    arguments = operation_arguments(np.array(operations), generator.random(count) * 10, signs)
    together = changed(levels, np.array(operations), arguments)
    for at in range(count):
        one = slice(at, at + 1)
        alone = changed(levels[one], np.array(operations[one]), arguments[one])
        assert torch.equal(together[one], alone), OPERATIONS[operations[at]]


def chosen(count: int = 7000, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Operations and arguments that one layer draws for `count` images."""
    return RandAugment(**options)._choose(uniform(0, 0, np.arange(count), 3))


@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_operations_are_equally_frequent(probability: float) -> None:
    operations, _ = chosen(probability=probability)
    share = probability / len(OPERATIONS)
    counts = np.bincount(operations, minlength=len(OPERATIONS)) / len(operations)
    others = np.delete(counts, OPERATIONS.index("Identity"))
    assert np.abs(others - share).max() < 5 * (share / len(operations)) ** 0.5
    idle = share + 1 - probability
    assert abs(counts[OPERATIONS.index("Identity")] - idle) < 5 * (idle / len(operations)) ** 0.5


def test_magnitudes_scatter_by_the_standard_deviation_and_signs_by_half() -> None:
    operations, arguments = chosen(70_000, magnitude=5.0, std=0.5)
    turns = arguments[operations == OPERATIONS.index("Rotate")] / 3  # magnitudes with a sign
    assert abs((turns > 0).mean() - 1 / 2) < 5 * 0.5 / len(turns) ** 0.5
    assert abs(np.abs(turns).mean() - 5) < 5 * 0.5 / len(turns) ** 0.5
    assert abs(np.abs(turns).std() - 0.5) < 0.04


def test_magnitudes_are_cut_off_at_ten() -> None:
    operations, arguments = chosen(magnitude=10.0, std=2.0)
    assert np.abs(arguments[operations == OPERATIONS.index("Rotate")]).max() == 30
    assert arguments[operations == OPERATIONS.index("Posterize")].min() == 1  # 0 would be black


@pytest.mark.parametrize("std", [0.0, 0.5])
def test_extreme_draws_select_operations_with_finite_arguments(std: float) -> None:
    ends = np.array([0.0, 1 - 2.0**-53])
    draws = np.stack(np.meshgrid(ends, ends, ends), axis=-1).reshape(-1, 3)
    operations, arguments = RandAugment(std=std)._choose(draws)
    assert set(operations) == {0, len(OPERATIONS) - 1}
    assert np.isfinite(arguments).all()


def test_invalid_numbers_are_rejected() -> None:
    numbers = (("num_ops", 0), ("magnitude", 10.5), ("magnitude", -1), ("std", -0.1), ("probability", 0.0))
    for name, value in numbers:
        with pytest.raises(UserError, match=f"{value:g}"):
            RandAugment(**{name: value})


GREY, SOLARIZED, BLURRED = 0.1, 0.5, 0.9
"""Draws that choose an operation."""


def levels(count: int, channels: int = 3, height: int = 24, width: int = 33) -> torch.Tensor:
    """Noise, as uint8 (B, C, H, W)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def with_choice(pixels: torch.Tensor, choice: float, width: float = 0.0) -> torch.Tensor:
    """Every picture after the chosen operation, in levels."""
    return three_augment(pixels / 255, np.array([[choice, width]] * len(pixels))) * 255


def test_greyscale_and_solarization_are_pillow_s() -> None:
    pixels = levels(1)
    picture = Image.fromarray(pixels[0].movedim(0, 2).numpy())
    grey = torch.from_numpy(np.array(picture.convert("L")))
    solarized = torch.from_numpy(np.array(ImageOps.solarize(picture))).movedim(2, 0)
    assert (with_choice(pixels, GREY)[0] - grey).abs().max() < 1  # Pillow rounds down
    torch.testing.assert_close(with_choice(pixels, SOLARIZED)[0], solarized.float(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("width", [0.0, 0.3, 1 - 1e-9])
@pytest.mark.parametrize("shape", [(24, 33), (5, 3), (1, 40)])
def test_blur_is_gaussian_with_the_drawn_deviation(width: float, shape: tuple[int, int]) -> None:
    pixels = levels(1, 3, *shape)
    low, high = DEVIATIONS
    deviation = low + width * (high - low)
    expected = gaussian_filter(pixels[0].double().numpy(), deviation, axes=(1, 2), radius=6, mode="nearest")
    torch.testing.assert_close(
        with_choice(pixels, BLURRED, width)[0].double(), torch.from_numpy(expected), atol=1e-3, rtol=0
    )


def test_narrowest_blur_changes_nothing_and_the_widest_reads_six_pixels() -> None:
    dot = torch.zeros(1, 1, 17, 17, dtype=torch.uint8)
    dot[..., 8, 8] = 255
    torch.testing.assert_close(with_choice(dot, BLURRED, 0.0), dot.float())
    spread = with_choice(dot, BLURRED, 1 - 1e-9)[0, 0]
    assert spread[8].gt(0).nonzero().flatten().tolist() == list(range(2, 15))
    assert float(spread.sum()) == pytest.approx(255, rel=1e-4)


def test_each_operation_changes_a_third_of_the_images() -> None:
    n = 3000
    pixels = levels(1, 3, 6, 6).expand(n, -1, -1, -1)
    found = three_augment(pixels / 255, uniform(0, 0, np.arange(n), DRAWS)) * 255
    grey = found.diff(dim=1).abs().amax(dim=(1, 2, 3)) < 1e-3
    solarized = (found - with_choice(pixels[:1], SOLARIZED)).abs().amax(dim=(1, 2, 3)) < 1e-3
    assert not (grey & solarized).any()
    for share in (grey, solarized, ~grey & ~solarized):
        assert abs(float(share.float().mean()) - 1 / 3) < 5 * (2 / 9 / n) ** 0.5


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_the_same_alone_and_in_a_batch(channels: int) -> None:
    pixels, draws = levels(9, channels) / 255, uniform(3, 1, np.arange(9), DRAWS)
    found = three_augment(pixels, draws)
    assert found.shape == pixels.shape
    for row in range(9):
        alone = three_augment(pixels[row : row + 1], draws[row : row + 1])[0]
        # One channel has a convolution kernel of its own, which may round differently.
        torch.testing.assert_close(alone, found[row], atol=1e-6, rtol=0)


def test_augmentation_applies_it_after_the_crop_and_before_the_colours() -> None:
    pixels, indices = levels(12), np.arange(12)
    draws = {"seed": 4, "epoch": 2}
    cropped = Augmentation(crop_scale=0.3)(pixels, indices, **draws)
    both = Augmentation(crop_scale=0.3, three_augment=True)(pixels, indices, **draws)
    torch.testing.assert_close(both, three_augment(cropped, uniform(4, 2, indices, 17)[:, 15:]))
    jittered = Augmentation(crop_scale=0.3, three_augment=True, color_jitter=0.3)
    again = Augmentation(color_jitter=0.3)
    expected = again((both * 255).round().to(torch.uint8), indices, **draws)
    torch.testing.assert_close(jittered(pixels, indices, **draws), expected, atol=2 / 255, rtol=0)
