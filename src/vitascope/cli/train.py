"""`vitascope train` and `vitascope pretrain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro

from vitascope.cli.parsing import parse
from vitascope.errors import UserError
from vitascope.model.configuration import options_of
from vitascope.training.options import Balance, Distillation, Masking, MaybeText
from vitascope.training.recipes import (
    GROUP_OF,
    NO_WEIGHTS,
    RECIPES,
    TrainConfig,
    default_start,
    merged_options,
)


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
    """Run to resume, one of its checkpoints, or `auto`; only engine options may change."""
    missing: Literal["error", "skip"] = "error"
    """What `--resume` does where images of the run are missing or changed.
    `skip` goes on without them, which is recorded."""

    def __post_init__(self) -> None:
        """Check nothing: `chosen` creates a `TrainConfig`, whose errors are one clear line."""

    def chosen(self) -> TrainConfig:
        """The configuration without the options of the command itself."""
        return TrainConfig(**{name: self.option(name) for name in GROUP_OF})

    def call(self) -> None:
        """Run or resume, and print the paths of the results."""
        from vitascope.training import train
        from vitascope.training.distributed import is_first
        from vitascope.training.train import PretrainResult

        if self.resume is not None:
            result = train.resume(self.resume, missing=self.missing, **dataclasses.asdict(self.engine))
        elif self.task == "masked":
            result = train.pretrain(self.chosen())
        else:
            result = train.train(self.chosen())
        if not is_first():
            return
        print(f"model  {result.run / 'model'}")
        for path in result.figures.values():
            print(f"figure {path}")
        print(f"report {result.report}")
        if isinstance(result, PretrainResult):
            print(f"next   vitascope train --weights {result.run} --data FOLDER")


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class Train(RunCommand):
    """Train a classifier; without options, on the embedded digits.

    The run folder contains the model, metrics, figures and a report.

    Ctrl-C saves a checkpoint and stops; `--resume` continues.
    """

    masking: tyro.conf.Suppress[Masking] = dataclasses.field(default_factory=Masking)
    """Options of `pretrain`."""


@dataclasses.dataclass(frozen=True, kw_only=True, init=False, repr=False)
class Pretrain(RunCommand):
    """Learn from images without their labels, by masked patch prediction.

    Some patches of each image are hidden; the model predicts their content.

    `vitascope train --weights RUN` fine-tunes the model.
    """

    balance: tyro.conf.Suppress[Balance] = dataclasses.field(default_factory=Balance)
    """Options of `train`."""
    distillation: tyro.conf.Suppress[Distillation] = dataclasses.field(default_factory=Distillation)
    """Options of `train`."""


R = TypeVar("R", bound=RunCommand)


def parse_run(command: type[R], name: str, args: Sequence[str]) -> R:
    """Parse the options of `train` or `pretrain`; a recipe or a file provides their defaults.

    Raises:
        UserError: as `parse`; an unknown recipe, or one of the other command; both a recipe and a file.
    """
    first = parse(command, name, args)
    if first.resume is not None:
        return _parse_resume(command, name, args, first)
    if first.missing != "error":
        raise UserError("--missing is about the images of a run that is resumed: add --resume RUN")
    task = "masked" if command is Pretrain else "classify"
    if first.config is not None:
        if first.recipe is not None:
            raise UserError("--config contains every option already; leave out --recipe")
        base = TrainConfig.from_yaml(first.config)
    else:
        asked, scratch = first.chosen().replace(task=task), first.weights == NO_WEIGHTS
        start = {"recipe": first.recipe} if first.recipe else default_start(asked, scratch=scratch)
        base = TrainConfig.from_recipe(**start)
    if base.task != task:
        other = "pretrain" if base.task == "masked" else "train"
        raise UserError(f"{first.config or f'the recipe {first.recipe}'} is for `vitascope {other}`")
    parsed = parse(
        command, name, args, _with_defaults(command, base, recipe=first.recipe, config=first.config)
    )
    model = parsed.architecture.model or "a Vision Transformer"
    if first.recipe == "cnn" and parsed.weights is None and not model.startswith("resnet"):
        raise UserError(
            f"the recipe cnn is for a CNN, not for {model}: add --model resnet29_w32_cifar, for example, or "
            "leave out --recipe"
        )
    if task == "masked" and parsed.optimization.keep != "last":
        raise UserError("pre-training keeps its last weights; leave out --keep")
    return parsed.replace(options=merged_options(base.architecture.options, first.architecture.options))


def _with_defaults(command: type[R], base: TrainConfig, **others: Any) -> R:
    """The command with a configuration as its defaults."""
    return command(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)}, **others)


def _parse_resume(command: type[R], name: str, args: Sequence[str], first: R) -> R:
    """Parse the options of `--resume`; all but engine options must be those of the run."""
    from vitascope.run.run import Run, lasting_paths

    run, _ = Run.find(first.resume or "")
    recorded = run.config
    with options_of(run.config_file):
        base = TrainConfig.from_dict(recorded)
    parsed = parse(command, name, args, _with_defaults(command, base, resume=first.resume))
    given, stored = (config.replace(**lasting_paths(config.to_dict())) for config in (parsed, base))
    changed = [
        option
        for option, group in GROUP_OF.items()
        if group != "engine" and given.option(option) != stored.option(option)
    ]
    changed += [option for option in ("recipe", "config") if getattr(first, option) is not None]
    if changed:
        raise UserError(
            f"--resume takes all options but engine options from {run.config_file}; "
            f"leave out {', '.join('--' + option.replace('_', '-') for option in changed)}"
        )
    return parsed
