"""scikit-learn's digits, embedded: 1,797 grey images of 8x8 pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vitascope.data.formats.format import DataFormat
from vitascope.data.splits import ImageSet, Inventory

NAME = "digits"


class Digits(DataFormat):
    """`digits`: 20% (stratified, random_state 0) are the test set."""

    def matches(self, data: str) -> bool:
        return data == NAME

    def read(self, data: str) -> Inventory:
        pixels, labels, rest, test = digits_arrays()
        everything = ImageSet("all", list(pixels), labels, tuple("0123456789"))
        sets = (everything.subset("train", rest), everything.subset("test", test))
        return Inventory(sets, channels=1, root=None)


def digits_arrays() -> tuple[
    npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]
]:
    """Pixels (1797, 8, 8), labels, and the indices of the 80% and of the 20% for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0..16
    labels = digits.target.astype(np.int64)
    rest, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return pixels, labels, rest, test


def digits_baseline() -> float:
    """Test accuracy of scikit-learn's `SVC()` with its own defaults on `digits`; it trains on all 80%."""
    from sklearn.svm import SVC

    pixels, labels, rest, test = digits_arrays()
    flat = pixels.reshape(-1, 64)  # (1797, 64)
    return float((SVC().fit(flat[rest], labels[rest]).predict(flat[test]) == labels[test]).mean())
