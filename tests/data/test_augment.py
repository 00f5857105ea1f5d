from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import law
from vitascope.data.augment import Augmentation, _erase, _rectangles
from vitascope.data.changes import apply_changes
from vitascope.data.randaugment import RandAugment
from vitascope.data.randomness import crop_draws, uniform

EVERYTHING = {"flip": 0.5, "crop_scale": 0.5, "shift": 0.2, "rotate": 20.0, "color_jitter": 0.4}


def pictures(count: int, channels: int = 3, side: int = 9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=generator)


def augment(pixels: torch.Tensor, indices: Any = None, seed: int = 0, epoch: int = 0, **options: Any) -> Any:
    indices = np.arange(len(pixels)) if indices is None else np.asarray(indices)
    return Augmentation(**options)(pixels, indices, seed=seed, epoch=epoch)


def repeated(picture: torch.Tensor, count: int) -> torch.Tensor:
    return picture.expand(count, -1, -1, -1)


def x_ramp(side: int = 52) -> torch.Tensor:
    """A horizontal ramp of brightness, 0 at the left, 1 at the right: (1, 1, side, side)."""
    return (torch.arange(side) * (255 // (side - 1))).to(torch.uint8).expand(1, 1, side, side)


def dot(row: int, column: int, side: int = 33) -> torch.Tensor:
    """A white dot on black, 3 pixels wide. (1, 1, side, side)"""
    picture = torch.zeros(1, 1, side, side, dtype=torch.uint8)
    picture[..., row - 1 : row + 2, column - 1 : column + 2] = 255
    return picture


def centroids(images: torch.Tensor) -> torch.Tensor:
    """Row and column of the light's centre, from the picture's centre: (B, 2)."""
    light = images[:, 0]
    side = light.shape[-1]
    at = torch.arange(side) - (side - 1) / 2
    total = light.sum(dim=(1, 2))
    return torch.stack(
        [(light.sum(dim=2) * at).sum(dim=1) / total, (light.sum(dim=1) * at).sum(dim=1) / total], 1
    )


@pytest.mark.parametrize("option", ["crop_scale", "shift", "rotate", "color_jitter"])
def test_augmentation_differs_by_seed_epoch_and_index(option: str) -> None:
    def of(seed: int = 1, epoch: int = 1, index: int = 1) -> torch.Tensor:
        return augment(pictures(1), [index], seed, epoch, **{option: EVERYTHING[option]})

    for other in (of(seed=2), of(epoch=2), of(index=2)):
        assert (other - of()).abs().max() > 1e-3


@pytest.mark.parametrize("others", [{"flip": 0.5}, {"rotate": 9.0}])
def test_shifts_without_a_value_grow_when_images_are_no_longer_new(others: dict[str, float]) -> None:
    for epoch, shift in ((0, 1 / 16), (4, 1 / 16), (5, 1 / 8), (99, 1 / 8)):
        grown, named = (augment(pictures(9), epoch=epoch, shift=each, **others) for each in (None, shift))
        assert torch.equal(grown, named)


def test_result_does_not_depend_on_the_global_random_state() -> None:
    torch.manual_seed(1)
    first = augment(pictures(3), **EVERYTHING)
    torch.manual_seed(2)
    np.random.seed(2)
    state = torch.get_rng_state()
    assert torch.equal(augment(pictures(3), **EVERYTHING), first)
    assert torch.equal(torch.get_rng_state(), state)  # nor does it change the state


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_flip_mirrors_its_share_of_the_images(share: float) -> None:
    picture, n = pictures(1), 2000
    found = augment(repeated(picture, n), flip=share)
    same = (found - picture / 255).abs().amax(dim=(1, 2, 3)) < 1e-3
    mirrored = (found - picture.flip(-1) / 255).abs().amax(dim=(1, 2, 3)) < 1e-3
    assert (same ^ mirrored).all()
    assert abs(float(mirrored.float().mean()) - share) <= 5 * (share * (1 - share) / n) ** 0.5


@pytest.mark.parametrize("crop_scale", [0.3, 0.5, 0.9])
def test_crop_keeps_at_least_its_minimal_area(crop_scale: float) -> None:
    n, side = 400, 52
    ramp = x_ramp(side)
    columns = augment(repeated(ramp, n), crop_scale=crop_scale)[:, 0] * (side - 1)
    rows = augment(repeated(ramp.mT, n), crop_scale=crop_scale)[:, 0].mT * (side - 1)
    width = columns[:, 20, 1:].diff(dim=1).mean(dim=1)  # of the crop, as a share: each pixel's step
    height = rows[:, 20, 1:].diff(dim=1).mean(dim=1)
    assert (width < 1.01).all()
    assert (height < 1.01).all()
    area = width * height
    assert area.min() >= crop_scale - 0.02
    assert area.min() < crop_scale + 0.1  # the whole range is used
    assert area.max() > 0.95


def test_shift_moves_by_up_to_its_share_of_the_side() -> None:
    moved = centroids(augment(repeated(dot(16, 16), 400), shift=0.25)).abs()
    assert moved.max() <= 0.25 * 33 + 0.1
    assert (moved.amax(dim=0) > 0.2 * 32).all()


def test_rotation_turns_about_the_centre_by_up_to_its_degrees() -> None:
    centre = centroids(augment(repeated(dot(16, 16), 100), rotate=30.0))
    assert centre.abs().max() < 0.05
    turned = centroids(augment(repeated(dot(16, 24), 400), rotate=30.0))  # 8 pixels to the right
    assert (turned.norm(dim=1) - 8).abs().max() < 0.2
    angles = torch.atan2(turned[:, 0], turned[:, 1]).rad2deg()
    assert angles.abs().max() < 30.5
    assert angles.max() > 25
    assert angles.min() < -25


@law
@given(seed=st.integers(0, 2**31), grey=st.integers(0, 255), channels=st.sampled_from([1, 3]))
def test_geometry_does_not_change_a_uniform_colour(seed: int, grey: int, channels: int) -> None:
    pixels = torch.full((4, channels, 7, 7), grey, dtype=torch.uint8)
    found = augment(pixels, seed=seed, **{**EVERYTHING, "color_jitter": 0.0})
    torch.testing.assert_close(found, pixels / 255, atol=1e-4, rtol=0)


@law
@given(
    seed=st.integers(0, 2**31),
    jitter=st.floats(0.01, 3),
    channels=st.sampled_from([1, 3]),
    ends=st.booleans(),
)
def test_values_stay_between_zero_and_one(seed: int, jitter: float, channels: int, ends: bool) -> None:
    pixels = pictures(6, channels, seed=seed)
    if ends:
        pixels = (pixels // 128) * 255
    found = augment(pixels, seed=seed, **{**EVERYTHING, "color_jitter": jitter})
    assert found.dtype == torch.float32
    assert found.shape == pixels.shape
    assert found.min() >= -1e-6
    assert found.max() <= 1 + 1e-6


def test_colour_jitter_changes_brightness_up_and_down() -> None:
    grey = torch.full((200, 3, 5, 5), 120, dtype=torch.uint8)
    change = augment(grey, color_jitter=0.4).mean(dim=(1, 2, 3)) / (120 / 255)
    assert change.min() < 0.8
    assert change.max() > 1.2


@pytest.mark.parametrize("size", [(60, 120), (120, 60)])
def test_rotation_and_flip_of_oblong_pictures_do_not_shear(size: tuple[int, int]) -> None:
    y, x = np.mgrid[: size[0], : size[1]]
    distance = np.hypot(y - size[0] / 2 + 0.5, x - size[1] / 2 + 0.5)
    disc = torch.from_numpy((255 * (distance < 15)).astype(np.uint8))
    turn = Augmentation(rotate=20.0, flip=0.5)
    turned = turn(disc.expand(8, 1, *size), np.arange(8), seed=0, epoch=0)
    away = torch.from_numpy(np.abs(distance - 15) > 1.5)  # from the edge
    torch.testing.assert_close(turned[..., away], (disc / 255)[away].expand(8, 1, -1))


@pytest.mark.parametrize("size", [(40, 80), (80, 40)])
def test_shifts_are_shares_of_each_side(size: tuple[int, int]) -> None:
    rows = torch.arange(size[0], dtype=torch.uint8).view(1, 1, -1, 1).expand(200, 1, *size)
    columns = torch.arange(size[1], dtype=torch.uint8).expand(200, 1, *size)
    for places, side in ((rows, size[0]), (columns, size[1])):
        moved = Augmentation(shift=0.25)(places, np.arange(200), seed=0, epoch=0) * 255
        middle = moved[:, 0, size[0] // 2, size[1] // 2] - side // 2
        assert middle.round().abs().max() == side / 4


def test_new_options_do_not_change_the_draws_of_others() -> None:
    pixels = pictures(6)
    before = augment(pixels, **EVERYTHING)
    after = augment(pixels, **EVERYTHING, randaugment=RandAugment(magnitude=0.0, std=0.0, probability=1e-9))
    torch.testing.assert_close(after, before, atol=0.5 / 255 + 1e-5, rtol=0)  # rounded to levels
    erased = augment(pixels, **EVERYTHING, erase=1.0)
    assert ((erased - before).abs() < 1e-6).flatten(1).float().mean(dim=1).min() > 0.5
    both = augment(pixels, **EVERYTHING, erase=1.0, randaugment=RandAugment())
    changed = augment(pixels, **EVERYTHING, randaugment=RandAugment())
    kept = (erased == before).all(dim=1, keepdim=True).expand_as(both)
    assert torch.equal(both[kept], changed[kept])  # the same rectangles, after RandAugment


def test_each_option_has_its_own_draws() -> None:
    pixels, indices, change = pictures(40), np.arange(40), RandAugment()
    draws = uniform(3, 4, indices, 15 + change.draws)
    options = {"seed": 3, "epoch": 4}
    assert torch.equal(augment(pixels, **options, randaugment=change), change(pixels / 255, draws[:, 15:]))
    erased = apply_changes(pixels / 255, _erase(draws[:, 9:15], 0.4, pixels.shape))
    assert torch.equal(augment(pixels, **options, erase=0.4), erased)
    np.testing.assert_array_equal(crop_draws(3, 4, indices), draws[:, :4])


def test_draws_equal_those_of_earlier_versions() -> None:
    pixels = (torch.arange(2 * 3 * 4 * 4) * 37 % 256).to(torch.uint8).view(2, 3, 4, 4)
    found = augment(pixels, [7, 10**6], seed=3, epoch=5, **EVERYTHING)
    expected = torch.tensor([[0.665705, 0.651239, 0.489609], [0.479789, 0.403525, 0.296092]])
    torch.testing.assert_close(found[:, :, 1, 2], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"crop_scale": 0.5}, {"shift": 0.2}])
def test_the_number_of_operations_does_not_grow_with_the_batch(options: dict[str, float]) -> None:
    counts = []
    for count in (150, 300):  # each operation has an image
        with Operations() as operations:
            augment(pictures(count), flip=0.5, randaugment=RandAugment(), erase=0.3, **options)
        counts.append(operations.count)
    assert counts[0] == counts[1] < 100


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_without_crop_keeps_every_other_draw() -> None:
    options = {**EVERYTHING, "randaugment": RandAugment(), "erase": 0.5}
    cropped = Augmentation(**options).without_crop()
    assert cropped == Augmentation(**{**options, "crop_scale": 1.0})
    ramp, indices = repeated(x_ramp(), 200), np.arange(200)
    flips = {"flip": 0.5, "rotate": 20.0}
    whole = Augmentation(**flips, crop_scale=0.5)(ramp, indices, seed=0, epoch=0)[:, 0, 20]
    apart = Augmentation(**flips, crop_scale=0.5).without_crop()(ramp, indices, seed=0, epoch=0)[:, 0, 20]
    assert torch.equal(whole[:, 30] > whole[:, 20], apart[:, 30] > apart[:, 20])  # same flips
    assert (apart[:, 30] > apart[:, 20]).float().mean() < 0.7


@law
@given(seed=st.integers(0, 2**31), epoch=st.integers(0, 1000), index=st.integers(0, 10**7))
def test_augmentation_is_independent_of_batch_and_position(seed: int, epoch: int, index: int) -> None:
    options = {"seed": seed, "epoch": epoch}
    for channels in (1, 3):
        mine, others = pictures(1, channels, seed=1), pictures(4, channels, seed=2)
        alone = augment(mine, [index], **options, **EVERYTHING)[0]
        first = augment(torch.cat([mine, others]), [index, 3, 1, 4, 1], **options, **EVERYTHING)[0]
        last = augment(torch.cat([others, mine]), [9, 2, 6, 5, index], **options, **EVERYTHING)[4]
        torch.testing.assert_close(first, alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(last, alone, atol=1e-5, rtol=0)
        options_of_levels = {**options, "randaugment": RandAugment(), "erase": 0.7}
        alone = augment(mine, [index], **options_of_levels)[0]
        last = augment(torch.cat([others, mine]), [9, 2, 6, 5, index], **options_of_levels)[4]
        assert torch.equal(last, alone)


@pytest.mark.parametrize("flip", [0.0, 0.5])
def test_shift_alone_is_a_random_window_of_the_reflected_picture_or_its_mirror_image(flip: float) -> None:
    n, padding = 1200, 2
    picture = pictures(1, side=8)
    height, width = 8, 8
    padded = np.pad(picture[0].numpy(), ((0, 0), (padding, padding), (padding, padding)), mode="reflect")
    windows = [
        torch.from_numpy(padded[:, y : y + height, x : x + width])
        for y in range(2 * padding + 1)
        for x in range(2 * padding + 1)
    ]
    if flip:
        windows += [window.flip(-1) for window in windows]
    found = (augment(repeated(picture, n), shift=padding / 8, flip=flip) * 255).round().to(torch.uint8)
    counts = [int((found == window).all(dim=(1, 2, 3)).sum()) for window in windows]
    assert sum(counts) == n
    assert min(counts) > 5  # at least 24 are expected of each


def erased(picture: torch.Tensor, count: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures with erasing and the mask of their erased pixels: (B, C, H, W) and (B, H, W)."""
    found = augment(repeated(picture, count), **options)
    return found, (found - picture / 255).abs().amax(dim=1) > 1e-6


def test_erasing_erases_its_share_of_the_images() -> None:
    n, share = 2000, 0.25
    _, where = erased(pictures(1), n, erase=share)
    assert abs(float(where.any(dim=(1, 2)).float().mean()) - share) < 5 * (share * (1 - share) / n) ** 0.5


@pytest.mark.parametrize(("height", "width"), [(40, 40), (24, 60), (60, 20)])
def test_erased_regions_are_rectangles_of_the_paper_s_sizes(height: int, width: int) -> None:
    n = 300
    picture = torch.full((1, 3, height, width), 100, dtype=torch.uint8)
    _, where = erased(picture, n, erase=1.0)
    rows, columns = where.any(dim=2), where.any(dim=1)
    h, w = rows.sum(dim=1), columns.sum(dim=1)
    assert torch.equal(where, rows.unsqueeze(2) & columns.unsqueeze(1))
    top, left, bottom, right = _rectangles(uniform(0, 0, np.arange(n), 15)[:, 10:14], height, width).reshape(
        4, n
    )
    assert h.tolist() == (bottom - top).tolist()
    assert w.tolist() == (right - left).tolist()
    assert rows.int().argmax(dim=1).tolist() == top.tolist()
    assert columns.int().argmax(dim=1).tolist() == left.tolist()
    for side in (rows, columns):
        assert (side.int().diff(dim=1).abs().sum(dim=1) <= 2).all()  # connected
        assert side.any(dim=0).all()  # everywhere
    area = h * w / (height * width)
    assert area.min() > 0.01
    assert area.max() < 0.37
    assert abs(float(area.mean()) - (0.02 + 1 / 3) / 2) < 0.03
    aspect = h / w
    assert aspect[area > 0.05].min() > 0.3 / 1.35  # sides are rounded to pixels
    assert aspect[area > 0.05].max() < 3.3 * 1.35
    assert aspect.min() < 0.7
    assert aspect.max() > 1.4


def test_erased_pixels_are_independent_noise() -> None:
    black = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    found, where = erased(black, 60, erase=1.0)
    noise = found.movedim(1, 3)[where].flatten()
    n = len(noise)
    assert abs(float(noise.mean()) - 1 / 2) < 5 * (1 / 12 / n) ** 0.5
    assert abs(float(noise.var()) - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    assert len(noise.unique()) > 0.99 * n  # no two images, channels or pixels share a value
    both = where[:, :, 1:] & where[:, :, :-1]
    left, right = found[:, 0, :, :-1][both], found[:, 0, :, 1:][both]
    assert abs(np.corrcoef(left, right)[0, 1]) < 5 / len(left) ** 0.5


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (2, 3), (40, 1)])
def test_every_option_works_on_tiny_and_oblong_pictures(shape: tuple[int, int]) -> None:
    pixels = torch.randint(0, 256, (30, 3, *shape), dtype=torch.uint8)
    rest = {"erase": 0.5, "randaugment": RandAugment(), "three_augment": True}
    found = augment(pixels, **EVERYTHING, **rest)
    assert found.shape == pixels.shape
    assert found.min() >= 0
    assert found.max() <= 1
