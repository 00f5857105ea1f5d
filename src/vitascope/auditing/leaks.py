"""Images with a near-copy in the training images, as far as a training and an evaluation look for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vitascope.auditing.duplicates import near_duplicates
from vitascope.auditing.looks import look_at
from vitascope.data.splits import ImageSet, Splits
from vitascope.formatting import counted

MOST = 5000
"""Images that are looked at, which takes a few seconds; `vitascope audit` looks at any number."""


def leaked(train: ImageSet, measured: ImageSet) -> npt.NDArray[np.bool_] | None:
    """Whether each of M measured images is a copy or near-copy of a training image, (M,), by its perceptual
    hash; None for more than `MOST` images."""
    N, M = len(train), len(measured)
    if N + M > MOST:
        return None
    pairs = near_duplicates(look_at([*train.sources, *measured.sources]))
    mask = np.zeros(M, dtype=np.bool_)
    mask[[pair.second - N for pair in pairs if pair.first < N <= pair.second]] = True
    return mask


def leaks_in_words(splits: Splits) -> str:
    """A line on the images of other parts that have a near-copy in training; empty without any."""
    counts = []
    for name, images in splits.parts.items():
        mask = leaked(splits.train, images) if name != "train" else None
        if mask is not None and mask.any():
            counts.append(f"{mask.sum():,} of {counted(len(mask), f'{name} image')}")
    if not counts:
        return ""
    return f"{' and '.join(counts)} have a near-copy in training: `vitascope audit` shows them"
