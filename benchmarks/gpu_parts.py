"""Check vitascope on a GPU: what its numbers, waits, shards and graphs are there, one part after the other.

    python benchmarks/gpu_parts.py agreement --out
    python benchmarks/gpu_parts.py agreement --device cpu --dry

`benchmarks/on_gpu.sh` calls the parts, each with a time limit:

- agreement: the GPU beside the CPU in fp32: augmentation, two steps of each recipe, each heatmap, a
  `Predictor`, and a resumed run;
- waits: training steps, predictions and features in which waiting for the GPU is an error, but for results of
  the step or batch before.

Every row is a check of its own. One that fails has its reason in the table, the others are run, and the exit
status is 1. With --out the rows so far are in benchmarks/results, or in the folder $OUT, after each check.
`--dry` takes tiny sizes and no code generation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import reports
import vitascope as vs
from conditions import Conditions
from gpu_training import compiling_with
from reports import command_line, markdown_table, note
from vitascope.analysis.explain.methods import heatmap, methods_for
from vitascope.data.augment import Augmentation
from vitascope.data.features.stream import FeatureStream
from vitascope.data.loading import Loader
from vitascope.data.randaugment import RandAugment
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassIndices
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.features import OWN
from vitascope.models.hardware import resolve_device, without_tf32
from vitascope.training.building import build_trainer, prepare
from vitascope.training.checkpoint.folders import load_checkpoint
from vitascope.training.loop import Trainer
from vitascope.training.options.recipes import BUILT_IN, RECIPES
from vitascope.training.run.run import Run

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8}
"""The model of all checks but those of speed."""
RESNET = "resnet29_w32_cifar"
STARTED = ("finetune", "lora", "small-finetune", "paper-finetune")
"""Recipes that start from weights, here those of the built-in model."""
WAITING: dict[str, dict[str, Any]] = {
    "small-data": {"randaugment": 2, "erase": 0.25, "mixup": 0.8, "cutmix": 1.0, **TINY},
    "small-data, compiled": {"progressive": 0.0, "compile": "on", **TINY},
    "small-data, streamed": {"crop_scale": 0.5, "workers": 0, **TINY},
    "small-data, kept once read": {"workers": 0, **TINY},
    "deit": {"accumulate": 2, **TINY},
    "deit3": TINY,
    "masked": TINY,
    "mae": {"decoder_dim": 32, **TINY},
}
"""Steps of `waits`: the recipe is the first word. Those with `workers` have a split that is too large to be
read before the first epoch."""


class DifferenceError(Exception):
    """A check found numbers that are not equal enough, with all its values."""

    def __init__(self, values: Row, reason: str) -> None:
        super().__init__(reason)
        self.values = values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much a part computes."""

    batch: int = 64
    image: int = 32
    """Side of the images, as of those that the built-in model was trained on."""
    explained: int = 8
    """Pictures with heatmaps."""
    steps: int = 10
    backend: str = "inductor"
    """Of torch.compile."""


FULL = Sizes()
DRY = Sizes(batch=6, explained=1, steps=2, backend="eager")

Row = dict[str, Any]
Checks = Iterator[tuple[str, Callable[[], Row]]]


# Shared by the parts


def noise(count: int, side: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pictures of random blocks of 4 x 4 pixels, which interpolation changes less than single pixels."""
    small = np.random.default_rng(seed).integers(0, 256, (count, side // 4, side // 4, 3), np.uint8)
    return small.repeat(4, axis=1).repeat(4, axis=2)


def splits_of(sizes: Sizes, batches: float) -> Splits:
    """So many batches of random pictures, in the classes of the built-in model, and a few to validate on."""
    count = int(batches * sizes.batch)
    labels = ClassIndices(np.arange(count) % 10, vs.from_pretrained(BUILT_IN).config.class_names)
    images = ImageSet("train", list(noise(count, sizes.image)), labels)
    return Splits(images, images.subset("val", np.arange(10)), None, channels=3)


@contextlib.contextmanager
def training(
    device: torch.device, sizes: Sizes, recipe: str, *, batches: float = 3, **options: Any
) -> Iterator[Trainer]:
    """The trainer of a run on random pictures, before its first step."""
    start: dict[str, Any] = {"weights": BUILT_IN} if recipe in STARTED else {"image_size": sizes.image}
    start |= {"teacher": BUILT_IN} if recipe == "distill" else {}
    start |= {"batch_size": sizes.batch, "epochs": 8, "warmup_steps": 1, "repeats": 1, "run": None}
    config = vs.TrainConfig.from_recipe(recipe, data="random pictures", **start | options)
    with tempfile.TemporaryDirectory() as run:
        trainer = build_trainer(Run(Path(run)), prepare(config, splits_of(sizes, batches)), device)
        trainer.module.train()
        yield trainer


def train(trainer: Trainer, steps: int) -> list[Tensor]:
    """Do the next steps; returns their losses, on the device."""
    losses: list[Tensor] = []
    while len(losses) < steps:
        epoch, start = divmod(trainer.step, trainer.steps_per_epoch)
        for batch in trainer.train_loader.epoch(epoch, start=start):
            losses.append(trainer._training_step(batch, epoch))
            trainer.losses.read()  # of the step before
            trainer.losses.add(trainer.step, trainer.rate, losses[-1])
            if len(losses) == steps:
                break
    return losses


def flat(module: nn.Module) -> Tensor:
    """All parameters of a module in one row, float64, on the CPU."""
    found = [parameter.detach() for parameter in module.parameters()]
    return torch.cat([parameter.double().cpu().flatten() for parameter in found])


def equal_enough(values: Row, name: str, limit: float) -> Row:
    """The row itself.

    Raises:
        DifferenceError: its value of that name is above the limit, or NaN.
    """
    if not values[name] <= limit:
        raise DifferenceError(values, f"{name}: {values[name]:.3g}, more than {limit:g}")
    return values


# The parts


def agreement(device: torch.device, sizes: Sizes) -> Checks:
    """The device beside the CPU, in fp32."""
    without_tf32(device)
    strong = Augmentation(
        flip=0.5, crop_scale=0.3, rotate=10, color_jitter=0.3, randaugment=RandAugment(num_ops=2), erase=0.25
    )
    augmentations = {
        "shift and flip": Augmentation(flip=0.5, shift=0.125),
        "crop, jitter, RandAugment, erase": strong,
        "3-Augment": Augmentation(flip=0.5, crop_scale=0.3, three_augment=True),
    }

    def augmented(augmentation: Augmentation) -> Row:
        pixels = torch.from_numpy(noise(sizes.batch, sizes.image)).permute(0, 3, 1, 2).contiguous()
        indices = np.arange(sizes.batch)
        theirs, ours = (
            augmentation(pixels.to(where), indices, seed=0, epoch=1).cpu() for where in (CPU, device)
        )
        # The mean, because rounding before a threshold may change single pixels.
        return equal_enough({"mean difference": float((ours - theirs).abs().mean())}, "mean difference", 1e-4)

    def steps(recipe: str) -> Row:
        shape: dict[str, Any] = {} if recipe in STARTED else {"model": RESNET} if recipe == "cnn" else TINY
        found = []
        for where in (CPU, device):
            # Without dropout and drop path, which draw other numbers on another device.
            options: dict[str, Any] = {"precision": "fp32", "dropout": 0.0, "drop_path": 0.0, **shape}
            with training(where, sizes, recipe, **options) as trainer:
                before = flat(trainer.module)
                losses = [float(loss) for loss in train(trainer, 2)]
                found.append((losses, flat(trainer.module) - before))
        (theirs, their_update), (ours, our_update) = found
        loss = max(abs(mine / its - 1) for mine, its in zip(ours, theirs, strict=True))
        # Of the mean: a gradient of about 0, as of the biases of keys, has a sign by chance.
        update = float((our_update - their_update).abs().mean() / their_update.abs().mean())
        row = equal_enough({"of the loss": loss, "of the update": update}, "of the loss", 1e-3)
        return equal_enough(row, "of the update", 0.1)

    def heat(method: str) -> Row:
        model = vs.from_pretrained(BUILT_IN)
        pixels = torch.from_numpy(noise(sizes.explained, sizes.image)).permute(0, 3, 1, 2) / 127.5 - 1
        settings: dict[str, Any] = {"window": 6} if method == "occlusion" else {}
        theirs = heatmap(model, pixels, method, batch_size=64, **settings)
        ours = heatmap(model.to(device), pixels.to(device), method, batch_size=64, **settings).cpu()
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        return equal_enough({"largest difference": difference}, "largest difference", 1e-2)

    def predictor() -> Row:
        pictures = list(noise(8, sizes.image))
        theirs, ours = (
            torch.tensor(
                [
                    [probability for _, probability in sorted((each.index, each.score) for each in of)]
                    for of in vs.Predictor(BUILT_IN, precision="fp32", device=where)(pictures, top_k=10)
                ]
            )
            for where in ("cpu", str(device))
        )
        return equal_enough(
            {"largest difference": float((ours - theirs).abs().max())}, "largest difference", 1e-3
        )

    def resumed() -> Row:
        options: dict[str, Any] = {"epochs": 2, "progressive": 0.5, "precision": "fp32", **TINY}
        with training(device, sizes, "small-data", **options) as whole:
            train(whole, 3)
            before = flat(whole.module)
            whole.save()
            whole.checkpoint_writer.wait()
            saved = load_checkpoint(whole.run.path)
            train(whole, 3)
        with training(device, sizes, "small-data", **options) as again:
            again.restore(saved)
            train(again, 3)
        update, difference = flat(whole.module) - before, flat(again.module) - flat(whole.module)
        share = float(difference.abs().mean() / update.abs().mean())
        return equal_enough(
            {"of the update": share, "bitwise": not bool(difference.any())}, "of the update", 0.01
        )

    for name, augmentation in augmentations.items():
        yield f"augmentation: {name}", partial(augmented, augmentation)
    for recipe in RECIPES:
        yield f"two steps of {recipe}", partial(steps, recipe)
    for method in methods_for(vs.from_pretrained(BUILT_IN)):
        yield f"heatmap: {method}", partial(heat, method)
    yield "Predictor", predictor
    yield "resumed run", resumed


@contextlib.contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError where the host waits for a GPU; a CPU has no such waits."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(device: torch.device, sizes: Sizes) -> Checks:
    """Steps with their batches, augmentation, optimizer and average, in which nothing may wait."""

    def steps(recipe: str, options: Mapping[str, Any]) -> Row:
        budget = {"memory_budget": 0} if "workers" in options else {}
        with (
            mock.patch.dict(Loader.__init__.__kwdefaults__ or {}, budget),
            compiling_with(sizes.backend),
            training(device, sizes, recipe, **options) as trainer,
        ):
            train(trainer, 3)  # data goes to the device, and graphs are compiled, in the first epoch
            with waiting_is_an_error(device):
                train(trainer, sizes.steps)
        return {"steps without a wait": sizes.steps}

    def predictions() -> Row:
        pictures = list(noise(4 * sizes.batch, sizes.image))
        predict = vs.Predictor(BUILT_IN, device=str(device), batch_size=sizes.batch)
        with waiting_is_an_error(device):
            predict(pictures)
        return {"batches without a wait": 4}

    def features() -> Row:
        engine = TorchEngine(vs.from_pretrained(BUILT_IN), device=str(device))
        pictures = list(noise(4 * sizes.batch, sizes.image))
        compute = vs.Compute(batch_size=sizes.batch, workers=0, cache=False)
        list(FeatureStream(engine, [OWN], pictures[:1], compute))
        found = FeatureStream(engine, [OWN], pictures, compute)
        with waiting_is_an_error(device):
            list(found)
        return {"batches without a wait": 4}

    for name, options in WAITING.items():
        recipe = name.partition(",")[0]
        yield name, partial(steps, recipe, options)
    yield "Predictor", predictions
    yield "features", features


PARTS: dict[str, Callable[[torch.device, Sizes], Checks]] = {
    "agreement": agreement,
    "waits": waits,
}


def shown(value: object) -> str:
    """A cell of the table."""
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)


def table(rows: list[Row]) -> str:
    """A row per check, with a column for every name in any row."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[shown(row.get(name)).replace("|", "/") for name in header] for row in rows]
    return markdown_table(header, cells)


def run(part: str, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The row of each check of a part; a failed one has its reason as "failure"."""
    for name, check in PARTS[part](device, sizes):
        began = time.monotonic()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                row = check()
        except Exception as error:  # noqa: BLE001 - the next check may tell more
            traceback.print_exc()
            reason = str(error).strip().partition("\n")[0][:200]
            row = error.values if isinstance(error, DifferenceError) else {}
            row |= {
                "failure": reason
                if isinstance(error, DifferenceError)
                else f"{type(error).__name__}: {reason}"
            }
        yield {"check": name, **row, "s": round(time.monotonic() - began, 1)}


def report_of(part: str, conditions: Conditions, rows: list[Row]) -> str:
    """The conditions, and the rows so far."""
    return f"{conditions.heading(f'On a GPU: {part}')}\n\n{table(rows)}"


def write(part: str, conditions: Conditions, rows: list[Row]) -> None:
    """Write the rows so far as Markdown and as JSON."""
    reports.RESULTS.mkdir(parents=True, exist_ok=True)
    path = reports.RESULTS / f"{datetime.date.today().isoformat()}-gpu_{part}"
    path.with_suffix(".md").write_text(f"{report_of(part, conditions, rows)}\n", encoding="utf-8")
    values = {**dataclasses.asdict(conditions), "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, for a test of the script")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    device, conditions, rows = resolve_device(arguments.device), Conditions.now(), []
    for row in run(arguments.part, device, DRY if arguments.dry else FULL):
        rows.append(row)
        note(f"{arguments.part}: {', '.join(f'{name} {shown(value)}' for name, value in row.items())}")
        if arguments.out:  # after each check, in case the time limit ends a later one
            write(arguments.part, conditions, rows)
    print(report_of(arguments.part, conditions, rows))
    sys.exit(any("failure" in row for row in rows))


if __name__ == "__main__":
    main()
