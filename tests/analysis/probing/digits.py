"""scikit-learn's digits as features of 64 pixels."""

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

from vitascope.data.targets import ClassIndices, ClassSets

PIXELS, LABELS = load_digits(return_X_y=True)
DIGITS = ClassIndices(LABELS.astype(np.int64), tuple("0123456789"))
PROPERTIES = ClassSets(
    np.stack([LABELS % 2 == 0, LABELS > 4, np.isin(LABELS, (0, 6, 8, 9))], axis=1), ("even", "large", "loop")
)
"""Several classes per image."""


def drawn(seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(len(LABELS))
