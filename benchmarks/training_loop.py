"""Measure the overhead of `vitascope train`: data, augmentation, mixing, clipping and averaging.

    .venv/bin/python benchmarks/training_loop.py --data cifar10/ --out

The recipe is `small-data` with a strong augmentation, on a folder of small images, which all have their whole
size (`--progressive 0`). Steps of the complete loop, which read, augment and mix a batch, take turns with
bare steps of the same model on one prepared batch: forward, loss, backward, optimizer, zero_grad, in the same
precision. The script takes about 3 minutes on 2 idle cores.

A second table has the end of an epoch beside its validation: metrics, a line, and the best weights.
`--rounds 1 --steps 1` measures little else.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import vitascope as vs
from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, publish
from vitascope.data.datasets import open_data
from vitascope.data.splits import Splits
from vitascope.model.hardware import resolve_device
from vitascope.model.vision_model import build
from vitascope.run.run import Run
from vitascope.training.loop import Trainer
from vitascope.training.optim import optimizer_of
from vitascope.training.progress import Progress
from vitascope.training.signals import stop_signals
from vitascope.training.train import build_trainer, prepare

Step = Callable[[], None]

STRONG: dict[str, Any] = {
    "progressive": 0.0,
    "randaugment": 2,
    "operation_probability": 1.0,
    "erase": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
}

NOTES = """\
Medians over the rounds. The loop's step contains the bare step and also the next batch of the epoch, crop,
flip, RandAugment and random erasing of each image, mixup or CutMix, gradient clipping, the running average of
the weights, and the counters. Validation and checkpoints are left out."""
END_NOTES = """\
Medians. Each validation is the best so far. With keep=best, its weights are written at most every ten
seconds, and are copied to memory otherwise; with keep=last, no weights are kept before the end."""


def loop_step(trainer: Trainer) -> Step:
    """The loop's next step, epoch after epoch."""
    epochs = itertools.count()
    batches = ((batch, epoch) for epoch in epochs for batch in trainer.train_loader.epoch(epoch))

    def step() -> None:
        trainer._training_step(*next(batches))

    return step


def bare_step(trainer: Trainer) -> Step:
    """The same model's step on a prepared batch."""
    model = build(trainer.model_config).to(trainer.device)
    model.load_state_dict(trainer.module.state_dict())
    optimizer = optimizer_of(model, trainer.config.optimization)
    batch = next(iter(trainer.train_loader.epoch(0)))
    images = trainer.preprocess.normalize(batch.pixels)  # (B, C, H, W)
    mixed = trainer.precision != torch.float32

    def step() -> None:
        with torch.autocast(trainer.device.type, trainer.precision, enabled=mixed):
            loss = F.cross_entropy(model(images).float(), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def epoch_ends(trainer: Trainer, *, written: bool, count: int) -> list[tuple[float, float]]:
    """Seconds of each end of an epoch without its validation, and of this; `written`: weights are due."""
    progress = Progress(count + 1, 10**6, 0, uneven=False, within_epochs=True, shown=False)
    trainer.recorder = trainer.run.write_metrics(trainer.step)
    batches, validating = trainer.train_loader.epoch(0), [0.0]
    validate = type(trainer.task).validate

    def timed(*arguments: Any) -> dict[str, float]:
        begun = time.perf_counter()
        found = validate(*arguments)
        validating.append(time.perf_counter() - begun)
        return found

    found = []
    with mock.patch.object(type(trainer.task), "validate", timed), stop_signals(patient=False) as stop:
        for batch in itertools.islice(batches, count):
            trainer._training_step(batch, 0)
            progress.advance(batch.planned)
            trainer.best_value = trainer.task.monitor.worst
            trainer.best_weights.due_at = 0.0 if written else math.inf
            begun = time.perf_counter()
            trainer._validate(progress, stop)
            found.append((time.perf_counter() - begun - validating[-1], validating[-1]))
    trainer.recorder.close()
    progress.close()
    return found


def table_of_ends(config: vs.TrainConfig, splits: Splits, count: int) -> str:
    """The end of an epoch by the weights that are kept."""
    rows = []
    for name, keep, written in (
        ("keep=last", "last", False),
        ("keep=best, in memory", "best", False),
        ("keep=best, written", "best", True),
    ):
        with tempfile.TemporaryDirectory() as run:
            opened = prepare(config.replace(keep=keep), splits)
            trainer = build_trainer(Run(Path(run)), opened, resolve_device("auto"))
            ends, validations = zip(*epoch_ends(trainer, written=written, count=count)[1:], strict=True)
        rows.append(
            (name, f"{1000 * statistics.median(ends):.1f}", f"{1000 * statistics.median(validations):.0f}")
        )
    return markdown_table(("end of an epoch", "ms beside the validation", "ms of the validation"), rows)


def seconds(step: Step, count: int) -> float:
    """The mean seconds per step over `count` steps."""
    begun = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begun) / count


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=positive, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--steps", type=positive, default=10, help="steps per round (default 10)")
    parser.add_argument("--ends", type=positive, default=6, help="timed ends of an epoch (default 6)")
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--recipe", default="small-data", help="default small-data")
    arguments = parser.parse_args()
    conditions = Conditions.now()  # before this script puts load on it
    method = f"{arguments.rounds} interleaved rounds of {arguments.steps} steps each, after 4 untimed steps"
    config = vs.TrainConfig.from_recipe(arguments.recipe, data=arguments.data, **STRONG)
    splits = open_data(config.data)
    with tempfile.TemporaryDirectory() as run:
        trainer = build_trainer(Run(Path(run)), prepare(config, splits), resolve_device("auto"))
        trainer.module.train()
        steps = {"loop": loop_step(trainer), "bare step": bare_step(trainer)}
        for step in steps.values():
            seconds(step, 4)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                times[name].append(seconds(step, arguments.steps))
    rates = {name: trainer.batch_size / statistics.median(found) for name, found in times.items()}
    rows = [
        (name, f"{rate:,.0f}", f"{rate / rates['bare step']:.1%}", spread(times[name]))
        for name, rate in rates.items()
    ]
    table = markdown_table(("step", "images/s", "of the bare step", "ms/step, lowest to highest"), rows)
    what = f"{trainer.model_config.summary}, batch {trainer.batch_size}, {trainer.precision}"
    head = conditions.heading(
        f"The training loop and its bare step: {arguments.recipe}", method=method, model=what
    )
    ends = table_of_ends(config, splits, arguments.ends + 1)
    publish("training_loop", f"{head}\n\n{table}\n\n{NOTES}\n\n{ends}\n\n{END_NOTES}", arguments)


def spread(times: list[float]) -> str:
    return f"{1000 * min(times):.0f} to {1000 * max(times):.0f}"


if __name__ == "__main__":
    main()
