"""Train for a number of operations instead of minutes: what each change of `small-data` teaches for its cost.

    python benchmarks/operations.py train --data cifar10/ --operations 3e13 --rows trials.jsonl batch_size=64
    python benchmarks/operations.py train --data cifar10/ --operations 3e13 --rows trials.jsonl \\
        --name "another tokenizer" --ideas ideas.py --idea stem=conv -- batch_size=64
    python benchmarks/operations.py table --rows trials.jsonl --out

A multiply-add counts as two operations, and the backward pass as two forward passes, which torch's
`FlopCounterMode` counts on images of each size that is shown. The steps follow from the operations. Other
arguments are options of `vitascope train`; what is no option yet is a function in a file of ideas, which
changes classes of the package before the model is built: `IDEAS = {"name": function of the value}`. Each
trial adds a line to the rows, also one that fails. Tune on the validation images, not on the test images.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import ttest_ind
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conditions import Conditions
from contest import positive
from reports import command_line, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.data.loading import Batch
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.models.hardware import resolve_device
from vitascope.models.views import mean_of_views, views_of
from vitascope.training import building as training
from vitascope.training.evaluation.measure import measure
from vitascope.training.loop import Trainer
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run
from vitascope.training.schedule import SIDES, resized
from vitascope.training.tasks.classify import ModuleEngine
from vitascope.training.tasks.task import Examples

VIEWED = 1e14
"""Operations from which a trial measures several views: a shorter one trains no longer than these take."""
FIXED = ("data", "run", "seed", "epochs", "steps", "minutes", "keep")
"""Options that the benchmark sets itself."""

NOTES = """\
"validation" and "test": accuracy in percent of the last weights, their moving average, on 5,000 images each,
one view: the mean over the seeds, and the range of several. "mirror" and "views": on the test images, of
`evaluate --views 2` and `--views 6`. "loss": the mean cross-entropy on the validation images, which label
smoothing raises, with the standard error of several seeds. "p": the probability that a change which does
nothing has so low a loss, by Student's t-test against the first row without options; of several rows, some
are low by chance. "minutes": of the training, on a machine with other work."""


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


@dataclasses.dataclass(frozen=True)
class Trial:
    """A training with one seed, `asked` for a number of operations; a failed one has no numbers."""

    name: str
    command: str
    seed: int
    asked: float
    operations: float = math.nan
    images: int = 0
    steps: int = 0
    parameters: int = 0
    validation: float = math.nan
    loss: float = math.nan
    test: float = math.nan
    mirror: float = math.nan
    views: float = math.nan
    minutes: float = math.nan
    machine: str = ""
    date: str = ""
    failure: str = ""


def averaged(model: nn.Module, views: int) -> nn.Module:
    """A classifier of the mean of its probabilities over views of images: (B, C, H, W) -> logits (B, K)."""
    module = nn.Module()
    module.forward = lambda images: mean_of_views(model(views_of(images, views)).float(), views, "exclusive")
    return module


@functools.cache
def training_operations(module: nn.Module, channels: int, height: int, width: int) -> float:
    """Operations of both passes of one image, in training mode; the module is left as it was."""
    trial = copy.deepcopy(module).train()
    device = next(trial.parameters()).device
    counter = FlopCounterMode(display=False)  # which knows no fused attention of a CPU
    with torch.random.fork_rng(devices=[]), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        trial(torch.zeros(2, channels, height, width, device=device))
    return 3 * counter.get_total_flops() / 2  # the backward pass counts as two


class CountingTrainer(Trainer):
    """A trainer that counts its operations."""

    operations, shown = 0.0, 0

    def _examples(self, part: Batch, epoch: int) -> Examples:
        examples = super()._examples(part, epoch)
        count, *shape = examples.images.shape
        self.operations += count * training_operations(self.module, *shape)
        self.shown += count
        return examples


def steps_of(operations: float, opened: training.Opened) -> int:
    """The number of steps that take so many operations, if no idea changes the cost during the run."""
    options, config = opened.plan.config.optimization, opened.plan.model
    module = training.start_model(opened)
    sizes = (resized(config, side) for side in SIDES)
    *smaller, whole = (training_operations(module, config.in_channels, *size) for size in sizes)
    per_image = options.progressive * statistics.mean(smaller) + (1 - options.progressive) * whole
    return max(1, round(operations / (options.batch_size or 1) / per_image))


def train(asked: Trial, data: str, options: dict[str, Any], device: str) -> Trial:
    """Train, and evaluate the last weights."""
    config = TrainConfig.from_recipe(**{"recipe": "small-data", **options}, data=data, seed=asked.seed)
    opened = training.prepare(config, open_data(data, seed=asked.seed))
    steps = steps_of(asked.asked, opened)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        decided = opened.plan.config.replace(run=f"{folder}/run", steps=steps, keep="last")
        opened = dataclasses.replace(opened, plan=dataclasses.replace(opened.plan, config=decided))
        run = Run.create(decided.to_dict(), {"asked": {}, **opened.plan.to_dict()})
        trainer = training.build_trainer(run, opened, resolve_device(device))
        assert isinstance(trainer, CountingTrainer)
        began = time.monotonic()
        trainer.fit()
        minutes = (time.monotonic() - began) / 60

        def measured(module: nn.Module, images: ImageSet) -> Any:
            engine = ModuleEngine(module, trainer.preprocess, images.truth, trainer.device, trainer.precision)
            return measure(engine, trainer.loader(images))

        model = trainer.trained.eval()
        validation, test = (measured(model, images) for images in (opened.splits.val, opened.splits.measured))
        numbers = {"validation": validation.accuracy, "loss": validation.loss, "test": test.accuracy}
        for name, views in {"mirror": 2, "views": 6}.items() if asked.asked >= VIEWED else ():
            numbers[name] = measured(averaged(model, views), opened.splits.measured).accuracy
    numbers |= {"minutes": minutes, "operations": trainer.operations}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return dataclasses.replace(asked, **numbers, images=trainer.shown, steps=steps, parameters=parameters)


SHARES = ("validation", "test", "mirror", "views")
HEADER = ("change", "seeds", *SHARES, "loss", "p", "images", "parameters", "minutes")


def percent(values: Iterable[float]) -> str:
    """The mean of shares, and the range of several; shares are unknown if they are NaN."""
    found = [100 * value for value in values if not math.isnan(value)]
    if not found:
        return ""  # of rows from before it was measured
    spread = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
    return f"{statistics.mean(found):.2f}{spread}"


def lower_by_chance(losses: Sequence[float], base: Sequence[float]) -> float:
    """One-sided p of losses that are lower than those of the baseline on average, by Student's t-test: two
    seeds know no variance of their own. NaN without a baseline, or for less than three losses in all."""
    if len(losses) + len(base) < 3 or not base:
        return math.nan
    return float(ttest_ind(losses, base, alternative="less").pvalue)


def row_of(trials: list[Trial], base: Sequence[Trial]) -> tuple[str, ...]:
    """The row of trials that differ by their seed, against those of the baseline."""
    first, count = trials[0], len(trials)
    columns = {name: [getattr(trial, name) for trial in trials] for name in (*SHARES, "loss", "minutes")}
    losses = columns["loss"]
    error = f" ± {statistics.stdev(losses) / math.sqrt(count):.4f}" if count > 1 else ""
    p = math.nan if trials is base else lower_by_chance(losses, [trial.loss for trial in base])
    return (
        *(first.name, str(count), *(percent(columns[name]) for name in SHARES)),
        *(f"{statistics.mean(losses):.4f}{error}", "" if math.isnan(p) else f"{p:.2g}", f"{first.images:,}"),
        *(f"{first.parameters / 1e6:.2f} M", f"{statistics.mean(columns['minutes']):.1f}"),
    )


def tables(trials: list[Trial]) -> str:
    """A table for each number of operations, the lowest validation loss first, and what repeats its rows."""
    alike: dict[float, dict[tuple[str, str], list[Trial]]] = {}
    failed = []
    for trial in trials:
        if trial.failure:
            failed.append(f"- {trial.name} (`{trial.command}`): {trial.failure}")
        else:
            alike.setdefault(trial.asked, {}).setdefault((trial.name, trial.command), []).append(trial)
    sections = []
    for operations, rows in sorted(alike.items()):
        found = sorted(rows.values(), key=lambda row: statistics.mean(trial.loss for trial in row))
        commands = [f"- {row[0].name}: `{row[0].command}`" for row in found]
        base = next((row for (_, command), row in rows.items() if not command), [])
        table = markdown_table(HEADER, [row_of(row, base) for row in found])
        sections += [f"## {operations:.2g} operations", table, "\n".join(commands)]
    return "\n\n".join([*sections, *(["## Failed", *failed] if failed else [])])


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
        publish("operations", f"{head}\n\n{NOTES}\n\n{tables(rows)}", arguments)
        return
    setattr(training, "Trainer", CountingTrainer)  # noqa: B010 - which `build_trainer` makes
    if arguments.idea:
        sys.path.insert(0, str(arguments.ideas.parent))
        ideas = importlib.import_module(arguments.ideas.stem).IDEAS
        for name, value in named_values(arguments.idea, fixed=()).items():
            ideas[name](value)
    stated: dict[str, Any] = {"machine": conditions.machine, "date": conditions.date}
    command = shlex.join([*arguments.idea, *arguments.options])
    options = named_values(arguments.options, fixed=FIXED)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        asked = Trial(arguments.name, command, seed, arguments.operations, **stated)
        try:
            row = train(asked, arguments.data, options, arguments.device)
        except (UserError, RuntimeError) as error:
            row = dataclasses.replace(asked, failure=str(error).splitlines()[0])
        note(line := json.dumps(dataclasses.asdict(row)))
        with arguments.rows.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
