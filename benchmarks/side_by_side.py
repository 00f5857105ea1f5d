"""Train side by side, at the same time, with one core each: our default, and timm's ViT-Ti/4 in a plain loop.

    .venv/bin/python benchmarks/side_by_side.py --data cifar10/ --minutes 10 --out

Ours is `vitascope train --data DATA --minutes N --weights none`. timm's loop is AdamW with rate 1e-3 and
weight decay 0.05, a warm-up of a twentieth and a cosine over the time, batches of 128, shifts of an eighth, and
flips, in bf16 where the CPU has units for it. Its validations do not count as time, ours do. Both read,
normalize and validate the same images; the test images are measured once, at the end. Another load on the
machine slows both down.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F

import reports
import vitascope as vs
from conditions import Conditions
from contestants import peer_model
from reports import command_line, markdown_table, publish
from vitascope.analysis.explain.plots import SERIES, new_figure, plain, save_figure
from vitascope.data.augment import Augmentation
from vitascope.data.datasets import open_data
from vitascope.data.loading import Loader
from vitascope.models.hardware import bf16_units
from vitascope.models.preprocess import Preprocess
from vitascope.training.run.run import Run

VALIDATIONS = 5


def ours(data: str, minutes: float) -> dict[str, Any]:
    """The default from random weights: the curve of validations in minutes, and the test."""
    with tempfile.TemporaryDirectory() as folder:
        result = vs.train(data=data, minutes=minutes, weights="none", run=f"{folder}/run")
        epochs = Run(result.run).records("epoch")
    parameters = sum(parameter.numel() for parameter in result.model.parameters())
    curve = [(record["seconds"] / 60, record["val_accuracy"]) for record in epochs]
    return {
        "parameters": parameters,
        "epochs": epochs[-1]["epoch"],
        "curve": curve,
        "test": result.evaluation.accuracy,
    }


def timm(data: str, minutes: float) -> dict[str, Any]:
    """timm's model in a plain loop, validated at equal distances."""
    torch.manual_seed(0)
    splits, preprocess = open_data(data), Preprocess(image_size=(32, 32))
    train, val, test = (
        Loader(
            images, preprocess, 128, seed=0 if images is splits.train else None, device=torch.device("cpu")
        )
        for images in (splits.train, splits.val, splits.measured)
    )
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 12, "num_heads": 3}
    model = peer_model("timm", vs.ViTConfig(**sizes, num_classes=len(splits.train.class_names)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    augmentation = Augmentation(flip=0.5, shift=0.125)

    def accuracy(loader: Loader) -> float:
        model.eval()
        with torch.no_grad(), precision():
            right = [
                (model(preprocess.normalize(b.pixels)).argmax(-1) == b.targets).sum() for b in loader.epoch()
            ]
        model.train()
        return sum(map(int, right)) / len(loader.images)

    def precision() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=bf16_units() is not None)

    curve: list[tuple[float, float]] = []
    started, steps, share, validating = time.monotonic(), 0, 0.0, 0.0
    while share < 1:
        for batch in train.epoch(steps // train.batches_per_epoch):
            share = (time.monotonic() - started - validating) / 60 / minutes
            if share >= 1:
                break
            if share * VALIDATIONS > len(curve) + 1:
                began = time.monotonic()
                curve.append((share * minutes, accuracy(val)))
                validating += time.monotonic() - began
            rate = share / 0.05 if share < 0.05 else 0.5 * (1 + math.cos(math.pi * (share - 0.05) / 0.95))
            optimizer.param_groups[0]["lr"] = 1e-3 * rate
            epoch = steps // train.batches_per_epoch
            images = augmentation(batch.pixels, batch.indices, seed=0, epoch=epoch)
            with precision():
                loss = F.cross_entropy(model(preprocess.normalize(images)).float(), batch.targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    curve.append((share * minutes, accuracy(val)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    epochs = steps / train.batches_per_epoch
    return {"parameters": parameters, "epochs": epochs, "curve": curve, "test": accuracy(test)}


CONTESTANTS = {"vitascope train": ours, "timm's ViT-Ti/4, plain loop": timm}


def run(name: str, core: int, data: str, minutes: float, results: Any) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    results.put((name, CONTESTANTS[name](data, minutes)))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training (default 10)")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results, conditions = context.Queue(), Conditions.now()
    cores = sorted(os.sched_getaffinity(0))
    for core, name in zip(cores, CONTESTANTS, strict=False):
        context.Process(target=run, args=(name, core, arguments.data, arguments.minutes, results)).start()
    ended = dict(results.get() for _ in CONTESTANTS)
    rows = [
        (name, f"{row['parameters'] / 1e6:.2f} M", f"{row['epochs']:.1f}", f"{100 * row['test']:.2f}")
        for name, row in ended.items()
    ]
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    for (name, row), colour in zip(ended.items(), SERIES, strict=True):
        minutes, shares = zip(*row["curve"], strict=True)
        axes.plot(minutes, [100 * share for share in shares], color=colour, marker=".", label=name)
    axes.legend(frameon=False)
    plain(axes, xlabel="minutes on one CPU core, side by side", ylabel="validation accuracy, %")
    header = ("contestant", "parameters", "epochs", "accuracy of the test images, %")
    title = conditions.heading(
        f"What {arguments.minutes:g} minutes of one core teach", curves=json.dumps(ended)
    )
    if arguments.out:
        save_figure(figure, reports.RESULTS / "side_by_side.png")
    publish("side_by_side", f"{title}\n\n{markdown_table(header, rows)}", arguments)


if __name__ == "__main__":
    main()
