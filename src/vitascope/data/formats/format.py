"""The interface of the formats in `datasets.FORMATS`."""

from abc import ABC, abstractmethod
from pathlib import Path

from vitascope.data.splits import Inventory


class DataFormat(ABC):
    """A way to store a data set: a format recognizes its own data and reads them.

    `data` is always a path or a name. `datasets` divides, measures, shows and lists what `read` returns.
    """

    @abstractmethod
    def matches(self, data: str) -> bool:
        """Whether the data are in this format."""

    @abstractmethod
    def read(self, data: str) -> Inventory:
        """The images that the data have, in the splits `train`, `val` and `test`, or in `all`.

        Raises:
            UserError: the data are damaged.
        """


class DataPackage(ABC):
    """A data set that is downloaded or unpacked before its format is recognized."""

    @abstractmethod
    def matches(self, data: str) -> bool:
        """Whether the data are packaged in this way."""

    @abstractmethod
    def contents(self, data: str) -> Path:
        """The file or folder inside the package."""
