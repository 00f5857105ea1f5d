"""Copies: images of a data set whose content another one has too."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from vitascope.data.contents import first_of_content, image_name
from vitascope.data.splits import Splits
from vitascope.errors import printable
from vitascope.formatting import counted

_NAMED = 3  # pairs of images that a message names


@dataclasses.dataclass(frozen=True)
class Copies:
    """The images of a data set that have the content of another one."""

    count: int
    """Without the first image of each content."""
    across: dict[str, int]
    """By split, the images with the content of one in an earlier split; splits without any are left out."""
    mislabelled: tuple[tuple[str, str], ...]
    """For each content with two labels, the names of two such images."""

    def described(self) -> list[str]:
        """A line with the number of copies; empty if there are none."""
        if not self.count:
            return []
        be = "is a copy of another" if self.count == 1 else "are copies of others"
        return [f"{counted(self.count, 'image')} {be}"]

    def warnings(self, *, labelled: bool = True) -> list[str]:
        """What is wrong with the copies: they lie in two splits, or have two labels."""
        found = []
        if self.across:
            listed = " and ".join(f"{count:,} {split}" for split, count in self.across.items())
            found.append(
                f"{listed} images are copies of images in another split, which makes the accuracy look too "
                "high: remove them, or put all images into one folder per class: vitascope's own splits keep "
                "copies together"
            )
        if self.mislabelled and labelled:
            pairs = ", ".join(f"{one} = {other}" for one, other in self.mislabelled[:_NAMED])
            more = ", ..." if len(self.mislabelled) > _NAMED else ""
            contents = counted(len(self.mislabelled), "picture")
            found.append(f"{contents} with two labels: {pairs}{more}; keep each in one class")
        return [printable(warning) for warning in found]


def find_copies(splits: Splits) -> Copies:
    """The copies in a data set; reads the contents that are not known yet."""
    parts = list(splits.identified().parts.values())
    sizes = [len(images) for images in parts]
    part = np.repeat(np.arange(len(parts)), sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    first = first_of_content(np.concatenate([images.contents for images in parts]))

    def name(index: int) -> str:
        images, place = parts[part[index]], int(row[index])
        return image_name(images.sources[place], splits.root) or f"{images.name} image {place}"

    copies = np.flatnonzero(first != np.arange(len(first)))
    across = np.bincount(part[copies][part[first[copies]] < part[copies]], minlength=len(parts))
    other = copies[:0]
    if splits.train.targets is not None:
        targets = functools.reduce(lambda one, more: one.joined(more), [images.truth for images in parts])
        other = copies[targets.differ(first[copies], copies)]
    firsts, places = np.unique(first[other], return_index=True)
    return Copies(
        count=len(copies),
        across={images.name: int(count) for images, count in zip(parts, across, strict=True) if count},
        mislabelled=tuple(
            (name(one), name(another)) for one, another in zip(firsts, other[places], strict=True)
        ),
    )
