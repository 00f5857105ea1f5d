"""`vitascope evaluate`: a trained model measured on labelled pictures."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from vitascope.cli.parsing import Device, Json, Model, Precision, Views, arguments_of
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.errors import UserError, printable
from vitascope.formatting import counted, listed

if TYPE_CHECKING:
    from vitascope.training.evaluation.measure import Evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model on its run's own test images, or on others."""

    model: Model
    """A run folder, a model folder or file, a hub id, or an exported model (.onnx, .xml)."""
    data: str | None = None
    """`digits`, a folder with test/<class>/, val/<class>/ or <class>/, a table, or another DATA.
    Images that the run was trained on are left out and counted.
    Default: the run's own test images."""
    rename: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=CLASS ...")] = ()
    """Classes of --data that have another name in the model, such as `--rename birds=bird`."""
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    batch_size: int | None = None
    """Images per batch. Default: 128; on a GPU as many as keep it busy."""
    views: Views = 1
    precision: Precision = "auto"
    device: Device = "auto"
    json: Json = False

    def call(self) -> None:
        """Measure and print."""
        from vitascope.analysis.evaluate import evaluate
        from vitascope.models.weights.stored_model import local_model
        from vitascope.training.run.run import Run

        evaluation = evaluate(**arguments_of(self, "rename", "json"), rename=renamed(self.rename))
        if self.json:
            print(json.dumps(evaluation_json(evaluation)))
        else:
            run = Run(local_model(self.model))
            print("\n".join(evaluation_lines(evaluation, run.better_start if run.exists else "")))
            if (averaged := evaluation.averaged) is not None:
                print(f"the mean of {self.views} views: {averaged.in_words()}, loss {averaged.loss:.3f}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Give a classifier true probabilities, and words for not knowing.

    Training does this at its end.

    The command is for models of other libraries, and for other data.

    The temperature and the sets of classes are of the validation images.

    What is familiar is as the training images are.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """Labelled images of the model's classes: any DATA of `vitascope train`.
    Without validation images, a tenth of each class is drawn."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(required)")]
    """A new folder for the calibrated model."""
    device: Device = "auto"

    def call(self) -> None:
        """Calibrate, and print what was found."""
        from vitascope.training.evaluation.calibrate import calibrate

        found = calibrate(self.model, self.data, self.out, device=self.device)
        print("\n".join([*found.lines(), self.out]))


def renamed(given: Sequence[str]) -> dict[str, str]:
    """The classes of NAME=CLASS each."""
    for text in given:
        if "=" not in text:
            raise UserError(f"--rename {text}: expected NAME=CLASS, such as birds=bird")
    return dict(text.rsplit("=", 1) for text in given)


def evaluation_json(evaluation: "Evaluation") -> dict[str, object]:
    """The summary, with the confusion matrix or the measures of each class."""
    return {
        **evaluation.summary(),
        "trained_on": evaluation.trained_on,
        "fitted_to": evaluation.fitted_to,
        "changes": evaluation.changes,
        "near_copies": None if evaluation.leaked is None else int(evaluation.leaked.sum()),
        "classes": list(evaluation.class_names),
        **evaluation.targets.class_values(evaluation.score, evaluation.answers),
    }


def evaluation_lines(evaluation: "Evaluation", better_start: str) -> Iterator[str]:
    """The summary, with advice for a model that has learned little, and one line per class."""
    yield from (f"left out: {reason}" for reason in evaluation.unreadable)
    targets, score = evaluation.targets, evaluation.score
    names = tuple(printable(name, 80) for name in evaluation.class_names)
    yield f"{evaluation.split}: {score.headline()}; loss {evaluation.loss:.3f}"
    if evaluation.reliability is not None:
        yield f"  {score.compared()}"
        yield from _without_near_copies(evaluation)
    if warning := score.warning(better_start):
        yield f"  {warning}"
    if evaluation.reliability is not None:
        yield from (f"  {line}" for line in evaluation.reliability.lines())
    yield from (f"  {line}" for line in targets.class_lines(score, evaluation.answers, names))
    if words := evaluation.fitted_in_words():
        yield f"  {words}"
    if absent := [name for name, count in zip(names, targets.counts.tolist(), strict=True) if not count]:
        number = f"{len(absent):,} of {len(names):,} classes"
        yield f"  without an image in {evaluation.split}, so not measured: {number}: {listed(absent)}"


def _without_near_copies(evaluation: "Evaluation") -> Iterator[str]:
    """The accuracy on the images that have no near-copy in training."""
    from vitascope.data.measures import wilson_interval

    leaked = evaluation.leaked
    if leaked is not None and leaked.any() and not leaked.all():
        others = wilson_interval(int(evaluation.correct[~leaked].sum()), int((~leaked).sum()))
        yield "  without {} that have a near-copy in training: {:.2%} (95% interval {:.1%} to {:.1%})".format(
            counted(int(leaked.sum()), "image"), evaluation.correct[~leaked].mean(), *others
        )
