"""Which pictures to label next: typical and different ones, then those that a classifier is unsure of."""

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

FEW = 50
"""Labels up to which typical pictures are offered."""
EVERY = 3
"""One of so many pictures is offered at random, to judge (benchmarks/results/2026-11-29-label-accept.md)."""
ROUND = 10
"""The fewest typical pictures that are chosen by one k-means."""
POOL = 5
"""The unsure pictures are chosen among so many times their number."""
CLUSTERS = 200
"""The most clusters of unsure pictures: the time of k-means grows with their number."""
UNSURE = "unsure"
SAMPLE = 20_000
"""The most pictures that k-means is fitted to; others go to the nearest centre."""


@dataclasses.dataclass(frozen=True)
class NextPicture:
    """A picture to label, why it is offered, and its near-copies, which its label holds for."""

    index: int
    reason: str
    copies: tuple[int, ...] = ()


def next_pictures(
    features: Features,
    count: int,
    *,
    labelled: Mask | None = None,
    labels: int | None = None,
    margins: Floats | None = None,
    groups: Integers | None = None,
    seed: int = 0,
) -> list[NextPicture]:
    """At most `count` of N pictures in the order in which labels tell the most.

    The first are `typical`; after `FEW` labels come `unsure` ones, or without a classifier random ones. Of
    near-copies one is offered, and none if one of them is labelled. The order of the pictures has no effect.

    Args:
        features: (N, D).
        count: the most pictures.
        labelled: which of the pictures have a label, (N,).
        labels: the number of labels; None if only these pictures have some.
        margins: how sure a classifier is of each picture, (N,); None without one.
        groups: the group of near-copies of each picture, (N,), of `data.duplicates.groups_of`.
        seed: of k-means, and of the random order.
    """
    N = len(features)
    has_label = np.zeros(N, np.bool_) if labelled is None else labelled
    of_group = np.arange(N) if groups is None else groups
    every, unit = np.argsort(random_keys(features, seed), kind="stable"), unit_of(features)
    order = every[~np.isin(of_group[every], of_group[has_label])]
    order = _one_of_each(order, of_group)
    few = max(0, FEW - int(has_label.sum() if labels is None else labels))
    chosen = order[typical(unit[order], min(few, count), unit[every[has_label[every]]], seed)]
    nearest = np.argmax(unit[order] @ unit[chosen].T, axis=1) if len(chosen) else np.arange(0)
    sizes = np.bincount(nearest, minlength=len(chosen)).tolist()
    reasons = [f"typical of {counted(max(size, 1), 'picture')}" for size in sizes]  # 0 of equal ones
    others = order[~np.isin(order, chosen)]
    if margins is not None and len(chosen) < count:
        others = others[unsure(unit[others], margins[others], count - len(chosen), seed)]
    others = others[: count - len(chosen)]
    reasons += ["at random" if margins is None else UNSURE] * len(others)
    chosen = np.concatenate([chosen, others])
    members = np.argsort(of_group, kind="stable")
    begin, end = (np.searchsorted(of_group[members], of_group[chosen], side) for side in ("left", "right"))
    alike = (members[first:last] for first, last in zip(begin, end, strict=True))
    copies = [tuple(rows[rows != index].tolist()) for index, rows in zip(chosen, alike, strict=True)]
    return [NextPicture(*each) for each in zip(chosen.tolist(), reasons, copies, strict=True)]


def judging(keys: Integers, groups: Integers, looked: Mask) -> tuple[Mask, Mask, Integers]:
    """Which of N pictures may judge a classifier, and which do, (N,) each; and those to look at next for
    this, (M,) in their order.

    People look at pictures that were chosen, which are no fair sample. So a random third, with all
    near-copies, is not chosen but looked at in a random order. Those before the first without a look judge;
    if all N have been looked at, all judge.

    Args:
        keys: of `random_keys`, (N,).
        groups: the group of near-copies of each picture, (N,).
        looked: which of the pictures a person has looked at, (N,).
    """
    order = np.argsort(keys, kind="stable")
    firsts = _one_of_each(order, groups)
    if not np.isin(groups, groups[looked]).all():
        firsts = firsts[keys[firsts] % EVERY == 0]
    known = np.isin(groups[firsts], groups[looked])
    before = firsts[: np.argmin(np.append(known, False))]
    rows = _one_of_each(order[looked[order]], groups)
    judges = np.zeros(len(order), np.bool_)
    judges[rows[np.isin(groups[rows], groups[before])]] = True
    return np.isin(groups, groups[firsts]), judges, firsts[~known]


def _one_of_each(rows: Integers, groups: Integers) -> Integers:
    """The first of each group among rows (n,), in their order."""
    return rows[np.sort(np.unique(groups[rows], return_index=True)[1])]


def doubts(probabilities: npt.NDArray[np.floating], class_names: Sequence[str]) -> list[str]:
    """The two most probable of two or more classes in words, by probabilities (N, K)."""
    top = np.argsort(-probabilities, axis=1, kind="stable")[:, :2]  # (N, 2)
    values = np.take_along_axis(probabilities, top, axis=1)
    return [
        f"{class_names[a]} or {class_names[b]}, {p:.0%} to {q:.0%}"
        for (a, b), (p, q) in zip(top.tolist(), values.tolist(), strict=True)
    ]


def typical(unit: Features, count: int, covered: Features | None = None, seed: int = 0) -> Integers:
    """Indices (n,) of typical and different pictures, n at most `count`, of unit features (N, D); others that
    are chosen before have unit features `covered`, (M, D).

    In rounds, k-means divides all pictures into more clusters than there are covered and chosen ones. Of
    each cluster that has none of these, the picture nearest to its centre is chosen, the largest cluster
    first (after TypiClust, Hacohen et al. 2022). So `count` does not change the order.
    """
    chosen, M = np.arange(0), 0 if covered is None else len(covered)
    every = unit if covered is None else np.concatenate([covered, unit])
    while len(chosen) < min(count, len(unit)):
        known = np.concatenate([np.arange(M), M + chosen])
        more = max(ROUND, len(known) // 2)
        clusters, distances = clusters_of(every, len(known) + more, seed)
        order = np.lexsort([distances, clusters])
        order = order[~np.isin(clusters[order], clusters[known])]
        _, first, sizes = np.unique(clusters[order], return_index=True, return_counts=True)
        nearest = order[first[np.argsort(-sizes, kind="stable")]]
        if not len(nearest):  # the others are equal to known ones
            nearest = np.setdiff1d(np.arange(M + len(unit)), known)
        chosen = np.concatenate([chosen, nearest[:more] - M])
    return chosen[:count]


def unsure(unit: Features, margins: Floats, count: int, seed: int = 0) -> Integers:
    """Indices (n,) of pictures of small margins, n at most `count`, of unit features (N, D), the least first.

    K-means divides the `POOL` times `count` pictures of the least margins, and each cluster gives its least
    one, so that they are not all alike (after Citovsky et al. 2021); the others follow by their margins.
    """
    pool = np.argsort(margins, kind="stable")[: POOL * count]
    k = min(count, CLUSTERS)
    first = np.unique(clusters_of(unit[pool], k, seed)[0], return_index=True)[1] if len(pool) else pool
    others = np.setdiff1d(np.arange(len(pool)), first)[: count - len(first)]
    return pool[np.sort(np.concatenate([first, others]))]


def clusters_of(unit: Features, k: int, seed: int) -> tuple[Integers, Floats]:
    """The cluster of each picture by k-means, (N,), and its squared distance to the centre."""
    from sklearn.cluster import KMeans  # which takes half a second

    k = min(k, len(np.unique(unit[:SAMPLE], axis=0)))
    with threadpool_limits(1):  # with several threads, sums and so clusters may differ
        means = KMeans(k, n_init=1, random_state=seed).fit(unit[:SAMPLE])
        clusters = means.predict(unit)
    return clusters.astype(np.int64), np.square(unit - means.cluster_centers_[clusters]).sum(axis=1)


def random_keys(features: Features, seed: int = 0) -> Integers:
    """A random number of at least 0 of each picture that depends on its features alone, (N,)."""
    key = seed.to_bytes(8, "little")
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest() for row in features)
    return np.frombuffer(digests, ">u8").astype(np.int64) & np.iinfo(np.int64).max


def unit_of(features: Features) -> npt.NDArray[np.float32]:
    """Features (N, D) of length 1; zeros stay zeros."""
    exact = features.astype(np.float32)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return np.asarray(exact / np.where(lengths == 0, 1, lengths), np.float32)
