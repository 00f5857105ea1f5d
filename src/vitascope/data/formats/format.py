"""The interface of the formats in `datasets.FORMATS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from vitascope.data.decoding import ImageSource
from vitascope.data.splits import ImageSet, Inventory, Splits


class DataFormat(ABC):
    """A way to store a data set.

    `data` is always a path or a name. A format recognizes its own data and opens them; the other
    methods follow from `open`, unless a format overrides them.
    """

    @abstractmethod
    def matches(self, data: str) -> bool:
        """Whether the data are in this format."""

    @abstractmethod
    def open(self, data: str, *, seed: int) -> Splits:
        """The splits, with missing ones drawn by seed; raises UserError if the data are damaged."""

    def open_unlabelled(self, data: str, *, seed: int) -> Splits:
        """The splits for training without labels."""
        return self.open(data, seed=seed)

    def evaluation_set(self, data: str, class_names: tuple[str, ...]) -> ImageSet:
        """The images to measure a model on, labelled by the positions in the model's class names."""
        return self.open(data, seed=0).final.in_classes(class_names, data)

    def images_to_show(self, data: str) -> Sequence[ImageSource]:
        """The images of the test split, else of `val`, else all."""
        return self.open(data, seed=0).final.sources

    def inventory(self, data: str, *, seed: int) -> Inventory:
        """All images, in any split."""
        splits = self.open(data, seed=seed)
        return Inventory(tuple(splits.parts.values()), splits.channels, splits.root)


class DataPackage(ABC):
    """A data set that is downloaded or unpacked before its format is recognized."""

    @abstractmethod
    def matches(self, data: str) -> bool:
        """Whether the data are packaged in this way."""

    @abstractmethod
    def contents(self, data: str) -> Path:
        """The file or folder inside the package."""
