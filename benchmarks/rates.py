"""Measure options of the model on CIFAR-10, each at its own best learning rate.

    .venv/bin/python benchmarks/rates.py --data cifar10/ --out --docs docs/options.md
    .venv/bin/python benchmarks/rates.py --data cifar10/ --out --docs docs/options.md --resume
    .venv/bin/python benchmarks/rates.py --docs docs/options.md

Options that change the size of gradients need other rates: with one rate for all, the paper first took mean
pooling for worse than the class token (appendix D.3). The script trains the recipe `small-data` with one
option changed at a time and with each rate, for the same number of epochs. The rate with the highest
validation accuracy counts; the test accuracy is that of its run. The first command measures, writes
benchmarks/results/<date>-rates.md and, after every run, the raw numbers beside it, and fills in the page. The
second continues it, the third only fills in the page. Other arguments NAME=VALUE are options of
`vitascope train` for all runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vitascope as vs
from conditions import Conditions
from contest import positive
from learning import named_values, tested, train
from reports import Numbers, command_line, fill_in, markdown_table, note, publish

CNN = "resnet29_w32_cifar"
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "positions=none": {"model_options": {"positions": "none"}},
    "positions=sincos_2d": {"model_options": {"positions": "sincos_2d"}},
    "positions=relative": {"model_options": {"positions": "relative"}},
    "positions=rotary": {"model_options": {"positions": "rotary"}},
    "pool=cls": {"pool": "cls"},
    "pool=sequence": {"pool": "sequence"},
    "pool=map": {"pool": "map"},
    "stem=conv": {"model_options": {"stem": "conv"}},
    "tokenizer_widths=[32, 64]": {"model_options": {"tokenizer_widths": [32, 64]}},
    "init=paper": {"model_options": {"init": "paper"}},
    "layer_scale=0.1": {"model_options": {"layer_scale": 0.1}},
    "num_registers=4": {"model_options": {"num_registers": 4}},
    "modern": {"model_options": "modern"},
    "progressive=0": {"progressive": 0.0},
    "optimizer=adamw": {"optimizer": "adamw"},
    "schedule=linear": {"schedule": "linear"},
    "batch_size=64": {"batch_size": 64},
    CNN: {"recipe": "cnn", "model": CNN},
}
"""Options of `TrainConfig.from_recipe`, by the name in the table."""
RATES = (1e-3, 3e-3, 9e-3)
FIXED = ("data", "run", "seed", "epochs", "lr", "pool", "model_options", "optimizer", "progressive", "model")

NOTES = """\
Accuracy in %. "option": the change to the base, the recipe `small-data`: a convolutional tokenizer, 4 blocks
of width 128, learned positions, mean pooling, mimetic initialization, Muon, smaller images in the first half
of the run. The last row is a CNN with the same training. The columns of rates: validation accuracy after
training at that peak rate. "test": of the run with the highest validation accuracy. One seed each:
differences below one point mean nothing."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run of an option at a rate."""

    name: str
    rate: float
    parameters: int
    validation: float
    """Accuracy of the finished weights."""
    test: float
    seconds: float
    """Time in the loop."""


@dataclasses.dataclass(frozen=True)
class Measurement(Numbers):
    """All runs and the conditions of the measurement, as stored in the JSON file."""

    data: str
    epochs: int
    options: list[str]
    runs: list[Trained]

    name = "rates"

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Measurement:
        """The inverse of `dataclasses.asdict`."""
        return cls(**values | {"runs": [Trained(**run) for run in values["runs"]]})

    def table(self) -> str:
        """One row per option, in the order of the runs."""
        rates = sorted({run.rate for run in self.runs})
        rows = []
        for name in dict.fromkeys(run.name for run in self.runs):
            found = {run.rate: run for run in self.runs if run.name == name}
            best = max(found.values(), key=lambda run: run.validation)
            cells = [f"{100 * found[rate].validation:.1f}" if rate in found else "-" for rate in rates]
            rows.append((name, *cells, f"{100 * best.test:.1f}", f"{best.parameters:,}"))
        return markdown_table(("option", *(f"{rate:g}" for rate in rates), "test", "parameters"), rows)

    def how(self) -> str:
        """A description of the setting."""
        options = "".join(f", {word}" for word in self.options)
        return f"{Path(self.data).name}, {self.epochs} epochs{options}"

    def for_docs(self) -> str:
        """The text for docs/options.md."""
        return f"{self.table()}\n\n{NOTES}\n\n{self.how()}; {self.machine}; {self.date}."

    def report(self) -> str:
        """The text for benchmarks/results."""
        head = self.heading("Options of the model on CIFAR-10, each at its best rate", method=self.how())
        return f"{head}\n\n{self.table()}\n\n{NOTES}"


def trained(name: str, rate: float, arguments: argparse.Namespace) -> Trained:
    """Train one option at one rate."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"recipe": "small-data", **CHANGES[name], **named_values(arguments.options, fixed=FIXED)}
        config = vs.TrainConfig.from_recipe(
            data=arguments.data, run=f"{folder}/run", epochs=arguments.epochs, lr=rate, **options
        )
        run = train(f"{name}, rate {rate:g}", config)
        last, test = run.records("epoch")[-1], tested(run)
        parameters = run.model().config.num_parameters
    return Trained(
        name=name,
        rate=rate,
        parameters=parameters,
        validation=last["val_accuracy"],
        test=test["accuracy"],
        seconds=test["seconds"],
    )


def start(arguments: argparse.Namespace) -> Measurement:
    """An empty measurement, or with --resume the newest one.

    Raises:
        UserError: an option is invalid, or the newest numbers belong to another setting.
    """
    named_values(arguments.options, fixed=FIXED)
    empty = Measurement(
        **dataclasses.asdict(Conditions.now()),
        data=arguments.data,
        epochs=arguments.epochs,
        options=arguments.options,
        runs=[],
    )
    return empty.newest_of("data", "epochs", "options") if arguments.resume else empty


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of `vitascope train`")
    parser.add_argument("--data", help="a DATA argument; without it, the page is filled in only")
    parser.add_argument("--epochs", type=positive, default=2, help="per run (default 2)")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="peak learning rates")
    parser.add_argument("--resume", action="store_true", help="skip the runs in the newest numbers")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="fill in this page")
    return parser.parse_intermixed_args(given)


def main() -> None:
    arguments = parse()
    if arguments.data:
        measured = start(arguments)
        done = {(run.name, run.rate) for run in measured.runs}
        for name, rate in itertools.product(CHANGES, arguments.rates):
            if (name, rate) not in done:
                measured.runs.append(trained(name, rate, arguments))
                note(measured.table())
                if arguments.out:  # after each run, in case a later one is interrupted
                    measured.write()
        publish("rates", measured.report(), arguments)
    if arguments.docs:
        fill_in(arguments.docs, "rates", Measurement.newest().for_docs())


if __name__ == "__main__":
    main()
