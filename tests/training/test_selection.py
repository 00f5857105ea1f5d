"""Which weights are kept: the last ones, unless the validation images show that they are worse."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from tests.training import let_losses_be, tiny_config, write_folder, write_uneven
from vitascope import runs
from vitascope.analysis.report.charts import kept_place
from vitascope.analysis.report.overview import training
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.training.loop import Trainer
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.run import Run
from vitascope.training.tasks.classify import Classify
from vitascope.training.tasks.losses import LOSSES, weighted_loss

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "greys"
    write_folder(root / "train", per_class=8)
    write_folder(root / "val", per_class=15)
    return root


def worse(last: Predictions, best: Predictions, weights: torch.Tensor | None = None) -> bool:
    return LOSSES[type(last.targets)].worse(last, best, weights)


def predictions(of_the_label: list[float]) -> Predictions:
    """Predictions of two classes, by the probability of each image's own class."""
    own = np.array(of_the_label, dtype=np.float32)
    labels = np.arange(len(own)) % 2
    probabilities = np.where(np.arange(2) == labels[:, None], own[:, None], 1 - own[:, None])
    return Predictions("val", np.arange(len(own)), ClassIndices(labels, ("a", "b")), probabilities)


def test_a_clear_loss_of_the_last_weights_is_worse() -> None:
    best = predictions([0.9, 0.8, 0.9, 0.7, 0.9, 0.8])
    assert worse(predictions([0.3, 0.2, 0.6, 0.1, 0.4, 0.2]), best)
    assert not worse(best, best)


def test_one_image_or_one_odd_image_shows_nothing() -> None:
    assert not worse(predictions([0.1]), predictions([0.9]))
    best = [0.9, 0.8, 0.9, 0.7, 0.9, 0.8]
    assert not worse(predictions([0.1, *best[1:]]), predictions(best))


def test_a_higher_loss_with_more_correct_predictions_is_not_worse() -> None:
    """A model may become more accurate while its loss grows."""
    best = predictions([0.9, 0.9, 0.4, 0.9, 0.9, 0.9] * 5)
    assert not worse(predictions([0.55] * 30), best)
    assert worse(predictions([0.55, 0.55, 0.45, 0.45, 0.55, 0.55] * 5), best)


def test_of_several_classes_per_image_a_lower_map_is_worse_and_a_higher_loss_is_not() -> None:
    generator = np.random.default_rng(0)
    labels = generator.random((100, 2)) < 0.3
    scores = generator.normal(size=(100, 2)) + 2 * labels

    def several(logits: np.ndarray) -> Predictions:
        probabilities = (1 / (1 + np.exp(-logits))).astype(np.float32)
        return Predictions("val", np.arange(100), ClassSets(labels, ("a", "b")), probabilities)

    best = several(scores)
    assert worse(several(scores + 3 * generator.normal(size=(100, 2))), best)
    assert not worse(several(scores - 4), best)  # the same order, with a higher loss and no class predicted
    assert not worse(best, best)


@pytest.mark.parametrize("options", [{"class_weights": ["balanced"]}, {"sampling": "balanced"}])
def test_a_training_that_balances_classes_is_selected_and_stopped_by_the_balanced_loss(
    tmp_path, monkeypatch, options
) -> None:
    validate, weighted = Classify.validate, iter([0.9, 0.4, 0.8, 0.7])

    def scripted(*arguments) -> dict[str, float]:
        measured = validate(*arguments)
        assert {"loss", "weighted_loss"} <= measured.keys()
        return {**measured, "weighted_loss": next(weighted)}

    monkeypatch.setattr(Classify, "validate", scripted)
    let_losses_be(monkeypatch, 0.4, 0.9, 0.3, 0.2)
    config = tiny_config(write_uneven(tmp_path / "data"), run=str(tmp_path / "run"), epochs=9, patience=2)
    run = Run(runs.train(config.replace(**options)).run)
    (kept,) = run.records("kept")
    assert kept["epoch"] == 2
    assert kept["reason"] == "they have the lowest weighted validation loss, 0.400"
    assert run.records("epoch")[-1]["epoch"] == 4
    assert kept_place(run, run.records("epoch")) == 1


def test_the_weighted_loss_is_that_of_scikit_learn_and_weights_may_reverse_what_is_worse() -> None:
    best, last = predictions([0.9, 0.2] * 20), predictions([0.3, 0.8] * 20)
    weights = torch.tensor([0.2, 3.0])
    for each in (best, last):
        expected = log_loss(each.labels, each.probabilities, sample_weight=weights.numpy()[each.labels])
        assert weighted_loss(each, weights) == pytest.approx(expected, abs=1e-6)
    assert not worse(last, best, weights)
    assert worse(best, last, weights)


def run_of(data: Path, folder: Path, monkeypatch, *, diverges: bool, **options: object) -> Run:
    """A run that learns in its first epochs; with `diverges`, its last epochs undo that."""
    step = Trainer._update

    def update(self: Trainer) -> None:
        step(self)
        if diverges and self.step == 34:
            for parameter in self.module.head.parameters():
                parameter.data.neg_()
            self.average.load_state_dict(self.module.state_dict())

    monkeypatch.setattr(Trainer, "_update", update)
    options = {"epochs": 10, "lr": 0.01, "warmup_epochs": 0.0, "keep": "auto", **options}
    config = tiny_config(data, run=str(folder), **options)
    return Run(runs.train(config).run)


def test_weights_that_diverged_are_replaced_by_the_best_and_both_places_say_so(
    data, tmp_path, monkeypatch, capsys
) -> None:
    run = run_of(data, tmp_path / "run", monkeypatch, diverges=True, epochs=None, steps=36)
    epochs = run.records("epoch")
    best = min(epochs, key=lambda epoch: epoch["val_loss"])
    assert best["epoch"] < epochs[-1]["epoch"]
    assert epochs[-1]["val_accuracy"] < 0.2
    assert run.records("kept")[0]["weights"] == "best"
    assert run.records("kept")[0]["epoch"] == best["epoch"]
    assert run.records("test")[0]["accuracy"] > 0.8
    line = f"the weights of epoch {best['epoch']:g} are kept: the last ones are worse on 30 validation images"
    assert line in capsys.readouterr().out
    kept = dict(training(run, None, None, "", "")["rows"])["Weights kept"]
    assert kept.startswith(f"those of epoch {best['epoch']:g}: the last ones are worse")


def test_last_weights_are_kept_where_their_loss_is_higher_by_chance(
    data, tmp_path, monkeypatch, capsys
) -> None:
    """A learning rate of almost 0 leaves the weights as they are, up to rounding."""
    run = run_of(data, tmp_path / "run", monkeypatch, diverges=False, lr=1e-9, ema=0.0)
    assert run.records("kept")[0]["weights"] == "last"
    line = (
        "the weights of epoch 10 are kept: they are the last ones, and not clearly worse than those of epoch "
    )
    assert line in capsys.readouterr().out
