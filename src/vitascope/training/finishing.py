"""The end of a run: selects and tests its weights, saves its model, draws its figures, writes its report."""

import dataclasses
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from vitascope.data.decisions import decided_in
from vitascope.data.splits import ImageSet, Splits
from vitascope.formatting import counted
from vitascope.models.hardware import suitable_threads
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.storage import explaining_failure
from vitascope.training import distributed
from vitascope.training.checkpoint.folders import remove_checkpoints, to_resume
from vitascope.training.evaluation.measure import Evaluation, measure
from vitascope.training.evaluation.novelty import Novelty
from vitascope.training.loop import Trainer
from vitascope.training.placement import images_at_once
from vitascope.training.results import PretrainResult, TrainResult
from vitascope.training.run.run import Run
from vitascope.training.signals import stopped_at_once
from vitascope.training.tasks.classify import Classify, engine_of
from vitascope.training.tasks.task import Finished, PatchEvaluation

DIGITS_BASELINE = 354 / 360
"""Test accuracy of scikit-learn's `SVC()` with its own defaults on `digits`, where it trains on all 80%.

Recorded, because scikit-learn takes as long to import as a small run to train; a test fits it again.
"""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The weights that were kept."""

    weights: str
    """`best`, of the best validation, or `last`; the name of their folder in `checkpoints/`."""
    epoch: float
    """The number of epochs that led to them."""
    reason: str

    def in_words(self) -> str:
        """One line."""
        return f"the weights of epoch {self.epoch:g} are kept: {self.reason}"


def select_weights(trainer: Trainer) -> Selection:
    """Decide by the option `keep`; saves the last weights if they are kept or have to be compared."""
    keep, best = trainer.config.optimization.keep, trainer.epoch_of(trainer.best_step)
    monitor = trainer.task.monitor
    if keep == "best" and trainer.step:
        return Selection("best", best, f"they have {monitor.best_in_words(trainer.best_value)}")
    folder, epoch = trainer.run.checkpoints / "last", trainer.epoch_of(trainer.step)
    trainer.save_model(folder)
    distributed.by_first(lambda: None)  # until it is written
    if not trainer.step:
        return Selection("last", epoch, "no step follows the fit of the head")
    if keep == "last":
        return Selection("last", epoch, "they are the last ones, as asked for by keep=last")
    if trainer.best_step == trainer.step:
        words = monitor.best_in_words(trainer.best_value)
        return Selection("last", epoch, f"they are the last ones, and have {words}")
    last, lowest = (predictions_of(trainer, saved) for saved in (folder, trainer.run.best))
    task = cast("Classify", trainer.task)  # pre-training keeps its last weights
    values = [monitor.shown(task.validated(predictions)[monitor.name]) for predictions in (last, lowest)]
    measured = f"{monitor.words} {values[0]} against {values[1]}"
    images = counted(len(last.targets), "validation image")
    if task.kind.worse(last, lowest, task.balance):
        return Selection("best", best, f"the last ones are worse on {images} ({measured})")
    words = f"they are the last ones, and not clearly worse than those of epoch {best:g} on {images}"
    return Selection("last", epoch, f"{words} ({measured})")


def predictions_of(trainer: Trainer, folder: Path) -> Evaluation:
    """The predictions of saved weights on the validation images."""
    model = from_pretrained(folder).to(trainer.device)
    return measure(engine_of(model, trainer.config), trainer.val_loader, distributed.gather)


class Reporter(Protocol):
    """What shows finished runs. Reports lie above training, so its callers hand one to it."""

    def draw(self, run: Run, model: VisionModel, images: ImageSet, tested: Any) -> dict[str, Path]:
        """Draw the figures of a model that was tested on images; returns their paths by name."""

    def write(self, run: Run, splits: Splits, device: str) -> Path:
        """Write the report; returns its path."""

    def rewrite(self, run: Run, device: str) -> str:
        """Draw figures and report of a finished run without; returns the reason if something is missing."""


def finish(trainer: Trainer, reporter: Reporter) -> TrainResult | PretrainResult:
    """Test and save the finished model, remove the checkpoints, draw the figures, write the report."""
    run, config, final = trainer.run, trainer.config, trainer.splits.measured
    images = images_at_once(trainer.batch_size, trainer.parts)
    with stopped_at_once(run), suitable_threads(trainer.model_config, trainer.device, images):
        distributed.by_first(lambda: _remove_drawn(run))
        kept = select_weights(trainer)
        distributed.print_first(kept.in_words())
        model = from_pretrained(run.checkpoints / kept.weights).to(trainer.device)
        loader, seconds = trainer.loader(final), trainer.seconds
        module, precision = trainer.trained, trainer.precision
        finished = Finished(
            run, config, model, module, loader, trainer.val_loader, trainer.known_images,
            precision, seconds,
        )  # fmt: skip
        distributed.print_first(f"evaluating {counted(len(final), final.noun)}")
        novelties = trainer.task.calibrate(finished)
        tested = trainer.task.test(finished)
        if note := decided_in(trainer.splits.notes, final.name):
            distributed.print_first(f"       after decisions: {note}")
        whole = config.data == "digits" and final.name == "test" and config.fold is None
        if whole and config.task == "classify":
            distributed.print_first(f"       {DIGITS_BASELINE:.2%} scikit-learn's SVC() on the same split")
        again = isinstance(tested, Evaluation)  # a saved model of pre-training has no head that could draw
        draw = partial(_drawn, trainer, model, tested, reporter, again=again)
        save = partial(_save, trainer, model, kept, novelties, tested)
        if again:
            distributed.by_first(save)
        figures = distributed.by_first(draw)
        if not again:
            distributed.by_first(save)
        report = distributed.by_first(lambda: _report(trainer, reporter))
        if run.store is not None:
            later = f"`vitascope train --resume {shlex.quote(run.ref)}` on this machine uploads it"
            distributed.by_first(partial(run.store.finish, later))
    # In no frame that the error of an upload may keep: the local copy lasts as long as the result.
    return _result(trainer, model.cpu(), tested, figures, report)


def _result(
    trainer: Trainer, model: Any, tested: Any, figures: dict[str, Path], report: Path
) -> TrainResult | PretrainResult:
    run, kind = trainer.run, TrainResult if trainer.config.task == "classify" else PretrainResult
    result = kind(
        run=run.path,
        model=model,
        evaluation=tested,
        seconds=trainer.seconds,
        figures=figures,
        report=report,
        url=run.url,
    )
    if run.store is not None and distributed.is_first():
        run.store.remove_with(result)
    return result


def _remove_drawn(run: Run) -> None:
    """Remove figures and report of an earlier end, so that none is beside another model."""
    shutil.rmtree(run.figures, ignore_errors=True)
    run.report.unlink(missing_ok=True)


def _save(
    trainer: Trainer,
    model: VisionModel,
    kept: Selection,
    novelties: Sequence[Novelty],
    tested: Evaluation | PatchEvaluation,
) -> None:
    """Write which weights were kept, the results, the predictions and the model."""
    run = trainer.run
    with explaining_failure(run.path, "the finished model", to_resume(run.path)):
        writer = run.write_metrics(trainer.step)
        writer.record("kept", trainer.step, dataclasses.asdict(kept))
        for novelty in novelties:
            writer.record("novelty", trainer.step, novelty.to_dict())
        writer.record("test", trainer.step, {**tested.summary(), "seconds": round(trainer.seconds, 2)})
        writer.close()
        if isinstance(tested, Evaluation):
            run.save_predictions(tested)
        save_pretrained(model, run.model_folder)
        if run.before.exists():  # of a finished run that got more epochs
            shutil.rmtree(run.before)
    if run.store is None:  # otherwise, an upload that fails is repeated from the last one
        keep = trainer.config.execution.keep_state
        remove_checkpoints(run.path, keep_state=keep)
        if keep:
            size = sum(file.stat().st_size for file in run.checkpoints.rglob("*") if file.is_file())
            print(f"state  {run.checkpoints}: {size / 1e6:,.0f} MB, for --resume with more epochs")


def _drawn(
    trainer: Trainer, model: VisionModel, tested: Any, reporter: Reporter, *, again: bool
) -> dict[str, Path]:
    """Draw the figures; once the model is saved, a later command can draw them again."""
    distributed.print_first("drawing the figures")
    advice = _later(trainer.run) if again else to_resume(trainer.run.path)
    with explaining_failure(trainer.run.path, "the figures", advice):
        return reporter.draw(trainer.run, model, trainer.splits.measured, tested)


def _report(trainer: Trainer, reporter: Reporter) -> Path:
    """Write the report, as a later command can again."""
    distributed.print_first("writing the report")
    with explaining_failure(trainer.run.path, "the report", _later(trainer.run)):
        return reporter.write(trainer.run, trainer.splits, str(trainer.device))


def _later(run: Run) -> str:
    report = f"make room, then run `vitascope report {shlex.quote(str(run.path))}`"
    return f"the model is saved in {run.model_folder}: {report}"
