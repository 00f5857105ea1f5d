from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax

from tests.data import read_tree
from tests.models import small_model, small_resnet
from tests.training import write_folder
from vitascope.cli import main
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.deploy.predict.predictor import Predictor
from vitascope.errors import UserError
from vitascope.models.heads import scale_logits
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.evaluation import calibrate as calibrate_module
from vitascope.training.evaluation.calibrate import KNOWN, calibrate, images_to_know
from vitascope.training.evaluation.calibration import SPREAD, Temperature, class_gaussians, sharpness

NAMES = ("ant", "bee", "cow")
TRUE = np.random.default_rng(0).normal(size=(2000, 3))
"""Logits."""


def drawn(logits: np.ndarray) -> ClassIndices:
    """Classes with the probabilities of logits (N, 3)."""
    generator = np.random.default_rng(1)
    return ClassIndices(np.array([generator.choice(3, p=softmax(row)) for row in logits]), NAMES)


def drawn_sets(logits: np.ndarray) -> ClassSets:
    return ClassSets(np.random.default_rng(1).random(logits.shape) < expit(logits), NAMES)


@pytest.mark.parametrize("off", [0.2, 1.0, 5.0])
def test_sharpness_is_the_factor_of_the_highest_likelihood(off: float) -> None:
    targets = drawn(TRUE)
    given = softmax(off * TRUE, axis=1)
    factor = sharpness(targets, targets.logits(given))
    assert factor == pytest.approx(1 / off, rel=0.15)
    rows = np.arange(2000), targets.labels
    found, wide, narrow = (
        -np.log(targets.sharpened(given, scale * factor)[rows]).mean() for scale in (1, 1.05, 0.95)
    )
    assert found <= min(wide, narrow)


def test_the_temperature_is_that_of_the_least_log_loss() -> None:
    targets, logits = drawn(TRUE), 3 * TRUE
    rows = np.arange(len(TRUE)), targets.labels
    least = minimize_scalar(lambda t: -log_softmax(logits / t, axis=1)[rows].mean(), (1, 5), tol=1e-10)
    temperature = Temperature.of(targets, logits)
    assert least.x == pytest.approx(3, rel=0.15)
    assert temperature.values == pytest.approx(least.x, rel=0.01)
    assert "from 2,000 validation images" in str(temperature)

    def improbable(t: float) -> float:
        return -log_softmax(logits / t, axis=1)[rows].sum() + (np.log(t) / SPREAD) ** 2 / 2

    most_probable = minimize_scalar(improbable, (1, 5), tol=1e-10)
    assert Temperature.of(targets, logits).values == pytest.approx(most_probable.x, rel=1e-6)


@pytest.mark.parametrize("images", [16, 60, 300])
@pytest.mark.parametrize("off", [0.5, 1.0, 2.0])
def test_calibration_does_not_raise_the_expected_log_loss(images: int, off: float) -> None:
    """Over draws of answers, by true probabilities of others; the bound is what chance costs where the
    answers are calibrated already."""
    generator = np.random.default_rng(images)
    true = 4 * generator.normal(size=(2000, 3))
    given, shares = off * true, softmax(true, axis=1)
    changes = []
    for _ in range(40):
        rows = generator.integers(0, len(true), images)
        labels = (shares[rows].cumsum(axis=1) < generator.random((images, 1))).sum(axis=1)
        targets = ClassIndices(labels, NAMES)
        found = Temperature.of(targets, given[rows], out_of_fold=True)
        losses = [-(shares * log_softmax(given / t, axis=1)).sum(axis=1).mean() for t in (found.values[0], 1)]
        changes.append(losses[0] - losses[1])
        few = Temperature.of(targets, given[rows])
        assert (few.values == 1).all() if images < 100 else np.array_equal(few.values, found.values)
    assert np.mean(changes) < 0.005
    assert off == 1 or images < 60 or np.mean(changes) < 0


def test_few_images_have_no_temperature_and_out_of_fold_answers_have_one() -> None:
    """Answers that all say 54%, of which 87.5% are right."""
    targets = ClassIndices(np.arange(64) % 8 // 7, ("right", "wrong"))
    logits = np.log(np.tile([0.54, 0.46], (64, 1)))
    few, found = Temperature.of(targets, logits), Temperature.of(targets, logits, out_of_fold=True)
    assert str(few).startswith("temperature 1: fitting one needs 100 validation images, or out-of-fold ans")
    assert "from 64 out-of-fold answers" in str(found)
    sure = ClassIndices.sharpened(np.exp(logits), 1 / found.values)[0, 0]
    assert 0.65 < sure < 0.875


def test_the_sharpness_of_right_answers_stays_finite() -> None:
    """Of 18 answers that are all right, which class scores of any scale gave."""
    targets = ClassIndices(np.arange(18) % 2, NAMES[:2])
    right = np.eye(2)[targets.labels] * np.random.default_rng(0).uniform(0.5, 1.5, (18, 1))
    for logits in (0.01 * right, right, 10 * right):
        shares = ClassIndices.sharpened(softmax(logits, axis=1), sharpness(targets, logits))
        confidence = shares[np.arange(18), targets.labels]
        assert logits.max() < 0.1 or confidence.mean() == pytest.approx(19 / 20, abs=0.03)  # Laplace's rule
        assert confidence.max() < 0.99


def test_sharpened_probabilities_are_those_of_scaled_logits() -> None:
    np.testing.assert_allclose(
        ClassIndices.sharpened(softmax(TRUE, axis=1), 2.0), np.exp(log_softmax(2 * TRUE, axis=1))
    )
    np.testing.assert_allclose(ClassSets.sharpened(expit(TRUE), 2.0), expit(2 * TRUE))


@pytest.mark.parametrize("exclusive", [True, False])
def test_sharpness_takes_certain_probabilities_and_changes_no_order(exclusive: bool) -> None:
    given = np.random.default_rng(0).dirichlet(np.ones(3), size=100)
    given[0], given[1] = np.eye(3)[0], np.eye(3)[1]
    targets = drawn(TRUE[:100]) if exclusive else drawn_sets(TRUE[:100])
    factor = sharpness(targets, targets.logits(given))
    found = targets.sharpened(given, factor)
    assert np.isfinite(found).all()
    assert 0 < factor < 1
    assert np.array_equal(found[2:].argsort(axis=1), given[2:].argsort(axis=1))


def test_images_that_cannot_tell_leave_the_temperature_at_1() -> None:
    labels, of_true, model = np.arange(120) % 3, drawn(TRUE).labels, small_model(num_classes=3)
    before = model.head.weight.clone()
    for logits, truth, reason in (
        (9 * np.eye(3)[labels], labels, "may be chance"),  # all are right
        (np.zeros((120, 3)), labels, "may be chance"),
        (1.1 * TRUE[:100], of_true[:100], "may be chance"),
        (3 * TRUE[:99], of_true[:99], "needs 100 validation images"),
        (np.zeros((0, 3)), labels[:0], "needs 100 validation images"),
    ):
        temperature = Temperature.of(ClassIndices(truth, NAMES), logits)
        assert reason in temperature.reason
        assert str(temperature).startswith("temperature 1: ")
        temperature.apply(model)
        assert torch.equal(model.head.weight, before)


def test_where_any_class_may_apply_each_with_enough_images_has_its_own_temperature() -> None:
    targets = drawn_sets(TRUE)
    found = Temperature.of(targets, TRUE * [1, 4, 0.5])
    assert found.values == pytest.approx([1, 4, 0.5], rel=0.2)
    few = Temperature.of(targets.take(np.arange(90)), TRUE[:90] * [4, 4, 4], out_of_fold=True)
    assert len(np.unique(few.values)) == 1  # fewer than enough of each


def test_scaled_heads_have_scaled_logits() -> None:
    several, one = torch.tensor([0.5, 2.0, 3.0]), torch.full((3,), 2.0)
    for model, factors in (
        (small_model(num_classes=3), several),
        (small_model(num_classes=3, distillation_token=True), several),
        (small_model(num_classes=3, head="mlp"), several),
        (small_model(num_classes=3, head="cosine", projection=8), one),
        (small_resnet(num_classes=3), several),
    ):
        images = torch.randn(2, 3, 32, 32)
        with torch.inference_mode():
            wanted = model.eval()(images) * factors
            scale_logits(model.head, factors)
            torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)


def test_gaussians_are_bounded_in_size_and_need_no_image_of_every_class() -> None:
    features, labels = torch.randn(60, 700), np.arange(60) % 30 * 2
    found = class_gaussians(features, labels)
    assert sum(numbers.nbytes for numbers in found.values()) <= 1.6e6
    assert found["means"].shape[0] == 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos", per_class=30, side=32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was not calibrated, with the classes of the folder and wild logits."""
    model = small_model(num_classes=2, class_names=("dark", "light"))
    with torch.no_grad():
        model.head.weight.normal_(std=5)
    model.preprocess = default_preprocess(model.config)
    return save_pretrained(model, tmp_path_factory.mktemp("model"))


def test_any_model_is_calibrated_into_a_new_folder(folder: Path, plain: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "calibrated"
    assert main(["calibrate", str(plain), str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    before, after = from_pretrained(plain), from_pretrained(out)
    assert before.trust is None
    assert after.trust is not None
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(after(images) * after.trust.temperature, before(images), rtol=1e-4, atol=1e-4)
    picture = next(folder.rglob("*.png"))
    verdict = Predictor(out)(picture).verdict
    assert verdict.familiarity is not None
    assert 0 < verdict.familiarity <= 1
    assert Predictor(plain)(picture).verdict.familiarity is None


def test_of_two_calibrations_into_one_folder_the_second_is_rejected(
    folder: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calibrate_model = tmp_path / "out", calibrate_module.calibrate_model

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(calibrate_module, "calibrate_model", calibrate_model)
        calibrate(plain, folder, out)
        return calibrate_model(*arguments)

    monkeypatch.setattr(calibrate_module, "calibrate_model", meanwhile)
    with pytest.raises(UserError, match="another process has written it meanwhile"):
        calibrate(plain, folder, out)
    assert from_pretrained(out).trust is not None


def test_calibration_overwrites_nothing_and_rejects_other_classes(folder, plain, tmp_path) -> None:
    with pytest.raises(UserError, match="is not overwritten"):
        calibrate(plain, folder, plain)
    other = write_folder(tmp_path / "birds", per_class=10, side=32)
    (other / "dark").rename(other / "bird")
    with pytest.raises(UserError, match="bird"):
        calibrate(plain, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bounded_number_of_training_images_tells_what_is_familiar(folder: Path) -> None:
    images = read_tree(folder)
    assert len(images_to_know(images)) == min(len(images), KNOWN)
