"""Measure class weights and balanced sampling on classes with very different numbers of images.

    .venv/bin/python benchmarks/uneven.py --data cifar10 --out

The script takes some training images of a few classes, and all their test images. It trains the same model on
them plainly, with `--class-weights balanced` and with `--sampling balanced`, with the same epochs and seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import vitascope as vs
from conditions import Conditions
from contest import positive
from learning import engine, options, runs_of, schedule, train, vit, write_classes
from reports import markdown_table, note, publish
from vitascope.evaluation.measure import Evaluation
from vitascope.run.measures import score_of

DEFAULT_COUNTS = {"airplane": 500, "automobile": 100, "ship": 30}
KINDS: dict[str, dict[str, str]] = {
    "neither": {},
    "class_weights": {"class_weights": "balanced"},
    "sampling": {"sampling": "balanced"},
}

NOTES = """\
Means over the seeds, of the weights with the lowest validation loss. "balanced accuracy": the mean of the
recalls in the last columns, each with the class's number of training images; a tenth of these selects the
weights."""


def count(text: str) -> tuple[str, int]:
    """A class and its number of training images, from NAME=COUNT."""
    name, equals, number = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=COUNT, not {text!r}")
    return name, positive(number)


def config_of(kind: str, seed: int, arguments: argparse.Namespace, data: str, runs: Path) -> vs.TrainConfig:
    """The training options of a run."""
    return vs.TrainConfig.from_recipe(
        "base",
        data=data,
        run=str(runs / f"{kind}-{seed}"),
        seed=seed,
        pool="mean",
        batch_size=32,
        **schedule(arguments.epochs),
        **KINDS[kind],
        **vit(arguments),
        **engine(arguments),
    )


def row(kind: str, evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """The table's row for a kind of training: balanced accuracy, macro F1, the recall of each class."""
    scores = [score_of(each.labels, each.probabilities) for each in evaluations]
    balanced = [score.balanced for score in scores]
    recalls = [np.diag(found.confusion) / found.confusion.sum(axis=1) for found in evaluations]  # (K,) each
    shares = [statistics.mean(balanced), statistics.mean(score.macro_f1 for score in scores)]
    seeds = ", ".join(f"{100 * share:.1f}" for share in balanced)
    balanced_mean, f1, *classes = (f"{100 * share:.1f}" for share in (*shares, *np.mean(recalls, axis=0)))
    return (kind, balanced_mean, seeds, f1, *classes)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, epochs=30)
    parser.set_defaults(patch_size=8, embed_dim=96, depth=3)
    parser.add_argument(
        "--counts",
        nargs="+",
        type=count,
        default=list(DEFAULT_COUNTS.items()),
        metavar="NAME=COUNT",
        help="training images per class (default: three classes of CIFAR-10)",
    )
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each kind (default 3)")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    counts = dict(arguments.counts)
    with runs_of(arguments) as runs:
        data = write_classes(arguments.data, counts, runs / "data")
        rows = []
        for kind in KINDS:
            configs = [config_of(kind, seed, arguments, data, runs) for seed in range(arguments.seeds)]
            found = [vs.evaluate(train(f"{kind}, seed {config.seed}", config).path) for config in configs]
            rows.append(row(kind, found))
            note(str(rows[-1]))
        length = f"{arguments.epochs} epochs; seeds: {arguments.seeds}"
        method = f"recipe `base` with pool mean, batches of 32, {length}"
    classes = (f"{name} ({number})" for name, number in counts.items())
    header = ("balanced", "balanced accuracy, %", "seeds, %", "macro F1, %", *classes)
    report = Conditions.now().heading(f"Uneven classes: {arguments.data}", method=method)
    publish("uneven", f"{report}\n\n{markdown_table(header, rows)}\n\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
