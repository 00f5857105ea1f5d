"""Which pictures to label next: typical and different ones, or those that a classifier is unsure of."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from vitascope.formatting import counted

Features = npt.NDArray[np.floating]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

CENTRES = 256
"""Of k-means, among whose nearest pictures typical ones are chosen at a time."""
SAMPLE = 20_000
"""The most pictures that k-means is fitted to; others go to the nearest centre."""
POOL = 5
"""The unsure pictures are spread over clusters of so many times their number."""
UNSURE = "unlike the training images"


@dataclasses.dataclass(frozen=True)
class NextPicture:
    """A picture to label.

    Attributes:
        index: among the N pictures.
        reason: why it is offered, in words.
        copies: the indices of its near-copies, which its label holds for.
    """

    index: int
    reason: str
    copies: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Opinion:
    """What a classifier says of N pictures.

    Attributes:
        probabilities: (N, K).
        class_names: of the K classes.
        thresholds: from which probability on each class applies, (K,), where several may; else empty.
        unfamiliar: whether each picture is unlike the training images, (N,); None where it is not known.
    """

    probabilities: npt.NDArray[np.floating]
    class_names: Sequence[str]
    thresholds: Sequence[float] = ()
    unfamiliar: Mask | None = None

    def margins(self) -> Floats:
        """How sure the classifier is, (N,): the difference of the two largest probabilities, or the least
        difference to a threshold; 0 for an unfamiliar picture."""
        values = self.probabilities.astype(np.float64)
        if self.thresholds:
            margins = np.abs(values - np.asarray(self.thresholds)).min(axis=1, initial=1.0)
        else:
            ordered = np.sort(np.pad(values, ((0, 0), (2, 0))), axis=1)  # 0 for the missing classes
            margins = ordered[:, -1] - ordered[:, -2]
        return margins if self.unfamiliar is None else np.where(self.unfamiliar, 0.0, margins)

    def reason(self, index: int) -> str:
        """Why a picture is worth a label, in words: `cat or dog, 51% to 48%`."""
        if self.unfamiliar is not None and self.unfamiliar[index]:
            return UNSURE
        values, names = self.probabilities[index], self.class_names
        if self.thresholds:
            near = int(np.abs(values - np.asarray(self.thresholds)).argmin())
            return f"{names[near]}, {values[near]:.0%}, and it applies from {self.thresholds[near]:.0%} on"
        first, *others = np.argsort(-values, kind="stable")[:2].tolist()
        if not others:
            return f"{names[first]}, {values[first]:.0%}"
        (second,) = others
        return f"{names[first]} or {names[second]}, {values[first]:.0%} to {values[second]:.0%}"


def next_pictures(
    features: Features,
    count: int,
    *,
    labelled: Mask | None = None,
    opinion: Opinion | None = None,
    groups: Integers | None = None,
    seed: int = 0,
) -> list[NextPicture]:
    """At most `count` of N pictures in the order in which labels tell the most.

    Without an opinion they are typical of many pictures and different from each other and from the labelled
    ones (`typical`), else those that the classifier is unsure of (`unsure`). Of near-copies one is offered,
    and none if one of them is labelled.

    Args:
        features: (N, D).
        count: the most pictures.
        labelled: which pictures have a label, (N,).
        opinion: what a classifier that was fitted to labels says of the N pictures.
        groups: the group of near-copies of each picture, (N,), of `data.duplicates.groups_of`.
        seed: of k-means, and of the order of equals.
    """
    N = len(features)
    has_label = np.zeros(N, np.bool_) if labelled is None else labelled
    of_group = np.arange(N) if groups is None else groups
    order = _reproducible(features, seed)
    order = order[~np.isin(of_group[order], of_group[has_label])]
    order = order[np.sort(np.unique(of_group[order], return_index=True)[1])]  # the first of each group
    unit = _unit(features)
    if opinion is None:
        chosen = order[typical(unit[order], count, unit[has_label], seed)]
        nearest = np.argmax(unit[order] @ unit[chosen].T, axis=1) if len(chosen) else np.arange(0)
        sizes = np.bincount(nearest, minlength=len(chosen)).tolist()
        reasons = [f"typical of {counted(size, 'picture')}" for size in sizes]
    else:
        chosen = order[unsure(unit[order], opinion.margins()[order], count, seed)]
        reasons = list(map(opinion.reason, chosen.tolist()))
    members = np.argsort(of_group, kind="stable")
    begin, end = (np.searchsorted(of_group[members], of_group[chosen], side) for side in ("left", "right"))
    copies = [
        tuple(np.setdiff1d(members[first:last], [index]).tolist())
        for index, first, last in zip(chosen, begin, end, strict=True)
    ]
    return [NextPicture(*each) for each in zip(chosen.tolist(), reasons, copies, strict=True)]


def typical(unit: Features, count: int, covered: Features | None = None, seed: int = 0) -> Integers:
    """Indices (n,) of typical and different pictures, n at most `count`, of unit features (N, D).

    Candidates are the pictures that are nearest to the centres of k-means (Lloyd 1982). They are taken one
    after the other: the one that reduces most the squared distances of all pictures to the nearest chosen
    one, with the pictures of each cluster at its candidate (greedy k-medoids). When all candidates are taken,
    others follow from the rest. So the order does not depend on `count`.

    Args:
        unit: of length 1, (N, D).
        count: the most pictures.
        covered: unit features of pictures that are chosen before, (M, D).
        seed: of k-means.
    """
    chosen, rest = [np.arange(0)], np.arange(len(unit))
    before = unit[:0] if covered is None else covered
    while len(rest) and sum(map(len, chosen)) < count:
        places, weights = _candidates(unit[rest], min(CENTRES, len(rest)), seed)
        candidates = unit[rest[places]]
        apart = _squared_distances(candidates, candidates)  # (k, k)
        nearest = np.full(len(places), 4.0)  # the largest squared distance of unit features
        if len(before):
            nearest = _squared_distances(candidates, before).min(axis=1)
        taken: list[int] = []
        for _ in range(min(len(places), count - sum(map(len, chosen)))):
            gains = weights @ np.maximum(nearest[:, None] - apart, 0)  # (k,)
            gains[taken] = -1.0
            taken.append(int(gains.argmax()))
            nearest = np.minimum(nearest, apart[taken[-1]])
        chosen.append(rest[places[taken]])
        before = np.concatenate([before, candidates[taken]])
        rest = np.delete(rest, places[taken])
    return np.concatenate(chosen)[:count]


def unsure(unit: Features, margins: Floats, count: int, seed: int = 0) -> Integers:
    """Indices (n,) of unsure and different pictures, n at most `count`, the least margin first.

    The pictures of the least margins, `POOL` times `count`, are divided by k-means, and each cluster gives
    the one of its least margin, so that a batch is not all alike (as Citovsky et al. 2021, section 3).

    Args:
        unit: features of length 1, (N, D).
        margins: how sure a classifier is of each, (N,).
        count: the most pictures.
        seed: of k-means.
    """
    pool = np.argsort(margins, kind="stable")[: POOL * count]
    if len(pool) <= count:
        return pool
    clusters = _clusters(unit[pool], count, seed)[0]
    first = np.sort(np.unique(clusters, return_index=True)[1])
    others = np.setdiff1d(np.arange(len(pool)), first)[: count - len(first)]  # where pictures are equal
    return pool[np.sort(np.concatenate([first, others]))]


def _candidates(unit: Features, k: int, seed: int) -> tuple[Integers, Floats]:
    """The pictures nearest to the centres of k-means, and the number of pictures of each centre."""
    if len(unit) == k:
        return np.arange(k), np.ones(k)
    clusters, distances = _clusters(unit, k, seed)
    order = np.lexsort([distances, clusters])
    _, first, sizes = np.unique(clusters[order], return_index=True, return_counts=True)
    return order[first], sizes.astype(np.float64)


def _clusters(unit: Features, k: int, seed: int) -> tuple[Integers, Floats]:
    """The cluster of each picture by k-means, (N,), and its squared distance to the centre."""
    from sklearn.cluster import KMeans  # which takes half a second

    k = min(k, len(np.unique(unit[:SAMPLE], axis=0)))
    with threadpool_limits(1):  # with several threads, sums and so clusters may differ
        means = KMeans(k, n_init=1, random_state=seed).fit(unit[:SAMPLE])
        clusters = means.predict(unit)
    return clusters.astype(np.int64), np.square(unit - means.cluster_centers_[clusters]).sum(axis=1)


def _squared_distances(first: Features, second: Features) -> Floats:
    """Between unit features (n, D) and (m, D): (n, m)."""
    return np.maximum(2 - 2 * (first @ second.T), 0.0)


def _reproducible(features: Features, seed: int) -> Integers:
    """An order of the pictures that is random and depends on their features, but not on their order, (N,)."""
    key = seed.to_bytes(8, "little")
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest() for row in features]
    return np.argsort(np.array(digests, "S8"), kind="stable")


def _unit(features: Features) -> npt.NDArray[np.float32]:
    """Features (N, D) of length 1; zeros stay zeros."""
    exact = features.astype(np.float32)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return np.asarray(exact / np.where(lengths == 0, 1, lengths), np.float32)
