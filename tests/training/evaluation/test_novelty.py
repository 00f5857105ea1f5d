from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from tests.training import write_folder
from vitascope.analysis.report import classification
from vitascope.cli import main
from vitascope.deploy.predict.predictor import Predictor
from vitascope.models.trust import class_distances, nearest_class
from vitascope.training.evaluation.calibrate import cross_fitted
from vitascope.training.evaluation.calibration import class_gaussians
from vitascope.training.evaluation.novelty import (
    LEAST,
    Novelty,
    classes_left_out,
    novelty_in_words,
    other_kinds,
)
from vitascope.training.run.run import Run

NAMES = ("ant", "bee", "cow")
RANDOM = np.random.default_rng(0)


def test_the_area_is_that_of_the_roc_curve_also_with_ties() -> None:
    usual, unusual = RANDOM.integers(0, 20, 300).astype(float), RANDOM.integers(5, 30, 200).astype(float)
    truth = np.repeat([0, 1], [300, 200])
    wanted = roc_auc_score(truth, np.concatenate([usual, unusual]))
    assert Novelty.of("noise", usual, unusual).area == pytest.approx(wanted)


def test_of_usual_pictures_one_in_a_hundred_is_noticed() -> None:
    shares = [Novelty.of("same", RANDOM.random(400), RANDOM.random(4000)).share for _ in range(50)]
    assert 0.005 < np.mean(shares) <= 0.0115
    assert Novelty.of("far", RANDOM.random(400), RANDOM.random(50) + 1).share == 1


def novelties(means: np.ndarray, count: int = 1200) -> list[Novelty]:
    """Those of classes with means (3, 4) and unit variance, each of a third of the images."""
    labels = np.arange(count) % 3
    features = torch.from_numpy(means[labels] + RANDOM.standard_normal((count, 4))).float()
    gaussians = class_gaussians(features, labels)
    distances = class_distances(features, **gaussians).numpy()
    return classes_left_out(distances, labels, np.arange(3), NAMES)


def test_a_class_that_is_left_out_is_noticed_as_far_as_it_differs_from_the_others() -> None:
    apart = novelties(np.array([[0, 0, 0, 0], [0, 0, 0, 0], [30, 0, 0, 0]], dtype=float))
    assert [novelty.name for novelty in apart] == list(NAMES)
    assert apart[2].share == 1
    assert max(novelty.share for novelty in apart[:2]) < 0.1
    assert apart[0].area == pytest.approx(0.5, abs=0.1)


def test_few_images_of_a_class_and_two_classes_say_nothing() -> None:
    assert novelties(np.zeros((3, 4)), 3 * LEAST - 1) == []
    distances, labels = RANDOM.random((400, 2)), np.arange(400) % 2
    assert classes_left_out(distances.astype(np.float32), labels, np.arange(2), NAMES) == []


def test_what_is_a_class_is_no_other_kind_of_pictures() -> None:
    assert set(other_kinds(NAMES, 3)) == {"digits", "drawings", "photographs", "noise"}
    assert set(other_kinds(NAMES, 1)) == {"digits", "drawings", "noise"}
    assert set(other_kinds(("7", "8"), 1)) == {"drawings", "noise"}
    animals = ("Cat", "dog", "horse", "airplane", "car")
    assert set(other_kinds(animals, 3)) == {"digits", "drawings", "noise"}


def test_a_share_of_few_pictures_is_a_count() -> None:
    noticed = [Novelty("photographs", False, 2, 1, 0.5), Novelty("noise", False, 100, 50, 0.5)]
    assert novelty_in_words(noticed) == "unfamiliar at 1% false alarms: 1 of 2 photographs, 50% of noise"


def test_each_image_is_compared_with_the_classes_of_the_other_folds() -> None:
    features, labels = (
        torch.randn(60, 40, generator=torch.Generator().manual_seed(0)),
        np.repeat(np.arange(3), 20),
    )
    found = cross_fitted(features, labels, np.arange(60) % 5)
    fitted = nearest_class(features, **found.gaussians)
    assert found.nearest.mean() > 1.05 * float(fitted.mean())  # which was fitted to the images themselves
    absent = cross_fitted(features, labels, labels)  # no other fold has the class
    assert np.isinf(absent.distances[np.arange(60), labels]).all()


def test_a_probe_knows_about_its_answers_and_what_it_notices(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(classification, "FEW", 1)
    write_folder(tmp_path / "photos", per_class=80, side=32)
    assert main(["probe", "cifar10", "--data", "photos", "--run", "run"]) == 0
    printed = capsys.readouterr().out
    recorded = [Novelty.of_record(record) for record in Run.open(Path("run")).records("novelty")]
    assert f"answers {novelty_in_words(recorded)}" in printed
    assert {novelty.name for novelty in recorded} == {"digits", "drawings", "photographs", "noise"}
    verdict = Predictor("run")(next(Path("photos").rglob("*.png"))).verdict
    assert verdict.familiarity is not None
    assert verdict.set
    report = Path("run", "report.html").read_text(encoding="utf-8")
    assert all(f">{novelty.name}</td>" in report for novelty in recorded)
