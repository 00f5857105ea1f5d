"""Measure how often the intervals of probes hold what they promise, on the pixels of scikit-learn's digits.

    OMP_NUM_THREADS=1 python benchmarks/probe_coverage.py --out

First, each repetition draws 150 training and 200 test images, chooses a classifier by cross-validation, and
asks whether the 95% intervals of the cross-validated and of the test accuracy hold the accuracy on all
remaining images. These are a sample too, so a perfect interval holds it slightly less often than in 95%.

Second, each repetition draws some training images, measures the learning curve, and asks whether the 95%
intervals of the forecasts hold the accuracy of the classifier that is trained on twice and four times as many
images, measured on the others. The prior of the forecast was chosen on these images and classifiers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, note, publish
from vitascope.data.targets import ClassIndices
from vitascope.probing.classifiers import Classifier, ClassMeans, LeastSquares, LogisticRegression, Neighbors
from vitascope.probing.curve import learning_curve
from vitascope.probing.folds import Division
from vitascope.probing.selection import CLASSIFIERS, Candidate, LabelledPart, select, value_of
from vitascope.run.measures import wilson_interval

TRAIN, TEST = 150, 200
SIZES = (150, 200, 300)
PROBED: tuple[Classifier, ...] = (
    LogisticRegression((0.1,)),
    Neighbors((1,)),
    Neighbors((10,)),
    LeastSquares((64.0,)),
    ClassMeans(),
)
Images = npt.NDArray[np.int64]


def digits() -> tuple[npt.NDArray[np.float32], ClassIndices]:
    """The pixels (N, 64) and the classes of all digits."""
    pixels, labels = load_digits(return_X_y=True)
    return pixels.astype(np.float32), ClassIndices(labels.astype(np.int64), tuple("0123456789"))


def accuracy(
    classifier: Classifier,
    features: npt.NDArray[np.float32],
    targets: ClassIndices,
    train: Images,
    test: Images,
) -> float:
    """The accuracy on some images after a fit on others."""
    fitted = classifier.fit(features[train], targets.take(train))
    (probabilities,) = fitted.probabilities(features[test])
    return float(targets.take(test).correct(probabilities.argmax(axis=1)).mean())


def chosen_rows(repeats: int) -> Iterator[tuple[str, ...]]:
    """How often the intervals of the chosen classifier hold the accuracy on the remaining images."""
    features, targets = digits()
    covered: dict[str, list[bool]] = {"cross-validation": [], "test": []}
    for seed in range(repeats):
        order = np.random.default_rng(seed).permutation(len(targets))
        train, test, rest = np.split(order, [TRAIN, TRAIN + TEST])
        candidate = Candidate("digits", "pixels", "", features[train], features[test])
        known, unseen = (LabelledPart(targets.take(part)) for part in (train, test))
        best = select([candidate], known, unseen, CLASSIFIERS, seed=seed).best
        true = accuracy(best.classifier, features, targets, train, rest)
        for name, score in (("cross-validation", best.validated), ("test", best.tested)):
            _, low, high = value_of(score)
            covered[name].append(low <= true <= high)
    for name, each in covered.items():
        yield (f"accuracy of the chosen classifier, {name}", *share(each))


def forecast_rows(repeats: int) -> Iterator[tuple[str, ...]]:
    """How often the intervals of the forecasts hold the accuracy with more images."""
    features, targets = digits()
    for classifier in PROBED:
        for size in SIZES:
            covered: dict[int, list[bool]] = {2: [], 4: []}
            for seed in range(repeats):
                order = np.random.default_rng(seed).permutation(len(targets))
                some = order[:size]
                division = Division.of(targets.take(some))
                folds = division.folds(seed=seed)
                for each in learning_curve(classifier, features[some], division, folds, seed=seed).forecasts:
                    train, rest = np.split(order, [each.factor * size])
                    true = accuracy(classifier, features, targets, train, rest)
                    covered[each.factor].append(each.low <= true <= each.high)
            note(f"{classifier.name}, {size} images")
            for factor, held in covered.items():
                name = " ".join((classifier.name, *classifier.settings)).strip()
                yield (f"{name}: {size} to {factor * size:,} images", *share(held))


def share(covered: list[bool]) -> tuple[str, str, str]:
    """Repetitions with an interval, the share that is covered, and its own 95% interval."""
    if not covered:
        return "0", "", ""
    low, high = wilson_interval(sum(covered), len(covered))
    return f"{len(covered)}", f"{np.mean(covered):.1%}", f"{low:.0%} to {high:.0%}"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--resamples", type=positive, default=200, help="of the chosen classifier (default 200)"
    )
    parser.add_argument("--repeats", type=positive, default=100, help="of each forecast (default 100)")
    arguments = parser.parse_args()
    conditions = Conditions.now()
    rows = [*chosen_rows(arguments.resamples), *forecast_rows(arguments.repeats)]
    table = markdown_table(("interval", "repetitions", "covered", "95% interval"), rows)
    publish(
        "probe_coverage", f"{conditions.heading('Coverage of the intervals of probes')}\n\n{table}", arguments
    )


if __name__ == "__main__":
    main()
