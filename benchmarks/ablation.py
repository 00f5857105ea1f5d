"""Measure the accuracy, size and speed of each option of the model on the embedded digits.

    .venv/bin/python benchmarks/ablation.py --out --docs docs/options.md
    .venv/bin/python benchmarks/ablation.py --docs docs/options.md

The script trains the recipe `digits` with one option changed at a time and several seeds per change, as the
paper does for positions (appendix D.4, table 8: clearly worse without any, alike with all kinds). Then it
times the training step of every change, with no other work on the machine. The first command measures, writes
benchmarks/results/<date>-ablation.md and the raw numbers beside it, and fills in the page. The second only
fills in the page from the newest raw numbers. It takes about 35 minutes on 2 idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from conditions import Conditions
from contest import (
    Timing,
    options,
    positive,
    rate,
    timing_of,
)
from contestants import our_training
from reports import Numbers, fill_in, markdown_table, note, publish
from vitascope.data.datasets import open_data
from vitascope.models.config import ViTConfig
from vitascope.runs import train
from vitascope.training.building import prepare
from vitascope.training.options.recipes import RECIPES, TrainConfig

RECIPE = "digits"
BATCH_SIZE = RECIPES[RECIPE].option("batch_size")


@dataclasses.dataclass(frozen=True)
class Change:
    """The recipe with some options changed, or unchanged."""

    options: tuple[str, ...] = ()
    """NAME=VALUE, as for `vitascope train --model-options`."""
    pool: str | None = None
    """An option of training, not of the model."""

    @property
    def name(self) -> str:
        """The name in the table."""
        pool = () if self.pool is None else (f"pool={self.pool}",)
        return " ".join((*pool, *self.options)) or "base"

    def train_config(self, **others: Any) -> TrainConfig:
        """The training options, in fp32, because the choice of `auto` depends on the number of tokens."""
        return TrainConfig.from_recipe(
            RECIPE, model_options=self.options, pool=self.pool, precision="fp32", **others
        )

    def model_config(self) -> ViTConfig:
        """The resulting model for the digits."""
        config = prepare(self.train_config(), open_data("digits")).plan.model
        assert isinstance(config, ViTConfig)
        return config


CHANGES = (
    Change(),
    # Equation 1
    Change(("positions=none",)),
    Change(("positions=learned_2d",)),
    Change(("positions=sincos_1d",)),
    Change(("positions=sincos_2d",)),
    Change(("positions=sincos_2d_big_vision",)),
    Change(("positions=relative",)),
    Change(("positions=relative_by_block",)),
    Change(("positions=rotary",)),
    Change(("positions=rotary_axial",)),
    Change(("positions=rotary_mixed",)),
    Change(("position_prefix=false",)),
    Change(("positions=rotary", "absolute=patches")),
    Change(("positions=rotary", "absolute=all")),
    Change(("stem=overlap", "stride=4")),
    Change(("stem=resnet", "resnet_layers=[1]", "resnet_width=16")),
    Change(("stem=tokenizer", "tokenizer_widths=[32, 64]")),
    Change(("stem=tokenizer", "tokenizer_widths=[24, 32, 64]", "tokenizer_pooling=[1, 2, 3]")),
    Change(("stem=tokenizer", "tokenizer_widths=[32, 64]", "tokenizer_activation=gelu")),
    Change(("embedding_norm=true",)),
    Change(("patch_norm=true",)),
    # Equations 2 and 3
    Change(("norm=post",)),
    Change(("norm=branch",)),
    Change(("norm_type=rms",)),
    Change(("qk_norm=true",)),
    Change(("inner_norm=mlp",)),
    Change(("inner_norm=all",)),
    Change(("layer_scale=0.1",)),
    Change(("mlp=gelu_tanh",)),
    Change(("mlp=quick_gelu",)),
    Change(("mlp=swiglu",)),
    Change(("mlp=swiglu", "mlp_ratio=2.667")),
    Change(("qkv_bias=none",)),
    Change(("qkv_bias=no_key",)),
    Change(("linear_bias=false",)),
    Change(("attention=axial",)),
    Change(("attention=window", "window=2")),
    # Equation 4
    Change(("num_registers=4",)),
    Change(("distillation_token=true",)),
    Change(pool="mean"),
    Change(("pool_norm=after",), pool="mean"),
    Change(("pool_norm=none",), pool="mean"),
    Change(pool="cls_mean"),
    Change(pool="sequence"),
    Change(pool="map"),
    Change(("pool_prefix=true", "class_token=true"), pool="map"),
    Change(("head=mlp",)),
    # The paper's initialization starts every head at zero, so `head_init` only matters with timm's.
    Change(("init=mimetic",)),
    Change(("init=timm",)),
    Change(("init=timm", "head_init=zero")),
)
"""The base, then one change at a time, in the order of the paper's equations."""

HEADER = ("option", "test accuracy, %", "lowest to highest", "parameters", "MFLOPs", "training, images/s")

NOTES = """\
"option": the change to the base, the recipe `digits`: 32x32 pixels, 16 patches of 8x8, 3 blocks of width 96,
6 heads, learned positions, a class token. "test accuracy": mean over the seeds on the 360 test digits; one
digit is 0.28. Differences within the spread of the seeds mean nothing, and the best option here need not be
the best on photographs. "MFLOPs": the matrix products of one image's forward pass, two per multiply-add.
"training": images per second of training steps (forward, loss, backward, AdamW) at the recipe's batch size in
fp32 on one thread, without augmentation. Labels train both heads of `distillation_token` here; there is no
teacher. `resnet_layers=[1] resnet_width=16` has a stride of 4: patches of 8 pixels are 4x4 patches of 2x2
features. With `mlp_ratio=2.667`, SwiGLU has as many parameters as the base's MLP."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The cost and the accuracy of a change."""

    name: str
    parameters: int
    flops: int
    """Per forward pass of one image."""
    accuracies: list[float]
    """Test accuracy by seed."""
    step_seconds: list[float]
    """Seconds per training step, by round."""

    def row(self) -> tuple[str, ...]:
        """The table's row."""
        percent = [100 * accuracy for accuracy in self.accuracies]
        return (
            self.name,
            f"{statistics.mean(percent):.2f}",
            f"{min(percent):.2f} to {max(percent):.2f}",
            f"{self.parameters:,}",
            f"{self.flops / 1e6:.2f}",
            rate(BATCH_SIZE / statistics.median(self.step_seconds)),
        )


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All results and the conditions of the measurement, as stored in the JSON file."""

    seeds: int
    epochs: int
    rounds: int
    jobs: int
    results: list[Result]
    trained_again: list[str] = dataclasses.field(default_factory=list)
    """Options whose accuracy comes from a later run; their speed comes from the first one."""

    name = "ablation"

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        return cls(**values | {"results": [Result(**result) for result in values["results"]]})

    def table(self) -> str:
        """One row per option."""
        return markdown_table(HEADER, [result.row() for result in self.results])

    def for_docs(self) -> str:
        """The text for docs/options.md."""
        how = f"{self.seeds} seeds, {self.epochs} epochs; {self.machine}; {self.date}{self.later('; ')}."
        return f"{self.table()}\n\n{NOTES}\n\n{how}"

    def later(self, before: str) -> str:
        """A sentence about the options of later runs, empty without any."""
        if not self.trained_again:
            return ""
        names = ", ".join(f"`{name}`" for name in self.trained_again)
        return f"{before}retrained later, after a change to the option: {names}"

    def with_accuracies(self, accuracies: dict[Change, list[float]]) -> Measurement:
        """Return a copy with the accuracies of retrained options."""
        found = {change.name: values for change, values in accuracies.items()}
        results = [
            dataclasses.replace(result, accuracies=found.get(result.name, result.accuracies))
            for result in self.results
        ]
        again = sorted({*self.trained_again, *found})
        return dataclasses.replace(self, results=results, trained_again=again)

    def report(self) -> str:
        """The text for benchmarks/results."""
        method = (
            f"accuracy: seeds: {self.seeds}, epochs: {self.epochs}, parallel runs: {self.jobs}, "
            "each on one thread; then speed, with no other work: one process, one thread, interleaved "
            f"rounds over all options: {self.rounds}, medians"
        )
        head = self.heading(
            "Accuracy and cost of each option: the digits, one change at a time", method=method
        )
        return f"{head}\n{self.later('- ')}\n\n{self.table()}\n\n{NOTES}"


def measure_accuracies(
    changes: Sequence[Change], seeds: int, epochs: int, jobs: int
) -> dict[Change, list[float]]:
    """Measure the test accuracy of each change with each seed, in `jobs` parallel runs."""
    runs = list(itertools.product(range(seeds), changes))
    found: dict[tuple[int, Change], float] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=silence_and_use_one_thread) as pool:
        futures = {pool.submit(test_accuracy, change, seed, epochs): (seed, change) for seed, change in runs}
        for count, future in enumerate(as_completed(futures), 1):
            seed, change = futures[future]
            found[seed, change] = future.result()
            note(f"run {count}/{len(runs)}: {change.name}, seed {seed}: {found[seed, change]:.2%}")
    return {change: [found[seed, change] for seed in range(seeds)] for change in changes}


def silence_and_use_one_thread() -> None:
    """Discard the output of a training process, and limit it to one thread."""
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    torch.set_num_threads(1)


def test_accuracy(change: Change, seed: int, epochs: int) -> float:
    """Train in a temporary run folder and return the test accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        config = change.train_config(seed=seed, epochs=epochs, device="cpu", run=f"{folder}/run")
        return train(config).evaluation.accuracy


def measure_steps(changes: Sequence[Change], rounds: int, timing: Timing) -> dict[Change, list[float]]:
    """Time a training step of each change, in interleaved rounds; returns seconds by round."""
    seconds: dict[Change, list[float]] = {change: [] for change in changes}
    with ExitStack() as stack:
        steps = {
            change: stack.enter_context(our_training(change.model_config(), BATCH_SIZE, torch.float32))
            for change in changes
        }
        for number in range(1, rounds + 1):
            note(f"speed, round {number}/{rounds}")
            for change, step in steps.items():
                seconds[change].append(timing.median(step))
    return seconds


def measure(changes: Sequence[Change], arguments: argparse.Namespace) -> Measurement:
    """Measure the accuracies, then the speed."""
    torch.set_num_threads(1)
    conditions = Conditions.now()  # before this script puts load on it
    accuracies = measure_accuracies(changes, arguments.seeds, arguments.epochs, arguments.jobs)
    steps = measure_steps(changes, arguments.rounds, timing_of(arguments))
    results = []
    for change in changes:
        config = change.model_config()
        results.append(
            Result(change.name, config.num_parameters, config.flops, accuracies[change], steps[change])
        )
    return Measurement(
        **dataclasses.asdict(conditions),
        seeds=arguments.seeds,
        epochs=arguments.epochs,
        rounds=arguments.rounds,
        jobs=arguments.jobs,
        results=results,
    )


def selected(texts: Sequence[str]) -> list[Change]:
    """The changes whose name contains one of the texts."""
    return [change for change in CHANGES if any(text in change.name for text in texts)]


def parse() -> argparse.Namespace:
    parser = options(__doc__, rounds=7, warmup=1, steps=5)
    epochs = RECIPES[RECIPE].option("epochs")
    parser.add_argument("--seeds", type=positive, default=3, help="runs per option (default 3)")
    parser.add_argument(
        "--epochs", type=positive, default=epochs, help=f"epochs per run (default {epochs}, the recipe's)"
    )
    parser.add_argument(
        "--jobs", type=positive, default=os.cpu_count(), help="parallel runs (default: one per core)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only options whose name contains one of these"
    )
    parser.add_argument(
        "--retrain",
        nargs="+",
        metavar="NAME",
        help="retrain these and put their accuracy into the newest numbers",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="fill in this page; without --out, from the newest numbers"
    )
    arguments = parser.parse_args()
    if arguments.only and (arguments.out or arguments.docs):
        parser.error("--only does not go with --out or --docs: published tables are complete")
    for names in filter(None, (arguments.only, arguments.retrain)):
        if not selected(names):
            parser.error(f"no option's name contains {' or '.join(names)}")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.retrain:
        measured = Measurement.newest()
        shape = (measured.seeds, measured.epochs, arguments.jobs)
        measured = measured.with_accuracies(measure_accuracies(selected(arguments.retrain), *shape))
        publish("ablation", measured.report(), arguments)
        if arguments.out:
            measured.write()
    elif arguments.out or not arguments.docs:
        measured = measure(selected(arguments.only) if arguments.only else CHANGES, arguments)
        publish("ablation", measured.report(), arguments)
        if arguments.out:
            measured.write()
    if arguments.docs:
        fill_in(arguments.docs, "ablation", Measurement.newest().for_docs())


if __name__ == "__main__":
    main()
