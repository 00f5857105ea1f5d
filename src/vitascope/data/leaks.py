"""What a training and an evaluation notice of pictures: near-copies in training, one shade, several pages."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vitascope.data.datasets import SAMPLE
from vitascope.data.duplicates import near_duplicates
from vitascope.data.looks import Looks, look_at
from vitascope.data.splits import ImageSet, Splits
from vitascope.formatting import counted

MOST = 5000
"""Images that are looked at, which takes a few seconds; `vitascope audit` looks at any number."""


def leaked(train: ImageSet, *measured: ImageSet) -> list[npt.NDArray[np.bool_]]:
    """For each set of M measured images, whether they are copies or near-copies of training images, (M,), by
    their perceptual hashes; an empty list for more than `MOST` images in all."""
    sizes = [len(images) for images in (train, *measured)]
    return [] if sum(sizes) > MOST else _leaked(_looks([train, *measured]), sizes)


def seen_in_words(splits: Splits) -> list[str]:
    """Lines on the images of other parts that have a near-copy in training, on pictures of one shade, and on
    those of which the first page counts. Of more than `MOST` images, some training images are looked at, for
    the last two."""
    parts = splits.parts
    sizes, lines = [len(images) for images in parts.values()], []
    every = sum(sizes) <= MOST
    looks = _looks(
        list(parts.values())
        if every
        else [splits.train.subset("train", np.array(splits.train.spread(SAMPLE)))]
    )
    masks = _leaked(looks, sizes) if every else []
    counts = [
        f"{mask.sum():,} of {counted(len(mask), f'{name} image')}"
        for name, mask in zip(list(parts)[1:], masks, strict=False)
        if mask.any()
    ]
    if counts:
        lines.append(f"{' and '.join(counts)} have a near-copy in training: `vitascope audit` shows them")
    of = counted(len(looks), "image") if every else f"{len(looks):,} training images that were looked at"
    if plain := int(looks["plain"].sum()):
        lines.append(f"{plain:,} of {of} are of one shade, as white on a transparent ground is")
    if several := int((looks["pages"] > 1).sum()):
        lines.append(f"{several:,} of {of} have several pages or frames: the first counts")
    return lines


def _looks(sets: Sequence[ImageSet]) -> Looks:
    return look_at([source for images in sets for source in images.sources])


def _leaked(looks: Looks, sizes: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """As `leaked`, by the looks of all images of sets of these sizes, the training set first."""
    mask = np.zeros(len(looks), dtype=np.bool_)
    mask[[pair.second for pair in near_duplicates(looks) if pair.first < sizes[0] <= pair.second]] = True
    return np.split(mask, np.cumsum(sizes)[:-1])[1:]
