"""A share of images, drawn by seed, where some images belong together or have several classes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bound_sets(*keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The set of each image, (N,), 0 to G - 1: two images of the same key, in any of the keys (N,), are in
    the same set, and so are images that a chain of such pairs connects."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    N = len(keys[0])
    columns = np.concatenate(
        [np.unique(key, return_inverse=True)[1] + N * (1 + n) for n, key in enumerate(keys)]
    )
    size = N * (1 + len(keys))
    edges = coo_array(
        (np.ones(len(columns), dtype=np.bool_), (np.tile(np.arange(N), len(keys)), columns)), (size, size)
    )
    _, sets = connected_components(edges, directed=False)
    found: npt.NDArray[np.int64] = np.unique(sets[:N], return_inverse=True)[1]
    return found


def draw_share(
    labels: npt.NDArray[np.bool_],
    sets: npt.NDArray[np.int64],
    share: float,
    generator: np.random.Generator,
    *,
    every_class: bool,
) -> npt.NDArray[np.bool_]:
    """Draw about a share of N images and of each of their K classes, without dividing a set: bool (N,).

    Sets are taken one by one, those of rare classes first (as in iterative stratification, Sechidis et al.
    2011), large ones before small ones, in a random order: if each of their classes and the whole are nearer
    to the share with them; then, in the reverse order, until the whole is as near as a further set could
    bring it. A class is never drawn completely. The number of images differs from the share by at most half
    of a set, unless that needs all sets of a class.

    Args:
        labels: the classes of each image, (N, K).
        sets: from `bound_sets`, (N,).
        share: in (0, 1).
        generator: of the order.
        every_class: draw at least one set of each class that is in two or more of them.
    """
    sizes = np.bincount(sets)  # (G,)
    counts = np.zeros((len(sizes), labels.shape[1]), dtype=np.int64)  # (G, K)
    np.add.at(counts, sets, labels)
    totals = counts.sum(axis=0)
    wanted, whole = share * totals, share * len(labels)
    rarest = np.where(counts > 0, totals, len(labels) + 1).min(axis=1, initial=len(labels) + 1)  # (G,)
    order = np.lexsort((generator.permutation(len(sizes)), -sizes, rarest))
    taken, drawn, drawn_whole = np.zeros(len(sizes), dtype=np.bool_), np.zeros(len(totals)), 0

    def take(number: int) -> None:
        nonlocal drawn_whole
        taken[number] = True
        drawn[:] += counts[number]
        drawn_whole += int(sizes[number])

    for k in np.argsort(totals, kind="stable") if every_class else ():
        having = order[counts[order, k] > 0]
        if len(having) > 1 and not taken[having].any():
            take(having[np.argmin(sizes[having])])
    for numbers, by_class in ((order, True), (order[::-1], False)):
        for number in numbers:
            own, size = counts[number], sizes[number]
            nearer = 2 * (whole - drawn_whole) > size
            if nearer and by_class:
                nearer = bool((2 * (wanted - drawn) > own)[own > 0].all())
            if nearer and not taken[number] and not ((own > 0) & (drawn + own == totals)).any():
                take(number)
    return taken[sets]
