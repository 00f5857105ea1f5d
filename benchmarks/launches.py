"""Count the operations of a training step that launch work on a device, by part of the step.

    .venv/bin/python benchmarks/launches.py --out

On a GPU each of them is at least one kernel launch, of a few microseconds, however small its tensors are.
They are counted on the CPU by PyTorch's dispatcher: views launch nothing and are left out, and so are random
numbers drawn by NumPy. The steps are those of `vitascope train` in fp32, without compilation, on pictures of
random pixels: the recipe `small-data` with a strong augmentation, and two ViTs with AdamW. Batches have 128
small images, so that each operation of RandAugment has one, as in most steps of a run, or 8 large ones. It
takes a minute.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import vitascope as vs
from conditions import Conditions
from reports import markdown_table, publish
from vitascope.data.datasets import open_data
from vitascope.run.run import Run
from vitascope.training import loop, optim
from vitascope.training.loop import Trainer
from vitascope.training.train import build_trainer, prepare

STRONG: dict[str, Any] = {
    "randaugment": 2,
    "operation_probability": 1.0,
    "crop_scale": 0.5,
    "erase": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "precision": "fp32",
}
STEPS: dict[str, dict[str, Any]] = {
    "small-data": {"recipe": "small-data", "progressive": 0.0, "batch_size": 128, **STRONG},
    "small-data, small images": {"recipe": "small-data", "progressive": 0.5, "batch_size": 128, **STRONG},
    "ViT-Ti/4": {
        "recipe": "deit",
        "model": "vit_ti16",
        "patch_size": 4,
        "image_size": 32,
        "batch_size": 128,
        **STRONG,
    },
    "ViT-B/16": {"recipe": "deit", "model": "vit_b16", "image_size": 224, "batch_size": 8, **STRONG},
}
FREE = re.compile("empty|detach|_unsafe_view|record_function|ndtri")
"""Operations that launch nothing, beside views: the quantiles of drawn numbers are computed on the host."""
PARTS = ("augmentation", "forward", "backward", "optimizer", "average")


class Launches(TorchDispatchMode):
    """Counts operations that are no views, by the part of the step that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = "other"
        self.counts: Counter[str] = Counter()
        self.names: dict[str, Counter[str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not (function.is_view or FREE.search(function.__name__)):
            self.counts[self.part] += 1
            self.names.setdefault(self.part, Counter())[function.__name__] += 1
        return result

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose operations are counted for a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self.part = self.part, part
            try:
                return function(*args, **kwargs)
            finally:
                self.part = before

        return call


def random_folder(root: Path, side: int, count: int) -> Path:
    """A folder of two classes with square pictures of random pixels, for training and testing."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for number in range(count):
            path = root / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)
    return root


@contextmanager
def trainer_of(options: dict[str, Any]) -> Iterator[Trainer]:
    """The trainer of a run on random pictures."""
    options = dict(options)
    with tempfile.TemporaryDirectory() as folder:
        side, batch_size = options.get("image_size") or 32, options["batch_size"]
        data = random_folder(Path(folder) / "data", side, count=3 * batch_size)
        config = vs.TrainConfig.from_recipe(
            options.pop("recipe"),
            data=str(data),
            run=str(Path(folder) / "run"),
            epochs=2,
            **options,
        )
        opened = prepare(config, open_data(config.data))
        yield build_trainer(Run(Path(str(config.run))), opened, torch.device("cpu"))


def count(options: dict[str, Any]) -> Launches:
    """The operations of the second training step."""
    with trainer_of(options) as trainer:
        launches = Launches()
        update_average = launches.within("average", optim.update_average)
        with (
            mock.patch.object(trainer, "_examples", launches.within("augmentation", trainer._examples)),
            mock.patch.object(
                type(trainer.task), "loss", launches.within("forward", type(trainer.task).loss)
            ),
            mock.patch.object(trainer, "_update", launches.within("optimizer", trainer._update)),
            mock.patch.object(trainer, "_backward", launches.within("backward", trainer._backward)),
            mock.patch.object(loop, "update_average", update_average),
        ):
            for number, batch in enumerate(trainer.train_loader.epoch(0)):
                if number == 0:
                    trainer._training_step(batch, 0)
                    continue
                with launches:
                    trainer._training_step(batch, 0)
                break
        return launches


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the launches of a training step, by part.")
    parser.add_argument("--out", action="store_true", help="also write benchmarks/results/<date>-launches.md")
    parser.add_argument("--names", action="store_true", help="also print the operations of each part")
    arguments = parser.parse_args()
    rows, listed = [], []
    for name, options in STEPS.items():
        launches = count(options)
        rest = sum(launches.counts[part] for part in launches.counts if part not in ("forward", "backward"))
        rows.append((name, *(f"{launches.counts[part]:,}" for part in PARTS), f"{rest:,}"))
        listed += [f"{name}, {part}: {dict(found.most_common())}" for part, found in launches.names.items()]
    conditions = Conditions.now()
    table = markdown_table(("step", *PARTS, "all but forward and backward"), rows)
    publish("launches", f"{conditions.heading('Launches of a training step')}\n\n{table}", arguments)
    if arguments.names:
        print("\n".join(listed))


if __name__ == "__main__":
    main()
