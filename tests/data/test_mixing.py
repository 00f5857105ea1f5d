import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law
from vitascope.data.mixing import Mixing
from vitascope.errors import UserError

MIXUP, CUTMIX = Mixing(cutmix=0.0), Mixing(mixup=0.0)


def batch(count: int = 6, height: int = 12, width: int = 15) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose image k has the value k + 1 everywhere and class k."""
    values = torch.arange(1.0, count + 1)
    return values.view(-1, 1, 1, 1).expand(count, 3, height, width).clone(), torch.eye(count)


def kept(targets: torch.Tensor) -> torch.Tensor:
    """The share that each image kept of its own class."""
    return targets.diagonal()


@law
@given(
    seed=st.integers(0, 2**40),
    step=st.integers(0, 10**6),
    mixing=st.sampled_from([MIXUP, CUTMIX, Mixing(), Mixing(probability=0.5)]),
    cut=st.integers(0, 4),
)
def test_mixing_slices_equals_mixing_the_batch(seed: int, step: int, mixing: Mixing, cut: int) -> None:
    images, targets = torch.rand(9, 3, 8, 8), torch.rand(9, 4)
    counters = {"seed": seed, "step": step}
    whole = mixing(images, targets, **counters)
    head = mixing(images[: 2 * cut], targets[: 2 * cut], **counters)
    tail = mixing(images[2 * cut :], targets[2 * cut :], first=2 * cut, **counters)
    for together, *parts in zip(whole, head, tail, strict=True):
        assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX])
def test_pixels_and_targets_are_mixed_in_the_same_proportion(mixing: Mixing) -> None:
    images, targets = batch()
    for step in range(50):
        mixed, soft = mixing(images, targets, seed=0, step=step)
        torch.testing.assert_close(soft.sum(dim=1), torch.ones(6))
        share = float(soft[0, 0])
        torch.testing.assert_close(kept(soft), torch.full((6,), share))
        torch.testing.assert_close(soft[1::2, ::2].diagonal(), torch.full((3,), 1 - share))
        # The mean brightness of a mixture of k + 1 and its neighbour reveals the share of each.
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), soft @ torch.arange(1.0, 7))


def test_mixup_is_the_same_everywhere_and_cutmix_a_box_of_the_partner() -> None:
    images, targets = batch()
    corners = set()
    for step in range(60):
        blended = MIXUP(images, targets, seed=0, step=step)[0]
        assert (blended.flatten(1).std(dim=1) < 1e-5).all()
        pasted = CUTMIX(images, targets, seed=0, step=step)[0]
        box = pasted[0, 0] == 2
        assert torch.equal(pasted[0, 0] == 1, ~box)
        assert torch.equal(box, box.any(dim=1, keepdim=True) & box.any(dim=0, keepdim=True))
        assert torch.equal((pasted[4, 0] == 6), box)  # the same box for all
        corners.add(tuple(box.nonzero()[0].tolist()) if box.any() else None)
    assert len(corners) > 20


def shares(mixing: Mixing, steps: int = 500) -> np.ndarray:
    images, targets = torch.zeros(2, 1, 2, 2), torch.eye(2)
    return np.array([float(mixing(images, targets, seed=0, step=step)[1][0, 0]) for step in range(steps)])


@pytest.mark.parametrize("alpha", [0.2, 0.8])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    found = shares(Mixing(mixup=alpha, cutmix=0.0))
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(found.mean() - 1 / 2) < 5 * (variance / len(found)) ** 0.5
    assert abs(found.var() - variance) < 0.12 * variance


def kinds(mixing: Mixing, steps: int) -> dict[str, float]:
    """The frequencies of unmixed, blended and pasted steps."""
    images, targets = batch(2, 16, 16)
    counts = {"nothing": 0, "mixup": 0, "cutmix": 0}
    for step in range(steps):
        mixed = mixing(images, targets, seed=0, step=step)[0]
        whole = bool((mixed == mixed.round()).all())
        counts["nothing" if mixed is images else "cutmix" if whole else "mixup"] += 1
    return {name: count / steps for name, count in counts.items()}


def test_options_set_the_frequency_of_mixup_and_cutmix() -> None:
    steps = 300
    for options, expected in (
        ({}, (0.0, 0.5, 0.5)),
        ({"switch": 0.2}, (0.0, 0.8, 0.2)),
        ({"probability": 0.6}, (0.4, 0.3, 0.3)),
        ({"mixup": 0.0, "switch": 0.0}, (0.0, 0.0, 1.0)),
        ({"cutmix": 0.0, "switch": 1.0}, (0.0, 1.0, 0.0)),
        ({"mixup": 0.0, "cutmix": 0.0}, (1.0, 0.0, 0.0)),
    ):
        for share, wanted in zip(kinds(Mixing(**options), steps).values(), expected, strict=True):
            # A box without pixels also leaves a batch unmixed.
            assert abs(share - wanted) <= 5 * (wanted * (1 - wanted) / steps) ** 0.5 + 0.01


def test_mixing_is_a_function_of_seed_and_step() -> None:
    images, targets = batch()
    first = MIXUP(images, targets, seed=1, step=2)[0]
    assert torch.equal(MIXUP(images, targets, seed=1, step=2)[0], first)
    assert not torch.equal(MIXUP(images, targets, seed=2, step=2)[0], first)
    assert not torch.equal(MIXUP(images, targets, seed=1, step=3)[0], first)


def test_invalid_numbers_are_rejected() -> None:
    for name, value in (("mixup", -0.1), ("cutmix", float("inf")), ("probability", 1.5), ("switch", -0.2)):
        with pytest.raises(UserError, match=f"{name}.*{value:g}"):
            Mixing(**{name: value})
