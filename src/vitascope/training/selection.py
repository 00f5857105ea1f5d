"""The weights of the finished model: those of the best validation, or the last ones."""

import dataclasses
from pathlib import Path
from typing import cast

from vitascope.formatting import counted
from vitascope.models.weights.loading import from_pretrained
from vitascope.training import distributed
from vitascope.training.evaluation.measure import Evaluation, measure
from vitascope.training.loop import Trainer
from vitascope.training.tasks.classify import Classify, engine_of


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
