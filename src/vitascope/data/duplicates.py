"""Copies: images of equal content, and near-duplicates: resized, recompressed, cropped, turned, ...

Hashes and features propose pairs. A pair is a near-duplicate if the details of the thumbnails correlate in
one of eight orientations: of both pictures, or of one and a part of the other.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import DisjointSet
from scipy.fft import dctn
from scipy.ndimage import gaussian_filter1d
from threadpoolctl import threadpool_limits

from vitascope.data.contents import first_of_content
from vitascope.data.finding import Finding
from vitascope.data.looks import SIDE, Looks
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
_LOW = 8  # side of the square of lowest DCT coefficients that the hash keeps
_SETS, _BITS, _DISTANCE = 12, 16, 10
_CROWD = 24  # more hashes than this with equal bits, such as those of blank pictures, propose no pairs
_GRID = SIDE // 2  # side of the views that are correlated
_FLAT = 1.0  # levels of luminance: with less detail than this, a picture is nothing but noise
_FEW = 30  # pixels of a view that have its details: planes and ships before a clear sky correlate by chance
_FEW_CORRELATION = 0.9
_FEWEST = 6  # with fewer, such as a spot on a plain ground, pictures have nothing to compare but the ground
# Where all images are alike, as digits are, copies must exceed the usual correlation by so much in Fisher's
# z, which leads to 0.8 among natural images. Images that are compared with at least four say what is usual.
_ABOVE_USUAL, _MOST, _COMPARED = 0.82, 0.97, 4
_PREFERENCE = 0.02  # of the correlation: the picture as it is before its parts and turned ones
_BLOCK = 4096  # thumbnails that are hashed at a time, 32 MB of floats
_ALL, _FIRST, _LAST = (0.0, 1.0), (0.0, 0.86), (0.14, 0.86)
_TURNS = (
    *("", "mirrored", "mirrored", "turned by 180 degrees"),
    *("mirrored", "turned by 90 degrees", "turned by 90 degrees", "mirrored"),
)
_SMOOTHING = gaussian_filter1d(np.eye(_GRID, dtype=np.float32), 1.25, axis=0)  # (16, 16)
_SECTIONS: list[Section] = [(0.0, 1.0)] + [
    (begin, length)
    for length, count in ((0.93, 3), (0.86, 5), (0.8, 5))
    for begin in np.linspace(0, 1 - length, count).round(3).tolist()
]
_LENGTHS = np.array(_SECTIONS)[:, 1]
# The parts that a copy may be, as indices of sections down and across, (2, V). The whole comes first.
_PARTS = np.argwhere(
    (np.abs(_LENGTHS[:, None] - _LENGTHS) < 0.08) | (_LENGTHS[:, None] == 1) | (_LENGTHS == 1)
).T
_HASHED_BOXES: list[tuple[Section, Section]] = [
    *(((0.06, 0.88), (0.06, 0.88)), ((0.04, 0.92), (0.04, 0.92)), (_FIRST, _ALL), (_LAST, _ALL)),
    *(((top, 0.85), (left, 0.85)) for top in (0, 0.075, 0.15) for left in (0, 0.075, 0.15)),
]


class Pair(NamedTuple):
    """Two images of which one is a copy of the other; `first` < `second`.

    Attributes:
        score: from 0.5 to 1, which are equal files.
        how: how they differ, such as "mirrored".
    """

    first: int
    second: int
    score: float
    how: str


def near_duplicates(looks: Looks, features: Features | None = None) -> list[Pair]:
    """Pairs of images that show one picture, the surest first; equal files are among them.

    Args:
        looks: of N images; those that cannot be read, and those without details but a spot, are in no pair.
        features: (N, D), any finite values for unreadable images. Without features, more cropped copies are
            missed.
    """
    views, depths = _details(_cut(looks["thumbnail"], _ALL, _ALL, _GRID))
    proposals = [_similar_hashes(looks["thumbnail"])]
    if features is not None and len(looks) > 1:
        from sklearn.neighbors import NearestNeighbors  # which training does without
        from sklearn.preprocessing import normalize

        search = NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(looks) - 1), algorithm="brute")
        nearest = search.fit(normalize(features)).kneighbors(return_distance=False)  # (N, k), by the cosine
        proposals.append(np.stack([np.arange(len(looks)).repeat(nearest.shape[1]), nearest.ravel()], axis=1))
    ends = np.sort(np.concatenate(proposals), axis=1)
    comparable = (depths >= _FLAT) & (_spread(views) >= _FEWEST)
    ends = np.unique(ends[(ends[:, 0] != ends[:, 1]) & comparable[ends].all(axis=1)], axis=0)
    return _verified(looks["thumbnail"], views, ends) if len(ends) else []


def orientations(squares: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Squares (..., S, S) in eight orientations, (..., 8, S, S): as it is, mirrored, upside down, turned
    by 180 degrees, and the transposes of these four."""
    four = [squares, squares[..., ::-1], squares[..., ::-1, :], squares[..., ::-1, ::-1]]
    return np.stack([*four, *(square.swapaxes(-1, -2) for square in four)], axis=-3)


def perceptual_hashes(squares: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """pHash of grey squares (N, 32, 32) in eight orientations, (N, 8).

    A bit says whether one of the 8x8 lowest coefficients of the DCT is above their median (Zauner,
    "Implementation and benchmarking of perceptual image hash functions", 2010), most significant bit first as
    in imagehash. A mirrored picture has the coefficients of odd frequencies negated, a transposed one the
    transposed coefficients.
    """
    low = dctn(squares.astype(np.float64), axes=(1, 2))[:, :_LOW, :_LOW]
    odd = (-1.0) ** np.arange(_LOW)
    four = [low, low * odd, low * odd[:, None], low * odd * odd[:, None]]
    oriented = np.stack([*four, *(square.swapaxes(1, 2) for square in four)], axis=1)
    flat = oriented.reshape(len(squares), 8, _LOW**2)
    bits = np.packbits(flat > np.median(flat, axis=2, keepdims=True), axis=2)
    return bits.view(">u8")[..., 0].astype(np.uint64)


def _similar_hashes(thumbnails: npt.NDArray[np.uint8]) -> Integers:
    """Pairs of images (P, 2): at most 10 bits differ between the hash of one and that of the other, in any
    orientation, or of a box of it, which finds cropped and framed copies.

    Only hashes that agree in one of 12 random sets of 16 bits are compared: 99% of those in which 4 bits
    differ, 73% of those with 8.
    """
    queries = np.empty((len(thumbnails), 8 + len(_HASHED_BOXES)), np.uint64)
    for start in range(0, len(thumbnails), _BLOCK):
        block = slice(start, start + _BLOCK)
        queries[block, :8] = perceptual_hashes(thumbnails[block])
        for number, box in enumerate(_HASHED_BOXES, 8):
            queries[block, number] = perceptual_hashes(_cut(thumbnails[block], *box, SIDE))[:, 0]
    upright, generator, pairs = queries[:, 0], np.random.default_rng(0), []
    for _ in range(_SETS):
        bits = generator.choice(64, _BITS, replace=False).astype(np.uint64)
        mask = np.bitwise_or.reduce(np.uint64(1) << bits)
        order = np.argsort(upright & mask, kind="stable")
        equal = (upright & mask)[order]
        begin, end = (np.searchsorted(equal, (queries & mask).ravel(), side) for side in ("left", "right"))
        counts = np.where(end - begin > _CROWD, 0, end - begin)
        query = np.repeat(np.arange(queries.size), counts)
        place = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        other = order[begin[query] + place]
        different = (queries.ravel()[query] ^ upright[other]).view(np.uint8).reshape(-1, 8)
        near = np.unpackbits(different, axis=1).sum(axis=1) <= _DISTANCE
        pairs.append(np.stack([query[near] // queries.shape[1], other[near]], axis=1))
    return np.unique(np.concatenate(pairs), axis=0)


@functools.cache
def _matrix(section: Section, size: int) -> Floats32:
    """The matrix (size, 32) that averages a section of a side into `size` pixels."""
    begin, length = section
    edges = (begin + length * np.arange(size + 1) / size) * SIDE
    pixels = np.arange(SIDE)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (overlap.clip(0) / (length * SIDE / size)).astype(np.float32)


def _cut(thumbnails: npt.NDArray[np.uint8], down: Section, across: Section, size: int) -> Floats32:
    """A box of each thumbnail (N, 32, 32) as squares (N, size, size)."""
    return np.asarray(_matrix(down, size) @ thumbnails.astype(np.float32) @ _matrix(across, size).T)


def _details(squares: Floats32) -> tuple[Floats32, Floats32]:
    """What remains of squares (N, 16, 16) without shades and large shapes, in which different pictures agree:
    with mean 0 and length 1, (N, 256), 1 KB per image, and its root mean square in levels, (N,)."""
    details = (squares - _SMOOTHING @ squares @ _SMOOTHING.T).reshape(-1, _GRID**2)
    details -= details.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(details, axis=1)
    return details / np.maximum(lengths, 1e-6)[:, None], lengths / _GRID


def _spread(views: Floats32) -> Floats32:
    """The number of pixels that have the details of views (N, 256), as the participation ratio, (N,)."""
    return np.asarray(1 / (views**4).sum(axis=1).clip(1e-9))


def _part_views(thumbnail: npt.NDArray[np.uint8]) -> Floats32:
    """The details of each part of one thumbnail, (V, 256). Nothing outside a part changes its details."""
    matrices = np.concatenate([_matrix(section, _GRID) for section in _SECTIONS])  # (16 S, 32)
    every = (matrices @ thumbnail @ matrices.T).reshape(len(_SECTIONS), _GRID, -1, _GRID)
    return _details(every.swapaxes(1, 2)[*_PARTS])[0]


def _verified(thumbnails: npt.NDArray[np.uint8], views: Floats32, ends: Integers) -> list[Pair]:
    """The pairs (P, 2) whose details correlate, by the views of all images (N, 256)."""
    both = np.concatenate([ends, ends[:, ::-1]])  # either may be a part of the other
    order = np.argsort(both[:, 0], kind="stable")
    wholes, begin = np.unique(both[order, 0], return_index=True)
    tasks = zip(wholes.tolist(), np.split(both[order, 1], begin[1:]), strict=True)
    with threadpool_limits(1, "blas"):  # the matrices are too small to be shared by threads
        matched = list(in_threads(lambda task: _matches(thumbnails[task[0]], views[task[1]]), tasks))
    medians = [float(np.median(some[:, 0])) for some in matched if len(some) >= _COMPARED]
    usual = np.median(np.array(medians or [0.0]))
    least = np.tanh(np.arctanh(np.clip(usual, 0, _MOST)) + _ABOVE_USUAL).clip(CORRELATION, _MOST)
    needed = np.where(_spread(views) < _FEW, max(least, _FEW_CORRELATION), least)  # (N,)
    matches = np.concatenate(matched)[order.argsort()].reshape(2, len(ends), 3)
    better = (matches[..., 0] - _PREFERENCE * (matches[..., 1] > 0)).argmax(axis=0)
    pairs = []
    for (first, second), match in zip(ends.tolist(), matches[better, np.arange(len(ends))], strict=True):
        correlation, part, turn = match.tolist()
        if correlation >= max(needed[first], needed[second]):
            changes = ["cropped or framed"] * (part > 0) + [_TURNS[int(turn)]] * (turn > 0)
            score = min(0.99, 0.5 + 0.49 * (correlation - float(least)) / (1 - float(least)))
            pairs.append(Pair(first, second, score, ", ".join(changes) or "nearly equal"))
    return sorted(pairs, key=lambda pair: -pair.score)


def _matches(whole: npt.NDArray[np.uint8], others: Floats32) -> npt.NDArray[np.float64]:
    """How a thumbnail, or a part of it, correlates best with each of P views (P, 256) in eight orientations:
    the correlation, the part and the orientation, (P, 3)."""
    parts = _part_views(whole)  # (V, 256)
    turned = orientations(others.reshape(-1, _GRID, _GRID)).reshape(len(others), 8, -1)
    correlations = turned @ parts.T  # (P, 8, V)
    preferred = correlations - 2 * _PREFERENCE
    preferred[:, 0] += _PREFERENCE
    preferred[:, :, 0] += _PREFERENCE
    best = preferred.reshape(len(others), -1).argmax(axis=1)
    turn, part = np.unravel_index(best, preferred.shape[1:])
    return np.stack([correlations[np.arange(len(others)), turn, part], part, turn], axis=1)


def groups_of(pairs: Sequence[Pair], count: int) -> Integers:
    """The group of each of N images, (N,): those that pairs connect are in one."""
    groups = DisjointSet(range(count))
    for pair in pairs:
        groups.merge(pair.first, pair.second)
    return np.array([groups[image] for image in range(count)], dtype=np.int64)


def duplicates(
    contents: npt.NDArray[np.bytes_],
    near: Sequence[Pair],
    parts: Sequence[str],
    labels: Sequence[str] | None = None,
) -> list[Finding]:
    """Findings of equal files and of `near_duplicates`, the worst first: those between parts or labels, then
    others by their scores.

    Of a group of g images there are g - 1 findings, which connect it by its worst pairs.

    Args:
        contents: of `data.contents`, of N images.
        parts: of each image: "train", "val" or "test".
        labels: the label of each image as text; empty without one.
    """
    firsts = enumerate(first_of_content(contents).tolist())
    equal = [Pair(first, image, 1.0, "equal file") for image, first in firsts if first != image]
    copies = {pair[:2] for pair in equal}
    findings = [_finding("copy", pair, parts, labels) for pair in equal]
    findings += [_finding("near-duplicate", pair, parts, labels) for pair in near if pair[:2] not in copies]
    groups = DisjointSet(range(len(parts)))
    ordered = sorted(findings, key=lambda finding: -finding.score)
    return [finding for finding in ordered if groups.merge(finding.image, finding.other)]


def _finding(
    issue: Literal["copy", "near-duplicate"], pair: Pair, parts: Sequence[str], labels: Sequence[str] | None
) -> Finding:
    """The finding of one pair, a leak if it is between parts. Its image is the one to drop: in train before
    val, in val before test."""
    image, other = pair.second, pair.first
    leak = parts[image] != parts[other]
    if leak and (parts[other] == "train" or (parts[other] == "val" and parts[image] != "train")):
        image, other = other, image
    here, there = (labels[image], labels[other]) if labels is not None else ("", "")
    differ = bool(here and there) and here != there
    detail = f"{pair.how}: a copy of another image" + (f", in {parts[other]}" if leak else "")
    if differ:
        detail += f"; here {here}, there {there}"
    score = 0.5 + pair.score / 2 if leak or differ else 0.75 * pair.score
    drop = (leak or issue == "copy") and not differ
    return Finding("leak" if leak else issue, score, detail, image, other, drop=drop)
