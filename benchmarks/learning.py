"""Parts shared by the benchmarks that train: options, part of a data set, a run and its result."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import vitascope as vs
from contest import positive
from reports import command_line, note
from vitascope.data.datasets import open_data
from vitascope.data.decoding import read_image
from vitascope.data.splits import ImageSet, check_known_classes
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError


def options(description: str | None, *, epochs: int) -> argparse.ArgumentParser:
    """A parser with the options of all of them."""
    parser = command_line(description)
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--epochs", type=positive, default=epochs, help=f"default {epochs}")
    parser.add_argument("--limit", type=positive, help="training images, at most (default: all)")
    parser.add_argument("--patch-size", type=positive, default=4, help="the ViT's patches (default 4)")
    parser.add_argument("--embed-dim", type=positive, default=192, help="the ViT's width (default 192)")
    parser.add_argument("--depth", type=positive, default=12, help="the ViT's blocks (default 12)")
    parser.add_argument("--num-heads", type=positive, default=3, help="the ViT's heads (default 3)")
    add_engine(parser)
    return parser


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options of where and how a benchmark runs."""
    parser.add_argument("--device", default="auto", help="default auto")
    parser.add_argument("--precision", default="auto", help="default auto")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="keep the runs here, so that the same command continues an interrupted measurement",
    )


def named_values(words: Sequence[str], fixed: Sequence[str]) -> dict[str, Any]:
    """Parse options of `vitascope train`, NAME=VALUE each.

    Raises:
        UserError: a word is not an option, or names an option that the benchmark fixes.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in fixed:
            raise UserError(f"expected an option NAME=VALUE that this benchmark does not fix, not {word!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value  # a name
    return options


def vit(arguments: argparse.Namespace) -> dict[str, int]:
    """The requested shape of the ViT."""
    return {name: getattr(arguments, name) for name in ("patch_size", "embed_dim", "depth", "num_heads")}


def schedule(epochs: int) -> dict[str, float]:
    """Epochs, with a warm-up of a twentieth of them but at least one."""
    return {"epochs": epochs, "warmup_epochs": max(1.0, epochs / 20)}


def engine(arguments: argparse.Namespace) -> dict[str, str]:
    """The device and the precision."""
    return {"device": arguments.device, "precision": arguments.precision}


@contextlib.contextmanager
def runs_of(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder for runs: that of --runs, which stays, or a temporary one."""
    if arguments.runs is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        arguments.runs.mkdir(parents=True, exist_ok=True)
        yield arguments.runs


def train(name: str, config: vs.TrainConfig) -> vs.Run:
    """Train or pre-train a model, with the log on stderr; returns the finished run.

    An interrupted run is continued, and a finished one is left as it is.
    """
    assert config.run is not None
    run = vs.Run(config.run)
    if not run.finished:
        note(f"training {name}")
        with contextlib.redirect_stdout(sys.stderr):
            if run.exists:
                vs.resume(run.path)
            else:
                (vs.pretrain if config.task == "masked" else vs.train)(config)
    return run


def tested(run: vs.Run) -> dict[str, Any]:
    """What the final test of a run has recorded, such as `accuracy` and the `seconds` of training."""
    return run.records("test")[-1]


def write_limited(data: str, limit: int, folder: Path) -> str:
    """Write a folder with `limit` training images, balanced over the classes, and all test images."""
    splits = open_data(data)
    places = [np.flatnonzero(splits.train.labels == label) for label in range(len(splits.train.class_names))]
    chosen = np.concatenate([place[: limit // len(places)] for place in places])
    return write_parts({"train": splits.train.subset("train", chosen), "test": splits.measured}, folder)


def write_classes(data: str, counts: Mapping[str, int | None], folder: Path) -> str:
    """Write a folder with some classes: so many training images of each (None: all), and all test images."""
    splits = open_data(data)
    check_known_classes(list(counts), splits.train.class_names, data)
    parts = {}
    for name, images, most in (
        ("train", splits.train, list(counts.values())),
        ("test", splits.measured, [None] * len(counts)),
    ):
        labels = [images.class_names.index(kind) for kind in counts]
        places = [
            np.flatnonzero(images.labels == label)[:number]
            for label, number in zip(labels, most, strict=True)
        ]
        chosen = images.subset(name, np.concatenate(places))
        renumbered = np.repeat(np.arange(len(counts)), list(map(len, places)))
        parts[name] = dataclasses.replace(chosen, targets=ClassIndices(renumbered, tuple(counts)))
    return write_parts(parts, folder)


def write_parts(parts: Mapping[str, ImageSet], folder: Path) -> str:
    """Write each set to `folder/<name>`; a folder that is there already is left as it is."""
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            for name, images in parts.items():
                write_images(images, Path(partial) / "data" / name)
            (Path(partial) / "data").rename(folder)
    return str(folder)


def write_images(images: ImageSet, folder: Path) -> None:
    """Write each image as `folder/<class>/<number>.png`."""
    for name in images.class_names:
        (folder / name).mkdir(parents=True)
    for index, (source, label) in enumerate(zip(images.sources, images.labels, strict=True)):
        read_image(source).save(folder / images.class_names[label] / f"{index:06}.png")
