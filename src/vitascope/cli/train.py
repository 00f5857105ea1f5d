"""`vitascope train` and `vitascope pretrain`: options, a recipe or a file under them, and what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from vitascope.cli.parsing import MaybePath, parse
from vitascope.errors import UserError
from vitascope.training.options import Distillation, ExecutionOptions, Masking, MaybeText
from vitascope.training.recipes import GROUP_OF, RECIPES, TrainConfig, default_recipe, merged_options

if TYPE_CHECKING:
    from vitascope.training.finish import PretrainResult, TrainResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run(TrainConfig):
    """What both commands share: where the options under the given ones come from."""

    recipe: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", help_behavior_hint=f"(one of {', '.join(sorted(RECIPES))})"),
    ] = None
    """Named starting point, which the options change; see docs/training.md."""
    config: MaybePath = None
    """A run's config.yaml to start from instead of a recipe: runs the same again."""
    resume: MaybeText = None
    """A stopped run to continue, one of its checkpoints, or `auto`; takes engine options only."""

    def __post_init__(self) -> None:
        """Check nothing yet: `chosen` makes a `TrainConfig`, whose refusals are then one clear line."""

    def chosen(self) -> TrainConfig:
        """The configuration, without where it came from."""
        return TrainConfig.from_dict({name: self.option(name) for name in GROUP_OF})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(_Run):
    """Train a classifier; without options, on the embedded digits.

    A new run folder gets the model, metrics, checkpoints and figures.

    Ctrl-C saves before it stops; `--resume` continues.
    """

    masking: tyro.conf.Suppress[Masking] = dataclasses.field(default_factory=Masking)
    """Belongs to `pretrain`."""

    def call(self) -> None:
        """Train or resume, and say what came out."""
        if self.resume is not None:
            resume(self.resume, self.engine)
            return
        from vitascope.training.train import train

        say_trained(train(self.chosen()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrain(_Run):
    """Learn from images without their labels, by masked patch prediction.

    Half of each image's patches are hidden; it learns to say what was there.

    `vitascope train --weights RUN` fine-tunes what it has learned.
    """

    distillation: tyro.conf.Suppress[Distillation] = dataclasses.field(default_factory=Distillation)
    """Belongs to `train`."""

    def call(self) -> None:
        """Pre-train or resume, and say what came out."""
        if self.resume is not None:
            resume(self.resume, self.engine)
            return
        if self.optimization.keep != "last":
            raise UserError("pre-training keeps its last weights; leave out --keep")
        from vitascope.training.train import pretrain

        say_pretrained(pretrain(self.chosen()))


def resume(ref: str, engine: ExecutionOptions) -> None:
    """Continue a run of either command, and say what came out."""
    from vitascope.training import train
    from vitascope.training.finish import TrainResult

    result = train.resume(ref, **dataclasses.asdict(engine))
    if isinstance(result, TrainResult):
        say_trained(result)
    else:
        say_pretrained(result)


def say_trained(result: TrainResult) -> None:
    """What training has made, in a few lines."""
    from vitascope.training.distributed import is_first

    if not is_first():
        return
    say_files(result.run, result.figures, result.report)


def say_pretrained(result: PretrainResult) -> None:
    """What pre-training has made, in a few lines."""
    from vitascope.training.distributed import is_first

    if not is_first():
        return
    say_files(result.run, result.figures, result.report)
    print(f"next   vitascope train --weights {result.run} --data FOLDER")


def say_files(run: Path, figures: dict[str, Path], report: Path) -> None:
    """Where the model, the pictures and the report are."""
    print(f"model  {run / 'model'}")
    for path in figures.values():
        print(f"figure {path}")
    print(f"report {report}")


R = TypeVar("R", bound=_Run)


def parse_run(command: type[R], name: str, args: Sequence[str]) -> R:
    """Options of `train` or `pretrain`: a recipe or a file decides the defaults, so it is read first.

    Raises:
        UserError: as `parse`; an unknown recipe; both a recipe and a file; those of the other command.
    """
    first = parse(command, name, args)
    task = "masked" if command is Pretrain else "classify"
    if first.resume is not None:
        return _parse_resume(command, name, args, first)
    if first.config is not None:
        if first.recipe is not None:
            raise UserError("--config holds every option already; leave out --recipe")
        base = TrainConfig.from_yaml(first.config)
    else:
        base = TrainConfig.from_recipe(first.recipe or default_recipe(first.chosen().replace(task=task)))
    if base.task != task:
        other = "pretrain" if base.task == "masked" else "train"
        raise UserError(f"{first.config or f'the recipe {first.recipe}'} is for `vitascope {other}`")
    parsed = parse(command, name, args, _over(command, base, recipe=first.recipe, config=first.config))
    model = parsed.architecture.model or "a Vision Transformer"
    if first.recipe == "cnn" and parsed.weights is None and not model.startswith("resnet"):
        raise UserError(
            f"the recipe cnn is for a CNN, not for {model}: add --model resnet29_w32_cifar, say, or leave "
            "out --recipe"
        )
    options = merged_options(base.architecture.options, first.architecture.options)
    return dataclasses.replace(parsed, architecture=dataclasses.replace(parsed.architecture, options=options))


def _over(command: type[R], base: TrainConfig, **others: Any) -> R:
    """A command whose options are those of a configuration."""
    given = {field.name: getattr(base, field.name) for field in dataclasses.fields(TrainConfig)}
    return command(**given, **others)


def _parse_resume(command: type[R], name: str, args: Sequence[str], first: R) -> R:
    """`--resume` with engine options over those of the run; what else is given must be as in the run."""
    from vitascope.run.run import Run, lasting_paths

    assert first.resume is not None
    run, _ = Run.find(first.resume)
    base = TrainConfig.from_dict(dict(run.config))
    parsed = parse(command, name, args, _over(command, base, resume=first.resume))
    given, stored = (config.replace(**lasting_paths(config.to_dict())) for config in (parsed, base))
    changed = [option for option, group in GROUP_OF.items() if group != "engine"]
    changed = [option for option in changed if given.option(option) != stored.option(option)]
    changed += [option for option in ("recipe", "config") if getattr(first, option) is not None]
    if changed:
        raise UserError(
            f"--resume takes all but the engine's options from {run.config_file}; "
            f"leave out {', '.join('--' + option.replace('_', '-') for option in changed)}"
        )
    return parsed
