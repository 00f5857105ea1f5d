"""Mixup and CutMix: images and their targets mixed in pairs, alike in every slice of a global batch."""

import dataclasses
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from vitascope.arguments import CheckedFields, Range
from vitascope.data.randomness import step_seed
from vitascope.models.engines.transfer import to_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixing(CheckedFields):
    """Mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019), one of them for a whole optimizer step.

    The choice and the share are f(seed, step) for all images of a step (timm's mode "batch"). Partners are
    neighbours, the images 2k and 2k + 1 of the global batch, so that a process or an accumulation step mixes
    its own slice with the same result as the whole batch.
    """

    mixup: Annotated[float, Range(ge=0)] = (
        0.8  # both parameters of Mixup's beta distribution; 0 turns Mixup off
    )
    cutmix: Annotated[float, Range(ge=0)] = (
        1.0  # both parameters of CutMix's beta distribution; 0 turns CutMix off
    )
    probability: Annotated[float, Range(ge=0, le=1)] = 1.0  # share of the steps that are mixed
    switch: Annotated[float, Range(ge=0, le=1)] = 0.5  # share of CutMix in the mixed steps, where both are on

    def __call__(
        self, images: Tensor, targets: Tensor, *, seed: int, step: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) mixed with their neighbours, and targets (B, K) in the same proportion.

        `first` is the place of the slice's first image in the global batch. The last image of an odd batch
        has no partner and stays as it is; the same tensors are returned where nothing is mixed.
        """
        assert first % 2 == 0, "the partner of an odd position is in another slice"
        share, box = self._draw(seed, step, *images.shape[2:])
        if share == 1:
            return images, targets
        shares = to_device(np.array([[share, 1 - share], [1 - share, share]], np.float32), images.device)
        if box is None:
            return _mix(images, shares), _mix(targets, shares)
        paired, pasted = 2 * (len(images) // 2), images.clone()  # CutMix: the partner's pixels inside the box
        pasted[:paired, :, *box] = _pairs(images[..., *box]).flip(1).flatten(0, 1)
        return pasted, _mix(targets, shares)

    def _draw(
        self, seed: int, step: int, height: int, width: int
    ) -> tuple[float, tuple[slice, slice] | None]:
        """An image's own share (lambda in both papers), and CutMix's box of rows and columns."""
        generator = np.random.default_rng(step_seed(seed, step))
        mixed, which, y, x = generator.random(4)
        cut = bool(which < self.switch) if self.mixup and self.cutmix else bool(self.cutmix)
        alpha = self.cutmix if cut else self.mixup
        if not alpha or mixed >= self.probability:
            return 1.0, None
        share = float(generator.beta(alpha, alpha))
        if not cut:
            return share, None
        box = _interval(y, height, (1 - share) ** 0.5), _interval(x, width, (1 - share) ** 0.5)
        area = (box[0].stop - box[0].start) * (box[1].stop - box[1].start)
        return 1 - area / (height * width), box  # of the box that is left inside the picture


def _interval(centre: float, length: int, share: float) -> slice:
    """A share of a side of `length` pixels, about the point `centre` in [0, 1), cut off at the border."""
    size, middle = int(length * share), int(centre * length)
    return slice(max(middle - size // 2, 0), min(middle + (size + 1) // 2, length))


def _pairs(values: Tensor) -> Tensor:
    """The pairs of neighbours, (B // 2, 2, ...); the last of an odd batch is left out."""
    pairs = len(values) // 2
    return values[: 2 * pairs].unflatten(0, (pairs, 2))


def _mix(values: Tensor, shares: Tensor) -> Tensor:
    """Mixup: lambda x + (1 - lambda) x', of images and of targets, by a product with `shares` (2, 2)."""
    pairs = _pairs(values)
    mixed = torch.bmm(shares.expand(len(pairs), -1, -1), pairs.flatten(2)).view(-1, *values.shape[1:])
    return torch.cat([mixed, values[-1:]]) if len(values) % 2 else mixed
