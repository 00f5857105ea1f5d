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


def leaked(train: ImageSet, *measured: ImageSet) -> list[npt.NDArray[np.bool_]]:
    """For each set of M measured images, whether they are copies or near-copies of training images, (M,), by
    their perceptual hashes; an empty list for more than `MOST` images in all."""
    sizes = [len(images) for images in (train, *measured)]
    if sum(sizes) > MOST:
        return []
    pairs = near_duplicates(look_at([source for images in (train, *measured) for source in images.sources]))
    mask = np.zeros(sum(sizes), dtype=np.bool_)
    mask[[pair.second for pair in pairs if pair.first < len(train) <= pair.second]] = True
    return np.split(mask, np.cumsum(sizes)[:-1])[1:]


def leaks_in_words(splits: Splits) -> str:
    """A line on the images of other parts that have a near-copy in training; empty without any."""
    others = {name: images for name, images in splits.parts.items() if name != "train"}
    masks = zip(others, leaked(splits.train, *others.values()), strict=False)
    counts = [
        f"{mask.sum():,} of {counted(len(mask), f'{name} image')}" for name, mask in masks if mask.any()
    ]
    if not counts:
        return ""
    return f"{' and '.join(counts)} have a near-copy in training: `vitascope audit` shows them"
