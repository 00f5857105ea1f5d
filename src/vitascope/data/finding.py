"""A finding: what may be wrong with an image, a pair of images, a class or a whole data set."""

import dataclasses
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

Issue = Literal[
    "leak",
    "unreadable",
    "copy",
    "near-duplicate",
    "label",
    "off-topic",
    "dark",
    "bright",
    "blurred",
    "empty",
    "shape",
    "grey",
    "shortcut",
    "group",
]
ISSUES: tuple[Issue, ...] = get_args(Issue)
"""In the order of the page."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What may be wrong.

    Attributes:
        issue: its kind.
        score: from 0 to 1; the highest is the worst.
        detail: what was seen, in words and numbers.
        image: the index of the image; None for a class, a group or all images.
        other: the index of the other image of a pair.
        drop: whether the image can go; otherwise only a person can tell.
        label: the class to relabel to, or "".
    """

    issue: Issue
    score: float
    detail: str
    image: int | None = None
    other: int | None = None
    drop: bool = False
    label: str = ""

    @property
    def suggestion(self) -> str:
        """What to do."""
        return f"relabel {self.label}" if self.label else "drop" if self.drop else "look"

    @property
    def images(self) -> list[int]:
        """The images that it is about: none, one, or two."""
        return [image for image in (self.image, self.other) if image is not None]

    def at(self, places: npt.NDArray[np.int64]) -> Self:
        """The same about other indices: those at the places of its own."""
        image, other = (None if index is None else int(places[index]) for index in (self.image, self.other))
        return dataclasses.replace(self, image=image, other=other)
