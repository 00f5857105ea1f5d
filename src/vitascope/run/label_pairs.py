"""Pairs of classes of images that may have several: which occur together, and which are confused."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.sparse import csr_array

from vitascope.run.label_measures import Bools


@dataclasses.dataclass(frozen=True)
class ClassPair:
    """Two of the K classes, and a number of images."""

    first: int
    second: int
    count: int


def pairs_together(labels: Bools, count: int) -> list[ClassPair]:
    """At most `count` pairs of classes that images (N, K) have together, the most frequent first."""
    own = csr_array(labels, dtype=np.int64)
    return _most_frequent(own.T @ own, count, ordered=False)


def pairs_confused(labels: Bools, answers: Bools, count: int) -> list[ClassPair]:
    """At most `count` pairs of a class that images have without its prediction, and a class that is predicted
    for them without being theirs, (N, K) each; the most frequent first."""
    missed, wrong = (csr_array(where, dtype=np.int64) for where in (labels & ~answers, ~labels & answers))
    return _most_frequent(missed.T @ wrong, count, ordered=True)


def _most_frequent(counts: csr_array, count: int, *, ordered: bool) -> list[ClassPair]:
    """The largest counts (K, K) of two classes; the counts are symmetric unless the pairs are `ordered`."""
    found = counts.tocoo()
    rows, columns = found.coords
    kept = (found.data > 0) & ((rows != columns) if ordered else (rows < columns))
    rows, columns, values = rows[kept], columns[kept], found.data[kept]
    order = np.lexsort((columns, rows, -values))[:count]
    return [ClassPair(int(rows[k]), int(columns[k]), int(values[k])) for k in order]
