import numpy as np
import pytest
import torch

from vitascope.errors import UserError
from vitascope.models.patches import patchify
from vitascope.models.preprocess import Preprocess
from vitascope.training.tasks.patch_targets import (
    ColorTarget,
    NormalizedPixelTarget,
    PixelTarget,
    color_classes,
)


def images_of(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def patches_of(image: np.ndarray, patch: tuple[int, int]) -> list[np.ndarray]:
    (_, H, W), (ph, pw) = image.shape, patch
    return [image[:, top : top + ph, left : left + pw] for top in range(0, H, ph) for left in range(0, W, pw)]


def color_class(area: np.ndarray) -> int:
    found = 0
    for channel in area:
        found = 8 * found + min(7, int(np.floor(8 * channel.mean())))
    return found


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("patch", "side"), [((4, 8), 1), ((8, 4), 4), ((8, 12), 4), ((4, 4), 4), ((7, 5), 1)]
)
def test_classes_equal_a_loop_over_patches(patch: tuple[int, int], side: int, channels: int) -> None:
    images = images_of(3, channels, 2 * patch[0], 3 * patch[1])
    h, w = patch[0] // side, patch[1] // side
    expected = [
        [
            [
                color_class(tile[:, r * h : (r + 1) * h, c * w : (c + 1) * w])
                for r in range(side)
                for c in range(side)
            ]
            for tile in patches_of(image, patch)
        ]
        for image in images.double().numpy()
    ]
    found = color_classes(images.double(), patch, side)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_colours_have_three_bits_red_first() -> None:
    image = torch.tensor([1.0, 0.125, 0.124]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    assert color_classes(image, (4, 4), 1).item() == 7 * 64 + 1 * 8 + 0
    assert color_classes(torch.ones(1, 1, 4, 4), (4, 4), 1).item() == 7
    levels = torch.arange(256).view(256, 1, 1, 1) / 255
    assert torch.equal(
        color_classes(levels, (1, 1), 1).flatten(),
        torch.arange(256) * 8 // 255 - (torch.arange(256) == 255).long(),
    )


def test_picture_of_the_correct_classes_is_the_image_in_3_bits() -> None:
    images = images_of(2, 3, 8, 16).repeat_interleave(2, 2).repeat_interleave(2, 3)
    target = ColorTarget(side=4, patch=(8, 8), channels=3)
    shown = target.pictures(target.targets(images), patchify(images, (8, 8)))  # (B, N, C, ph, pw)
    tiles = images.unflatten(2, (2, 8)).unflatten(4, (4, 8)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    assert torch.equal(shown, (tiles * 8).floor() / 8 + 1 / 16)


def test_pixels_are_normalized_patches_and_their_picture_is_the_image() -> None:
    preprocess = Preprocess(image_size=(8, 12), mean=(0.1, 0.5, 0.7), std=(0.2, 0.3, 0.4))
    target, images = PixelTarget(patch=(4, 6), preprocess=preprocess), images_of(2, 3, 8, 12)
    wanted = target.targets(images)
    expected = [
        [tile.ravel() for tile in patches_of(image, (4, 6))] for image in preprocess.normalize(images).numpy()
    ]
    np.testing.assert_array_equal(wanted.numpy(), np.array(expected))
    assert target.outputs == wanted.shape[2]
    tiles = torch.from_numpy(np.array([patches_of(image, (4, 6)) for image in images.numpy()]))
    torch.testing.assert_close(target.pictures(target.predictions(wanted), tiles.flatten(2)), tiles)
    predictions = torch.zeros_like(wanted).requires_grad_()
    torch.testing.assert_close(target.measure(predictions, wanted)["loss"], wanted.square().mean(dim=(1, 2)))


def test_normalized_pixels_have_no_mean_and_a_variance_of_one_in_each_patch() -> None:
    preprocess = Preprocess(image_size=(8, 12), mean=(0.1, 0.5, 0.7), std=(0.2, 0.3, 0.4))
    target = NormalizedPixelTarget(patch=(4, 6), preprocess=preprocess)
    images = images_of(2, 3, 8, 12)
    images[:, :, :4, :6] = 0.5  # a patch with a variance between its channels only
    wanted = target.targets(images)
    for image, found in zip(preprocess.normalize(images).double().numpy(), wanted.numpy(), strict=True):
        for tile, normalized in zip(patches_of(image, (4, 6)), found, strict=True):
            expected = (tile - tile.mean()) / np.sqrt(tile.var(ddof=1) + 1e-6)
            np.testing.assert_allclose(normalized, expected.ravel(), rtol=1e-4, atol=1e-4)
    tiles = torch.from_numpy(np.array([patches_of(image, (4, 6)) for image in images.numpy()]))
    torch.testing.assert_close(target.pictures(wanted, tiles.flatten(2)), tiles)


def test_patches_too_small_for_the_target_are_rejected() -> None:
    with pytest.raises(UserError, match="a patch of 8x2 pixels has no 4x4 picture; predict its mean_color"):
        ColorTarget(side=4, patch=(8, 2), channels=3)
