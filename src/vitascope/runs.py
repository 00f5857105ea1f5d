"""`train`, `pretrain` and `resume`: training, with the figures and the report of finished runs."""

from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from vitascope.arguments import checked
from vitascope.data.splits import ImageSet, Splits
from vitascope.models.vision_model import VisionModel
from vitascope.training.keywords import ResumeKeywords, TrainKeywords
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.results import PretrainResult, TrainResult
from vitascope.training.resume import resume_run
from vitascope.training.run.run import Run
from vitascope.training.train import run_training


class _Report:
    """The `Reporter` of training; matplotlib, which it needs, delays the start of training."""

    def draw(self, run: Run, model: VisionModel, images: ImageSet, tested: Any) -> dict[str, Path]:
        from vitascope.analysis.report.figures import draw_tested

        return draw_tested(run, model, images, tested)

    def write(self, run: Run, splits: Splits, device: str) -> Path:
        from vitascope.analysis.report.write import write_report

        return write_report(run, splits=splits, device=device)

    def rewrite(self, run: Run, device: str) -> str:
        from vitascope.analysis.report.write import rewrite_report

        return rewrite_report(run, device=device)[1]


def train(
    config: TrainConfig | None = None, *, recipe: str | None = None, **options: Unpack[TrainKeywords]
) -> TrainResult:
    """Train a classifier, as `vitascope train` does.

    Under `torchrun` every process calls this function, and gets the same result.

    Args:
        config: the configuration; None starts from a recipe.
        recipe: name of the recipe; None selects one by the options and the number of images, as
            `training.plan.Start.usual` does.
        **options: changes of the configuration: `train(data="photos/", epochs=20)`. `data` may be a pandas
            DataFrame, a table whose paths are relative to `images` or to the working directory; the run
            keeps it.

    Raises:
        UserError: data, model or options that cannot be used.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """
    run = partial(run_training, task="classify", reporter=_Report())
    return cast("TrainResult", run(config, recipe, options))


def pretrain(
    config: TrainConfig | None = None, *, recipe: str | None = None, **options: Unpack[TrainKeywords]
) -> PretrainResult:
    """Pre-train a model without a head by masked patch prediction, as `vitascope pretrain` does.

    The finished model has the last weights.

    Args:
        config, recipe, options: as for `train`.

    Raises:
        UserError: data, model or options that cannot be used.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """
    task: dict[str, Any] = {"task": "masked"} if config is None and recipe is None else {}
    run = partial(run_training, task="masked", reporter=_Report())
    return cast("PretrainResult", run(config, recipe, {**task, **options}))


@checked
def resume(
    run: str | PathLike[str],
    *,
    missing: Literal["error", "skip"] = "error",
    **options: Unpack[ResumeKeywords],
) -> TrainResult | PretrainResult:
    """Resume an interrupted run, with any number of processes.

    A finished run with `epochs` gets more of them: from its last checkpoint if it kept that (`keep_state`),
    else from its model, with an optimizer that begins anew. The new epochs have a schedule of their own, with
    warm-up and decay; only a constant rate goes on from a checkpoint as if there had been no end. The model
    that is kept is the best of all epochs by the rule of `keep`. If the new epochs diverge, or fail before
    their first checkpoint, the run is what it was.

    On a CPU, with the same number of processes, the final weights are bitwise identical to those of an
    uninterrupted run. A run that skips missing images ends with other weights: it takes as many steps as
    planned, at the same learning rates, but the order is drawn anew from the images that are left, and the
    validation loss is that of the validation images that are left. The images that it skips are recorded, so
    that it is resumed bitwise from then on.

    Args:
        run: a run folder or its URL, for its newest valid checkpoint, or its start if it has none; one of
            the checkpoints of a local run, `RUN/checkpoints/step-N`; or `auto` for the newest unfinished run
            in runs/.
        missing: `skip` resumes the run without the images that are missing or changed, from now on; `error`
            rejects data in which there are any.
        **options: changes of execution options, such as `device="cuda"`; other options are as recorded.

    Raises:
        UserError: no such run, a finished one or one in use, no valid checkpoint, changes of the data, the
            classes or the model, or options that are not execution options.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """

    def begin(member: TrainConfig) -> object:
        return train(member)

    return resume_run(run, options, missing=missing, reporter=_Report(), begin=begin)
