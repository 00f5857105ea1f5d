"""Balanced sampling: epochs in which every class occurs equally often."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vitascope.data.splits import ImageSet

_STREAM = 0x62616C61
"""Makes the choice of the images independent of their order, which is drawn from the same seed and epoch."""


def balanced_order(
    images: ImageSet, among: npt.NDArray[np.int64], seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """An epoch of len(among) places for the images `among` (indices), each class equally often: (n,).

    Each of the K classes gets n // K places, and n % K random ones get one more. The places of a class take
    its images in turn, in a random order: a small class has repetitions, a large one has images that are left
    out. The r-th repetition of an image, r from 1, has its index plus r len(images), so that random draws by
    index differ. Every class must have an image.
    """
    N, K, n = len(images), len(images.class_names), len(among)
    generator = np.random.default_rng([seed, epoch, _STREAM])
    places = np.full(K, n // K)
    places[generator.permutation(K)[: n % K]] += 1
    chosen = []
    for members, count in zip(images.truth.take(among).by_class(), places, strict=True):
        turn = np.arange(count)
        mixed = generator.permutation(among[members])
        chosen.append(mixed[turn % len(members)] + N * (turn // len(members)))
    drawn = np.concatenate(chosen)
    # In the set's own order: shards are read forward.
    return drawn[images.subset(images.name, drawn % N).order(seed, epoch)]
