"""Measure the test accuracy of a ViT, a CNN and a hybrid by the number of training images.

    .venv/bin/python benchmarks/data_sizes.py --data cifar10 --out --docs docs/training.md
    .venv/bin/python benchmarks/data_sizes.py --docs docs/training.md

A CNN assumes that nearby pixels belong together and that an object looks the same everywhere; a ViT assumes
neither (Dosovitskiy et al. 2021, section 3.1, and figures 3 and 4, where ResNets are ahead on few images and
ViTs on many). The script trains a ViT, the same ViT behind a convolutional tokenizer, and a ResNet on
growing shares of the same images. The number of steps is the same for each share: with the same number of
epochs, few images would also mean little training. The first command measures, writes
benchmarks/results/<date>-data_sizes.md and, after every run, the raw numbers beside it, fills in the page and
draws docs/images/data_sizes.png. The second only fills in and draws from the newest raw numbers. `--resume`
trains only the runs that are missing there.

Other arguments NAME=VALUE are options of `vitascope train` for all models. The models have 4.9 to 5.6 M
parameters; for about 1.3 M each: --embed-dim 128 --depth 6 --num-heads 4 --cnn resnet29_w32_cifar.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

import vitascope as vs
from contest import describe_machine, describe_versions, positive
from learning import engine, named_values, options, train, vit, write_images
from reports import Numbers, fill_in, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.explain.plots import INK, RIGHT, SERIES, new_figure, plain, save_figure

NAME = "data_sizes"
MODELS = ("ViT", "hybrid", "ResNet")
COLOURS = dict(zip(MODELS, (*SERIES, RIGHT), strict=True))
FIXED = ("data", "run", "seed", "epochs", "batch_size", "model", "options")
"""Options that differ between the models or have a flag of their own."""
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "data_sizes.png"

NOTES = """\
Test accuracy in %: the mean over the seeds, with the lowest and the highest if there are several, always on
all test images. "images": training images, a share of each class. The same share of the validation images
selects the weights with the lowest loss, like the paper's early stopping. "ViT": the recipe `small-data`
without its ResNet stem; one convolution makes the patches, as in the paper. "hybrid": the recipe unchanged.
"ResNet": the recipe `cnn`. All three have the same augmentation, batch size, peak learning rate, warm-up and
number of steps, rounded to whole epochs."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a model on a share of the images."""

    model: str
    share: float
    """Percent of the training images."""
    seed: int
    images: int
    """Number of training images."""
    epochs: int
    steps: int
    parameters: int
    flops: int
    """Per forward pass of one image."""
    accuracy: float
    """Test accuracy."""
    seconds: float
    """Time in the loop, with validation."""


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All runs and the conditions of the measurement, as stored in the JSON file."""

    machine: str
    versions: str
    date: str
    command: str
    setting: dict[str, Any]
    """Settings of all runs: data, steps, batch size, model sizes."""
    runs: list[Run]

    name = NAME

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        return cls(**values | {"runs": [Run(**run) for run in values["runs"]]})

    def of(self, model: str, share: float) -> list[Run]:
        """The runs of a model on a share, one per seed."""
        return [run for run in self.runs if (run.model, run.share) == (model, share)]

    def shares(self) -> list[float]:
        """All shares in percent, ascending."""
        return sorted({run.share for run in self.runs})

    def table(self) -> str:
        """The accuracies with one row per share, then the sizes of the models."""
        rows = []
        for share in self.shares():
            runs = [self.of(model, share) for model in MODELS]
            some = next(filter(None, runs))[0]
            rows.append((f"{some.images:,}", f"{share:g}%", f"{some.epochs:,}", *map(cell, runs)))
        models = []
        for model in MODELS:
            runs_of_it = [run for run in self.runs if run.model == model]
            if runs_of_it:
                seconds = statistics.median(run.seconds for run in runs_of_it)
                some = runs_of_it[0]
                models.append((model, f"{some.parameters:,}", f"{some.flops / 1e6:.1f}", f"{seconds:,.0f}"))
        sizes = markdown_table(("model", "parameters", "MFLOPs", "training, s (median)"), models)
        return f"{markdown_table(('images', 'share', 'epochs', *MODELS), rows)}\n\n{sizes}"

    def how(self) -> str:
        """A description of the setting."""
        said = self.setting
        return (
            f"{said['data']}, {said['steps']:,} steps of {said['batch_size']} images "
            f"({said['epochs']} epochs of all images){''.join(f', {word}' for word in said['options'])}; "
            f"seeds: {len({run.seed for run in self.runs})}"
        )

    def for_docs(self) -> str:
        """The text for the page."""
        return (
            f"![test accuracy by the number of training images](images/{PICTURE.name})\n\n"
            f"{self.table()}\n\n{NOTES}\n\n{self.how()}; {self.machine}; {self.date}."
        )

    def report(self) -> str:
        """The text for benchmarks/results."""
        return (
            f"# Accuracy of a ViT, a hybrid and a CNN by the number of images: {self.setting['data']}\n\n"
            f"- machine: {self.machine}\n"
            f"- versions: {self.versions}\n"
            f"- date: {self.date}\n"
            f"- command: `{self.command}`\n"
            f"- method: {self.how()}; setting: {json.dumps(self.setting)}\n\n"
            f"{self.table()}\n\n{NOTES}"
        )


def cell(runs: Sequence[Run]) -> str:
    """The mean accuracy of some seeds and their range, or a dash without measurements."""
    percent = [100 * run.accuracy for run in runs]
    if not percent:
        return "-"
    spread = f" ({min(percent):.2f} to {max(percent):.2f})" if len(percent) > 1 else ""
    return f"{statistics.mean(percent):.2f}{spread}"


def draw(measured: Measurement) -> Figure:
    """Plot test accuracy over the number of training images, with one line per model, named at its end."""
    figure = new_figure(7.6, 4.6, "Test accuracy by the number of training images")
    axes = figure.subplots()
    ends: dict[str, tuple[float, float]] = {}
    for model in MODELS:
        runs = [found for share in measured.shares() if (found := measured.of(model, share))]
        if not runs:
            continue
        images = [found[0].images for found in runs]
        percent = [[100 * run.accuracy for run in found] for found in runs]
        means = [statistics.mean(values) for values in percent]
        axes.plot(images, means, color=COLOURS[model], marker="o")
        low, high = [min(values) for values in percent], [max(values) for values in percent]
        axes.fill_between(images, low, high, color=COLOURS[model], alpha=0.15, linewidth=0)
        ends[model] = (images[-1], means[-1])
    plain(axes, xlabel="training images", ylabel="test accuracy, %", xscale="log")
    ticks = sorted({run.images for run in measured.runs})
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda images, _: f"{images:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    name_ends(axes, ends)
    said, seeds = measured.setting, len({run.seed for run in measured.runs})
    short = f"{said['data']}, {said['steps']:,} steps of {said['batch_size']} images each"
    axes.set_title(f"{short}; bands: lowest to highest of {seeds} seeds", fontsize=9, color=INK)
    return figure


def name_ends(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Write each line's name to the right of its last point, in its colour, without overlaps."""
    low, high = axes.get_ylim()
    gap = (high - low) / 18
    place = -math.inf
    for model, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        place = max(y, place + gap)
        axes.annotate(
            model,
            (x, place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[model],
            fontweight="bold",
            annotation_clip=False,
        )


def write_share(splits: Splits, share: float, folder: Path) -> None:
    """Write a folder with a share of the training and validation images of each class, and all test images.

    A larger share contains the smaller ones.

    Args:
        splits: the splits of the complete data set.
        share: the share in percent.
        folder: a new folder.
    """
    assert splits.test is not None
    for images in (splits.train, splits.val):
        places = [np.flatnonzero(images.labels == label) for label in range(len(images.class_names))]
        chosen = [place[: max(1, round(share / 100 * len(place)))] for place in places]
        write_images(images.subset(images.name, np.concatenate(chosen)), folder / images.name)
    write_images(splits.test, folder / "test")


def configs(arguments: argparse.Namespace, data: str, epochs: int, steps: int) -> dict[str, vs.TrainConfig]:
    """The training options by model, without run folders and seeds."""
    shared = {
        "data": data,
        "epochs": epochs,
        "batch_size": arguments.batch_size,
        "warmup_steps": steps // 20,
        "image_size": arguments.image_size,
        **engine(arguments),
        **named_values(arguments.options, fixed=FIXED),
    }
    from_recipe = vs.TrainConfig.from_recipe
    return {
        "ViT": from_recipe("small-data", options=("stem=conv",), **vit(arguments), **shared),
        "hybrid": from_recipe("small-data", **vit(arguments), **shared),
        "ResNet": from_recipe("cnn", model=arguments.cnn, **shared),
    }


def epochs_of(steps: int, images: int, batch_size: int) -> int:
    """The number of epochs with about `steps` steps."""
    return max(1, round(steps / math.ceil(images / batch_size)))


def runs_of(
    arguments: argparse.Namespace, splits: Splits, done: set[tuple[str, float, int]]
) -> Iterator[Run]:
    """Train and measure all runs (model, share, seed) that are not in `done`, share by share."""
    for share in sorted(arguments.shares):
        missing = [
            (model, seed)
            for seed in range(arguments.seeds)
            for model in arguments.models
            if (model, share, seed) not in done
        ]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data"
            write_share(splits, share, data)
            images = len(open_data(str(data)).train)
            if images < arguments.batch_size:
                raise UserError(f"{share:g}% are {images} images, less than a batch: lower --batch-size")
            epochs = epochs_of(arguments.steps, images, arguments.batch_size)
            for model, seed in missing:
                config = configs(arguments, str(data), epochs, arguments.steps)[model]
                config = config.replace(seed=seed, run=f"{folder}/{model}-{seed}")
                trained = train(f"{model} on {share:g}%, {images:,} images, seed {seed}", config)
                shape = trained.model.config
                yield Run(
                    model=model,
                    share=share,
                    seed=seed,
                    images=images,
                    epochs=epochs,
                    steps=epochs * math.ceil(images / arguments.batch_size),
                    parameters=shape.num_parameters,
                    flops=shape.flops,
                    accuracy=trained.evaluation.accuracy,
                    seconds=trained.seconds,
                )


def measure(arguments: argparse.Namespace) -> Measurement:
    """Do all runs; with --out, write the raw numbers after each."""
    splits = open_data(arguments.data)
    if splits.test is None:
        raise UserError(
            f"{arguments.data}: no test images; validation images cannot test the weights that they select"
        )
    setting = {
        name: getattr(arguments, name) for name in ("data", "epochs", "batch_size", "image_size", "cnn")
    }
    arguments.steps = arguments.epochs * math.ceil(len(splits.train) / arguments.batch_size)
    setting |= {"steps": arguments.steps, "precision": arguments.precision, **vit(arguments)}
    setting["options"] = arguments.options
    measured = Measurement(
        machine=describe_machine(),  # before this script puts load on it
        versions=describe_versions(),
        date=datetime.date.today().isoformat(),
        command=shlex.join(["python", *sys.argv]),
        setting=setting,
        runs=[],
    )
    if arguments.resume:
        measured = measured.newest_of("setting")
    done = {(run.model, run.share, run.seed) for run in measured.runs}
    for run in runs_of(arguments, splits, done):
        note(str(run))
        measured.runs.append(run)
        if arguments.out:
            measured.write()
    return measured


def percent(text: str) -> float:
    """Parse a number above 0 and at most 100, for argparse."""
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100, not {value:g}")
    return value


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, epochs=30)
    shares = (2.0, 5.0, 10.0, 30.0, 100.0)
    parser.add_argument(
        "--shares", nargs="+", type=percent, default=shares, help="shares in percent (default 2 5 10 30 100)"
    )
    parser.add_argument("--seeds", type=positive, default=3, help="runs per model and share (default 3)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all three")
    parser.add_argument("--batch-size", type=positive, default=128, help="default 128")
    parser.add_argument("--image-size", type=positive, help="pixels (default: the size of small images)")
    parser.add_argument("--cnn", default="resnet29_w64_cifar", help="named ResNet (default %(default)s)")
    parser.add_argument("--resume", action="store_true", help="add missing runs to the newest numbers")
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="PAGE",
        help="draw the figure and fill in this page; without --out, from the newest numbers",
    )
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of `vitascope train`")
    return parser.parse_intermixed_args(given)


def main() -> None:
    arguments = parse()
    if arguments.out or not arguments.docs:
        measured = measure(arguments)
        publish(NAME, measured.report(), arguments)
    if arguments.docs:
        measured = Measurement.newest()
        fill_in(arguments.docs, NAME, measured.for_docs())
        save_figure(draw(measured), PICTURE)


if __name__ == "__main__":
    main()
