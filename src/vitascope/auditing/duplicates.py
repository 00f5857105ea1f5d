"""Copies: images of equal content, and near-duplicates: resized, recompressed, cropped, turned, ...

Hashes and features propose pairs. A pair is a near-duplicate if the details of the thumbnails correlate in
one of eight orientations: of both pictures, of one and a part of the other, or of most of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter1d
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree
from threadpoolctl import threadpool_limits

from vitascope.auditing.finding import Finding
from vitascope.auditing.looks import SIDE, Looks, orientations, perceptual_hashes
from vitascope.data.contents import first_of_content
from vitascope.network import in_threads

Features = npt.NDArray[np.floating]
Floats32 = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

NEIGHBOURS = 6
"""Nearest neighbours by features that are compared with an image."""
CORRELATION = 0.8
"""Least correlation of the details of near-duplicates."""
Section: TypeAlias = tuple[float, float]
"""Begin and length of a part of a side, as shares of it."""
Box: TypeAlias = tuple[Section, Section]
"""The sections down and across."""
_SETS, _BITS, _DISTANCE = 12, 16, 10
_CROWD = 24  # more hashes than this with equal bits, such as those of blank pictures, propose no pairs
_GRID = SIDE // 2  # side of the views that are correlated
_SMOOTH = 1.25  # of their pixels
_FLAT = 1.0  # levels of luminance: with less detail than this, a picture is nothing but noise
_FEW = 30  # pixels of a view that have its details: planes and ships before a clear sky correlate by chance
_FEW_CORRELATION = 0.9
# Where all images are alike, as digits are, copies must exceed the usual correlation by so much in Fisher's
# z, which leads to 0.8 among natural images. Images that are compared with at least four say what is usual.
_ABOVE_USUAL, _MOST, _COMPARED = 0.82, 0.97, 4
_PREFERENCE = 0.02  # of the correlation: the picture as it is before its parts and turned ones
_ROWS = 512  # images whose similarities to all others are computed at a time
_BLOCK = 4096  # thumbnails that are floats at a time, 16 MB
_ALL, _INNER, _FIRST, _LAST = (0.0, 1.0), (0.1, 0.8), (0.0, 0.86), (0.14, 0.86)
_BOXES = [(_ALL, _ALL), (_INNER, _INNER), (_FIRST, _ALL), (_LAST, _ALL), (_ALL, _FIRST), (_ALL, _LAST)]
# For a box (whole, inner, upper, lower) and an orientation, which of _BOXES of the picture is there.
_ORIENTED_BOX = np.array([[0] * 8, [1] * 8, [2, 2, 3, 3, 4, 5, 4, 5], [3, 3, 2, 2, 5, 4, 5, 4]])
_TURNS = (
    *("", "mirrored", "mirrored", "turned by 180 degrees"),
    *("mirrored", "turned by 90 degrees", "turned by 90 degrees", "mirrored"),
)
_HASHED_BOXES: list[Box] = [
    *(((0.06, 0.88), (0.06, 0.88)), ((0.04, 0.92), (0.04, 0.92)), (_FIRST, _ALL), (_LAST, _ALL)),
    *(((top, 0.85), (left, 0.85)) for top in (0, 0.075, 0.15) for left in (0, 0.075, 0.15)),
]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two images of which one is a copy of the other; `first` < `second`.

    Attributes:
        score: from 0.5 to 1, which are equal files.
        how: how they differ, such as "mirrored".
    """

    first: int
    second: int
    score: float
    how: str

    def at(self, places: Integers) -> Pair:
        """The same pair by other indices: those at the places, which ascend, of its own."""
        return dataclasses.replace(self, first=int(places[self.first]), second=int(places[self.second]))


def copies(contents: npt.NDArray[np.bytes_]) -> list[Pair]:
    """Each image whose content, of `data.contents`, is that of an earlier one, with the first such image."""
    firsts = first_of_content(contents).tolist()
    return [Pair(first, own, 1.0, "equal file") for own, first in enumerate(firsts) if first != own]


def neighbours(features: Features, k: int) -> tuple[Integers, Floats32]:
    """The nearest other images of each by cosine similarity, nearest first: indices and similarities, (N, k).

    Features (N, D) of N > k images; N² D multiplications, and memory for 512 rows of N similarities.
    """
    unit = np.asarray(features, dtype=np.float32)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    count = len(unit)
    if not 0 < k < count:
        raise ValueError(f"{k} neighbours among {count} images: k must be between 1 and {count - 1}")
    indices, similarities = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
    for start in range(0, count, _ROWS):
        stop = min(count, start + _ROWS)
        near = unit[start:stop] @ unit.T  # (rows, N)
        near[np.arange(stop - start), np.arange(start, stop)] = -np.inf
        best = np.argpartition(near, count - k, axis=1)[:, count - k :]
        values = np.take_along_axis(near, best, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        indices[start:stop] = np.take_along_axis(best, order, axis=1)
        similarities[start:stop] = np.take_along_axis(values, order, axis=1)
    return indices, similarities


def near_duplicates(
    looks: Looks, features: Features | None = None, nearest: Integers | None = None
) -> list[Pair]:
    """Pairs of images that show one picture, the surest first; equal files are among them.

    Args:
        looks: of N images; those that cannot be read, and flat ones, are in no pair.
        features: (N, D), any finite values for unreadable images. Without features, more cropped copies are
            missed.
        nearest: indices of `neighbours`, (N, k), if they are known already.
    """
    views, depths = _views(looks.thumbnails)
    usable = looks.readable & (depths >= _FLAT)
    proposals = [_similar_hashes(looks)]
    if features is not None and nearest is None and len(looks) > 1:
        nearest, _ = neighbours(features, min(NEIGHBOURS, len(looks) - 1))
    if nearest is not None:
        owners = np.repeat(np.arange(len(looks)), nearest.shape[1])
        proposals.append(np.stack([owners, nearest.ravel()], axis=1))
    ends = np.sort(np.concatenate(proposals), axis=1)
    ends = np.unique(ends[(ends[:, 0] != ends[:, 1]) & usable[ends].all(axis=1)], axis=0)  # (P, 2)
    return _verified(looks, views, ends)


def _similar_hashes(looks: Looks) -> Integers:
    """Pairs of images (P, 2): at most 10 bits differ between the hash of one and that of the other, in any
    orientation, or of a box of it, which finds cropped and framed copies.

    Only hashes that agree in one of 12 random sets of 16 bits are compared: 99% of those in which 4 bits
    differ, 73% of those with 8.
    """
    upright, queries = looks.hashes[:, 0], _queries(looks)
    generator = np.random.default_rng(0)
    pairs = [np.empty((0, 2), np.int64)]
    for _ in range(_SETS):
        bits = generator.choice(64, _BITS, replace=False).astype(np.uint64)
        mask = np.bitwise_or.reduce(np.uint64(1) << bits)
        order = np.argsort(upright & mask, kind="stable")
        equal = (upright & mask)[order]
        begin = np.searchsorted(equal, (queries & mask).ravel(), "left")
        counts = np.searchsorted(equal, (queries & mask).ravel(), "right") - begin
        counts[counts > _CROWD] = 0
        query = np.repeat(np.arange(queries.size), counts)
        place = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        other = order[begin[query] + place]
        different = (queries.ravel()[query] ^ upright[other]).view(np.uint8).reshape(-1, 8)
        near = np.unpackbits(different, axis=1).sum(axis=1) <= _DISTANCE
        pairs.append(np.stack([query[near] // queries.shape[1], other[near]], axis=1))
    return np.unique(np.concatenate(pairs), axis=0)


def _queries(looks: Looks) -> npt.NDArray[np.uint64]:
    """The hashes of pictures in eight orientations, and those of `_HASHED_BOXES`, (N, 21)."""
    queries = np.empty((len(looks), 8 + len(_HASHED_BOXES)), np.uint64)
    queries[:, :8] = looks.hashes
    for start in range(0, len(looks), _BLOCK):
        block = slice(start, start + _BLOCK)
        for number, (down, across) in enumerate(_HASHED_BOXES, 8):
            squares = (
                _matrix(down, SIDE) @ looks.thumbnails[block].astype(np.float32) @ _matrix(across, SIDE).T
            )
            queries[block, number] = perceptual_hashes(squares)[:, 0]
    return queries


@functools.cache
def _matrix(section: Section, size: int) -> Floats32:
    """The matrix (size, 32) that averages a section of a side into `size` pixels."""
    begin, length = section
    edges = (begin + length * np.arange(size + 1) / size) * SIDE
    pixels = np.arange(SIDE)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (overlap.clip(0) / (length * SIDE / size)).astype(np.float32)


@functools.cache
def _smoothing() -> Floats32:
    """The Gaussian (16, 16) that finds shades and large shapes, in which different pictures agree."""
    return gaussian_filter1d(np.eye(_GRID, dtype=np.float32), _SMOOTH, axis=0)


def _views(thumbnails: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float16], Floats32]:
    """The details in each of `_BOXES` of thumbnails (N, 32, 32), of length 1, (N, 6, 256), 3 KB per image,
    and the root mean square of those of the whole, (N,). Nothing outside a box changes its details."""
    views = np.empty((len(thumbnails), len(_BOXES), _GRID**2), np.float16)
    depths = np.empty(len(thumbnails), np.float32)
    for start in range(0, len(thumbnails), _BLOCK):
        block = slice(start, start + _BLOCK)
        for number, (down, across) in enumerate(_BOXES):
            squares = _matrix(down, _GRID) @ thumbnails[block].astype(np.float32) @ _matrix(across, _GRID).T
            details = squares - _smoothing() @ squares @ _smoothing().T
            views[block, number] = _unit(details.reshape(len(squares), -1).astype(np.float32))
            if number == 0:
                depths[block] = np.sqrt((details**2).mean(axis=(1, 2)))
    return views, depths


def _part_views(thumbnail: npt.NDArray[np.uint8]) -> Floats32:
    """The details of each part of one thumbnail, of length 1, (V, 256)."""
    sections, down, across = _sections()
    matrices = np.concatenate([_matrix(section, _GRID) for section in sections])  # (16 sections, 32)
    smooth = np.concatenate([_smoothing() @ _matrix(section, _GRID) for section in sections])
    grey = thumbnail.astype(np.float32)
    every = (matrices @ grey @ matrices.T - smooth @ grey @ smooth.T).reshape(len(sections), _GRID, -1, _GRID)
    return _unit(every.transpose(0, 2, 1, 3)[down, across].reshape(len(down), -1))


def _unit(views: Floats32) -> Floats32:
    """Views (..., 256) with mean 0 and length 1."""
    centred = views - views.mean(axis=-1, keepdims=True)
    return centred / np.maximum(np.linalg.norm(centred, axis=-1, keepdims=True), 1e-6)


@functools.cache
def _sections() -> tuple[list[Section], Integers, Integers]:
    """The sections of a side, and the parts that a copy may be, as indices of sections down and across,
    (V,) each. The whole comes first."""
    sections: list[Section] = [_ALL]
    for length, count in ((0.93, 3), (0.86, 5), (0.8, 5)):
        sections += [(begin, length) for begin in np.linspace(0, 1 - length, count).round(3).tolist()]
    lengths = np.array([length for _, length in sections])
    down, across = np.indices((len(sections), len(sections))).reshape(2, -1)
    kept = (np.abs(lengths[down] - lengths[across]) < 0.08) | (down == 0) | (across == 0)
    return sections, down[kept], across[kept]


def _verified(looks: Looks, views: npt.NDArray[np.float16], ends: Integers) -> list[Pair]:
    """The pairs (P, 2) whose details correlate, by the views of `_BOXES` of all images (N, 6, 256)."""
    both = np.concatenate([ends, ends[:, ::-1]])  # either may be a part of the other
    both = both[np.argsort(both[:, 0], kind="stable")]
    wholes, begin = np.unique(both[:, 0], return_index=True)
    tasks = zip(wholes.tolist(), np.split(both[:, 1], begin[1:]), strict=True) if len(both) else ()
    matches: dict[tuple[int, int], _Match] = {}
    usual = []
    with threadpool_limits(1, "blas"):  # the matrices are too small to be shared by threads
        for some in in_threads(lambda task: _matches(looks.thumbnails, views, *task), tasks):
            if len(some) >= _COMPARED:
                usual.append(np.median([match.correlation for match in some.values()]))
            for pair, match in some.items():
                matches[pair] = max(match, matches.get(pair, match))
    usual_z = np.arctanh(np.clip(np.median(usual or [0]), 0, _MOST))
    least = float(np.clip(np.tanh(usual_z + _ABOVE_USUAL), CORRELATION, _MOST))
    spread = 1 / (views[:, 0].astype(np.float32) ** 4).sum(axis=1).clip(1e-9)  # the participation ratio
    needed = np.where(spread < _FEW, max(least, _FEW_CORRELATION), least)  # (N,)
    pairs = [
        Pair(
            *(first, second, min(0.99, 0.5 + 0.49 * (match.correlation - least) / (1 - least))),
            match.how or _change(looks, first, second),
        )
        for (first, second), match in matches.items()
        if match.correlation >= max(needed[first], needed[second])
    ]
    return sorted(pairs, key=lambda pair: -pair.score)


@functools.cache
def _comparisons() -> tuple[Integers, list[int], Floats32]:
    """The pixels of a view in eight orientations, (8, 256); the indices of the parts that are the four boxes
    of `_ORIENTED_BOX`; the penalty of the correlation for a part and for a turn, (8, V)."""
    sections, down, across = _sections()
    parts = [(sections[row], sections[column]) for row, column in zip(down, across, strict=True)]
    lost = np.full((8, len(parts)), -2 * _PREFERENCE, np.float32)
    lost[0] += _PREFERENCE
    lost[:, 0] += _PREFERENCE
    pixels = orientations(np.arange(_GRID**2).reshape(_GRID, _GRID)).reshape(8, -1)
    return pixels, [parts.index(box) for box in _BOXES[:4]], lost


class _Match(NamedTuple):
    """How two images correlate best; the rank, by which it is compared, prefers whole pictures."""

    rank: float
    correlation: float
    how: str


def _matches(
    thumbnails: npt.NDArray[np.uint8], views: npt.NDArray[np.float16], whole: int, others: Integers
) -> dict[tuple[int, int], _Match]:
    """How one image, and each part of it, correlates with each of P others in eight orientations."""
    turned_pixels, boxes, preference = _comparisons()
    part_views = _part_views(thumbnails[whole])  # (V, 256)
    oriented = views[others].astype(np.float32)[:, _ORIENTED_BOX[..., None], turned_pixels]  # (P, 4, 8, 256)
    by_part = (oriented[:, 0].reshape(-1, _GRID**2) @ part_views.T).reshape(len(others), 8, -1)  # (P, 8, V)
    by_box = (oriented * part_views[boxes, None]).sum(axis=3)  # (P, 4, 8)
    matches = {}
    for other, of_parts, of_boxes in zip(others.tolist(), by_part, by_box, strict=True):
        turn, part = np.unravel_index(np.argmax(of_parts + preference), of_parts.shape)
        correlation, how = float(of_parts[turn, part]), "cropped or framed" if part else ""
        box, box_turn = np.unravel_index(np.argmax(of_boxes), of_boxes.shape)
        if of_boxes[box, box_turn] - 2 * _PREFERENCE > correlation:
            correlation, turn, how = float(of_boxes[box, box_turn]), box_turn, "with a border or a caption"
        rank = correlation - _PREFERENCE * bool(how)
        pair = (min(whole, other), max(whole, other))
        matches[pair] = _Match(rank, correlation, ", ".join(filter(None, (how, _TURNS[turn]))))
    return matches


def _change(looks: Looks, first: int, second: int) -> str:
    """What else differs between two images of one picture."""
    light = looks.brightness[second] - looks.brightness[first]
    if abs(light) > 0.03:
        return "brighter or darker"
    sizes = {(looks.height[index], looks.width[index]) for index in (first, second)}
    return "resized" if len(sizes) > 1 else "recompressed"


def groups_of(pairs: Sequence[Pair], count: int) -> Integers:
    """The group of each of N images, (N,): those that pairs connect are in one."""
    groups: Integers = connected_components(_graph(pairs, count, [1.0] * len(pairs)), directed=False)[1]
    return groups.astype(np.int64)


def duplicates(
    equal: Sequence[Pair],
    near: Sequence[Pair],
    parts: Sequence[str],
    labels: Sequence[str] | None = None,
) -> list[Finding]:
    """Findings of `copies` and `near_duplicates`, the worst first: those between parts or labels, then
    others by their scores.

    Of a group of g images there are g - 1 findings, which connect it by its worst pairs.

    Args:
        parts: of each of N images: "train", "val" or "test".
        labels: the label of each image as text; empty without one.
    """
    known = {(pair.first, pair.second) for pair in equal}
    pairs = [*equal, *(pair for pair in near if (pair.first, pair.second) not in known)]
    findings = [_finding(pair, number < len(equal), parts, labels) for number, pair in enumerate(pairs)]
    graph = _graph(pairs, len(parts), [2 - finding.score for finding in findings])
    forest = set(zip(*minimum_spanning_tree(graph).nonzero(), strict=True))
    kept = [
        finding
        for finding in findings
        if {(finding.image, finding.other), (finding.other, finding.image)} & forest
    ]
    return sorted(kept, key=lambda finding: -finding.score)


def _graph(pairs: Sequence[Pair], count: int, weights: Sequence[float]) -> coo_matrix:
    ends = np.array([(pair.first, pair.second) for pair in pairs], dtype=np.int64).reshape(-1, 2)
    return coo_matrix((weights, (ends[:, 0], ends[:, 1])), shape=(count, count))


def _finding(pair: Pair, equal: bool, parts: Sequence[str], labels: Sequence[str] | None) -> Finding:
    """The finding of one pair; its image is the one to drop, that in train before that in test."""
    image, other = pair.second, pair.first
    if parts[image] != parts[other] and parts[other] == "train":
        image, other = other, image
    leak = parts[image] != parts[other]
    here, there = (labels[image], labels[other]) if labels is not None else ("", "")
    differ = bool(here and there) and here != there
    detail = f"{pair.how}: a copy of another image, in {parts[other]}"
    return Finding(
        "copy" if equal else "near-duplicate",
        0.5 + pair.score / 2 if leak or differ else 0.75 * pair.score,
        detail + (f"; here {here}, there {there}" if differ else ""),
        image,
        other,
        "drop" if equal and not leak and not differ else "look",
    )
