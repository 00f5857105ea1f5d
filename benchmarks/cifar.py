"""CIFAR-10 from scratch, by the recipe `small-data`, with a ViT of at most 6.3 million parameters.

    python benchmarks/cifar.py --data cifar10 --epochs 100 --seeds 3 --out
    python benchmarks/cifar.py --data cifar10 --minutes 7 --seeds 1 --out \\
        batch_size=500 lr=0.002 warmup_epochs=10 precision=bf16 compile=true
    python benchmarks/cifar.py --data cifar10 --add --seeds 1 --out \\
        batch_size=500 lr=0.002 warmup_epochs=10 precision=bf16 compile=true

Every further word is an option of `vitascope train`. A tenth of the training images is held out and draws the
curve; nothing is chosen by it: what is measured on the test images is the running average of the weights
after the last step (`keep=last`).

The second command aims at 95.0% within 10 minutes on an H200, all included: `--minutes` is the time in the
loop, with validation and compilation; how many epochs they hold is found by a run of three. 500 divides
45,000, so that every batch has one size and one compilation; the rate grows with the square root of the
batch, from 1e-3 at 128. The third command adds a seed, of as many epochs, to the newest numbers.

To a machine without a network bring the images as an archive (`--data cifar10.tar.xz`: 17 MB as JPEG files),
which is unpacked there once. Tar shards of such small files are many times as large.
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
"accuracy": of the running average of the weights after the last step, on images that neither training nor any
choice has seen. "training": seconds in the loop, with validation and compilation; "images/s" counts the
training images over the same seconds."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A seed."""

    seed: int
    right: int
    """Test images."""
    seconds: float
    """In the loop."""
    minutes: list[float]
    """In the loop, at the end of each epoch; this and what follows."""
    val_accuracy: list[float]
    train_loss: list[float]


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All runs, and how they came about: what the JSON file holds."""

    machine: str
    versions: str
    date: str
    commands: list[str]
    options: dict[str, Any]
    """Those of the run, resolved, by name; without the seed and the place."""
    parameters: int
    images: dict[str, int]
    """By split."""
    measured_on: str
    """The split that the accuracy is of."""
    runs: list[Run]

    name = "cifar"

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        return cls(**values | {"runs": [Run(**run) for run in values["runs"]]})

    @property
    def tested(self) -> int:
        """Images that the accuracy is of."""
        return self.images[self.measured_on]

    @property
    def accuracy(self) -> float:
        """Of all seeds, the mean."""
        return statistics.mean(run.right for run in self.runs) / self.tested

    def table(self) -> str:
        """A line for each seed, and their mean."""
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
        return markdown_table(("seed", f"{self.measured_on} accuracy", "right", "training", "images/s"), rows)

    def report(self) -> str:
        """What stands in benchmarks/results."""
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
    """The recipe with options changed, NAME=VALUE each.

    Raises:
        UserError: a word that is no option, or names what this benchmark fixes.
    """
    options = named_values(words, fixed=("data", "run", "seed", "epochs", "keep"))
    return vs.TrainConfig.from_recipe("small-data", data=data, epochs=epochs, keep="last", **options)


def resolved(config: vs.TrainConfig, splits: Splits) -> tuple[dict[str, Any], int]:
    """The options of a run as plain values, and the model's parameters.

    Raises:
        UserError: more parameters than allowed.
    """
    whole, model = resolve_config(config, splits)
    if model.num_parameters > MOST_PARAMETERS:
        raise UserError(f"{model.num_parameters:,} parameters are more than {MOST_PARAMETERS:,}")
    options = {name: value for name, value in whole.to_dict().items() if name not in ("run", "seed")}
    return options, model.num_parameters


def run_of(config: vs.TrainConfig, seed: int, images: int, kept: Path | None = None) -> Run:
    """Train a seed on so many images; the run stays in `kept`, where there is one."""
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
    """How many epochs fit: the first one also starts and compiles, the last ones probed tell the pace."""
    pace = (probed.minutes[-1] - probed.minutes[0]) / (len(probed.minutes) - 1)
    return max(1, int(1 + (minutes - probed.minutes[0]) / pace))


def draw(measured: Measurement) -> Figure:
    """Validation accuracy and training loss, by epochs and by minutes, a line a seed."""
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
    """A line a seed; a dot where there is one epoch."""
    for number, run in enumerate(runs):
        marker = "o" if len(run.minutes) == 1 else ""
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(x_of(run), y_of(run), color=colour, linewidth=1, marker=marker, label=f"seed {run.seed}")


def start(arguments: argparse.Namespace) -> tuple[vs.TrainConfig, Measurement]:
    """What is to be run, and the measurement so far: empty, or the newest one.

    Raises:
        UserError: an option that makes no sense, or numbers to add to that are of other options.
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
        note(f"{arguments.minutes:g} minutes are {epochs} epochs")
        config = config.replace(epochs=epochs)
    options, parameters = resolved(config, splits)
    if earlier is not None and earlier.options != options:
        raise UserError("the newest numbers are of other options; leave out --add")
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
    parser.add_argument("--minutes", type=float, help="in the loop; takes as many epochs as they hold")
    parser.add_argument("--seeds", type=positive, default=3, help="default 3")
    parser.add_argument("--runs", type=Path, help="keep the runs there, as seed-0 and so on")
    parser.add_argument("--add", action="store_true", help="add seeds to the newest numbers")
    parser.add_argument("--out", action="store_true", help="write report, numbers and curves to results too")
    return parser.parse_intermixed_args(given)


def main() -> None:
    arguments = parse()
    config, measured = start(arguments)
    first = 1 + max((run.seed for run in measured.runs), default=-1)
    for seed in range(first, first + arguments.seeds):
        run = run_of(config, seed, measured.images["train"], arguments.runs)
        measured = dataclasses.replace(measured, runs=[*measured.runs, run])
        note(measured.table())
        if arguments.out:  # after each seed: what comes later may be stopped
            measured.write()
            save_figure(draw(measured), reports.RESULTS / f"{datetime.date.today().isoformat()}-cifar.png")
    publish("cifar", measured.report(), arguments)


if __name__ == "__main__":
    main()
