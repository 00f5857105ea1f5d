"""Measure the effect of pre-training without labels: pre-train on all images, fine-tune on a few labels.

    .venv/bin/python benchmarks/pretraining.py --data cifar10 --out

The script pre-trains a ViT on all training images for each target: the paper's three (appendix B.1.2) and a
masked autoencoder. It then trains each body, and one with random weights, on `--limit` labelled images (by
default a tenth of all), with the same recipe, epochs and seeds. An epoch of a masked autoencoder takes less
time than one of the others; `NAME:EPOCHS` gives each target its own number. `--pretrain` and `--finetune`
change options of `vitascope pretrain` and `vitascope train`:

    .venv/bin/python benchmarks/pretraining.py --targets mae:10 mean_color:3 --limit 1000 --patch-size 4 \\
        --pretrain decoder_dim=64 decoder_depth=1 --finetune layer_decay=0.75 randaugment=2 keep=last

With `--runs FOLDER`, the same command continues an interrupted measurement.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vitascope as vs
from conditions import Conditions
from contest import positive
from learning import engine, named_values, options, runs_of, schedule, tested, train, vit, write_limited
from reports import markdown_table, note, publish
from vitascope.data.datasets import open_data

TARGETS = ("mean_color", "downsampled", "pixels", "mae")
FIXED = ("data", "run", "weights", "seed", "epochs", "target")
HEADER = ("start", "epochs", "on hidden patches", "test accuracy, %", "seeds, %", "pre-training, s")

NOTES = """\
"start": the initial weights of the classifier's body, random or pre-trained on a target. "on hidden
patches": of the test images, the accuracy of the colours, or the loss of the pixels (squared error of
normalized values). "test accuracy": the mean over the seeds of the fine-tuning."""


def target(text: str) -> tuple[str, int | None]:
    """Parse NAME or NAME:EPOCHS, for argparse."""
    name, _, epochs = text.partition(":")
    if name not in TARGETS:
        raise argparse.ArgumentTypeError(f"unknown target {name!r}; one of {', '.join(TARGETS)}")
    return name, positive(epochs) if epochs else None


def pretrain(name: str, epochs: int, arguments: argparse.Namespace, runs: Path) -> vs.Run:
    """Pre-train a body on a target with all images."""
    values: dict[str, Any] = schedule(epochs) | vit(arguments) | engine(arguments)
    values |= named_values(arguments.pretrain, FIXED)
    config = vs.TrainConfig.from_recipe(
        task="masked", data=arguments.data, run=str(runs / name), target=name, **values
    )
    return train(f"a body on {name}", config)


def finetune(start: str | None, seed: int, arguments: argparse.Namespace, data: str, runs: Path) -> float:
    """Return the test accuracy after training on a few labels, from a run's body or from random weights."""
    values: dict[str, Any] = schedule(arguments.finetune_epochs) | vit(arguments) | engine(arguments)
    values |= {"pool": "mean", "lr": arguments.finetune_lr, "layer_decay": 1.0}
    values |= named_values(arguments.finetune, FIXED)
    config = vs.TrainConfig.from_recipe(
        "finetune",
        data=data,
        run=str(runs / f"{start}-{seed}"),
        weights=None if start is None else str(runs / start),
        seed=seed,
        **values,
    )
    return tested(train(f"from {start}, seed {seed}", config))["accuracy"]


def row(start: str, accuracies: Sequence[float], pretrained: vs.Run | None) -> tuple[str, ...]:
    """The table's row for a start."""
    seeds = ", ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies)
    epochs, said, seconds = "-", "-", "-"
    if pretrained is not None:
        metrics = tested(pretrained)
        seconds = f"{metrics['seconds']:,.0f}"
        share = metrics.get("accuracy")
        said = f"loss {metrics['loss']:.3f}" if share is None else f"{100 * share:.1f}% correct"
        epochs = str(pretrained.config["epochs"])
    return (start, epochs, said, f"{100 * statistics.mean(accuracies):.2f}", seeds, seconds)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, epochs=50)
    parser.add_argument(
        "--targets",
        type=target,
        nargs="+",
        default=[(name, None) for name in TARGETS],
        metavar="NAME[:EPOCHS]",
        help=f"targets, each with its own epochs or those of --epochs (default {' '.join(TARGETS)})",
    )
    parser.add_argument(
        "--finetune-epochs", type=positive, default=50, help="epochs of the fine-tuning (default 50)"
    )
    parser.add_argument(
        "--finetune-lr", type=float, default=1e-3, help="learning rate of the fine-tuning (default 0.001)"
    )
    parser.add_argument("--seeds", type=positive, default=3, help="runs of the fine-tuning (default 3)")
    for command in ("pretrain", "finetune"):
        text = f"other options of the {command.removesuffix('e')}ing, NAME=VALUE each"
        parser.add_argument(f"--{command}", nargs="+", default=[], metavar="NAME=VALUE", help=text)
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with runs_of(arguments) as runs:
        labels = arguments.limit or len(open_data(arguments.data).train) // 9  # train has nine tenths of all
        data = write_limited(arguments.data, labels, runs / "data")
        others = f" and {shlex.join(arguments.finetune)}" if arguments.finetune else ""
        method = (
            "each target with its own recipe and all training images; then the recipe `finetune` with pool "
            f"mean, learning rate {arguments.finetune_lr:g}, no layer decay{others}: "
            f"{arguments.finetune_epochs} epochs of {labels:,} labelled images (a tenth is for validation)"
        )
        report = Conditions.now().heading(f"Pre-training without labels: {arguments.data}", method=method)
        rows = []
        for start, epochs in ((None, None), *arguments.targets):
            pretrained = None
            if start is not None:
                pretrained = pretrain(start, epochs or arguments.epochs, arguments, runs)
            seeds = [finetune(start, seed, arguments, data, runs) for seed in range(arguments.seeds)]
            rows.append(row(start or "random weights", seeds, pretrained))
            note(str(rows[-1]))
    publish("pretraining", f"{report}\n\n{markdown_table(HEADER, rows)}\n\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
