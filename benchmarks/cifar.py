"""Train a ViT of at most 6.3 million parameters on CIFAR-10 from scratch with the recipe `small-data`.

    python benchmarks/cifar.py --data cifar10 --epochs 100 --seeds 3 --out
    python benchmarks/cifar.py --data cifar10 --minutes 7 --seeds 1 --out \\
        batch_size=500 lr=0.002 warmup_epochs=10 precision=bf16 compile=true
    python benchmarks/cifar.py --data cifar10 --add --seeds 1 --out \\
        batch_size=500 lr=0.002 warmup_epochs=10 precision=bf16 compile=true

Other arguments NAME=VALUE are options of `vitascope train`. A tenth of the training images is held out for
the validation curve and for nothing else. The test accuracy is that of the running average of the weights
after the last step (`keep=last`).

The second command aims at 95.0% within 10 minutes on an H200, everything included. `--minutes` is the time in
the loop, with validation and compilation; a run of three epochs measures how many epochs fit. 500 divides
45,000, so every batch has the same size and the model is compiled once. The learning rate grows with the
square root of the batch size, from 1e-3 at 128. The third command adds a seed, with the same number of
epochs, to the newest numbers.

On a machine without a network, use an archive of the images (`--data cifar10.tar.xz`: 17 MB as JPEG files).
It is unpacked once. Tar shards of such small files are many times as large.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import reports
import vitascope as vs
from contest import describe_machine, describe_versions, positive
from learning import named_values, train
from reports import Numbers, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.explain.plots import GREY, RIGHT, SERIES, WRONG, new_figure, plain, save_figure
from vitascope.run import run as run_folder
from vitascope.training.defaults import resolve_config

MOST_PARAMETERS = 6_300_000
PROBED_EPOCHS = 3
COLOURS = (*SERIES, RIGHT, GREY, WRONG)

NOTES = """\
"accuracy": of the running average of the weights after the last step, on images that are not used for
training or for any choice. "training": time in the loop, with validation and compilation. "images/s":
training images over the same time."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The run of one seed."""

    seed: int
    right: int
    """Correctly classified test images."""
    seconds: float
    """Time in the loop."""
    minutes: list[float]
    """Time in the loop at the end of each epoch; the next two lists are per epoch as well."""
    val_accuracy: list[float]
    train_loss: list[float]


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All runs and the conditions of the measurement, as stored in the JSON file."""

    machine: str
    versions: str
    date: str
    commands: list[str]
    options: dict[str, Any]
    """Resolved options of the runs by name, without seed and run folder."""
    parameters: int
    images: dict[str, int]
    """Number of images by split."""
    measured_on: str
    """The name of the split that accuracy is measured on."""
    runs: list[Run]

    name = "cifar"

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        return cls(**values | {"runs": [Run(**run) for run in values["runs"]]})

    @property
    def tested(self) -> int:
        """The number of images that accuracy is measured on."""
        return self.images[self.measured_on]

    @property
    def accuracy(self) -> float:
        """The mean over the seeds."""
        return statistics.mean(run.right for run in self.runs) / self.tested

    def table(self) -> str:
        """One row per seed, and their mean."""
        shown = self.options["epochs"] * self.images["train"]
        rows = [
            (
                str(run.seed),
                f"{run.right / self.tested:.2%}",
                f"{run.right:,} of {self.tested:,}",
                f"{run.seconds:,.0f} s",
                f"{shown / run.seconds:,.0f}",
            )
            for run in self.runs
        ]
        seconds = statistics.mean(run.seconds for run in self.runs)
        rows.append(("mean", f"{self.accuracy:.2%}", "", f"{seconds:,.0f} s", f"{shown / seconds:,.0f}"))
        return markdown_table(
            ("seed", f"{self.measured_on} accuracy", "correct", "training", "images/s"), rows
        )

    def report(self) -> str:
        """The text for benchmarks/results."""
        counts = ", ".join(f"{count:,} {name}" for name, count in self.images.items())
        commands = "".join(f"- command: `{command}`\n" for command in self.commands)
        recipe = vs.TrainConfig.from_recipe("small-data", data=self.options["data"]).to_dict()
        options = [f"{name}={value}" for name, value in self.options.items() if recipe[name] != value]
        return (
            f"# From scratch: {self.accuracy:.2%} on {self.options['data']}\n\n"
            f"- machine: {self.machine}\n"
            f"- versions: {self.versions}\n"
            f"- date: {self.date}\n"
            f"{commands}"
            f"- model: {self.parameters:,} parameters\n"
            f"- images: {counts}\n"
            f"- recipe: small-data with {', '.join(options)}\n\n"
            f"{self.table()}\n\n{NOTES}"
        )


def configuration(data: str, epochs: int, words: list[str]) -> vs.TrainConfig:
    """Return the recipe with options changed, NAME=VALUE each.

    Raises:
        UserError: a word is not an option, or names an option that this benchmark fixes.
    """
    options = named_values(words, fixed=("data", "run", "seed", "epochs", "keep"))
    return vs.TrainConfig.from_recipe("small-data", data=data, epochs=epochs, keep="last", **options)


def resolved(config: vs.TrainConfig, splits: Splits) -> tuple[dict[str, Any], int]:
    """Return the options of a run as plain values, and the number of parameters.

    Raises:
        UserError: the model has more parameters than allowed.
    """
    whole, model = resolve_config(config, splits)
    if model.num_parameters > MOST_PARAMETERS:
        raise UserError(f"{model.num_parameters:,} parameters are more than {MOST_PARAMETERS:,}")
    options = {name: value for name, value in whole.to_dict().items() if name not in ("run", "seed")}
    return options, model.num_parameters


def run_of(config: vs.TrainConfig, seed: int, images: int, kept: Path | None = None) -> Run:
    """Train one seed on `images` images; the run folder stays in `kept` if that is given."""
    with tempfile.TemporaryDirectory() as folder:
        run = (kept or Path(folder)) / f"seed-{seed}"
        result = train(f"seed {seed}", config.replace(seed=seed, run=str(run)))
        epochs = [record for record in run_folder.Run(run).metrics if record["kind"] == "epoch"]
    evaluation = result.evaluation
    return Run(
        seed=seed,
        right=int((evaluation.classes == evaluation.labels).sum()),
        seconds=result.seconds,
        minutes=[record["epoch"] * images / record["images_per_second"] / 60 for record in epochs],
        val_accuracy=[record["val_accuracy"] for record in epochs],
        train_loss=[record["train_loss"] for record in epochs],
    )


def epochs_in(minutes: float, probed: Run) -> int:
    """Return how many epochs fit: the last probed epochs set the pace, the first one includes compilation."""
    pace = (probed.minutes[-1] - probed.minutes[0]) / (len(probed.minutes) - 1)
    return max(1, int(1 + (minutes - probed.minutes[0]) / pace))


def draw(measured: Measurement) -> Figure:
    """Plot validation accuracy and training loss by epochs and by minutes, one line per seed."""
    figure = new_figure(
        10,
        6.4,
        f"{measured.accuracy:.2%} {measured.measured_on}, {measured.parameters / 1e6:.2f} M parameters",
    )
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    across: list[tuple[str, Callable[[Run], list[float]]]] = [
        ("epoch", lambda run: [*map(float, range(1, len(run.minutes) + 1))]),
        ("minutes in the loop", lambda run: run.minutes),
    ]
    up: list[tuple[str, Callable[[Run], list[float]]]] = [
        ("validation accuracy, %", lambda run: [100 * share for share in run.val_accuracy]),
        ("training loss", lambda run: run.train_loss),
    ]
    for row, (ylabel, y_of) in zip(panels, up, strict=True):
        for axes, (xlabel, x_of) in zip(row, across, strict=True):
            draw_seeds(axes, measured.runs, x_of, y_of)
            plain(axes, xlabel=xlabel if y_of is up[-1][1] else "", ylabel=ylabel if axes is row[0] else "")
    panels[0][0].legend(frameon=False)
    return figure


def draw_seeds(
    axes: Axes, runs: list[Run], x_of: Callable[[Run], list[float]], y_of: Callable[[Run], list[float]]
) -> None:
    """Draw one line per seed, or a dot if there is only one epoch."""
    for number, run in enumerate(runs):
        marker = "o" if len(run.minutes) == 1 else ""
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(x_of(run), y_of(run), color=colour, linewidth=1, marker=marker, label=f"seed {run.seed}")


def start(arguments: argparse.Namespace) -> tuple[vs.TrainConfig, Measurement]:
    """Return the training options and the measurement so far: empty, or the newest one with --add.

    Raises:
        UserError: an option is invalid, or the newest numbers have other options.
    """
    earlier = None
    if arguments.add:
        earlier = Measurement.newest()
    splits = open_data(arguments.data)
    epochs = arguments.epochs if earlier is None else earlier.options["epochs"]
    config = configuration(arguments.data, epochs, arguments.options)
    resolved(config, splits)
    if earlier is None and arguments.minutes is not None:
        probe = config.replace(epochs=PROBED_EPOCHS, warmup_epochs=1.0, warmup_steps=None)
        epochs = epochs_in(arguments.minutes, run_of(probe, 0, len(splits.train)))
        note(f"{epochs} epochs fit into {arguments.minutes:g} minutes")
        config = config.replace(epochs=epochs)
    options, parameters = resolved(config, splits)
    if earlier is not None and earlier.options != options:
        raise UserError("the newest numbers have other options; leave out --add")
    command = shlex.join(["python", *sys.argv])
    if earlier is not None:
        return config, dataclasses.replace(earlier, commands=[*earlier.commands, command])
    parts = (splits.train, splits.val, splits.final)
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return config, Measurement(
        machine=gpu + describe_machine(),
        versions=describe_versions(),
        date=datetime.date.today().isoformat(),
        commands=[command],
        options=options,
        parameters=parameters,
        images={part.name: len(part) for part in parts},
        measured_on=splits.final.name,
        runs=[],
    )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of `vitascope train`")
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--epochs", type=positive, default=100, help="default 100")
    parser.add_argument("--minutes", type=float, help="time in the loop, instead of --epochs")
    parser.add_argument("--seeds", type=positive, default=3, help="number of runs (default 3)")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder, as seed-0, seed-1, ...")
    parser.add_argument("--add", action="store_true", help="add seeds to the newest numbers")
    parser.add_argument("--out", action="store_true", help="also write report, numbers and curves to results")
    return parser.parse_intermixed_args(given)


def main() -> None:
    arguments = parse()
    config, measured = start(arguments)
    first = 1 + max((run.seed for run in measured.runs), default=-1)
    for seed in range(first, first + arguments.seeds):
        run = run_of(config, seed, measured.images["train"], arguments.runs)
        measured = dataclasses.replace(measured, runs=[*measured.runs, run])
        note(measured.table())
        if arguments.out:  # after each seed, in case a later one is interrupted
            measured.write()
            save_figure(draw(measured), reports.RESULTS / f"{datetime.date.today().isoformat()}-cifar.png")
    publish("cifar", measured.report(), arguments)


if __name__ == "__main__":
    main()
