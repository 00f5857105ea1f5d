"""`vitascope train` and `vitascope pretrain`."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import tyro

from vitascope.cli.parsing import Without
from vitascope.errors import UserError
from vitascope.training.options.recipes import RECIPES, TrainConfig

if TYPE_CHECKING:
    from vitascope.training.results import RunResult

START = TrainConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCommand:
    """The common options of both commands, beside those of the run."""

    RECIPE: ClassVar[str]
    """The recipe whose options the help shows."""

    recipe: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", help_behavior_hint=f"(one of {', '.join(sorted(RECIPES))})"),
    ] = None
    """Recipe of the defaults; see docs/recipes.md."""
    config: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """config.yaml of a run that provides the defaults instead of a recipe: repeats that run."""
    resume: str | None = None
    """Run to resume, one of its checkpoints, or `auto`; only execution options may change."""
    missing: Literal["error", "skip"] = "error"
    """What `--resume` does where images of the run are missing or changed.
    `skip` goes on without them, which is recorded."""
    training: Any = START
    """Options of the run."""

    def defaults(self) -> Self:
        """The command with the options of its recipe or file, which the help shows."""
        if self.config is not None:
            return dataclasses.replace(self, training=TrainConfig.from_yaml(self.config))
        return dataclasses.replace(self, training=TrainConfig.from_recipe(self.recipe or self.RECIPE))

    def call(self) -> dict[str, object]:
        """Run or resume, and print the paths of the results."""
        from vitascope import runs
        from vitascope.training.distributed import is_first

        if self.resume is None:
            result = self.start()
        elif self.recipe is not None or self.config is not None:
            raise UserError(f"--resume takes its options from {self.resume}: leave out --recipe and --config")
        else:
            result = runs.resume(self.resume, missing=self.missing, **self.training)
        if not is_first():
            return {}
        run = result.url or str(result.run)
        lines = [f"model  {result.run / 'model'}", *(f"figure {path}" for path in result.figures.values())]
        print("\n".join([*lines, f"report {result.report}"]).replace(str(result.run), run))
        return {"run": run}

    def start(self) -> "RunResult":
        """Run the function of the library, whose recipe decides on what is not named."""
        from vitascope import runs

        if self.missing != "error":
            raise UserError("--missing is about the images of a run that is resumed: add --resume RUN")
        config = None if self.config is None else TrainConfig.from_yaml(self.config)
        function = runs.pretrain if isinstance(self, Pretrain) else runs.train
        return function(config, recipe=self.recipe, **self.training)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(RunCommand):
    """Train a classifier; without options, on the embedded digits.

    Most runs need two options: `--data FOLDER --minutes 10`.

    Ctrl-C saves a checkpoint and stops; `--resume` continues.

    Defaults are of the recipe small-data; `--recipe NAME --help` shows others.
    """

    RECIPE = "small-data"
    FIRST = (
        *("data", "run", "weights", "recipe", "resume", "minutes", "epochs", "folds"),
        *("model", "image_size", "batch_size", "lr", "seed", "device"),
    )
    """The options of the short help."""

    training: Annotated[TrainConfig, Without(("masking",))] = START
    """Options of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrain(RunCommand):
    """Learn from images without their labels, by masked patch prediction.

    Some patches of each image are hidden; the model predicts their content.

    Defaults are of the recipe masked; `--recipe NAME --help` shows others.

    Then `vitascope train --weights RUN` fine-tunes the model.
    """

    RECIPE = "masked"
    FIRST = (
        *("data", "run", "weights", "recipe", "resume", "minutes", "epochs", "target"),
        *("model", "image_size", "batch_size", "lr", "device"),
    )
    """The options of the short help."""

    training: Annotated[TrainConfig, Without(("balance", "distillation"))] = START
    """Options of the run."""
