"""Train for the same number of minutes on the same images: our default, our ResNet, and timm's ViT-Ti/4.

    python benchmarks/same_minutes.py --data cifar10/ --minutes 30 --seeds 3 --out
    python benchmarks/same_minutes.py --data cifar10/ --minutes 30 --seeds 3 --out --resume

Ours is `vitascope train --data DATA --minutes N` without any other option. The ResNet is the same command
with `--model resnet29_w32_cifar`. timm's ViT of patches of 4 pixels has a plain loop: AdamW with rate 1e-3
and weight decay 0.05, a warm-up of a twentieth and a cosine over the time, batches of 128, shifts of an
eighth and flips, fp32 on a CPU and bf16 on CUDA. All three read and normalize the images in the same way, and
validate on the same images after each epoch, within their time. Test images are evaluated once, at the end.
The second command continues an interrupted measurement.

Other arguments NAME=VALUE are options of `vitascope train` for ours alone. On a GPU, a larger model, with
patches of 2 pixels and a stronger augmentation:

    python benchmarks/same_minutes.py --data cifar10/ --minutes 10 --only vitascope --goal 0.94 --out \\
        embed_dim=256 depth=6 patch_size=2 batch_size=512 randaugment=2 erase=0.25 cutmix=1.0 compile=on
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

import reports
import vitascope as vs
from conditions import Conditions
from contest import positive
from contestants import peer_model
from learning import named_values
from reports import Numbers, command_line, markdown_table, note, publish
from vitascope.data.augment import Augmentation
from vitascope.data.datasets import open_data
from vitascope.data.loading import Loader
from vitascope.data.preprocess import Preprocess
from vitascope.evaluation.measure import measure
from vitascope.explain.plots import RIGHT, SERIES, new_figure, plain, save_figure
from vitascope.model.hardware import resolve_device
from vitascope.model.vision_model import evaluation_mode
from vitascope.run.run import Run
from vitascope.training.tasks.classify import ModuleEngine

NOTES = """\
"accuracy": of the finished model on the test images, which nothing else has used: the mean and the range over
the seeds. "to N%": minutes until a validation, at the end of an epoch, reached that accuracy, median over the
seeds. "epochs": passes over the training images in the time."""
FIXED = ("data", "run", "seed", "epochs", "steps", "minutes")
"""Options that the benchmark sets itself."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """One contestant with one seed."""

    name: str
    seed: int
    parameters: int
    epochs: float
    minutes: list[float]
    """At the end of each validation, from the start of training."""
    accuracy: list[float]
    """Of each validation."""
    tested: float
    """Accuracy on the test images."""
    total: float
    """Minutes from the start to the end, with reading the images and the test."""

    def reached(self, goal: float) -> float:
        """Minutes until a validation reached an accuracy; infinite if none did."""
        pairs = zip(self.minutes, self.accuracy, strict=True)
        return next((minute for minute, share in pairs if share >= goal), math.inf)


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All contestants, and the conditions."""

    data: str
    minutes: float
    goal: float
    """A validation accuracy; the table has the time to it."""
    options: list[str]
    """Of our training, NAME=VALUE each."""
    trained: list[Trained]

    name = "same_minutes"

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        return cls(**values | {"trained": [Trained(**found) for found in values["trained"]]})

    def of(self, name: str) -> list[Trained]:
        """The runs of a contestant."""
        return [found for found in self.trained if found.name == name]

    def table(self) -> str:
        """One row per contestant."""
        rows = []
        for name in dict.fromkeys(found.name for found in self.trained):
            runs = self.of(name)
            tested = [100 * found.tested for found in runs]
            reached = statistics.median(found.reached(self.goal) for found in runs)
            rows.append(
                (
                    name,
                    f"{runs[0].parameters / 1e6:.2f} M",
                    f"{statistics.mean(found.epochs for found in runs):.1f}",
                    f"{statistics.mean(tested):.2f} ({min(tested):.2f} to {max(tested):.2f})",
                    f"{reached:.1f}" if math.isfinite(reached) else "not reached",
                    f"{statistics.mean(found.total for found in runs):.1f}",
                )
            )
        header = (
            "contestant",
            "parameters",
            "epochs",
            "accuracy, %",
            f"to {self.goal:.0%}, min",
            "in all, min",
        )
        return markdown_table(header, rows)

    def report(self) -> str:
        """The text for benchmarks/results."""
        head = self.heading(
            f"What {self.minutes:g} minutes teach",
            seeds=str(1 + max(found.seed for found in self.trained)),
            options=" ".join(self.options) or "none",
        )
        return f"{head}\n\n{self.table()}\n\n{NOTES}"


def ours(name: str, data: str, minutes: float, seed: int, **options: Any) -> Trained:
    """Our training, with its defaults but for `options`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        result = vs.train(data=data, minutes=minutes, seed=seed, run=f"{folder}/run", **options)
        epochs = Run(result.run).records("epoch")
    return Trained(
        name=name,
        seed=seed,
        parameters=sum(parameter.numel() for parameter in result.model.parameters()),
        epochs=epochs[-1]["epoch"],
        minutes=[record["seconds"] / 60 for record in epochs],
        accuracy=[record["val_accuracy"] for record in epochs],
        tested=result.evaluation.accuracy,
        total=(time.monotonic() - began) / 60,
    )


def timm(name: str, data: str, minutes: float, seed: int) -> Trained:
    """timm's ViT-Ti/4 with a plain loop."""
    began = time.monotonic()
    torch.manual_seed(seed)
    splits, device = open_data(data, seed=seed), resolve_device("auto")
    preprocess = Preprocess(image_size=(32, 32))
    train, val, test = (
        Loader(images, preprocess, 128, seed=seed if images is splits.train else None, device=device)
        for images in (splits.train, splits.val, splits.measured)
    )
    classes = len(splits.train.class_names)
    tiny = vs.ViTConfig(
        image_size=32, patch_size=4, embed_dim=192, depth=12, num_heads=3, num_classes=classes
    )
    model = peer_model("timm", tiny).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    augmentation = Augmentation(flip=0.5, shift=0.125)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    started = time.monotonic()
    limit, passed, steps = 60 * minutes - (started - began), 0.0, 0
    curve: list[tuple[float, float]] = []
    while not curve or passed < limit:
        epoch = len(curve)
        for batch in train.epoch(epoch):
            passed = time.monotonic() - started
            if steps and passed >= limit:
                break
            share = passed / limit
            rate = share / 0.05 if share < 0.05 else 0.5 * (1 + math.cos(math.pi * (share - 0.05) / 0.95))
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate
            images = augmentation(batch.pixels, batch.indices, seed=seed, epoch=epoch)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = F.cross_entropy(model(preprocess.normalize(images)).float(), batch.targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        share = accuracy_of(model, val)
        curve.append(((time.monotonic() - started) / 60, share))
    return Trained(
        name=name,
        seed=seed,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=steps / train.batches_per_epoch,
        minutes=[minute for minute, _ in curve],
        accuracy=[share for _, share in curve],
        tested=accuracy_of(model, test),
        total=(time.monotonic() - began) / 60,
    )


def accuracy_of(model: nn.Module, loader: Loader) -> float:
    """The share of correct predictions on a split."""
    engine = ModuleEngine(model, loader.preprocess, loader.images.class_names, loader.device)
    with evaluation_mode(model):
        return measure(engine, loader).accuracy


CONTESTANTS: dict[str, Callable[..., Trained]] = {
    "vitascope": ours,
    "resnet29_w32_cifar": functools.partial(ours, model="resnet29_w32_cifar"),
    "timm's ViT-Ti/4": timm,
}
COLOURS = dict(zip(CONTESTANTS, (*SERIES, RIGHT), strict=True))


def draw(measured: Measurement) -> Figure:
    """Validation accuracy by minutes: one line per run, a colour per contestant."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    for name in dict.fromkeys(found.name for found in measured.trained):
        for number, found in enumerate(measured.of(name)):
            percent = [100 * share for share in found.accuracy]
            axes.plot(
                found.minutes, percent, color=COLOURS[name], linewidth=1, label=None if number else name
            )
    axes.axhline(100 * measured.goal, color="0.8", linewidth=0.8, zorder=0)
    axes.legend(frameon=False, loc="center right")
    plain(axes, xlabel="minutes", ylabel="validation accuracy, %")
    return figure


def start(arguments: argparse.Namespace) -> Measurement:
    """An empty measurement, or with --resume the newest one.

    Raises:
        UserError: an option is invalid, or the newest numbers belong to another setting.
    """
    named_values(arguments.options, fixed=FIXED)
    empty = Measurement(
        **dataclasses.asdict(Conditions.now()),
        data=arguments.data,
        minutes=arguments.minutes,
        goal=arguments.goal,
        options=arguments.options,
        trained=[],
    )
    return empty.newest_of("data", "minutes", "goal", "options") if arguments.resume else empty


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of `vitascope train`")
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--minutes", type=float, default=30.0, help="per run (default 30)")
    parser.add_argument("--goal", type=float, default=0.7, help="validation accuracy to reach (default 0.7)")
    parser.add_argument("--seeds", type=positive, default=3, help="runs per contestant (default 3)")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--resume", action="store_true", help="skip the runs in the newest numbers")
    return parser.parse_intermixed_args(given)


def main() -> None:
    arguments = parse()
    measured = start(arguments)
    done = {(found.name, found.seed) for found in measured.trained}
    for seed in range(arguments.seeds):
        for name in arguments.only:
            if (name, seed) in done:
                continue
            note(f"{name}, seed {seed}")
            options = named_values(arguments.options, fixed=FIXED) if name == "vitascope" else {}
            found = CONTESTANTS[name](name, arguments.data, arguments.minutes, seed, **options)
            measured = dataclasses.replace(measured, trained=[*measured.trained, found])
            note(measured.table())
            if arguments.out:  # after each run, in case a later one is interrupted
                measured.write()
                path = reports.RESULTS / f"{datetime.date.today().isoformat()}-same_minutes.png"
                save_figure(draw(measured), path)
    publish("same_minutes", measured.report(), arguments)


if __name__ == "__main__":
    main()
