"""scikit-learn's digits, embedded: 1,797 grey images of 8x8 pixels."""

from __future__ import annotations

import numpy as np

from vitascope.data.formats.format import DataFormat
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.targets import ClassIndices

NAME = "digits"


class Digits(DataFormat):
    """`digits`: 20% (stratified, random_state 0) are the test set; pixels are uint8 (8, 8)."""

    def matches(self, data: str) -> bool:
        return data == NAME

    def read(self, data: str) -> Inventory:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0..16
        labels = digits.target.astype(np.int64)
        rest, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
        everything = ImageSet("all", list(pixels), ClassIndices(labels, tuple("0123456789")))
        sets = (everything.subset("train", rest), everything.subset("test", test))
        return Inventory(sets, channels=1, root=None)
