"""Compare what can be done with a few hundred labelled images and a trained body.

    .venv/bin/python benchmarks/small_data.py --data cifar10-files/ --runs small/ --out

For each seed, `--images` training images are drawn, and every command learns from the same ones: a probe,
LoRA, full fine-tuning with two recipes, and training from scratch. Each is
measured on all test images. A body is first trained on half of the classes; the commands learn the other
half, of which it has seen no image. With `--weights`, a body of your own, they learn all classes. Commands
run one after the other, each in its own process, from the start to the finished report.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import vitascope as vs
from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.data.splits import ImageSet, check_known_classes
from vitascope.data.targets import ClassIndices
from vitascope.models.decoding import read_image

COMMANDS = {
    "`probe`": "probe {body} --data {data}",
    "LoRA (`--lora 8`)": "train --data {data} --weights {body} --lora 8",
    "full fine-tuning (`finetune`, 2e-3)": "train --data {data} --weights {body} --recipe finetune --lr 2e-3 "
    "--warmup-epochs 5",
    "full fine-tuning (`small-finetune`)": "train --data {data} --weights {body} --recipe small-finetune",
    "from scratch (`small-data`)": "train --data {data} --weights none --recipe small-data",
}
NOTES = """\
Accuracy on the test images, in %: the mean over the seeds, which draw the training images too, and in
parentheses the lowest and the highest. Seconds and peak memory are those of the whole command, from its start
to the report, the mean and the maximum over the seeds. The features of the body were not in the cache."""


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--images", type=positive, default=500, help="training images (default 500)")
    parser.add_argument("--seeds", type=positive, default=3, help="default 3")
    parser.add_argument("--epochs", type=positive, default=10, help="of the body (default 10)")
    parser.add_argument("--weights", help="a body to use instead, for all classes")
    parser.add_argument("--device", default="auto", help="default auto")
    parser.add_argument("--precision", default="auto", help="default auto")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="keep the runs here, so that the same command continues an interrupted measurement",
    )
    return parser.parse_args(given)


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


def drawn(data: str, classes: tuple[str, ...], count: int, seed: int, folder: Path) -> str:
    """Write `count` random training images, as many of each class, and all test images of some classes."""
    if folder.exists():
        return str(folder)
    folder.parent.mkdir(exist_ok=True)
    whole = write_classes(data, dict.fromkeys(classes), folder.with_name("all"))
    splits = open_data(whole)
    train = splits.train.followed_by(splits.val)  # `val` was drawn from the training images
    generator = np.random.default_rng(seed)
    per_class = count // len(classes)
    chosen = [generator.permutation(places)[:per_class] for places in train.truth.by_class()]
    some = train.subset("train", np.concatenate(chosen))
    return write_parts({"train": some, "test": splits.measured}, folder)


def timed(command: str) -> tuple[float, float]:
    """Run a command of vitascope in a process of its own; returns its seconds and its peak memory in MiB."""
    began = time.monotonic()
    words = [sys.executable, "-m", "vitascope.cli", *shlex.split(command)]
    process = subprocess.Popen(words, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"failed: vitascope {command}")
    return time.monotonic() - began, usage.ru_maxrss / 1024


def measured(arguments: argparse.Namespace, runs: Path) -> list[tuple[str, ...]]:
    """The rows of the table."""
    classes = open_data(arguments.data).train.class_names
    body, learned = arguments.weights, classes
    if body is None:
        seen, learned = classes[::2], classes[1::2]
        data = write_classes(arguments.data, dict.fromkeys(seen), runs / "seen")
        engine = {"device": arguments.device, "precision": arguments.precision}
        config = vs.TrainConfig.from_recipe(
            "small-data", data=data, run=str(runs / "body"), epochs=arguments.epochs, **engine
        )
        body = str(train("the body", config).path)
    name = "all" if arguments.weights else "unseen"
    folders = [
        drawn(arguments.data, learned, arguments.images, seed, runs / name / f"{arguments.images}-{seed}")
        for seed in range(arguments.seeds)
    ]
    rows: list[tuple[str, ...]] = []
    for label, command in COMMANDS.items():
        shares, seconds, memory = [], [], []
        for seed, data in enumerate(folders):
            run = runs / f"{name}-{len(rows)}-{seed}"
            shutil.rmtree(run, ignore_errors=True)
            options = f" --run {run} --seed {seed} --device {arguments.device}"
            os.environ["VITASCOPE_CACHE"] = str(runs / f"cache-{len(rows)}")  # no features of other commands
            spent, peak = timed(command.format(body=body, data=data) + options)
            shares.append(100 * tested(vs.Run(run))["accuracy"])
            seconds.append(spent)
            memory.append(peak)
        extent = f"{np.mean(shares):.1f} ({min(shares):.1f} to {max(shares):.1f})"
        rows.append((label, extent, f"{np.mean(seconds):.0f}", f"{max(memory):,.0f}"))
        note(str(rows[-1]))
    return rows


def main() -> None:
    arguments = parse()
    with runs_of(arguments) as runs:
        rows = measured(arguments, runs)
    body = arguments.weights or f"{arguments.epochs} epochs on half of the classes; the others are learned"
    report = Conditions.now().heading(
        f"{arguments.images} labelled images, {arguments.data}", body=body, seeds=str(arguments.seeds)
    )
    header = ("command", "test accuracy", "seconds", "peak memory, MiB")
    publish("small_data", f"{report}\n\n{markdown_table(header, rows)}\n\n{NOTES}", arguments)


if __name__ == "__main__":
    main()
