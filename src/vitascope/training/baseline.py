"""A baseline on scikit-learn's digits, to compare a run with."""

from __future__ import annotations

import numpy as np

from vitascope.data.datasets import read_data


def digits_baseline() -> float:
    """Test accuracy of scikit-learn's `SVC()` with its own defaults on `digits`; it trains on all 80%."""
    from sklearn.svm import SVC

    rest, test = read_data("digits").sets
    flat, unseen = (np.array(images.sources).reshape(-1, 64) for images in (rest, test))  # (N, 64) each
    return float((SVC().fit(flat, rest.labels).predict(unseen) == test.labels).mean())
