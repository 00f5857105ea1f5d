"""What a run leaves when its last step is done: the finished model, measured on what it has not seen."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer
from vitascope.report.figures import draw_figures
from vitascope.report.records import Predictions, save_predictions
from vitascope.report.write import write_report
from vitascope.training.distributed import by_first, is_first
from vitascope.training.evaluate import Evaluation, evaluate
from vitascope.training.loop import Trainer
from vitascope.training.masked import Masked, draw_masked
from vitascope.training.run import Recorder
from vitascope.weights.store import from_pretrained, save_pretrained


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
    """Measure, draw and save a classifier."""
    run, config, final = trainer.run, trainer.config, trainer.splits.final
    kept = run / "checkpoints" / config.optimization.keep
    if config.optimization.keep == "last":
        trainer.save_model(kept)
    by_first(lambda: None)  # until it is written
    model = from_pretrained(kept).to(trainer.device)
    evaluation = evaluate(model, trainer.loader(final), precision=trainer.precision)

    def leave() -> tuple[dict[str, Path], Path]:
        record(trainer, evaluation.summary())
        save_predictions(run, predictions_of(evaluation))
        measured = final.subset(evaluation.split, evaluation.indices)
        figures = draw_figures(run, model, trainer.preprocess, measured, evaluation.probabilities)
        save_pretrained(model, run / "model", preprocess=trainer.preprocess)
        remove_models(run)
        return figures, report_of(trainer)

    figures, report = by_first(leave)
    return TrainResult(run, model.cpu(), evaluation, trainer.seconds, figures, report)


def finish_pretraining(trainer: Trainer) -> PretrainResult:
    """Measure, draw and save the body of a pre-trained model."""
    run, final, task = trainer.run, trainer.splits.final, trainer.task
    assert isinstance(task, Masked)
    metrics = task.validate(trainer.trained, trainer.loader(final), trainer.precision)
    figures = draw_masked(run, task, trainer.trained, final)

    if is_first():
        record(trainer, {"split": final.name, "images": len(final), **metrics})
    trainer.save_model(run / "model")

    def leave() -> Path:
        remove_models(run)
        return report_of(trainer)

    report = by_first(leave)
    model = from_pretrained(run)
    assert isinstance(model, VisionTransformer)
    return PretrainResult(run, model, metrics, final.name, trainer.seconds, figures, report)


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
    return write_report(trainer.run, splits=trainer.splits, device=str(trainer.device))


def remove_models(run: Path) -> None:
    """Remove the models that nobody needs now: what the run began with, and the last, which is `model/`."""
    for name in ("start", "last"):
        shutil.rmtree(run / "checkpoints" / name, ignore_errors=True)


def record(trainer: Trainer, values: dict[str, object]) -> None:
    """The last line of the run's metrics."""
    recorder = Recorder(trainer.run, trainer.step)
    recorder.record("test", trainer.step, {**values, "seconds": round(trainer.seconds, 2)})
    recorder.close()
