"""`train --folds`: from the runs of the folds to predictions of all images and to one model, an ensemble."""

import dataclasses
import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from vitascope import layout
from vitascope.data.contents import image_name
from vitascope.data.folds import copies_across, fold_names
from vitascope.data.loading import Loader
from vitascope.data.rows.cells import column_names, csv_line
from vitascope.data.splits import OUT_OF_FOLD, ImageSet, Splits
from vitascope.errors import Interrupted, UserError, printable
from vitascope.formatting import SEPARATOR, counted
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.ensemble import Ensemble
from vitascope.models.trust import CrossFamiliarity, Familiarity, PredictionSets, Trust, nearest_class
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.remote import url_name
from vitascope.storage import explaining_failure, replacing
from vitascope.training import distributed
from vitascope.training.checkpoint.folders import to_resume
from vitascope.training.evaluation.calibration import Temperature, familiarity_of, mean_loss
from vitascope.training.evaluation.measure import (
    BATCH_SIZE,
    Evaluation,
    batches_of,
    features_of_images,
    measure,
)
from vitascope.training.finishing import Reporter
from vitascope.training.holding import held
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.results import TrainResult
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.run import Run

log = logging.getLogger(__name__)


def check_folds(config: TrainConfig) -> None:
    """Reject runs by fold that others would have to write into, or in several processes."""
    if distributed.world_size() > 1:
        raise UserError(
            f"folds={config.folds} trains one run after another in one process: leave out torchrun"
        )
    if config.run is not None and url_name(config.run):
        raise UserError(f"folds={config.folds} needs a run folder on this machine, not {config.run}")


def train_folds(
    run: Run,
    config: TrainConfig,
    splits: Splits,
    reporter: Reporter,
    begin: Callable[[TrainConfig], object],
    resume: Callable[[Run], object],
) -> TrainResult:
    """Train the runs of the folds, as far as they are not finished, and finish the run of them all."""
    with held(run):
        names = fold_names(splits.train.folds)
        _train_members(run, names, config, reporter, begin, resume)
        crossed, device = CrossValidation.of(run, splits.train), config.execution.device
        seconds = sum(member.records("test")[-1]["seconds"] for member in run.members)
        tested, model = crossed.tested, crossed.ensemble(run, device)
        alone = [{"images": len(each.targets), **each.score.summary()} for each in crossed.predictions]
        values = [score[tested.targets.value] for score in alone]
        print(f"folds  {tested.in_words()}; by fold {min(values):.2%} to {max(values):.2%}")
        print(f"       {crossed.temperature}")
        if absent := len(splits.train) - len(tested.indices):
            print(f"       {counted(absent, 'image')} without a prediction: unreadable, or of a rare class")
        if copies := copies_across(splits.train):
            found = counted(copies, "image")
            print(f"       too good: {found} with a copy in another fold; columns fold= draws other folds")
        final = tested
        if splits.test is not None:
            final, others = compared(model, splits.test, device)
            values = [each.summary()[tested.targets.value] for each in others]
            print(f"test   {final.in_words()}; its models alone {min(values):.2%} to {max(values):.2%}")
        with explaining_failure(run.path, "the ensemble", to_resume(run.path)):
            crossed.write(run, splits)
            writer = run.write_metrics()
            for fold, score in enumerate(alone):
                writer.record("fold", fold + 1, score)
            writer.record("out_of_fold", 0, {**tested.summary(), "copies_across": copies})
            writer.record("test", 0, {**final.summary(), "seconds": round(seconds, 2)})
            writer.close()
            run.save_predictions(final)
            save_pretrained(model, run.model_folder)
        shown = from_pretrained(run.path, device=device)
        figures = reporter.draw(run, shown, splits.measured, final)
        report = reporter.write(run, splits, device)
    made: dict[str, Any] = {"run": run.path, "model": model.eval().cpu(), "seconds": seconds}
    return TrainResult(evaluation=final, figures=figures, report=report, **made)


def _train_members(
    run: Run,
    names: Sequence[str],
    config: TrainConfig,
    reporter: Reporter,
    begin: Callable[[TrainConfig], object],
    resume: Callable[[Run], object],
) -> None:
    """Train or finish the runs of these folds, one after another; they share the minutes of `config`."""
    minutes = config.optimization.minutes
    if minutes is not None:
        config = config.replace(minutes=minutes / len(run.members))
    for fold, (name, member) in enumerate(zip(names, run.members, strict=True)):
        if member.exists and not member.split_file.is_file():  # it was stopped before it had begun
            shutil.rmtree(member.path)
        if member.finished:
            if not member.report.is_file() and (reason := reporter.rewrite(member, config.execution.device)):
                log.warning("%s: %s", member.path, reason)
            continue
        called = "" if name == str(fold + 1) else printable(f": {name}")
        print(f"fold   {fold + 1} of {len(run.members)}{called}", flush=True)
        try:
            if member.exists:
                resume(member)
            else:
                begin(config.replace(run=str(member.path), fold=fold))
        except Interrupted as stop:
            raise Interrupted(run.ref, stop.signum) from stop
        except UserError:
            if not any(each.exists for each in run.members):  # the same command can be given again
                shutil.rmtree(run.path)
            raise


@dataclasses.dataclass(frozen=True, eq=False)
class CrossValidation:
    """What the runs of the folds say about images that they were not trained on.

    Attributes:
        images: the training images of all, with their folds.
        places: of the images of each fold, among all.
        predictions: of these images, by the run of the fold.
        temperature: of the predictions of all images.
        tested: these predictions, at the temperature, in the order of the images.
    """

    images: ImageSet
    places: list[npt.NDArray[np.int64]]
    predictions: list[Predictions]
    temperature: Temperature
    tested: Evaluation

    @classmethod
    def of(cls, run: Run, images: ImageSet) -> Self:
        """Read the predictions of finished runs.

        Raises:
            UserError: the data have changed from one run to the next; predictions are missing.
        """
        predictions, places = [], []
        for name, member in zip(fold_names(images.folds), run.members, strict=True):
            inside = np.flatnonzero(images.folds == name)
            if not np.array_equal(member.split_record().parts["test"].contents, images.contents[inside]):
                raise UserError(
                    f"{member.path}: the images of this fold are not those of {run.path}: the data have "
                    "changed since it began; start it again"
                )
            if member.predictions is None:
                raise UserError(f"{member.path} has no predictions: remove it, and resume {run.path}")
            predictions.append(member.predictions)
            places.append(inside[member.predictions.indices])
        order = np.argsort(np.concatenate(places), kind="stable")
        indices = np.concatenate(places)[order]
        probabilities = np.concatenate([each.probabilities for each in predictions])[order]
        targets = images.truth.take(indices)
        temperature = Temperature.of(targets, targets.logits(probabilities), out_of_fold=True)
        factor = 1 / temperature.values
        probabilities = targets.sharpened(probabilities, factor)
        known = [each.familiarity for each in predictions if each.familiarity is not None]
        thresholds = [each.thresholds for each in predictions if each.thresholds is not None]
        if thresholds:
            mean = np.stack(thresholds).mean(axis=0, keepdims=True)  # (1, K)
            thresholds = [targets.sharpened(mean, factor)[0].astype(np.float32)]
        tested = Evaluation(
            split=OUT_OF_FOLD,
            indices=indices,
            targets=targets,
            probabilities=probabilities.astype(np.float32),
            thresholds=thresholds[0] if thresholds else None,
            loss=mean_loss(targets, targets.logits(probabilities)),
            familiarity=np.concatenate(known)[order] if len(known) == len(predictions) else None,
            unreadable=tuple(reason for each in predictions for reason in each.unreadable),
        )
        return cls(images, places, predictions, temperature, tested)

    def ensemble(self, run: Run, device: str) -> Ensemble:
        """The ensemble of the runs' models, with what these predictions say about its answers."""
        models = [member.model() for member in run.members]
        ensemble = Ensemble.of(cast("Any", models))
        self.temperature.apply(ensemble)
        if self.tested.thresholds is not None:
            ensemble.config = ensemble.config.replace(thresholds=self.tested.thresholds.tolist())
            return ensemble
        answers = torch.from_numpy(self.tested.probabilities), torch.from_numpy(self.tested.labels)
        parts = [self._familiarity(fold, model, device) for fold, model in enumerate(models)]
        known = [part for part in parts if part is not None]
        ensemble.trust = Trust(
            temperature=float(self.temperature.values[0]),
            sets=PredictionSets.fitted(*answers),
            familiarity=CrossFamiliarity(known) if len(known) == len(parts) else None,
        )
        return ensemble

    def _familiarity(self, fold: int, model: VisionModel, device: str) -> Familiarity | None:
        """What is familiar to the model of a fold, at the distances of the images that tested it."""
        known = None if model.trust is None else model.trust.familiarity
        if not isinstance(known, Familiarity):
            return None
        engine = TorchEngine(model, device=device)
        images = self.images.subset("test", self.places[fold])
        features, _ = features_of_images(
            engine, Loader(images, engine.preprocess, BATCH_SIZE, device=engine.device)
        )
        gaussians = {name: getattr(known, name).cpu() for name in ("center", "projection", "means")}
        distances = nearest_class(features, **gaussians)
        return familiarity_of(gaussians, distances) if len(distances.unique()) > 1 else None

    def write(self, run: Run, splits: Splits) -> None:
        """Write `out_of_fold.csv`: of each image its name, fold, classes, prediction and probabilities.

        With several classes per image, `unknown` has those of which it is not known whether the image has
        them; they are predicted as the others are.
        """
        tested, names = self.tested, self.images.class_names
        known, thresholds = tested.targets.names(), tested.thresholds
        targets = tested.targets
        predicted = targets.membership(targets.answers(tested.probabilities, thresholds))  # (N, K)
        columns = ["image", "fold", "label", "prediction", *["unknown"] * (targets.strata is None)]

        def listed(mask: npt.NDArray[np.bool_]) -> str:
            return SEPARATOR.join(names[k] for k in np.flatnonzero(mask))

        with replacing(run.path / layout.OUT_OF_FOLD) as aside, open(aside, "wb") as file:
            file.write(csv_line([*columns, *column_names(names, columns)]).encode())
            for row, place in enumerate(tested.indices.tolist()):
                name = image_name(self.images.sources[place], splits.root) or place
                cells = [name, self.images.folds[place], SEPARATOR.join(known[row]), listed(predicted[row])]
                cells += [listed(targets.rows[row] < 0)] if targets.strata is None else []
                file.write(csv_line([*cells, *tested.probabilities[row]]).encode())


def compared(ensemble: Ensemble, test: ImageSet, device: str) -> tuple[Evaluation, list[Evaluation]]:
    """The ensemble on images that no member was trained on, and each member alone."""

    def measured(model: VisionModel) -> Evaluation:
        engine = TorchEngine(model, device=device)
        return measure(engine, batches_of(engine, test))

    return measured(ensemble), [measured(cast("VisionModel", member)) for member in ensemble.members]
