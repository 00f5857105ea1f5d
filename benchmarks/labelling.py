"""Simulate labelling: the accuracy of a probe after some labels, by the order in which pictures are labelled.

    python benchmarks/labelling.py --data five runs/five others 5000 2000 --data photos cifar10 photos 60 29
    python benchmarks/labelling.py --accept --data digits cifar10 digits 1200 597

Each draw divides the images of a folder of class folders into a pool and test images. Pictures of the pool
get their true label in the order of `vitascope next`, ten at a time. The probe is the logistic regression of
`vitascope probe` with C = 0.1, which is good for 20 to 200 labels: chosen by cross-validation on 20 labels, C
is often so small that all answers are one class, which would flatter every order with even classes.

With --accept, what `fit_labels` tells is held against the truth: the accuracy of the classifier on the test
images, and of the answers that it would give without a look. In some of the orders, a share of the pictures
is offered at random, and these alone judge.
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
from vitascope.analysis.labelling.fit import fit_labels
from vitascope.analysis.labelling.order import FEW, next_pictures, typical, unit_of, unsure
from vitascope.data.targets import ClassIndices
from vitascope.training.linear.classifiers import LogisticRegression

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
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


Draws = list[tuple[Labelled, Labelled]]
"""The pool and the test images of each draw."""
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


def with_judges(order: Order, every: int) -> Order:
    """One of `every` pictures of the pool, whose order is random, is offered in this order, to judge. The
    other order chooses among the rest, and does not see the labels of these."""

    def mixed(pool: Labelled, chosen: Integers, K: int, count: int, seed: int) -> Integers:
        judging = judges_of(len(pool.classes), every)
        judges, others = np.flatnonzero(judging), np.flatnonzero(~judging)
        before, places = judging[chosen].sum(), judges_of(len(chosen) + count, every)[len(chosen) :]
        pictures, known = np.empty(count, np.int64), np.searchsorted(others, chosen[~judging[chosen]])
        pictures[places] = judges[before : before + places.sum()]
        pictures[~places] = others[order(pool.take(others), known, K, int((~places).sum()), seed)]
        return pictures

    return mixed


def judges_of(count: int, every: int) -> Mask:
    """Which of the first labels, or pictures of the pool, judge: (count,)."""
    return np.arange(count) % every == every - 1


def judged_by(every: int) -> tuple[Order, int]:
    """Typical pictures, then unsure ones after as many labels as without judges."""
    return with_judges(after(offered, least_sure, FEW - FEW // every), every), every


JUDGED: dict[str, tuple[Order, int]] = {
    "no judges: all labels": (ORDERS["typical to 50, then unsure"], 1),
    **{f"1 of {every} judges": judged_by(every) for every in (5, 3, 2)},
    "all at random": (at_random, 1),
}
"""Orders, and how many labels have one that judges."""
FIT_MARKS = (50, 100, 200, 400)
FIT_HEAD = (
    *(
        "order",
        "labels",
        "said",
        "width",
        "test",
        "held",
        "rest",
        "held",
        "draws",
        "accepted",
        "said",
        "right",
    ),
    *("below", "above", "classes below 90"),
)
ENOUGH = 10
"""Accepted pictures of a class whose share of right ones is looked at."""


class Told(NamedTuple):
    """What a fit says, and the truth, of one draw; NaN where nothing is said."""

    said: float
    width: float
    test: float
    """The accuracy on the test images, and whether the interval has it."""
    held: float
    rest: float
    """The same of the pictures of the pool without a label."""
    rest_held: float
    accepted: float = np.nan
    """Share of the pictures without a label."""
    promised: float = np.nan
    right: float = np.nan
    below: float = np.nan
    """Whether fewer are right than the interval says."""
    above: float = np.nan
    bad: float = 0
    """Classes of at least `ENOUGH` accepted pictures of which fewer than 90% are right."""
    classes: float = 0


def told(pool: Labelled, test: Labelled, K: int, order: Order, every: int, seed: int) -> Iterator[Told]:
    """After the numbers of labels of `FIT_MARKS`."""
    features = np.concatenate([pool.features, test.features])
    truth = np.concatenate([pool.classes, test.classes])
    is_test, chosen = np.arange(len(truth)) >= len(pool.classes), np.arange(0)
    targets = ClassIndices(truth, tuple(map(str, range(K))))
    for mark in (mark for mark in FIT_MARKS if mark <= len(pool.classes)):
        while len(chosen) < mark:
            chosen = np.concatenate([chosen, order(pool, chosen, K, min(BATCH, mark - len(chosen)), seed)])
        judges = judges_of(mark, every)
        fit = fit_labels(features, chosen, targets.take(chosen), judges=judges, taken=is_test, seed=seed)
        assert fit.probabilities is not None
        value, low, high = fit.score.value_and_limits if fit.score else (np.nan,) * 3
        right, is_rest = fit.probabilities.argmax(axis=1) == truth, ~is_test
        is_rest[chosen] = False
        shares = [float(right[where].mean()) for where in (is_test, is_rest)]
        held = [float(low <= share <= high) if fit.score else np.nan for share in shares]
        score = value, high - low, shares[0], held[0], shares[1], held[1]
        if not fit.acceptances:
            yield Told(*score)
            continue
        by_class = [truth[each.rows] == int(each.label) for each in fit.acceptances]
        accepted, (first, *_) = np.concatenate(by_class), fit.acceptances
        large = [float(each.mean()) for each in by_class if len(each) >= ENOUGH]
        yield Told(
            *score,
            len(accepted) / is_rest.sum(),
            first.value,
            float(accepted.mean()),
            float(accepted.mean() < first.low),
            float(accepted.mean() > first.high),
            sum(share < 0.9 for share in large),
            len(large),
        )


def told_rows(name: str, draws: list[list[Told]]) -> Iterator[list[str]]:
    """The rows of an order, below `FIT_HEAD`."""
    for mark, of_mark in zip(FIT_MARKS, zip(*draws, strict=True), strict=False):
        values = dict(zip(Told._fields, np.array(of_mark).T, strict=True))
        offers = ~np.isnan(values["right"])
        score = [f"{100 * np.nanmean(values[key]):.1f}" for key in Told._fields[:6]]
        accepted = [""] * 6
        if offers.any():
            means = [f"{100 * column[offers].mean():.1f}" for column in (values["promised"], values["right"])]
            accepted = [f"{100 * np.where(offers, values['accepted'], 0).mean():.0f}", *means]
            accepted += [f"{int(column[offers].sum())}" for column in (values["below"], values["above"])]
            accepted += [f"{int(values['bad'].sum())} of {int(values['classes'].sum())}"]
        yield [name, f"{mark}", *score, f"{int(offers.sum())} of {len(draws)}", *accepted]


def accuracy_table(name: str, draws: Draws, K: int) -> str:
    """The accuracies of all orders."""
    found: dict[str, Array] = {}
    for order_name, order in ORDERS.items():
        values = [list(accuracies(*parts, K, order, seed)) for seed, parts in enumerate(draws)]
        found[order_name] = np.array(values)  # (draws, marks)
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
    return markdown_table(["order", *(f"{mark} labels" for mark in MARKS[: found["random"].shape[1]])], rows)


def told_table(name: str, draws: Draws, K: int) -> str:
    """What the fits of all orders say, beside the truth."""
    rows: list[list[str]] = []
    for order_name, (order, every) in JUDGED.items():
        found = [list(told(*parts, K, order, every, seed)) for seed, parts in enumerate(draws)]
        rows += told_rows(order_name, found)
        note(f"{name}: {rows[-1]}")
    return markdown_table(FIT_HEAD, rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--data", nargs=5, action="append", required=True, metavar=("NAME", "MODEL", "DATA", "POOL", "TEST")
    )
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--accept", action="store_true", help="measure the fit instead of the orders")
    arguments = parser.parse_args()
    conditions, sections = Conditions.now(), []
    for name, model, data, *sizes in arguments.data:
        embedded = vs.embed(model, data, compute=vs.Compute(precision="fp32", workers=0))
        assert embedded.labels is not None
        class_names, classes = np.unique(embedded.labels, return_inverse=True)
        everything, (pool_size, test_size) = Labelled(embedded.features, classes), map(int, sizes)
        draws = []
        for seed in range(arguments.draws):
            mixed = np.random.default_rng(seed).permutation(len(classes))[: pool_size + test_size]
            draws.append((everything.take(mixed[:pool_size]), everything.take(mixed[pool_size:])))
        table = (told_table if arguments.accept else accuracy_table)(name, draws, len(class_names))
        about = f"{len(class_names)} classes, a pool of {pool_size:,}, {test_size:,} test images, {model}"
        sections.append(f"## {name}: {about}\n\n{table}")
    title = conditions.heading(
        "What a classifier of some labels says, beside the truth"
        if arguments.accept
        else "Labels per accuracy, by the order of labelling",
        figures=f"in percent, the mean of {arguments.draws} draws, and of accuracies its standard error",
    )
    publish("label-accept" if arguments.accept else "labelling", "\n\n".join([title, *sections]), arguments)


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
