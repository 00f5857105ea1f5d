"""What a run leaves when its last step is done: the finished model, measured on what it has not seen."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from vitascope.data.datasets import digits_baseline
from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer
from vitascope.report.figures import draw_figures
from vitascope.report.wording import counted
from vitascope.report.write import write_report
from vitascope.run.predictions import Predictions
from vitascope.storage import explaining_failure
from vitascope.training.checkpoint.folders import remove_checkpoints, to_resume
from vitascope.training.distributed import by_first, is_first
from vitascope.training.evaluate import Evaluation, evaluate
from vitascope.training.loop import Trainer
from vitascope.training.signals import stopped_at_once
from vitascope.training.tasks.masked import Masked, draw_masked
from vitascope.weights.loading import from_pretrained
from vitascope.weights.saving import save_pretrained


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run has made.

    Attributes:
        run: the run folder.
        model: the finished model, in evaluation mode.
        evaluation: the model on the test split (on `val` where a data set has no test split).
        seconds: time in the loop, validation included, over all of the run's processes.
        figures: paths of the pictures, by name.
        report: path of the page that shows all of it.
    """

    run: Path
    model: Classifier
    evaluation: Evaluation
    seconds: float
    figures: dict[str, Path]
    report: Path


@dataclasses.dataclass(frozen=True)
class PretrainResult:
    """What finished pre-training has made.

    Attributes:
        run: the run folder, which `train --weights` starts from.
        model: the body, without a head, in evaluation mode.
        metrics: on the test split (on `val` where a data set has no test split): `loss`, and `accuracy`
            where patches are classified.
        split: that split's name.
        seconds: time in the loop, validation included, over all of the run's processes.
        figures: paths of the pictures, by name.
        report: path of the page that shows all of it.
    """

    run: Path
    model: VisionTransformer
    metrics: dict[str, float]
    split: str
    seconds: float
    figures: dict[str, Path]
    report: Path


def finish_training(trainer: Trainer) -> TrainResult:
    """Measure, save and draw a classifier.

    The model is saved as soon as it is measured, and the checkpoints are removed: figures and report can be
    made again from the run folder.

    Raises:
        UserError: a file cannot be written; says how to continue.
        Interrupted: by SIGINT or SIGTERM.
    """
    run, config, final = trainer.run, trainer.config, trainer.splits.final
    kept = run.checkpoints / config.optimization.keep
    with stopped_at_once(run):
        if config.optimization.keep == "last":
            trainer.save_model(kept)
        by_first(lambda: None)  # until it is written
        model = from_pretrained(kept).to(trainer.device)
        print_first(f"measuring {counted(len(final), f'{final.name} image')}")
        evaluation = evaluate(model, trainer.loader(final), precision=trainer.precision)
        print_first(result_of(trainer, evaluation))
        if evaluation.split == "test" and config.data == "digits" and is_first():
            print(f"       {digits_baseline():.2%} scikit-learn's SVC() on the same split", flush=True)

        def save() -> None:
            with explaining_failure(run.path, "the finished model", to_resume(run.path)):
                record(trainer, evaluation.summary())
                run.save_predictions(predictions_of(evaluation))
                save_pretrained(model, run.model_folder)
            remove_checkpoints(run.path)

        def draw() -> tuple[dict[str, Path], Path]:
            measured = final.subset(evaluation.split, evaluation.indices)
            print_first("drawing the figures")
            with explaining_failure(run.path, "the figures", to_report(run.path)):
                figures = draw_figures(run, model, trainer.preprocess, measured, evaluation.probabilities)
            return figures, report_of(trainer)

        by_first(save)
        figures, report = by_first(draw)
    return TrainResult(run.path, model.cpu(), evaluation, trainer.seconds, figures, report)


def finish_pretraining(trainer: Trainer) -> PretrainResult:
    """Measure, draw and save the body of a pre-trained model.

    It is drawn before it is saved: what predicts hidden patches is not part of the saved model.

    Raises:
        UserError: a file cannot be written; says how to continue.
        Interrupted: by SIGINT or SIGTERM.
    """
    run, final, task = trainer.run, trainer.splits.final, trainer.task
    assert isinstance(task, Masked)
    with stopped_at_once(run):
        print_first(f"measuring {counted(len(final), f'{final.name} image')}")
        metrics = task.validate(trainer.trained, trainer.loader(final), trainer.precision)
        said = [f"loss {metrics['loss']:.3f} for hidden patches"]
        if "accuracy" in metrics:
            said.append(f"{metrics['accuracy']:.2%} of their colours right")
        print_first(f"{final.name:<6} {', '.join(said)}, after {trainer.seconds:.1f} s of training")
        print_first("drawing the figures")
        figures = draw_masked(run, task, trainer.trained, final)

        def note() -> None:
            with explaining_failure(run.path, "the finished model", to_resume(run.path)):
                record(trainer, {"split": final.name, "images": len(final), **metrics})

        by_first(note)
        trainer.save_model(run.model_folder)

        def leave() -> Path:
            remove_checkpoints(run.path)
            return report_of(trainer)

        report = by_first(leave)
    model = run.model()
    assert isinstance(model, VisionTransformer)
    return PretrainResult(run.path, model, metrics, final.name, trainer.seconds, figures, report)


def print_first(text: str) -> None:
    """Print at once, from the first of several processes."""
    if is_first():
        print(text, flush=True)


def result_of(trainer: Trainer, evaluation: Evaluation) -> str:
    """A classifier's test result in a few lines."""
    score = evaluation.score
    lines = [
        f"{evaluation.split:<6} {evaluation.accuracy:.2%} right: {score.right} of "
        f"{counted(score.total, 'image')}, after {trainer.seconds:.1f} s of training",
        f"       {score.compared()}",
    ]
    warning = score.warning(from_scratch=trainer.config.weights is None)
    lines += [f"       {warning}"] if warning else []
    return "\n".join(lines)


def to_report(run: Path) -> str:
    """How to continue where only figures or the report are missing."""
    return (
        f"the model is saved in {run / 'model'}: make room, then run "
        f"`vitascope report {shlex.quote(str(run))}`"
    )


def predictions_of(evaluation: Evaluation) -> Predictions:
    """What the run keeps of an evaluation."""
    return Predictions(
        split=evaluation.split,
        class_names=evaluation.class_names,
        indices=evaluation.indices,
        labels=evaluation.labels,
        probabilities=evaluation.probabilities,
        unreadable=tuple(evaluation.unreadable.values()),
    )


def report_of(trainer: Trainer) -> Path:
    """The report of a run whose model is written."""
    print_first("writing the report")
    with explaining_failure(trainer.run.path, "the report", to_report(trainer.run.path)):
        return write_report(trainer.run, splits=trainer.splits, device=str(trainer.device))


def record(trainer: Trainer, values: dict[str, object]) -> None:
    """The last line of the run's metrics."""
    writer = trainer.run.write_metrics(trainer.step)
    writer.record("test", trainer.step, {**values, "seconds": round(trainer.seconds, 2)})
    writer.close()
