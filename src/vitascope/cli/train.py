"""`vitascope train`: options, a recipe or a file under them, and what is said at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vitascope.cli.parsing import parse
from vitascope.errors import UserError
from vitascope.training.recipes import MaybePath, MaybeText, TrainConfig, default_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a classifier; without options, on the embedded digits.

    A new run folder gets the model, metrics, checkpoints and figures.

    Ctrl-C saves before it stops; `--resume` continues.
    """

    recipe: MaybeText = None
    """Named starting point, which the options change: `digits`, `small-data` or `finetune`.
    Default: `digits` for digits, `finetune` with --weights, else `small-data`."""
    config: MaybePath = None
    """A run's config.yaml to start from instead of a recipe: runs the same again."""
    resume: MaybePath = None
    """A stopped run folder to continue; takes no other option."""

    def __post_init__(self) -> None:
        """Check nothing yet: `call` makes a `TrainConfig`, whose refusals are then one clear line."""

    def call(self) -> None:
        """Train or resume, and say what came out."""
        from vitascope.training import loop

        if self.resume is not None:
            changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
            changed.remove("resume")
            if changed:
                raise UserError(
                    f"--resume takes everything from {self.resume / 'config.yaml'}; "
                    f"leave out {', '.join('--' + name.replace('_', '-') for name in changed)}"
                )
            result = loop.resume(self.resume)
        else:
            names = [field.name for field in dataclasses.fields(TrainConfig)]
            result = loop.train(TrainConfig(**{name: getattr(self, name) for name in names}))
        evaluation, run = result.evaluation, result.run
        right = round(evaluation.accuracy * len(evaluation.labels))
        print(
            f"{evaluation.split:<6} {evaluation.accuracy:.2%} right: {right} of {len(evaluation.labels)} "
            f"images, after {result.seconds:.1f} s of training"
        )
        if evaluation.split == "test" and self.data == "digits":
            from vitascope.data.datasets import digits_baseline

            print(f"       {digits_baseline():.2%} scikit-learn's SVC() on the same split")
        print(f"model  {run / 'model'}")
        for path in result.figures.values():
            print(f"figure {path}")


def parse_train(args: Sequence[str]) -> Train:
    """Options of `train`: a recipe or a file decides the defaults, so it is read before the rest."""
    first = parse(Train, "train", args)
    if first.resume is not None:
        return first
    if first.config is not None:
        if first.recipe is not None:
            raise UserError("--config holds every option already; leave out --recipe")
        base = TrainConfig.from_yaml(first.config)
    else:
        base = TrainConfig.from_recipe(
            first.recipe or default_recipe(first.data, first.weights),
            data=first.data,
            weights=first.weights,
        )
    default = Train(**dataclasses.asdict(base), recipe=first.recipe, config=first.config)
    return parse(Train, "train", args, default)
