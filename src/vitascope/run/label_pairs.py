"""Pairs of classes of images that may have several: which occur together, and which are confused."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy  # whose parts are imported when they are used

from vitascope.run.average_precision import Bools


@dataclasses.dataclass(frozen=True)
class ClassPair:
    """Two of the K classes, and a number of images."""

    first: int
    second: int
    count: int


def pairs_together(labels: Bools, count: int) -> list[ClassPair]:
    """At most `count` pairs of classes that images (N, K) have together, the most frequent first."""
    own = scipy.sparse.csr_array(labels, dtype=np.int64)
    return _most_frequent(scipy.sparse.triu(own.T @ own, k=1), count)  # each pair once


def pairs_confused(labels: Bools, answers: Bools, count: int) -> list[ClassPair]:
    """At most `count` pairs of a class that images have without its prediction, and a class that is predicted
    for them without being theirs, (N, K) each; the most frequent first."""
    missed, wrong = (
        scipy.sparse.csr_array(where, dtype=np.int64) for where in (labels & ~answers, ~labels & answers)
    )
    return _most_frequent(missed.T @ wrong, count)


def _most_frequent(counts: scipy.sparse.sparray, count: int) -> list[ClassPair]:
    """The largest of the counts (K, K)."""
    found = counts.tocoo()
    order = np.lexsort((found.col, found.row, -found.data))[:count]
    return [ClassPair(int(found.row[k]), int(found.col[k]), int(found.data[k])) for k in order]
