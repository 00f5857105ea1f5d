"""3-Augment: each operation against Pillow's or scipy's, and their shares."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy.ndimage import gaussian_filter

from vitascope.data.augment import Augmentation
from vitascope.data.randomness import uniform
from vitascope.data.three_augment import DEVIATIONS, DRAWS, three_augment

GREY, SOLARIZED, BLURRED = 0.1, 0.5, 0.9
"""Draws that choose an operation."""


def levels(count: int, channels: int = 3, height: int = 24, width: int = 33) -> torch.Tensor:
    """Noise, as uint8 (B, C, H, W)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def changed(pixels: torch.Tensor, choice: float, width: float = 0.0) -> torch.Tensor:
    """Every picture after the chosen operation, in levels."""
    return three_augment(pixels / 255, np.array([[choice, width]] * len(pixels))) * 255


def test_greyscale_and_solarization_are_pillow_s() -> None:
    pixels = levels(1)
    picture = Image.fromarray(pixels[0].movedim(0, 2).numpy())
    grey = torch.from_numpy(np.array(picture.convert("L")))
    solarized = torch.from_numpy(np.array(ImageOps.solarize(picture))).movedim(2, 0)
    assert (changed(pixels, GREY)[0] - grey).abs().max() < 1  # Pillow rounds down
    torch.testing.assert_close(changed(pixels, SOLARIZED)[0], solarized.float(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("width", [0.0, 0.3, 1 - 1e-9])
@pytest.mark.parametrize("shape", [(24, 33), (5, 3), (1, 40)])
def test_blur_is_gaussian_with_the_drawn_deviation(width: float, shape: tuple[int, int]) -> None:
    pixels = levels(1, 3, *shape)
    low, high = DEVIATIONS
    deviation = low + width * (high - low)
    expected = gaussian_filter(pixels[0].double().numpy(), deviation, axes=(1, 2), radius=6, mode="nearest")
    torch.testing.assert_close(
        changed(pixels, BLURRED, width)[0].double(), torch.from_numpy(expected), atol=1e-3, rtol=0
    )


def test_narrowest_blur_changes_nothing_and_the_widest_reads_six_pixels() -> None:
    dot = torch.zeros(1, 1, 17, 17, dtype=torch.uint8)
    dot[..., 8, 8] = 255
    torch.testing.assert_close(changed(dot, BLURRED, 0.0), dot.float())
    spread = changed(dot, BLURRED, 1 - 1e-9)[0, 0]
    assert spread[8].gt(0).nonzero().flatten().tolist() == list(range(2, 15))
    assert float(spread.sum()) == pytest.approx(255, rel=1e-4)


def test_each_operation_changes_a_third_of_the_images() -> None:
    n = 3000
    pixels = levels(1, 3, 6, 6).expand(n, -1, -1, -1)
    found = three_augment(pixels / 255, uniform(0, 0, np.arange(n), DRAWS)) * 255
    grey = found.diff(dim=1).abs().amax(dim=(1, 2, 3)) < 1e-3
    solarized = (found - changed(pixels[:1], SOLARIZED)).abs().amax(dim=(1, 2, 3)) < 1e-3
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


def test_grey_pictures_stay_as_they_are_in_greyscale() -> None:
    pixels = levels(2, channels=1)
    torch.testing.assert_close(changed(pixels, GREY), pixels.float())


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
