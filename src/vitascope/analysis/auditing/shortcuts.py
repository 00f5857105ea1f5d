"""What tells the label without the content of the picture, and classes and groups that are few or worse."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import hypergeom
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.preprocessing import OneHotEncoder
from sklearn.tree import DecisionTreeClassifier

from vitascope.analysis.probing.label_errors import Probabilities
from vitascope.data.finding import Finding
from vitascope.data.looks import Looks
from vitascope.data.measures import wilson_interval
from vitascope.data.targets import Targets
from vitascope.formatting import listed
from vitascope.training.linear.classifiers import Floats

FOLDS, SAMPLE = 5, 10_000
"""Of cross-validation, on so many images at most."""
LEAVES, LEAF = 16, 5
"""Leaves of a tree, two for each class if that is more, and images of a leaf."""
FREQUENT, CATEGORIES = 20, 30
"""Images of a category with a column, such as a camera, and the number of these at most."""
MEASURES: Mapping[str, tuple[float, Callable[[Looks], npt.NDArray[Any]]]] = {
    "file size": (0.1, lambda looks: looks["file_bytes"]),
    "proportions": (0.1, lambda looks: looks["width"] / np.maximum(looks["height"], 1)),
    "number of pixels": (0.1, lambda looks: looks["width"] * looks["height"]),
    "format": (0.1, lambda looks: looks["format"]),
    "camera": (0.1, lambda looks: looks["camera"]),
    "day": (0.1, lambda looks: looks["day"]),
    "border colour": (0.2, lambda looks: looks["border"]),
    "mean colour": (0.5, lambda looks: looks["colour"]),
    "brightness": (0.5, lambda looks: looks["brightness"]),
    "sharpness": (0.5, lambda looks: looks["sharpness"]),
}
"""With the share of guessing's errors that has to disappear: content may tell the class, as sky is blue."""
FOLDER = 0.1
IMBALANCE = 10
MEMBERS, WORSE, LEVEL = 10, 0.1, 0.05
"""Of a comparison with the others: images, the loss of accuracy that matters, the probability of chance."""

Texts = npt.NDArray[Any]


def shortcuts(looks: Looks, targets: Targets, folders: Texts, groups: Texts) -> list[Finding]:
    """What alone predicts the label: the accuracy of a cross-validated decision tree, against guessing.

    The accuracy is the plain one; guessing answers the most frequent class. Where images have several
    classes, it is that of the class that is told best. Intervals count groups, which no fold divides.

    Args:
        looks: of N readable images.
        targets: their labels.
        folders: of each image, (N,), without a part that is the class.
        groups: of each image, (N,); (0,) for none.
    """
    sets = np.unique(groups, return_inverse=True)[1] if len(groups) else np.arange(len(targets))
    values = {name: (least, value(looks), sets) for name, (least, value) in MEASURES.items()}
    values["folder"] = (FOLDER, folders, sets)
    if len(groups):  # which no fold could predict if they stayed together
        values["group"] = (FOLDER, groups, np.arange(len(sets)))
    if len(targets) < FOLDS:
        return []
    sample = np.sort(np.random.default_rng(0).permutation(len(targets))[:SAMPLE])
    some, findings = targets.take(sample), []
    share = some.counts / len(some)
    alone = targets.strata is None  # each class is told by itself
    guess = np.maximum(share, 1 - share) if alone else share.max(keepdims=True)  # (K,) or (1,)
    leaves = max(LEAVES, 2 * len(targets.class_names))
    tree = DecisionTreeClassifier(max_leaf_nodes=leaves, min_samples_leaf=LEAF, random_state=0)
    for name, (least, value, apart) in values.items():
        units = len(np.unique(apart[sample]))
        if units < FOLDS or not (columns := _columns(value[sample])).shape[1]:
            continue
        predicted = cross_val_predict(tree, columns, some.labels, groups=apart[sample], cv=GroupKFold(FOLDS))
        accuracy = (predicted == some.labels).reshape(len(sample), -1).mean(axis=0)
        limits = np.array([wilson_interval(share * units, units) for share in accuracy])
        gains = (limits[:, 0] - guess) / np.where(guess < 1, 1 - guess, np.inf)
        best = int(gains.argmax())
        if gains[best] >= least:
            of = f", of {targets.class_names[best]!r}" if alone else ""
            points, usual, low, high = (100 * x for x in (accuracy[best], guess[best], *limits[best]))
            detail = f"{name} alone{of}: {points:.0f}% ({low:.0f} to {high:.0f}) where guessing gives"
            detail += f" {usual:.0f}%, {points - usual:.0f} points more"
            findings.append(Finding("shortcut", float(gains[best]), detail))
    return findings


def _columns(values: npt.NDArray[Any]) -> Floats:
    """Numbers (n, D) for a tree, with a column for each frequent category; none where all are equal."""
    if values.dtype.kind in "UO":
        encoder = OneHotEncoder(min_frequency=FREQUENT, max_categories=CATEGORIES, sparse_output=False)
        values = encoder.fit_transform(values[:, None])
    numbers = values.reshape(len(values), -1).astype(np.float64)
    return numbers[:, (numbers != numbers[:1]).any(axis=0)]


def groups(
    targets: Targets, parts: Texts, groups: Texts, probabilities: Probabilities | None = None
) -> list[Finding]:
    """Classes that are rare, missing or of one group, and classes and groups that are predicted worse.

    Accuracies are compared by Fisher's exact test, corrected for their number (Bonferroni); those of classes
    only where images have one.

    Args:
        targets: the labels of N images.
        parts: `train`, `val` or `test` for each image, (N,).
        groups: of each image, (N,); (0,) for none.
        probabilities: out-of-fold, (N, K); None where there are none.
    """
    names, counts, classes = targets.class_names, targets.counts, targets.by_class()
    used, N = np.flatnonzero(counts), len(targets)
    seen: list[tuple[float, str]] = []
    rare = used[IMBALANCE * counts[used] < counts.max(initial=0)]
    if len(rare):
        largest, times = int(counts.argmax()), float(counts.max() / counts[rare].min())
        few = listed([f"{names[k]!r} {counts[k]:,}" for k in rare[np.argsort(counts[rare])]])
        detail = f"{names[largest]!r} has {counts[largest]:,} images, up to {times:.0f} times those of {few}"
        seen.append((times / (times + IMBALANCE), detail))
    for part in np.unique(parts).tolist():
        present = targets.take(np.flatnonzero(parts == part)).counts  # (K,)
        if missing := [repr(names[k]) for k in used if not present[k]]:
            seen.append((1.0 if part == "train" else 0.8, f"without an image in {part}: {listed(missing)}"))
    kinds, place = np.unique(groups, return_inverse=True)
    for k in used if len(kinds) > 1 else []:
        (first, *others) = np.unique(place[classes[k]]).tolist()
        if not others and counts[k] > 1:
            seen.append((0.9, f"all {counts[k]:,} images of {names[k]!r} are of group {str(kinds[first])!r}"))
    if probabilities is not None:
        right = targets.correct(targets.answers(probabilities))
        sets = [] if targets.strata is None else [(f"class {names[k]!r}", classes[k]) for k in used]
        sets += [(f"group {str(kind)!r}", np.flatnonzero(place == i)) for i, kind in enumerate(kinds)]
        sets = [(name, images) for name, images in sets if MEMBERS <= len(images) < N]
        for name, images in sets:
            n, hits = len(images), int(right[images].sum())
            share, rest = hits / n, (int(right.sum()) - hits) / (N - n)
            chance = len(sets) * hypergeom.cdf(hits, N, int(right.sum()), n)
            if chance < LEVEL and share < rest - WORSE:
                low, high = (100 * limit for limit in wilson_interval(hits, n))
                detail = (
                    f"{name}: {share:.0%} ({low:.0f} to {high:.0f}) of {n:,} images are predicted correctly"
                )
                seen.append(((rest - share) / rest, f"{detail}, of the others {rest:.0%}"))
    return [Finding("group", score, detail) for score, detail in seen]
