from collections.abc import Callable

import numpy as np
import pytest
import torch

from vitascope.data.randomness import uniform
from vitascope.training.tasks.corruption import _STREAM, Corruption, RandomMask, corruption, random_mask


@pytest.mark.parametrize(("num_patches", "share", "count"), [(16, 0.5, 8), (49, 0.15, 7), (64, 0.99, 63)])
def test_exact_share_of_each_image_is_corrupted(num_patches: int, share: float, count: int) -> None:
    drawn = corruption(0, 0, np.arange(50), num_patches, share)
    assert all(field.shape == (50, count) for field in drawn)
    assert (drawn.places.diff(dim=1) > 0).all()  # each place once, in order
    assert drawn.places.min() >= 0
    assert drawn.places.max() < num_patches


def test_80_percent_of_corrupted_patches_are_masked_10_replaced_and_10_kept() -> None:
    places, sources, masked = corruption(0, 3, np.arange(4000), 64, 0.5)
    replaced = sources != places
    assert not (masked & replaced).any()  # no patch is of two kinds
    kinds = torch.stack([masked, replaced, ~masked & ~replaced]).double().mean(dim=(1, 2))
    expected = torch.tensor([0.8, 0.1, 0.1]).double()
    assert ((kinds - expected).abs() < 5 * (expected * (1 - expected) / masked.numel()).sqrt()).all()


def test_every_patch_is_corrupted_and_used_as_replacement_equally_often() -> None:
    N, images = 16, 20_000
    places, sources, _ = corruption(0, 0, np.arange(images), N, 0.25)
    corrupted = places.flatten().bincount(minlength=N) / images
    assert (corrupted - 0.25).abs().max() < 5 * (0.25 * 0.75 / images) ** 0.5
    lent = sources[sources != places].bincount(minlength=N)
    expected = int(lent.sum()) / N
    assert (lent - expected).abs().max() < 5 * expected**0.5


def test_replacement_patch_gets_the_position_of_the_replaced_one() -> None:
    places, sources, _ = corruption(0, 0, np.arange(500), 16, 0.75)
    replaced = sources != places
    assert replaced.any()
    corrupted = (sources[:, :, None] == places[:, None, :]).any(dim=2)
    assert not (corrupted & replaced).any()


def test_corruption_depends_only_on_seed_epoch_and_index() -> None:
    def draw(seed: int, epoch: int, indices: list[int]) -> Corruption:
        return corruption(seed, epoch, np.array(indices), 64, 0.5)

    together, others = draw(7, 2, [5, 9, 1]), draw(7, 2, [1, 4, 5, 8])
    for ours, theirs in zip(together, others, strict=True):
        assert torch.equal(ours[0], theirs[2])
        assert torch.equal(ours[2], theirs[0])
    for seed, epoch, index in ((8, 2, 5), (7, 3, 5), (7, 2, 6)):
        assert not torch.equal(draw(seed, epoch, [index]).places, together.places[:1])


def test_corruption_is_not_correlated_with_augmentation() -> None:
    indices = np.arange(4000)
    drawn = corruption(0, 0, indices, 16, 0.5)
    first = (drawn.places == 0).any(dim=1).double().numpy()
    mirror = uniform(0, 0, indices, 9)
    correlations = [np.corrcoef(first, draw)[0, 1] for draw in mirror.T]
    assert np.abs(correlations).max() < 0.08


# Random masks


@pytest.mark.parametrize(("num_patches", "share", "count"), [(16, 0.75, 12), (49, 0.15, 7), (64, 0.99, 63)])
def test_each_patch_is_either_hidden_or_visible(num_patches: int, share: float, count: int) -> None:
    drawn = random_mask(0, 0, np.arange(50), num_patches, share)
    assert drawn.places.shape == drawn.sources.shape == drawn.masked.shape == (50, count)
    assert (drawn.places.diff(dim=1) > 0).all()
    assert (drawn.visible.diff(dim=1) > 0).all()
    both = torch.cat([drawn.places, drawn.visible], dim=1).sort(dim=1).values
    assert torch.equal(both, torch.arange(num_patches).expand(50, -1))


def test_every_patch_is_hidden_equally_often() -> None:
    N, images = 16, 20_000
    hidden = random_mask(0, 0, np.arange(images), N, 0.75).places.flatten().bincount(minlength=N) / images
    assert (hidden - 0.75).abs().max() < 5 * (0.25 * 0.75 / images) ** 0.5


@pytest.mark.parametrize("share", [0.1, 0.75])
def test_the_patches_with_the_smallest_draws_are_hidden(share: float) -> None:
    """So they have been since the first version."""
    indices, N = np.arange(30), 49
    order = uniform(5 ^ _STREAM, 2, indices, N).argsort(axis=1, kind="stable")
    hidden, visible = np.split(order, [round(share * N)], axis=1)
    drawn = random_mask(5, 2, indices, N, share)
    np.testing.assert_array_equal(drawn.places, np.sort(hidden, axis=1))
    np.testing.assert_array_equal(drawn.visible, np.sort(visible, axis=1))
    np.testing.assert_array_equal(corruption(5, 2, indices, N, share).places, drawn.places)


@pytest.mark.parametrize("draw", [corruption, random_mask])
def test_no_image_has_no_hidden_patches(draw: Callable[..., Corruption | RandomMask]) -> None:
    assert draw(0, 0, np.arange(0), 16, 0.5).places.shape == (0, 8)


def test_random_mask_depends_only_on_seed_epoch_and_index() -> None:
    def draw(seed: int, epoch: int, indices: list[int]) -> RandomMask:
        return random_mask(seed, epoch, np.array(indices), 64, 0.75)

    together, others = draw(7, 2, [5, 9, 1]), draw(7, 2, [1, 4, 5, 8])
    for ours, theirs in zip(together, others, strict=True):
        assert torch.equal(ours[0], theirs[2])
        assert torch.equal(ours[2], theirs[0])
    for seed, epoch, index in ((8, 2, 5), (7, 3, 5), (7, 2, 6)):
        assert not torch.equal(draw(seed, epoch, [index]).places, together.places[:1])
