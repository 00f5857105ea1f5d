"""Positions and local attention written out token by token in NumPy, float64: the references of tests."""

import math
from collections.abc import Sequence

import numpy as np

Grid = tuple[int, int]
Array = np.ndarray


def places(grid: Grid) -> list[tuple[int, int]]:
    """Row and column of every patch, in the order of the sequence."""
    return [(row, column) for row in range(grid[0]) for column in range(grid[1])]


def sincos(kind: str, grid: Grid, D: int) -> Array:
    """The sine-cosine embedding of every patch: (N, D)."""
    if kind == "sincos_1d":
        vectors = [
            waves(number, [10000 ** (-2 * k / D) for k in range(D // 2)])
            for number in range(len(places(grid)))
        ]
    else:
        last = D / 4 - 1 if kind == "sincos_2d_big_vision" else D / 4
        omega = [10000 ** (-k / last) for k in range(D // 4)]
        vectors = [waves(column, omega) + waves(row, omega) for row, column in places(grid)]
    return np.array(vectors)


def waves(place: float, frequencies: Sequence[float]) -> list[float]:
    """All sines, then all cosines."""
    return [math.sin(place * w) for w in frequencies] + [math.cos(place * w) for w in frequencies]


def rotate(vectors: Array, grid: Grid, base: float, num_prefix_tokens: int) -> Array:
    """DINOv3's rotary embedding as complex numbers: (T, hd) -> (T, hd).

    Channel i is the real part, channel i + hd/2 the imaginary part of the number that is rotated by angle i.
    """
    turned = vectors.astype(np.float64)
    half = vectors.shape[1] // 2
    for patch, (row, column) in enumerate(places(grid)):
        y, x = 2 * (row + 0.5) / grid[0] - 1, 2 * (column + 0.5) / grid[1] - 1
        periods = [base ** (2 * k / half) for k in range(half // 2)]
        angles = np.array(
            [2 * math.pi * y / period for period in periods]
            + [2 * math.pi * x / period for period in periods]
        )
        token = vectors[num_prefix_tokens + patch].astype(np.float64)
        numbers = (token[:half] + 1j * token[half:]) * np.exp(1j * angles)
        turned[num_prefix_tokens + patch] = np.concatenate([numbers.real, numbers.imag])
    return turned


def relative_bias(offsets: Array, prefix: Array | None, grid: Grid, num_prefix_tokens: int) -> Array:
    """The bias of every score of a full grid: (heads, 2*gh - 1, 2*gw - 1) -> (heads, T, T)."""
    P, patches = num_prefix_tokens, places(grid)
    bias = np.zeros((len(offsets), P + len(patches), P + len(patches)))
    for i in range(P + len(patches)):
        for j in range(P + len(patches)):
            if i < P and j < P:
                bias[:, i, j] = prefix[:, 2]
            elif i < P:
                bias[:, i, j] = prefix[:, 0]
            elif j < P:
                bias[:, i, j] = prefix[:, 1]
            else:
                down, right = patches[i - P][0] - patches[j - P][0], patches[i - P][1] - patches[j - P][1]
                bias[:, i, j] = offsets[:, grid[0] - 1 + down, grid[1] - 1 + right]
    return bias


def may_attend(grid: Grid, window: Grid, num_prefix_tokens: int) -> Array:
    """Whether token i attends to token j, (T, T): in one window, or either of them in the prefix."""
    P, patches = num_prefix_tokens, places(grid)
    windows = [(row // window[0], column // window[1]) for row, column in patches]
    allowed = np.ones((P + len(patches), P + len(patches)), dtype=bool)
    for i, mine in enumerate(windows):
        for j, other in enumerate(windows):
            allowed[P + i, P + j] = mine == other
    return allowed


def softmax_where(scores: Array, allowed: Array) -> Array:
    """Softmax of each row over its allowed columns."""
    exponential = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return exponential / exponential.sum(-1, keepdims=True)


def merged_pairs(keys: Array, count: int) -> tuple[list[int], dict[int, int]]:
    """Token merging's pairs of keys (N, hd): the remaining tokens in new order, and merge targets."""
    first, second = list(range(1, len(keys), 2)), list(range(0, len(keys), 2))

    def cosine(i: int, j: int) -> float:
        return float(keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j]))

    nearest = {i: max(second, key=lambda j: cosine(i, j)) for i in first}
    leaving = sorted(first, key=lambda i: -cosine(i, nearest[i]))[: min(count, len(first))]
    return [i for i in first if i not in leaving] + second, {i: nearest[i] for i in leaving}


def merge(
    tokens: Array, groups: list[set[int]], keys: Array, P: int, count: int
) -> tuple[Array, list[set[int]]]:
    """Merge `count` patches of (Q, D) into their nearest; each token stands for a group of original ones."""
    stay, joins = merged_pairs(keys[P:], count)
    new_tokens, new_groups = list(tokens[:P]), groups[:P]
    for place in stay:
        members = [P + place] + [P + i for i, j in joins.items() if j == place]
        weights = [len(groups[member]) for member in members]
        new_tokens.append(np.average([tokens[member] for member in members], axis=0, weights=weights))
        new_groups.append(set().union(*(groups[member] for member in members)))
    return np.array(new_tokens), new_groups
