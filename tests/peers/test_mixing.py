"""Mixup and CutMix against timm's, given the same lambda and the same box."""

from typing import Any

import numpy as np
import pytest
import torch

from vitascope.data import mixing
from vitascope.data.mixing import Mixing

timm_mixup = pytest.importorskip("timm.data.mixup", reason="timm is not installed (vitascope[peers])")

ORDER = [0, 2, 4, 5, 3, 1]  # timm pairs the first with the last, and so on inwards; ours are neighbours


def soft_targets(labels: torch.Tensor, num_classes: int, smoothing: float) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def timm_mixed(images: torch.Tensor, labels: torch.Tensor, smoothing: float) -> Any:
    mixed, targets = timm_mixup.Mixup(mixup_alpha=0.8, num_classes=5, label_smoothing=smoothing)(
        images[ORDER].clone(), labels[ORDER]
    )
    back = np.argsort(ORDER)
    return mixed[back], targets[back]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixup_equals_timm(smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = torch.rand(6, 3, 10, 14), torch.tensor([0, 3, 1, 4, 2, 2])
    monkeypatch.setattr(Mixing, "_draw", lambda *_: (0.37, None))
    monkeypatch.setattr(timm_mixup.Mixup, "_params_per_batch", lambda _: (0.37, False))
    found = Mixing()(images, soft_targets(labels, 5, smoothing), seed=0, step=0)
    for mine, theirs in zip(found, timm_mixed(images, labels, smoothing), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("centre", [(0.0, 0.99), (0.5, 0.5), (0.93, 0.2)])
def test_cutmix_equals_timm(
    share: float, centre: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Given:
        """A generator that draws given numbers."""

        def random(self, _: int) -> list[float]:
            return [0.0, 0.0, *centre]

        def beta(self, *_: float) -> float:
            return share

    images, labels = torch.rand(6, 3, 10, 14), torch.tensor([0, 3, 1, 4, 2, 2])
    middles = iter([int(centre[0] * 10), int(centre[1] * 14)])
    monkeypatch.setattr(timm_mixup.Mixup, "_params_per_batch", lambda _: (share, True))
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(middles))
    theirs = timm_mixed(images, labels, 0.1)
    monkeypatch.setattr(mixing.np.random, "default_rng", lambda _: Given())
    found = Mixing()(images, soft_targets(labels, 5, 0.1), seed=0, step=0)
    for mine, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(mine, other)
