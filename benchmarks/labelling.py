"""Simulate labelling: the accuracy of a probe after some labels, by the order in which pictures are labelled.

    python benchmarks/labelling.py --data five runs/five others 5000 2000 --data photos cifar10 photos 60 29

Each draw divides the images of a folder of class folders into a pool and test images. Pictures of the pool
get their true label in the order of `vitascope next`, ten at a time. The probe is the logistic regression of
`vitascope probe` with C = 0.1, which is good for 20 to 200 labels: chosen by cross-validation on 20 labels, C
is often so small that all answers are one class, which would flatter every order with even classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

import vitascope as vs
from conditions import Conditions
from reports import command_line, markdown_table, note, publish
from vitascope.analysis.labelling.order import next_pictures, typical, unit_of, unsure
from vitascope.data.targets import ClassIndices
from vitascope.training.linear.classifiers import LogisticRegression

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
MARKS = (10, 20, 50, 100, 200)
"""Labels after which the accuracy is measured."""
BATCH = 10
PROBE = LogisticRegression((0.1,))


class Labelled(NamedTuple):
    """Features (N, D) and classes (N,)."""

    features: npt.NDArray[np.float32]
    classes: Integers

    def take(self, rows: Integers) -> Labelled:
        """Some of the pictures."""
        return Labelled(self.features[rows], self.classes[rows])


def probabilities(known: Labelled, features: npt.NDArray[np.float32], K: int) -> Array:
    """Of pictures with features (M, D), by the probe of the known pictures, (M, K)."""
    names = tuple(map(str, range(K)))
    targets = ClassIndices.of_names([(str(k),) for k in known.classes], names)
    return next(iter(PROBE.fit(known.features, targets).probabilities(features)))


Order = Callable[[Labelled, Integers, int, int, int], Integers]
"""The next pictures: of the pool, those chosen before, the number of classes, how many, and the seed."""


def at_random(pool: Labelled, chosen: Integers, K: int, count: int, seed: int) -> Integers:
    return np.random.default_rng(seed).permutation(len(pool.classes))[len(chosen) :][:count]


def offered(pool: Labelled, chosen: Integers, K: int, count: int, seed: int) -> Integers:
    """As `vitascope next` without a classifier: typical ones up to `FEW` labels, then random ones."""
    labelled = np.isin(np.arange(len(pool.classes)), chosen)
    found = next_pictures(pool.features, count, labelled=labelled, seed=seed)
    return np.array([picture.index for picture in found])


def always_typical(pool: Labelled, chosen: Integers, K: int, count: int, seed: int) -> Integers:
    """By k-means, whatever the number of labels."""
    unit = unit_of(pool.features)
    rest = np.setdiff1d(np.arange(len(unit)), chosen)
    return rest[typical(unit[rest], count, unit[chosen], seed)]


def least_sure(pool: Labelled, chosen: Integers, K: int, count: int, seed: int) -> Integers:
    """By the differences between the two largest probabilities, whatever the number of labels."""
    rest = np.setdiff1d(np.arange(len(pool.classes)), chosen)
    ordered = np.sort(probabilities(pool.take(chosen), pool.features[rest], K), axis=1)
    margins = ordered[:, -1] - ordered[:, -2]
    return rest[unsure(unit_of(pool.features[rest]), margins, count, seed)]


def after(first: Order, then: Order, labels: int) -> Order:
    """One order up to a number of labels, then another."""
    return lambda pool, chosen, *others: (first if len(chosen) < labels else then)(pool, chosen, *others)


ORDERS: dict[str, Order] = {
    "random": at_random,
    "typical to 50, then random": offered,
    "typical": always_typical,
    "typical to 20, then unsure": after(offered, least_sure, 20),
    "typical to 50, then unsure": after(offered, least_sure, 50),
}


def accuracies(pool: Labelled, test: Labelled, K: int, order: Order, seed: int) -> Iterator[float]:
    """On the test images, after the numbers of labels that the pool has."""
    chosen = np.arange(0)
    for mark in (mark for mark in MARKS if mark <= len(pool.classes)):
        while len(chosen) < mark:
            count = min(BATCH, mark - len(chosen))
            chosen = np.concatenate([chosen, order(pool, chosen, K, count, seed)])
        answers = probabilities(pool.take(chosen), test.features, K)
        yield float((answers.argmax(axis=1) == test.classes).mean())


def in_words(values: Array) -> str:
    """Mean and standard error over the draws, in percent."""
    return f"{100 * values.mean():+.1f} ± {100 * values.std(ddof=1) / np.sqrt(len(values)):.1f}"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--data", nargs=5, action="append", required=True, metavar=("NAME", "MODEL", "DATA", "POOL", "TEST")
    )
    parser.add_argument("--draws", type=int, default=5)
    arguments = parser.parse_args()
    conditions, sections = Conditions.now(), []
    for name, model, data, *sizes in arguments.data:
        embedded = vs.embed(model, data, compute=vs.Compute(precision="fp32", workers=0))
        assert embedded.labels is not None
        class_names, classes = np.unique(embedded.labels, return_inverse=True)
        everything, (pool_size, test_size) = Labelled(embedded.features, classes), map(int, sizes)
        found: dict[str, Array] = {}
        for order_name, order in ORDERS.items():
            draws = []
            for seed in range(arguments.draws):
                mixed = np.random.default_rng(seed).permutation(len(classes))[: pool_size + test_size]
                pool, test = everything.take(mixed[:pool_size]), everything.take(mixed[pool_size:])
                draws.append(list(accuracies(pool, test, len(class_names), order, seed)))
            found[order_name] = np.array(draws)  # (draws, marks)
            note(f"{name}, {order_name}: {found[order_name].mean(axis=0)}")
        rows = [
            [order_name, *(in_words(column).lstrip("+") for column in values.T)]
            for order_name, values in found.items()
        ]
        rows += [
            [f"{order_name}, above {other}", *(in_words(column) for column in (values - found[other]).T)]
            for order_name, values in found.items()
            for other in ("random", "typical to 50, then random")
            if other != order_name != "random"
        ]
        head = ["order", *(f"{mark} labels" for mark in MARKS[: found["random"].shape[1]])]
        about = f"{len(class_names)} classes, a pool of {pool_size:,}, {test_size:,} test images, {model}"
        sections.append(f"## {name}: {about}\n\n{markdown_table(head, rows)}")
    title = conditions.heading(
        "Labels per accuracy, by the order of labelling",
        figures=f"accuracy in percent, mean of {arguments.draws} draws and its standard error",
    )
    publish("labelling", "\n\n".join([title, *sections]), arguments)


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
