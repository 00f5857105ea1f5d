"""`vitascope train` and `vitascope pretrain`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro

from vitascope.cli.parsing import parse
from vitascope.errors import UserError
from vitascope.model.configuration import options_of
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

    given: tyro.conf.Suppress[tuple[str, ...]] = ()
    """The options that the command line names."""

    def __post_init__(self) -> None:
        """Check nothing: `train` does, whose errors are one clear line."""

    def named(self) -> dict[str, Any]:
        """The named options of a run, without those of the command itself."""
        return {name: self.option(name) for name in self.given if name in GROUP_OF}

    def call(self) -> None:
        """Run or resume, and print the paths of the results."""
        from vitascope.training import train
        from vitascope.training.distributed import is_first
        from vitascope.training.train import PretrainResult

        named = self.named()
        if self.resume is not None:  # `parse_run` has compared the other options with those of the run
            execution = {name: named[name] for name in named if GROUP_OF[name] == "execution"}
            result = train.resume(self.resume, missing=self.missing, **execution)
        else:
            config = None if self.config is None else TrainConfig.from_yaml(self.config)
            start = train.pretrain if isinstance(self, Pretrain) else train.train
            result = start(config, recipe=self.recipe, **named)
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


R = TypeVar("R", bound=RunCommand)


def parse_run(command: type[R], name: str, args: Sequence[str]) -> R:
    """Parse the options of `train` or `pretrain`; a recipe, a file or a run provides the defaults.

    Raises:
        UserError: as `parse`; an unknown recipe; no such file or run; options that a run cannot change.
    """
    recipe, config, resume = (_value(args, option) for option in ("--recipe", "--config", "--resume"))
    # The defaults that the help shows: `train` gets the named options alone, and chooses the recipe itself.
    base = TrainConfig.from_recipe("masked" if command is Pretrain else "small-data")
    if resume is not None:
        base = _recorded(resume)
    elif config is not None:
        base = TrainConfig.from_yaml(config)
    elif recipe is not None:
        base = TrainConfig.from_recipe(recipe)
    defaults = command(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})
    parsed = parse(command, name, args, defaults)
    parsed = parsed.replace(given=tuple(option for option in parsed.groups() if _names(args, option)))
    if resume is not None:
        _check_resumed(parsed, base)
    elif parsed.missing != "error":
        raise UserError("--missing is about the images of a run that is resumed: add --resume RUN")
    return parsed


def _names(args: Sequence[str], option: str) -> bool:
    """Whether arguments name an option."""
    return any(word.partition("=")[0].replace("_", "-") == f"--{option.replace('_', '-')}" for word in args)


def _value(args: Sequence[str], option: str) -> str | None:
    """The value of an option, found before the others are parsed; None without one."""
    for word, after in itertools.pairwise([*args, ""]):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after or None
    return None


def _recorded(resume: str) -> TrainConfig:
    """The options of the run to resume."""
    from vitascope.run.run import Run

    run, _ = Run.find(resume)
    recorded = run.config
    with options_of(run.config_file):
        return TrainConfig.from_dict(recorded)


def _check_resumed(parsed: RunCommand, base: TrainConfig) -> None:
    """Reject options that a resumed run cannot change, unless they say what it has recorded."""
    from vitascope.run.run import lasting_paths

    given = parsed.named()
    stored, now = (
        config.replace(**lasting_paths(config.to_dict())) for config in (base, base.replace(**given))
    )
    changed = [
        name for name in given if GROUP_OF[name] != "execution" and now.option(name) != stored.option(name)
    ]
    changed += [option for option in ("recipe", "config") if getattr(parsed, option) is not None]
    if changed:
        raise UserError(
            f"--resume takes all options but execution options from {parsed.resume}; "
            f"leave out {', '.join('--' + option.replace('_', '-') for option in changed)}"
        )
