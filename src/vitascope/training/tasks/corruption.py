"""The hidden patches of each image: functions of the seed, the epoch and the image's index, on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitascope.data.changes import together
from vitascope.data.randomness import fractions, random_bits, sorting_keys
from vitascope.errors import UserError

MASKED, REPLACED = 0.8, 0.1
"""The shares of the corrupted patches that become [mask] and another patch; the others stay."""
_STREAM = 0x6D61736B
"""Makes the corruption independent of the augmentation, which draws from the same seed and epoch."""


class Corruption(NamedTuple):
    """The n corrupted patches of each image and their replacements, (B, n) each."""

    places: Tensor
    """Positions of the corrupted patches, ascending; int64."""
    sources: Tensor
    """Positions of the patches whose embeddings are used instead, perhaps the same ones; int64."""
    masked: Tensor
    """Whether [mask] is used instead; boolean."""


class RandomMask(NamedTuple):
    """The n hidden and the N - n visible patches of each image."""

    places: Tensor
    """Positions of the hidden patches, ascending; int64 (B, n)."""
    visible: Tensor
    """Positions of the others, ascending; int64 (B, N - n)."""

    @property
    def sources(self) -> Tensor:
        """No patch is replaced by another: the positions of the hidden patches, (B, n)."""
        return self.places

    @property
    def masked(self) -> Tensor:
        """Every hidden patch becomes a mask token: true, boolean (B, n)."""
        return torch.ones_like(self.places, dtype=torch.bool)


def on_device(drawn: Corruption | RandomMask, device: torch.device) -> Corruption | RandomMask:
    """The same on a device."""
    return type(drawn)(*together([field.numpy() for field in drawn], device))


def num_corrupted(num_patches: int, share: float) -> int:
    """The number n of corrupted patches per image: the share, rounded."""
    count = round(share * num_patches)
    if not 0 < count < num_patches:
        raise UserError(
            f"corrupt {share:g} of {num_patches} patches is {count}: some must be hidden and some visible; "
            "choose another share or smaller patches"
        )
    return count


def corruption(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], num_patches: int, share: float
) -> Corruption:
    """Draw the corruption of Dosovitskiy et al. 2021, appendix B.1.2."""
    # Another patch is an uncorrupted one of the same image: results do not depend on the batch, and no hidden
    # patch becomes visible elsewhere.
    N, n = num_patches, num_corrupted(num_patches, share)
    bits = random_bits(seed ^ _STREAM, epoch, indices, N + 2 * n)
    keys, mask = sorting_keys(bits[:, :N])
    shuffled = np.sort(keys, axis=1)
    places = _places(keys < shuffled[:, n : n + 1], n)  # (B, n): of the n smallest keys
    seen = (shuffled[:, n:] & mask).astype(np.int64)  # (B, N - n), in random order
    kind, other = np.split(fractions(bits[:, N:]), 2, axis=1)  # (B, n) each
    others = np.take_along_axis(seen, (other * (N - n)).astype(np.int64), axis=1)  # (B, n)
    replaced = (kind >= MASKED) & (kind < MASKED + REPLACED)
    sources = np.where(replaced, others, places)
    return Corruption(*(torch.from_numpy(field) for field in (places, sources, kind < MASKED)))


def random_mask(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], num_patches: int, share: float
) -> RandomMask:
    """Draw the hidden patches of a masked autoencoder (He et al. 2022, section 3, "Masking")."""
    n = num_corrupted(num_patches, share)
    keys, _ = sorting_keys(random_bits(seed ^ _STREAM, epoch, indices, num_patches))
    hidden = keys < np.partition(keys, n, axis=1)[:, n : n + 1]  # (B, N): those with the n smallest keys
    parts = _places(hidden, n), _places(~hidden, num_patches - n)
    return RandomMask(*(torch.from_numpy(part) for part in parts))


def _places(marked: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.int64]:
    """The ascending positions of the marked patches, `count` in each image: (B, N) -> (B, count)."""
    images, patches = marked.shape
    return np.flatnonzero(marked).reshape(images, count) - patches * np.arange(images)[:, None]
