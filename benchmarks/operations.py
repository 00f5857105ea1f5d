"""Train for a number of operations instead of minutes: what each change of `small-data` teaches for its cost.

    python benchmarks/operations.py train --data cifar10/ --operations 3e13 --seeds 1 --rows trials.jsonl \\
        --name "batches of 64" batch_size=64
    python benchmarks/operations.py train --data cifar10/ --operations 3e13 --rows trials.jsonl \\
        --name "BatchNorm in the tokenizer" --ideas ideas.py --idea batch_norm=true batch_size=64
    python benchmarks/operations.py table --rows trials.jsonl --out

A multiply-add counts as two operations, and the backward pass as two forward passes. The forward pass is that
of the model in training mode on the images of the step, as torch's `FlopCounterMode` counts it: convolutions,
matrix products and attention, of smaller images too, and of the tokens that are left. The number of steps
follows from the operations. The other arguments are options of `vitascope train`; what is no option yet is a
function in a file of ideas, by name, which changes classes of the package for its trial, before the model is
built: `IDEAS = {"name": function of the value}`. Each trial adds a line to the rows, also one that fails.

Tune on the validation images: the test images are for the table, each model once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import importlib.util
import itertools
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from conditions import Conditions
from contest import positive
from learning import named_values
from reports import command_line, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.data.loading import Batch
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.evaluation.measure import measure
from vitascope.model.hardware import resolve_device
from vitascope.options.recipes import TrainConfig
from vitascope.run.run import Run
from vitascope.training import train as training
from vitascope.training.loop import Trainer
from vitascope.training.schedule import small_size
from vitascope.training.tasks.classify import ModuleEngine
from vitascope.training.tasks.task import Examples

FIXED = ("data", "run", "seed", "epochs", "steps", "minutes", "keep")
"""Options that the benchmark sets itself."""
OF_BACKWARD = 2
"""Operations of the backward pass over those of the forward pass."""
RECOUNTED = 100
"""Steps between two counts: an idea may change the cost of a step during the run."""

NOTES = """\
"operations": of the training, forward and backward. "validation" and "test": accuracy in percent of the last
weights (their moving average) on the 5,000 images each, one view: the mean over the seeds, and the range of
several. "mirror": the mean of the probabilities of two views, the image and its mirror image, on the test
images. "loss": cross-entropy on the validation images. "time": minutes of the training, on a machine with
other work. Trials of one seed differ by about half a point by chance."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A training with one seed."""

    name: str
    command: str
    """The arguments that repeat it."""
    seed: int
    asked: float
    """The operations that the steps were chosen for."""
    operations: float = math.nan
    images: int = 0
    steps: int = 0
    parameters: int = 0
    validation: float = math.nan
    loss: float = math.nan
    test: float = math.nan
    mirror: float = math.nan
    minutes: float = math.nan
    machine: str = ""
    date: str = ""
    failure: str = ""
    """Why there are no numbers."""


class Mirrored(nn.Module):
    """The logarithm of the mean of a classifier's probabilities for images and their mirror images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        both = torch.stack([self.model(images), self.model(images.flip(-1))]).float()
        return both.softmax(dim=-1).mean(dim=0).log()


def forward_operations(module: nn.Module, channels: int, height: int, width: int) -> float:
    """Operations of a forward pass of one image, in training mode; the module is left as it was."""
    trial = copy.deepcopy(module).train()
    device = next(trial.parameters()).device
    with torch.random.fork_rng(devices=[]), torch.no_grad(), FlopCounterMode(display=False) as counter:
        trial(torch.zeros(2, channels, height, width, device=device))
    return counter.get_total_flops() / 2


class CountingTrainer(Trainer):
    """A trainer that counts its operations."""

    operations, images_shown = 0.0, 0

    def _training_step(self, batch: Batch, epoch: int) -> Tensor:
        if self.step % RECOUNTED == 0:
            self.costs: dict[tuple[int, ...], float] = {}
        return super()._training_step(batch, epoch)

    def _examples(self, part: Batch, epoch: int) -> Examples:
        examples = super()._examples(part, epoch)
        shape = tuple(examples.images.shape[1:])
        if shape not in self.costs:
            self.costs[shape] = (1 + OF_BACKWARD) * forward_operations(self.module, *shape)
        self.operations += len(examples.images) * self.costs[shape]
        self.images_shown += len(examples.images)
        return examples


def steps_of(operations: float, opened: training.Opened) -> int:
    """The number of steps that take so many operations."""
    options, config = opened.plan.options.optimization, opened.plan.model
    module = training.start_model(opened)
    small, whole = (
        (1 + OF_BACKWARD) * forward_operations(module, config.in_channels, *size)
        for size in (small_size(config), config.image_hw)
    )
    share = options.progressive
    return max(1, round(operations / options.batch_size / (share * small + (1 - share) * whole)))


def train(asked: Trial, data: str, options: dict[str, Any], device: str) -> Trial:
    """Train, and evaluate the last weights."""
    config = TrainConfig.from_recipe(**{"recipe": "small-data", **options}, data=data, seed=asked.seed)
    opened = training.prepare(config, open_data(data, seed=asked.seed))
    steps = steps_of(asked.asked, opened)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        decided = opened.plan.options.replace(run=f"{folder}/run", steps=steps, keep="last")
        opened = dataclasses.replace(opened, plan=dataclasses.replace(opened.plan, options=decided))
        run = Run.create(decided.to_dict(), {"asked": {}, **opened.plan.to_dict()})
        trainer = training.build_trainer(run, opened, resolve_device(device))
        assert isinstance(trainer, CountingTrainer)
        began = time.monotonic()
        trainer.fit()
        minutes = (time.monotonic() - began) / 60

        def measured(module: nn.Module, images: ImageSet) -> Any:
            names, precision = images.class_names, trainer.precision
            engine = ModuleEngine(module, trainer.preprocess, names, trainer.device, precision)
            return measure(engine, trainer.loader(images))

        model = trainer.trained.eval()
        validation, test = (measured(model, images) for images in (opened.splits.val, opened.splits.measured))
        mirror = measured(Mirrored(model), opened.splits.measured)
    return dataclasses.replace(
        asked,
        operations=trainer.operations,
        images=trainer.images_shown,
        steps=steps,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        validation=validation.accuracy,
        loss=validation.loss,
        test=test.accuracy,
        mirror=mirror.accuracy,
        minutes=minutes,
    )


def apply_ideas(path: Path, chosen: list[str]) -> None:
    """Change classes of the package, for the rest of this process."""
    spec = importlib.util.spec_from_file_location("ideas", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in named_values(chosen, fixed=()).items():
        module.IDEAS[name](value)


def table(rows: list[Trial]) -> str:
    """A table for each number of operations, best first."""

    def cell(values: list[float]) -> str:
        percent = [100 * value for value in values]
        spread = f" ({min(percent):.1f} to {max(percent):.1f})" if len(percent) > 1 else ""
        return f"{statistics.mean(percent):.2f}{spread}"

    def loss(trials: list[Trial]) -> float:
        return statistics.mean(trial.loss for trial in trials)

    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.asked, row.name, row.command].append(row)
    sections: list[str] = []
    header = (
        "change",
        "seeds",
        "validation, %",
        "loss",
        "test, %",
        "mirror, %",
        "images",
        "parameters",
        "time",
    )
    for asked, keys in itertools.groupby(sorted(groups, key=lambda key: key[0]), key=lambda key: key[0]):
        done: list[Any] = []
        failed: list[Any] = []
        for key in keys:
            (failed if groups[key][0].failure else done).append(key)
        done.sort(key=lambda key: loss(groups[key]))
        lines = []
        for key in done:
            found = groups[key]
            first = found[0]
            seeds = str(len({trial.seed for trial in found}))
            accuracies = [
                cell([getattr(trial, name) for trial in found]) for name in ("validation", "test", "mirror")
            ]
            cost = (f"{first.images:,}", f"{first.parameters / 1e6:.2f} M")
            time = f"{statistics.mean(trial.minutes for trial in found):.1f}"
            lines.append((key[1], seeds, accuracies[0], f"{loss(found):.3f}", *accuracies[1:], *cost, time))
        texts = [f"## {asked:.2g} operations", markdown_table(header, lines) if lines else ""]
        texts += [
            f"- {name}: failed: {groups[asked, name, command][0].failure}" for _, name, command in failed
        ]
        texts.append("\n".join(f"- {key[1]}: `{key[2]}`" for key in done))
        sections += filter(None, texts)
    return "\n\n".join(sections)


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("action", choices=("train", "table"))
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of `vitascope train`")
    parser.add_argument("--data", default="cifar10", help="a DATA argument (default cifar10)")
    parser.add_argument("--operations", type=float, default=3e13, help="per training (default 3e13)")
    parser.add_argument("--seeds", type=positive, default=1, help="trainings (default 1)")
    parser.add_argument("--first-seed", type=int, default=0, help="default 0")
    parser.add_argument("--name", default="small-data", help="the change in words")
    parser.add_argument("--ideas", type=Path, help="a Python file with IDEAS")
    parser.add_argument("--idea", nargs="+", default=[], metavar="NAME=VALUE", help="ideas and their values")
    parser.add_argument("--rows", type=Path, required=True, help="a file of JSON lines, to add to or to read")
    parser.add_argument("--device", default="cpu", help="default cpu")
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse()
    conditions = Conditions.now()
    if arguments.action == "table":
        rows = [Trial(**json.loads(line)) for line in arguments.rows.read_text(encoding="utf-8").splitlines()]
        head = conditions.heading("What operations teach", trials=str(len(rows)))
        publish("operations", f"{head}\n\n{NOTES}\n\n{table(rows)}", arguments)
        return
    setattr(training, "Trainer", CountingTrainer)  # noqa: B010 - not one of the module's public names
    if arguments.idea:
        apply_ideas(arguments.ideas, arguments.idea)
    words = [*arguments.idea, *arguments.options]
    options = named_values(arguments.options, fixed=FIXED)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        asked = Trial(
            arguments.name,
            shlex.join(words),
            seed,
            arguments.operations,
            machine=conditions.machine,
            date=conditions.date,
        )
        try:
            row = train(asked, arguments.data, options, arguments.device)
        except (UserError, RuntimeError) as error:
            row = dataclasses.replace(asked, failure=str(error).splitlines()[0])
        with arguments.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        note(json.dumps(dataclasses.asdict(row)))


if __name__ == "__main__":
    main()
