"""`soup`: the mean of the weights of several runs from one start, if validation images say it is better."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vitascope.arguments import checked
from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.evaluation.calibrate import calibrate_model, images_to_know
from vitascope.evaluation.calibration import as_logits, mean_loss, sharpness
from vitascope.evaluation.measure import BATCH_SIZE, Evaluation, batches_of, measure
from vitascope.formatting import counted
from vitascope.model.ensemble import Ensemble
from vitascope.model.heads import scale_logits
from vitascope.model.vision_model import VisionModel, kind_of
from vitascope.predict.engine import TorchEngine
from vitascope.run.run import Run
from vitascope.storage import check_new_folder
from vitascope.weights.loading import from_pretrained, save_pretrained


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SoupResult:
    """The result of `soup`.

    Attributes:
        runs: in the order in which they were tried, the best on the validation images first.
        validated: the log loss of each on the validation images, nats, at its best temperature.
        members: the runs whose weights are averaged.
        value: the log loss of their average there.
        tested: the average, and before it the best run alone, on the test images.
        model: the average.
    """

    runs: Sequence[Path]
    validated: Sequence[float]
    members: Sequence[Path]
    value: float
    tested: tuple[Evaluation, Evaluation]
    model: VisionModel

    def lines(self) -> list[str]:
        """The choice and its results in words."""
        alone, averaged = self.tested
        lines = [
            f"log loss {value:.3f}, {'averaged' if run in self.members else 'left out'}  {run}"
            for run, value in zip(self.runs, self.validated, strict=True)
        ]
        if len(self.members) == 1:
            return [*lines, f"no average is better on the validation images: the model is {self.runs[0]}"]
        what = f"the average of {counted(len(self.members), 'run')}"
        return [
            *lines,
            f"log loss {self.value:.3f}, {what}",
            f"test   {averaged.in_words()}; the best run alone: {alone.in_words()}",
        ]


@checked
def soup(
    runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, device: str = "auto"
) -> SoupResult:
    """Average the weights of runs from one start, as `vitascope soup` does.

    This is the greedy soup of Wortsman et al. (2022, recipe 1): from the best run on, each is added if the
    average is better with it on the validation images. What is compared is the log loss, each at its best
    temperature, which few images measure better than the accuracy. The result is calibrated.

    Args:
        runs: at least two finished classifiers, trained from the same weights with the same classes, which
            differ in their rates, seeds, augmentation and so on.
        out: a new model folder.
        device: `auto`, or a torch device.

    Raises:
        UserError: fewer than two runs, runs of different starts, sizes or classes; no validation image that
            none of them was trained on.
    """
    folder, given = Path(out), [runs] if isinstance(runs, str | os.PathLike) else runs
    check_new_folder(folder)
    opened = [Run.open(Path(run)) for run in given]
    models = _models(opened)
    names = tuple(models[0].config.class_names)
    train, val, test = _images(opened, names)

    def measured(model: VisionModel, images: ImageSet) -> Evaluation:
        engine = TorchEngine(copy.deepcopy(model), precision="fp32", device=device)
        return measure(engine, batches_of(engine, images))

    losses = [loss_of(measured(model, val)) for model in models]
    order = np.argsort(losses, kind="stable").tolist()
    members, value = [order[0]], losses[order[0]]
    for candidate in order[1:]:
        tried = loss_of(measured(average([models[n] for n in (*members, candidate)]), val))
        if tried < value:
            members, value = [*members, candidate], tried
    model = average([models[n] for n in members])

    known = train.subset(train.name, images_to_know(train))

    def engine() -> TorchEngine:
        return TorchEngine(model, precision="fp32", device=device)

    def batches(images: ImageSet) -> Loader:
        return Loader(images, engine().preprocess, BATCH_SIZE, device=engine().device)

    calibrate_model(model, engine, batches(val), lambda: batches(known))
    tested = measured(models[order[0]], test), measured(model, test)
    save_pretrained(model.cpu(), folder)
    return SoupResult(
        runs=[opened[n].path for n in order],
        validated=[losses[n] for n in order],
        members=[opened[n].path for n in members],
        value=value,
        tested=tested,
        model=model,
    )


def loss_of(evaluation: Evaluation) -> float:
    """The mean log loss at the temperature that is best for these images, nats."""
    targets = evaluation.targets
    logits = as_logits(evaluation.probabilities, exclusive=targets.exclusive)
    return mean_loss(targets, sharpness(targets, logits) * logits)


def average(models: Sequence[VisionModel]) -> VisionModel:
    """A model with the mean of the weights of models of one architecture, and the options of the first."""
    result, states = copy.deepcopy(models[0]), [model.state_dict() for model in models]
    means = {
        name: torch.stack([state[name] for state in states]).mean(dim=0)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }
    result.load_state_dict(means)
    return result


def _models(runs: Sequence[Run]) -> list[VisionModel]:
    """The models of the runs, without their temperatures, which would weigh their heads."""
    if len({run.path.resolve() for run in runs}) < max(2, len(runs)):
        raise UserError("a soup takes two or more different runs")
    models: list[VisionModel] = []
    for run in runs:
        if not run.finished or not run.classifies or run.probes:
            raise UserError(f"{run.path}: not a finished training of a classifier")
        model = from_pretrained(run.path)
        if isinstance(model, Ensemble):
            raise UserError(f"{run.path} is {kind_of(model.config)}: average the runs in its folds/ instead")
        first, start = (models or [model])[0], run.config.get("weights")
        if model.config.replace(thresholds=()) != first.config.replace(thresholds=()):
            raise UserError(f"{run.path} has another size or other classes than {runs[0].path}")
        if start != runs[0].config.get("weights") or (
            start is None and run.config["seed"] != runs[0].config["seed"]
        ):
            raise UserError(
                f"{run.path} starts from {start or 'random weights of its seed'} and {runs[0].path} from "
                f"{runs[0].config.get('weights') or 'those of another'}: an average of weights needs one "
                "start"
            )
        if model.trust is not None:
            with torch.no_grad():
                scale_logits(model.head, torch.full((model.config.num_classes,), model.trust.temperature))
            model.trust = None
        models.append(model)
    return models


def _images(runs: Sequence[Run], names: tuple[str, ...]) -> tuple[ImageSet, ImageSet, ImageSet]:
    """The training images of the first run, and its validation and test images that no run was trained on."""
    data = runs[0].open_data(check=("val", "test"))
    test, val = data.test_images(names), data.restored.present("val", names)
    records = [run.split_record() for run in runs]

    def unseen(images: ImageSet) -> ImageSet:
        seen = np.any([record.trained_on(images) for record in records], axis=0)
        if seen.all():
            raise UserError(
                f"all {counted(len(images), images.noun)} of {runs[0].path} were trained on by "
                "another run: train them with the same --seed, or give your own val and test parts"
            )
        return images.subset(images.name, np.flatnonzero(~seen))

    return data.splits.train, unseen(val), unseen(test)
