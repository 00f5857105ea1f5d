"""`probe.html`: every section, bounded, without requests."""

import dataclasses
import functools
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.analysis.probing.digits import DIGITS, PIXELS, PROPERTIES, drawn
from tests.models import small_model
from vitascope.analysis.probing import page
from vitascope.analysis.probing.curve import LearningCurve, learning_curve
from vitascope.analysis.probing.page import class_examples, confused, write_page
from vitascope.data.folds import Division
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.training.linear.classifiers import ClassMeans, LeastSquares, Neighbors
from vitascope.training.linear.selection import Candidate, ProbeSelection, select
from vitascope.training.run.run import Run

ORDER = drawn(0)
TRAIN, TEST = ORDER[:300], ORDER[300:500]


def probed(targets: ClassIndices | ClassSets) -> tuple[ProbeSelection, LearningCurve]:
    division = Division.of(targets.take(TRAIN))
    candidate = Candidate("body & soul", "3", "mean", PIXELS[TRAIN], PIXELS[TEST])
    selection = select(
        [candidate], division, targets.take(TEST), (Neighbors((1, 5)), LeastSquares((64.0,)), ClassMeans())
    )
    best = selection.best
    return selection, learning_curve(best.classifier, best.candidate.train, division, selection.folds)


@functools.cache
def probed_digits() -> tuple[ProbeSelection, LearningCurve]:
    return probed(DIGITS)


def written(root: Path, targets: ClassIndices | ClassSets, **changes: object) -> str:
    selection, curve = probed_digits() if targets is DIGITS else probed(targets)
    config = {"task": "probe", "data": "digits", "seed": 0, "run": str(root / "run"), "device": "cpu"}
    pixels = np.clip(16 * PIXELS[TRAIN], 0, 255).astype(np.uint8).reshape(-1, 8, 8)
    pictures = [Image.fromarray(each) for each in pixels]
    known = ImageSet("train", pictures, targets.take(TRAIN))
    model = small_model(in_channels=1)
    curve = dataclasses.replace(curve, **changes)
    run = Run.create(config)
    text = write_page(run, selection, curve, known, model, ["body & soul: 1.0 s"]).read_text("utf-8")
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text
    return text


@pytest.mark.parametrize("targets", [DIGITS, PROPERTIES], ids=["exclusive", "several"])
def test_page_has_the_table_the_forecast_and_what_is_hard(targets, tmp_path: Path) -> None:
    text = written(tmp_path, targets)
    sections = re.findall(r'<section id="(\w+)"', text)
    confused = ["hard"] * (targets is DIGITS)  # no image of the others has one class in place of another
    assert [name for name in sections if name != "doubtful"] == ["scores", "more", *confused, "typical"]
    assert "body &amp; soul" in text
    assert "Twice as many labels" in text
    assert ("mAP" in text) == (targets is PROPERTIES)
    for name in targets.class_names:
        assert f"<h3>{name}</h3>" in text
    assert text.count("<img") >= 8 * len(targets.class_names)


def test_most_difficult_classes_alone_have_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "CLASSES", 3)
    text = written(tmp_path, DIGITS)
    assert "These are the 3 most difficult classes" in text
    assert len(re.findall(r'<div class="together">', text)) == 3


def test_further_classifiers_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "ROWS", 1)
    assert "The other 2 classifiers" in written(tmp_path, DIGITS)


def test_wrong_labels_are_shown_to_check(tmp_path: Path) -> None:
    labels = DIGITS.labels.copy()
    labels[TRAIN[0]] = (labels[TRAIN[0]] + 5) % 10
    text = written(tmp_path, ClassIndices(labels, DIGITS.class_names))
    assert f"labelled {labels[TRAIN[0]]}" in text
    assert f"perhaps {DIGITS.labels[TRAIN[0]]}" in text


def test_a_curve_without_a_forecast_states_the_reason(tmp_path: Path) -> None:
    text = written(tmp_path, DIGITS, forecasts=(), reason="too few images")
    assert "No forecast for more labels: too few images" in text
    assert "power law" not in text


def test_examples_are_the_extremes_of_their_class() -> None:
    targets = ClassIndices(np.array([0, 0, 0, 0, 1, 1]), ("a", "b"))
    own = np.array([0.9, 0.1, 0.5, 0.7, 0.2, 0.8])
    probabilities = np.where(targets.labels[:, None] == np.arange(2), own[:, None], 1 - own[:, None])
    a, b = class_examples(targets, probabilities, 2)
    assert a.most.tolist() == [0, 3]
    assert a.least.tolist() == [1, 2]
    assert b.most.tolist() == [5]
    assert b.least.tolist() == [4]


def test_confused_pairs_are_counted() -> None:
    targets = ClassIndices(np.array([0, 0, 0, 1]), ("a", "b"))
    (pair,) = confused(targets, np.array([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3], [0.1, 0.9]]))
    assert (pair.first, pair.second, pair.count) == (0, 1, 2)
    sets = ClassSets(np.array([[True, False], [True, True]]), ("a", "b"))
    (pair,) = confused(sets, np.array([[0.1, 0.9], [0.8, 0.9]]))
    assert (pair.first, pair.second, pair.count) == (0, 1, 1)
