"""The interface of the formats in `datasets.FORMATS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from vitascope.data.decoding import ImageSource
from vitascope.data.splits import ImageSet, Inventory, Splits, complete_splits


class DataFormat(ABC):
    """A way to store a data set.

    `data` is always a path or a name. A format recognizes its own data and reads them; the other
    methods follow from `read`, unless a format overrides them.
    """

    @abstractmethod
    def matches(self, data: str) -> bool:
        """Whether the data are in this format."""

    @abstractmethod
    def read(self, data: str) -> Inventory:
        """The splits that the data have: `train` and perhaps `val` and `test`, or `all` images in one.

        Raises:
            UserError: the data are damaged.
        """

    def open(self, data: str, *, seed: int) -> Splits:
        """The splits, with missing ones drawn by seed; errors as `read`."""
        return complete_splits(self.read(data), data, seed=seed)

    def open_unlabelled(self, data: str, *, seed: int) -> Splits:
        """The splits for training without labels."""
        return self.open(data, seed=seed)

    def evaluation_set(self, data: str, class_names: tuple[str, ...]) -> ImageSet:
        """The images to measure a model on, labelled by the positions in the model's class names."""
        return self._final(data).in_classes(class_names, data)

    def images_to_show(self, data: str) -> Sequence[ImageSource]:
        """The images of the test split, else of `val`, else all."""
        return self._final(data).sources

    def _final(self, data: str) -> ImageSet:
        """The test split, else `val`; where neither is given, the one that is drawn."""
        found = self.read(data)
        given = found.by_name
        split = next((split for split in ("test", "val") if split in given), None)
        return complete_splits(found, data, seed=0).final if split is None else given[split]

    def inventory(self, data: str) -> Inventory:
        """All images, in any split, to find those of an earlier one."""
        return self.read(data)


class DataPackage(ABC):
    """A data set that is downloaded or unpacked before its format is recognized."""

    @abstractmethod
    def matches(self, data: str) -> bool:
        """Whether the data are packaged in this way."""

    @abstractmethod
    def contents(self, data: str) -> Path:
        """The file or folder inside the package."""
