"""How many images a Vision Transformer needs, beside a CNN and beside the hybrid of both.

    .venv/bin/python benchmarks/data_sizes.py --data cifar10 --out --docs docs/training.md
    .venv/bin/python benchmarks/data_sizes.py --docs docs/training.md

A ViT knows neither that neighbours belong together nor that a thing is the same wherever it is; a CNN is made
of both (Dosovitskiy et al. 2021, section 3.1, and figures 3 and 4, where ResNets are ahead on few images and
ViTs on many). Here a ViT, the same ViT behind a ResNet stem, and a ResNet of about as many parameters are
trained on growing shares of the same images, with as many steps on each: with as many epochs, few images
would mean little training too. The first command measures, writes benchmarks/results/<date>-data_sizes.md
and, after every run, the raw numbers beside it, fills in the page and draws docs/images/data_sizes.png; the
second only fills in and draws, from the newest raw numbers. `--go-on` trains what these lack.

Every further word is an option of `vitascope train`, for all of them. The models have 4.9 to 5.6 M
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
"""Options that are not everybody's, or have a place of their own."""
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "data_sizes.png"

NOTES = """\
Test accuracy in %: the mean over the seeds, with the lowest and the highest where there are several. All test
images are asked in every line. "images": trained on, a share of each class; the same share of the validation
images chooses the weights, those of the lowest loss, as the paper stops early. "ViT": the recipe
`small-data` without its ResNet stem, patches by one convolution as in the paper. "hybrid": the recipe as it
is. "ResNet": the recipe `cnn`. All three have the same augmentation, batch, peak rate, warm-up and number of
steps, to the nearest whole epoch."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A model, trained once on a share of the images and measured."""

    model: str
    share: float
    """Percent of the training images."""
    seed: int
    images: int
    """Trained on."""
    epochs: int
    steps: int
    parameters: int
    flops: int
    """Of one image's forward pass."""
    accuracy: float
    """Share of the test images that are right."""
    seconds: float
    """In the loop, validation included."""


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All runs, and how they were made: what the JSON file holds."""

    machine: str
    versions: str
    date: str
    command: str
    setting: dict[str, Any]
    """What all runs share: data, steps, batch, sizes."""
    runs: list[Run]

    name = NAME

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        return cls(**values | {"runs": [Run(**run) for run in values["runs"]]})

    def of(self, model: str, share: float) -> list[Run]:
        """The runs of a model on a share, one a seed."""
        return [run for run in self.runs if (run.model, run.share) == (model, share)]

    def shares(self) -> list[float]:
        """In percent, growing."""
        return sorted({run.share for run in self.runs})

    def table(self) -> str:
        """A line for each share, then what the models are."""
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
        """The setting, in a sentence."""
        said = self.setting
        return (
            f"{said['data']}, {said['steps']:,} steps of {said['batch_size']} images, which are "
            f"{said['epochs']} epochs of all{''.join(f', {word}' for word in said['options'])}; "
            f"seeds: {len({run.seed for run in self.runs})}"
        )

    def for_docs(self) -> str:
        """What stands in the page."""
        return (
            f"![test accuracy by the number of training images](images/{PICTURE.name})\n\n"
            f"{self.table()}\n\n{NOTES}\n\n{self.how()}; {self.machine}; {self.date}."
        )

    def report(self) -> str:
        """What stands in benchmarks/results."""
        return (
            f"# How many images a ViT needs, beside a CNN: {self.setting['data']}\n\n"
            f"- machine: {self.machine}\n"
            f"- versions: {self.versions}\n"
            f"- date: {self.date}\n"
            f"- command: `{self.command}`\n"
            f"- method: {self.how()}; setting: {json.dumps(self.setting)}\n\n"
            f"{self.table()}\n\n{NOTES}"
        )


def cell(runs: Sequence[Run]) -> str:
    """The mean accuracy of some seeds, and their range; a dash where nothing is measured."""
    percent = [100 * run.accuracy for run in runs]
    if not percent:
        return "-"
    spread = f" ({min(percent):.2f} to {max(percent):.2f})" if len(percent) > 1 else ""
    return f"{statistics.mean(percent):.2f}{spread}"


def draw(measured: Measurement) -> Figure:
    """Test accuracy over the number of training images, a line a model, its name at its end."""
    figure = new_figure(7.6, 4.6, "What each model makes of few and of many images")
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
    """Write each line's name to the right of its last point, in its colour and never over another's."""
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
    """A folder with a share of the training and validation images of each class, and all test images.

    A smaller share is part of a larger one.

    Args:
        splits: of the whole data set.
        share: percent.
        folder: a new one.
    """
    assert splits.test is not None
    for images in (splits.train, splits.val):
        places = [np.flatnonzero(images.labels == label) for label in range(len(images.class_names))]
        chosen = [place[: max(1, round(share / 100 * len(place)))] for place in places]
        write_images(images.subset(images.name, np.concatenate(chosen)), folder / images.name)
    write_images(splits.test, folder / "test")


def configs(arguments: argparse.Namespace, data: str, epochs: int, steps: int) -> dict[str, vs.TrainConfig]:
    """What is trained on some data, by model; without run folders and seeds."""
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
    """Epochs of some images that have about so many steps."""
    return max(1, round(steps / math.ceil(images / batch_size)))


def runs_of(
    arguments: argparse.Namespace, splits: Splits, done: set[tuple[str, float, int]]
) -> Iterator[Run]:
    """Train and measure what is not done yet, by model, share and seed; all models of a share in a row."""
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
    """Every run; with --out the raw numbers are written after each."""
    splits = open_data(arguments.data)
    if splits.test is None:
        raise UserError(f"{arguments.data}: no test images; what chooses the weights cannot measure them too")
    setting = {
        name: getattr(arguments, name) for name in ("data", "epochs", "batch_size", "image_size", "cnn")
    }
    arguments.steps = arguments.epochs * math.ceil(len(splits.train) / arguments.batch_size)
    setting |= {"steps": arguments.steps, "precision": arguments.precision, **vit(arguments)}
    setting["options"] = arguments.options
    measured = Measurement(
        machine=describe_machine(),  # before it is busy with us
        versions=describe_versions(),
        date=datetime.date.today().isoformat(),
        command=shlex.join(["python", *sys.argv]),
        setting=setting,
        runs=[],
    )
    if arguments.go_on:
        measured = Measurement.newest()
        if measured.setting != setting:
            raise UserError(
                f"the newest numbers are of {measured.setting}, not of {setting}: nothing to go on"
            )
    done = {(run.model, run.share, run.seed) for run in measured.runs}
    for run in runs_of(arguments, splits, done):
        note(str(run))
        measured.runs.append(run)
        if arguments.out:
            measured.write()
    return measured


def percent(text: str) -> float:
    """A number above 0 and at most 100, for argparse."""
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100, not {value:g}")
    return value


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, epochs=30)
    shares = (2.0, 5.0, 10.0, 30.0, 100.0)
    parser.add_argument(
        "--shares", nargs="+", type=percent, default=shares, help="percent (default 2 5 10 30 100)"
    )
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each (default 3)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all three")
    parser.add_argument("--batch-size", type=positive, default=128, help="default 128")
    parser.add_argument("--image-size", type=positive, help="pixels (default: small images' own)")
    parser.add_argument("--cnn", default="resnet29_w64_cifar", help="named ResNet (default %(default)s)")
    parser.add_argument("--go-on", action="store_true", help="train what the newest numbers lack")
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="PAGE",
        help="draw, and fill in this page; without --out, from the newest numbers",
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
