"""Measure the test accuracy of a ViT, a CNN and a hybrid by the number of training images, near the plateau.

    .venv/bin/python benchmarks/data_sizes.py --data cifar10 --out --docs docs/training.md
    .venv/bin/python benchmarks/data_sizes.py --docs docs/training.md

A CNN assumes that nearby pixels belong together and that an object looks the same everywhere; a ViT assumes
neither (Dosovitskiy et al. 2021, section 3.1, and figures 3 and 4, where ResNets are ahead on few images and
ViTs on many). The script trains a ViT, the same ViT behind a convolutional tokenizer, and a ResNet on growing
shares of the same images, with the recipe `small-data`. On each share, each model is trained with several
learning rates (`--rates`), and then twice as long with the one that had the highest validation accuracy: what
the longer training gains shows how far it is from the plateau. Smaller shares have more epochs, and fewer
steps. Shares above `--tune-up-to` try only the rate that was the best on the share before.

The first command measures, writes benchmarks/results/<date>-data_sizes.md and, after every run, the raw
numbers beside it, fills in the page and draws docs/images/data_sizes.png. The second only fills in and draws
from the newest raw numbers. `--resume` trains only the runs that are missing there. Other arguments
NAME=VALUE are options of `vitascope train` for all models.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

import vitascope as vs
from conditions import Conditions
from contest import positive
from learning import engine, named_values, tested, train, write_images
from reports import Numbers, command_line, fill_in, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.explain.plots import INK, RIGHT, SERIES, new_figure, plain, save_figure

NAME = "data_sizes"
MODELS = ("ViT", "hybrid", "ResNet")
COLOURS = dict(zip(MODELS, (*SERIES, RIGHT), strict=True))
FIXED = (
    "data",
    "run",
    "seed",
    "epochs",
    "lr",
    "batch_size",
    "model",
    "embed_dim",
    "num_heads",
    "model_options",
)
"""Options that differ between the models or have a flag of their own."""
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "data_sizes.png"

POWER = 0.65
"""The number of epochs falls with this power of the number of images."""

NOTES = """\
Test accuracy in %: the mean over the seeds, with the lowest and the highest if there are several, always on
all test images. "images": training images, a share of each class. "ViT": the recipe `small-data` with one
convolution that makes the patches, as in the paper. "hybrid": with the convolutional tokenizer instead.
"ResNet": the recipe `cnn`. All three have the same augmentation, optimizer, batch size and number of epochs.
The learning rate is the best of those tried, by the validation accuracy of runs with half of the epochs. In
parentheses: the gain over the best of these shorter runs, in points."""


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
    half: bool
    """Whether it has half of the epochs."""
    rate: float
    """Peak learning rate."""
    validation: float
    """Validation accuracy."""
    accuracy: float
    """Test accuracy."""
    seconds: float
    """Time in the loop, with validation."""


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All runs and the conditions of the measurement, as stored in the JSON file."""

    setting: dict[str, Any]
    """Settings of all runs: data, steps, batch size, model sizes."""
    runs: list[Run]

    name = NAME

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        return cls(**values | {"runs": [Run(**run) for run in values["runs"]]})

    def of(self, model: str, share: float, *, half: bool = False) -> list[Run]:
        """The runs of a model on a share, one per seed: that of the best rate."""
        runs = [run for run in self.runs if (run.model, run.share, run.half) == (model, share, half)]
        seeds = sorted({run.seed for run in runs})
        return [best(run for run in runs if run.seed == seed) for seed in seeds]

    def cell(self, model: str, share: float) -> str:
        """The mean accuracy of a model on a share and its gain, or a dash without measurements."""
        found = percents(self.of(model, share))
        if not found:
            return "-"
        spread = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
        shorter = percents(self.of(model, share, half=True))
        gain = f" ({statistics.mean(found) - statistics.mean(shorter):+.1f})" if shorter else ""
        return f"{statistics.mean(found):.1f}{spread}{gain}"

    def shares(self) -> list[float]:
        """All shares in percent, ascending."""
        return sorted({run.share for run in self.runs})

    def table(self) -> str:
        """The accuracies with one row per share, then the sizes of the models."""
        rows = []
        for share in self.shares():
            whole = [run for run in self.runs if run.share == share and not run.half]
            if whole:
                cells = [self.cell(model, share) for model in MODELS]
                rows.append((f"{whole[0].images:,}", f"{share:g}%", f"{whole[0].epochs:,}", *cells))
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
        most = said["tune_up_to"]
        return (
            f"{Path(said['data']).name}, batches of {said['batch_size']}, learning rates tried: "
            f"{', '.join(f'{rate:g}' for rate in said['rates'])}"
            f"{'' if most >= 100 else f' (up to {most:g}% of the images)'}"
            f"{''.join(f', {word}' for word in said['options'])}; "
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
        head = self.heading(
            f"Accuracy of a ViT, a hybrid and a CNN by the number of images: {self.setting['data']}",
            method=self.how(),
            setting=json.dumps(self.setting),
        )
        return f"{head}\n\n{self.table()}\n\n{NOTES}"


def best(runs: Iterable[Run]) -> Run:
    """The run with the highest validation accuracy."""
    return max(runs, key=lambda run: run.validation)


def percents(runs: Sequence[Run]) -> list[float]:
    """Accuracies in %."""
    return [100 * run.accuracy for run in runs]


def draw(measured: Measurement) -> Figure:
    """Plot test accuracy over the number of training images, with one line per model, named at its end."""
    figure = new_figure(7.6, 4.6, "Test accuracy by the number of training images")
    axes = figure.subplots()
    ends: dict[str, tuple[float, float]] = {}
    for model, half in itertools.product(MODELS, (True, False)):
        runs = [found for share in measured.shares() if (found := measured.of(model, share, half=half))]
        if not runs:
            continue
        images = [found[0].images for found in runs]
        means = [statistics.mean(percents(found)) for found in runs]
        if half:
            axes.plot(images, means, color=COLOURS[model], linewidth=1, linestyle=":", alpha=0.7)
            continue
        axes.plot(images, means, color=COLOURS[model], marker="o")
        low, high = [min(percents(found)) for found in runs], [max(percents(found)) for found in runs]
        axes.fill_between(images, low, high, color=COLOURS[model], alpha=0.15, linewidth=0)
        ends[model] = (images[-1], means[-1])
    plain(axes, xlabel="training images", ylabel="test accuracy, %", xscale="log")
    ticks = sorted({run.images for run in measured.runs})
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda images, _: f"{images:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    name_ends(axes, ends)
    seeds = len({run.seed for run in measured.runs})
    bands = f"; bands: lowest to highest of {seeds} seeds" if seeds > 1 else ""
    data = Path(measured.setting["data"]).name
    axes.set_title(f"{data}; dotted: half as many epochs{bands}", fontsize=9, color=INK)
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


def configs(arguments: argparse.Namespace, data: str, epochs: int) -> dict[str, vs.TrainConfig]:
    """The training options by model, without run folders, seeds and learning rates."""
    width = arguments.embed_dim
    shared = {
        "data": data,
        "epochs": epochs,
        "batch_size": arguments.batch_size,
        **engine(arguments),
        **named_values(arguments.options, fixed=FIXED),
    }
    vit = {"recipe": "small-data", "embed_dim": width, "num_heads": max(1, width // 32), **shared}
    from_recipe = vs.TrainConfig.from_recipe
    return {
        "ViT": from_recipe(model_options={"stem": "conv"}, **vit),
        "hybrid": from_recipe(model_options={"tokenizer_widths": [width // 2, width]}, **vit),
        "ResNet": from_recipe("cnn", model=arguments.cnn, **shared),
    }


def epochs_of(epochs: int, share: float) -> int:
    """The number of epochs of a share, in percent, for that of all images."""
    return max(2, round(epochs * (100 / share) ** POWER))


def runs_of(arguments: argparse.Namespace, splits: Splits, done: Sequence[Run]) -> Iterator[Run]:
    """Train and measure all runs that are not in `done`, share by share."""
    chosen: dict[tuple[str, int], float] = {}  # the best rate so far, by model and seed
    for share in sorted(arguments.shares):
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data"
            write_share(splits, share, data)
            images = len(open_data(str(data)).train)
            if images < arguments.batch_size:
                raise UserError(f"{share:g}% are {images} images, less than a batch: lower --batch-size")
            for model, seed in itertools.product(arguments.models, range(arguments.seeds)):
                found = [run for run in done if (run.model, run.share, run.seed) == (model, share, seed)]
                tuned = share <= arguments.tune_up_to or (model, seed) not in chosen
                for rate in arguments.rates if tuned else [chosen[model, seed]]:
                    if not any(run.half and run.rate == rate for run in found):
                        found.append(run_once(model, share, seed, rate, data, arguments, half=True))
                        yield found[-1]
                chosen[model, seed] = best(run for run in found if run.half).rate
                if all(run.half for run in found):
                    yield run_once(model, share, seed, chosen[model, seed], data, arguments, half=False)


def run_once(
    model: str,
    share: float,
    seed: int,
    rate: float,
    data: Path,
    arguments: argparse.Namespace,
    *,
    half: bool,
) -> Run:
    """Train and measure a model on a share of the images, in the folder `data`."""
    epochs = epochs_of(arguments.epochs, share) // (2 if half else 1)
    config = configs(arguments, str(data), epochs)[model]
    config = config.replace(seed=seed, lr=rate, run=f"{data.parent}/{model}-{seed}-{epochs}-{rate:g}")
    images = len(open_data(str(data)).train)
    trained = train(f"{model} on {share:g}%, {images:,} images, {epochs} epochs, rate {rate:g}", config)
    shape, record = trained.model().config, tested(trained)
    return Run(
        model=model,
        share=share,
        seed=seed,
        images=images,
        epochs=epochs,
        steps=epochs * math.ceil(images / arguments.batch_size),
        parameters=shape.num_parameters,
        flops=shape.flops,
        half=half,
        rate=rate,
        validation=trained.records("epoch")[-1]["val_accuracy"],
        accuracy=record["accuracy"],
        seconds=record["seconds"],
    )


def measure(arguments: argparse.Namespace) -> Measurement:
    """Do all runs; with --out, write the raw numbers after each."""
    splits = open_data(arguments.data)
    if splits.test is None:
        raise UserError(
            f"{arguments.data}: no test images; validation images cannot test the weights that they select"
        )
    names = (
        "data",
        "epochs",
        "rates",
        "tune_up_to",
        "embed_dim",
        "batch_size",
        "cnn",
        "precision",
        "options",
    )
    setting = {name: getattr(arguments, name) for name in names}
    study = Measurement(**dataclasses.asdict(Conditions.now()), setting=setting, runs=[])
    if arguments.resume:
        study = study.newest_of("setting")
    for run in runs_of(arguments, splits, tuple(study.runs)):
        note(str(run))
        study.runs.append(run)
        if arguments.out:
            study.write()
    return study


def percent(text: str) -> float:
    """Parse a number above 0 and at most 100, for argparse."""
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100, not {value:g}")
    return value


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--epochs", type=positive, default=22, help="of all images (default 22)")
    shares = [1.0, 4.0, 16.0]
    parser.add_argument(
        "--shares", nargs="+", type=percent, default=shares, help="in percent (default 1 4 16)"
    )
    rates = [1e-3, 3e-3, 9e-3]
    parser.add_argument(
        "--rates", nargs="+", type=float, default=rates, help="to try (default 0.001 0.003 0.009)"
    )
    parser.add_argument(
        "--tune-up-to", type=percent, default=100.0, help="largest share that tries all rates (default 100)"
    )
    parser.add_argument(
        "--embed-dim",
        type=positive,
        default=64,
        help="width of the ViTs (default 64)",
    )
    parser.add_argument("--seeds", type=positive, default=1, help="runs per model and share (default 1)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all three")
    parser.add_argument("--batch-size", type=positive, default=128, help="default 128")
    parser.add_argument("--device", default="auto", help="default auto")
    parser.add_argument("--precision", default="auto", help="default auto")
    parser.add_argument("--cnn", default="resnet29_w16_cifar", help="named ResNet (default %(default)s)")
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
