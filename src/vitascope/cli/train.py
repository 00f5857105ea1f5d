"""`vitascope train` and `vitascope pretrain`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from vitascope.cli.parsing import parse
from vitascope.errors import UserError
from vitascope.options.groups import Balance, Distillation, Masking, MaybeText
from vitascope.options.recipes import GROUP_OF, RECIPES, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class RunCommand(TrainConfig):
    """The common options of both commands."""

    recipe: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", help_behavior_hint=f"(one of {', '.join(sorted(RECIPES))})"),
    ] = None
    """Recipe that provides the defaults of the options; see docs/training.md."""
    config: Annotated[str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """config.yaml of a run that provides the defaults instead of a recipe: repeats that run."""
    resume: MaybeText = None
    """Run to resume, its URL, one of its checkpoints, or `auto`; only execution options may change."""
    missing: Literal["error", "skip"] = "error"
    """What `--resume` does where images of the run are missing or changed.
    `skip` goes on without them, which is recorded."""

    named: tyro.conf.Suppress[tuple[str, ...]] = ()
    """The options of a run that the command line names."""

    def __post_init__(self) -> None:
        """Check nothing: the library does, whose errors are one clear line."""

    def call(self) -> None:
        """Run or resume, and print the paths of the results."""
        from vitascope.training import train
        from vitascope.training.distributed import is_first
        from vitascope.training.train import PretrainResult

        options = {name: self.option(name) for name in self.named}
        if self.resume is not None:
            if self.recipe is not None or self.config is not None:
                raise UserError(
                    f"--resume takes its options from {self.resume}: leave out --recipe and --config"
                )
            result = train.resume(self.resume, missing=self.missing, **options)
        elif self.missing != "error":
            raise UserError("--missing is about the images of a run that is resumed: add --resume RUN")
        else:
            config = None if self.config is None else TrainConfig.from_yaml(self.config)
            start = train.pretrain if isinstance(self, Pretrain) else train.train
            result = start(config, recipe=self.recipe, **options)
        if not is_first():
            return
        lines = [f"model  {result.run / 'model'}"]
        lines += [f"figure {path}" for path in result.figures.values()]
        lines.append(f"report {result.report}")
        if isinstance(result, PretrainResult):
            lines.append(f"next   vitascope train --weights {result.run} --data FOLDER")
        print("\n".join(lines).replace(str(result.run), result.url or str(result.run)))


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class Train(RunCommand):
    """Train a classifier; without options, on the embedded digits.

    Most runs need two options: `--data FOLDER --minutes 10`.

    Defaults are of the recipe small-data; `--recipe NAME --help` shows others.

    Up to 1,000 images, trained weights, teachers and the digits have own recipes.

    The run folder contains the model, metrics, figures and a report.

    Ctrl-C saves a checkpoint and stops; `--resume` continues.
    """

    masking: tyro.conf.Suppress[Masking] = dataclasses.field(default_factory=Masking)
    """Options of `pretrain`."""


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class Pretrain(RunCommand):
    """Learn from images without their labels, by masked patch prediction.

    Some patches of each image are hidden; the model predicts their content.

    Defaults are of the recipe masked; `--recipe NAME --help` shows others.

    Then `vitascope train --weights RUN` fine-tunes the model.
    """

    balance: tyro.conf.Suppress[Balance] = dataclasses.field(default_factory=Balance)
    """Options of `train`."""
    distillation: tyro.conf.Suppress[Distillation] = dataclasses.field(default_factory=Distillation)
    """Options of `train`."""


def parse_run(command: type[RunCommand], name: str, args: Sequence[str]) -> RunCommand:
    """Parse the options of `train` or `pretrain`; those that are not named have the defaults that the help
    shows, of a recipe or a file, and the library chooses theirs."""
    words = [text for word in args for text in word.split("=", 1)]
    after = dict(itertools.pairwise(words))
    base = TrainConfig.from_recipe(
        after.get("--recipe") or ("masked" if command is Pretrain else "small-data")
    )
    if "--config" in after:
        base = TrainConfig.from_yaml(after["--config"])
    defaults = command(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in args if word[:2] == "--"}
    return parse(command, name, args, defaults).replace(named=tuple(names & GROUP_OF.keys()))
