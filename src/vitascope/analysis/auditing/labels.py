"""Labels that may be wrong, and classes that may be one, from probabilities by classifiers of features."""

import re
import unicodedata
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import numpy.typing as npt
from scipy.stats import mannwhitneyu
from threadpoolctl import threadpool_limits

from vitascope.analysis.probing.label_errors import Probabilities, suspects
from vitascope.data.finding import Finding
from vitascope.data.folds import Division
from vitascope.data.measures import Z, predicted_classes
from vitascope.data.targets import Targets
from vitascope.network import in_threads
from vitascope.training.evaluation.calibration import sharpness
from vitascope.training.linear.classifiers import Classifier, Features, Neighbors
from vitascope.training.linear.selection import CLASSIFIERS, THREADS, cross_validated

LINEAR = tuple(each for each in CLASSIFIERS if not isinstance(each, Neighbors))
"""Nearest neighbours give most classes the probability 0, which no temperature calibrates."""
LEAST_PROBABILITY = 1e-12
SIMILAR = 0.9
"""The score of two classes whose names are spellings of one."""
CONFUSED = 0.5
"""The rates at which two classes are predicted for each other, added, from which on they are compared."""
ALIKE = 0.65
"""The largest AUC, with its 95% interval, of two classes that cannot be told apart."""
ACCENTS = re.compile("[\u0300-\u036f]")
PLURALS = (("s", ""), ("es", ""), ("ies", "y"))
BETWEEN_LETTERS = re.compile(r"(?<=[^\W\d_])[\s_-]+(?=[^\W\d_])")


def held_out_probabilities(
    bodies: Sequence[Features], division: Division, seed: int = 0
) -> npt.NDArray[np.float32]:
    """Calibrated probabilities (N, K) of each image by a classifier that did not see it.

    Of all bodies and linear classifiers, the one with the lowest cross-validated log loss: an average with
    worse ones finds fewer wrong labels.

    Args:
        bodies: the features (N, D) of each body.
        division: the labels of the N images, and the sets of them that no fold divides.
        seed: of the folds.

    Raises:
        UserError: one class; a class that is too rare for two folds.
    """
    targets, folds = division.targets, division.folds(seed=seed)

    def validated(pair: tuple[Features, Classifier]) -> tuple[float, npt.NDArray[np.float32]]:
        features, classifier = pair
        _, held_out = cross_validated(classifier, features, targets, folds)
        # Likeliest: with images of an unknown class, a wrong label would be as doubtful as right ones.
        factor = sharpness(targets, targets.logits(held_out), unknown=0)
        probabilities = targets.sharpened(held_out, factor)
        confidence = np.maximum(targets.self_confidence(probabilities), LEAST_PROBABILITY)
        return -float(np.log(confidence).sum()), probabilities.astype(np.float32)

    with threadpool_limits(1, user_api="blas"):
        results = list(in_threads(validated, product(bodies, LINEAR), most=THREADS))
    return min(results, key=lambda result: result[0])[1]


def wrong_labels(targets: Targets, probabilities: Probabilities) -> list[Finding]:
    """The labels that may be wrong, the least probable first; `probabilities` are those of `suspects`."""
    findings = []
    for suspect in suspects(targets, probabilities):
        given, suggested, sure = suspect.given, suspect.suggested, suspect.confidence
        if given and suggested:
            likely = sure + suspect.margin
            detail = f"{suggested!r} ({likely:.1%}) is more probable than {given!r} ({sure:.1%})"
        elif given:
            detail = f"{given!r} may be wrong: its probability is {sure:.1%}"
        else:
            detail = f"{suggested!r} may be missing: its probability is {1 - sure:.1%}"
        label = suggested if given and suggested else ""
        findings.append(Finding("label", 1 - sure, detail, suspect.image, label=label))
    return findings


def confusable_names(targets: Targets, probabilities: Probabilities | None) -> list[Finding]:
    """Pairs of classes that may be one: by their names, and by images that cannot be told apart.

    Args:
        targets: the labels of N images.
        probabilities: out-of-fold, (N, K), used where images have one class; None where there are none.
    """
    names, counts, members = targets.class_names, targets.counts, targets.members
    spellings = [_spellings(name) for name in names]
    used = combinations(np.flatnonzero(counts).tolist(), 2)
    similar = [(a, b) for a, b in used if spellings[a] & spellings[b]]
    findings = [
        Finding("label", SIMILAR, f"{names[a]!r} ({counts[a]:,} images) may be {names[b]!r} ({counts[b]:,})")
        for a, b in similar
    ]
    if probabilities is None or targets.strata is None:
        return findings
    rates = targets.confusion(predicted_classes(probabilities)) / np.maximum(counts, 1)[:, None]  # (K, K)
    compared = np.triu(rates + rates.T >= CONFUSED, 1) & np.outer(counts > 0, counts > 0)
    for a, b in np.argwhere(compared).tolist():
        first, second = np.maximum(probabilities[:, [a, b]], LEAST_PROBABILITY).T
        m, n = counts[[a, b]].tolist()
        ratios = ((first / second)[members[:, k]] for k in (a, b))
        area = mannwhitneyu(*ratios).statistic / (m * n)  # the AUC (Mann and Whitney 1947)
        high = max(area, 0.5) + Z * np.sqrt((m + n + 1) / (12 * m * n))  # of classes that do not differ
        if high <= ALIKE and (a, b) not in similar:
            detail = (
                f"{names[a]!r} may be {names[b]!r}, or the model does not see the difference: it tells which "
                f"is which in {area:.0%} of the pairs of their images (guessing: 50%)"
            )
            findings.append(Finding("label", min(1.0, 2 - 2 * area), detail))
    return findings


def _spellings(name: str) -> set[str]:
    """The forms of a name in which it is compared: no case, accents or separators, singular and plural."""
    plain = ACCENTS.sub("", unicodedata.normalize("NFKD", name)).casefold().strip()
    plain = " ".join(BETWEEN_LETTERS.sub("", plain).replace("_", " ").replace("-", " ").split())
    endings = [(old, new) for old, new in PLURALS if plain.endswith(old) and not plain.endswith("ss")]
    return {plain} | {plain.removesuffix(old) + new for old, new in endings if len(plain) > len(old) + 2}
