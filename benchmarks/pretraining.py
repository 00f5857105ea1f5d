"""Measure the effect of masked patch prediction: pre-train without labels, fine-tune on a tenth of them.

    .venv/bin/python benchmarks/pretraining.py --data cifar10 --out

The script pre-trains a ViT on all training images for each of the paper's three targets (appendix B.1.2). It
then trains each body, and one with random weights, on a tenth of the labels, with the same recipe, epochs and
seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import vitascope as vs
from contest import positive
from learning import engine, heading, options, schedule, train, vit, write_limited
from reports import markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.training.train import PretrainResult

TARGETS = ("mean_color", "downsampled", "pixels")
HEADER = ("start", "validation of the pre-training", "test accuracy, %", "seeds, %", "pre-training, s")

NOTES = """\
"start": the initial weights of the classifier's body, random or pre-trained on a target. "validation of the
pre-training": on the hidden patches of the test images, the accuracy of the colours, or the loss of the
pixels (squared error of normalized values). "test accuracy": the mean over the seeds of the fine-tuning, with
the weights of the lowest validation loss."""


def pretrain(target: str, arguments: argparse.Namespace, runs: Path) -> PretrainResult:
    """Pre-train a body on a target with all images."""
    note(f"pre-training on {target}")
    config = vs.TrainConfig.from_recipe(
        "masked",
        data=arguments.data,
        run=str(runs / target),
        target=target,
        **schedule(arguments.epochs),
        **vit(arguments),
        **engine(arguments),
    )
    with contextlib.redirect_stdout(sys.stderr):
        return vs.pretrain(config)


def finetune(start: str | None, seed: int, arguments: argparse.Namespace, data: str, runs: Path) -> float:
    """Return the test accuracy after training on a few labels, from a run's body or from random weights."""
    config = vs.TrainConfig.from_recipe(
        "finetune",
        data=data,
        run=str(runs / f"{start}-{seed}"),
        weights=None if start is None else str(runs / start),
        **schedule(arguments.finetune_epochs),
        seed=seed,
        pool="mean",
        lr=arguments.finetune_lr,
        layer_decay=1.0,
        **vit(arguments),
        **engine(arguments),
    )
    return train(f"from {start}, seed {seed}", config).evaluation.accuracy


def row(start: str, accuracies: Sequence[float], pretrained: PretrainResult | None) -> tuple[str, ...]:
    """The table's row for a start."""
    seeds = ", ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies)
    said, seconds = "-", "-"
    if pretrained is not None:
        metrics, seconds = pretrained.metrics, f"{pretrained.seconds:,.0f}"
        share = metrics.get("accuracy")
        said = f"loss {metrics['loss']:.3f}" if share is None else f"{100 * share:.1f}% correct"
    return (start, said, f"{100 * statistics.mean(accuracies):.2f}", seeds, seconds)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, epochs=50)
    parser.add_argument(
        "--finetune-epochs", type=positive, default=50, help="epochs of the fine-tuning (default 50)"
    )
    parser.add_argument(
        "--finetune-lr", type=float, default=1e-3, help="learning rate of the fine-tuning (default 0.001)"
    )
    parser.add_argument("--seeds", type=positive, default=3, help="runs of the fine-tuning (default 3)")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        limit = arguments.limit or len(open_data(arguments.data).train) // 9  # train has nine tenths of all
        data = write_limited(arguments.data, limit, runs / "data")
        method = (
            f"recipe `masked`, {arguments.epochs} epochs of all training images; then `finetune` with pool "
            f"mean, learning rate {arguments.finetune_lr:g} and no layer decay, "
            f"{arguments.finetune_epochs} epochs of {limit:,} labelled images (a tenth of them selects "
            f"the weights)"
        )
        report = heading(f"Masked patch prediction: {arguments.data}", method)
        rows = []
        for start in (None, *TARGETS):
            pretrained = None if start is None else pretrain(start, arguments, runs)
            seeds = [finetune(start, seed, arguments, data, runs) for seed in range(arguments.seeds)]
            rows.append(row(start or "random weights", seeds, pretrained))
            note(str(rows[-1]))
    publish("pretraining", f"{report}\n{markdown_table(HEADER, rows)}\n\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
