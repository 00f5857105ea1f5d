"""scikit-learn's digits, embedded: 1,797 grey images of 8x8 pixels."""

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.data.formats.format import DataFormat
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.targets import ClassIndices

NAME = "digits"
TEST_SHARE = 0.2


class Digits(DataFormat):
    """`digits`: 20% (stratified, random_state 0) are the test set; pixels are uint8 (8, 8)."""

    def matches(self, data: str) -> bool:
        return data == NAME

    def read(self, data: str) -> Inventory:
        rows = np.loadtxt(_file(), delimiter=",", dtype=np.int64)  # (N, 64 pixels and the digit)
        pixels = np.rint(rows[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)  # stored as 0..16
        labels = rows[:, 64]
        everything = ImageSet("all", list(pixels), ClassIndices(labels, tuple("0123456789")))
        rest, test = stratified_halves(labels, TEST_SHARE, np.random.RandomState(0))
        sets = (everything.subset("train", rest), everything.subset("test", test))
        return Inventory(sets, channels=1, root=None)


def _file() -> Path:
    """What `sklearn.datasets.load_digits` reads; importing scikit-learn takes longer than training."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None, "a dependency"
    assert package.submodule_search_locations, "a package"
    return Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def stratified_halves(
    labels: npt.NDArray[np.int64], share: float, generator: np.random.RandomState
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The images, in random order, that scikit-learn's `train_test_split` puts into its two parts.

    Each class has its share in the second part, up to one image; those whose share was rounded most get one
    more in the first. Labels (N,) are 0 to K - 1, each of which occurs.
    """
    counts = np.bincount(labels)
    num_first = len(labels) - int(np.ceil(share * len(labels)))
    exact = counts / len(labels) * num_first
    first = np.floor(exact)
    while missing := num_first - int(first.sum()):
        rounded = np.where(first > exact, -1, exact - first)
        most = np.flatnonzero(rounded == rounded.max())
        first[generator.choice(most, size=min(len(most), missing), replace=False)] += 1
    parts: tuple[list[int], list[int]] = ([], [])
    for k, count in enumerate(counts):
        shuffled = np.flatnonzero(labels == k)[generator.permutation(count)]
        parts[0].extend(shuffled[: int(first[k])])
        parts[1].extend(shuffled[int(first[k]) :])
    return generator.permutation(parts[0]), generator.permutation(parts[1])
