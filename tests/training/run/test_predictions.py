import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError
from vitascope.training.run.predictions import Predictions


def some_predictions(**others: Any) -> Predictions:
    probabilities = np.random.default_rng(0).dirichlet(np.ones(3), 7).astype(np.float32)
    labels = np.array([0, 1, 2, 0, 1, 2, 0])
    values: dict[str, Any] = {
        "split": "test",
        "indices": np.array([0, 1, 2, 4, 5, 6, 9]),
        "targets": ClassIndices(labels, ('<b>&"', "猫", "")),
        "probabilities": probabilities,
        "unreadable": ("a/3.png: broken",),
    }
    return Predictions(**(values | others))


def some_sets(**others: Any) -> Predictions:
    generator = np.random.default_rng(0)
    labels = generator.random((7, 3)) < 0.5
    probabilities = generator.random((7, 3)).astype(np.float32)
    thresholds = np.array([0.5, 0.2, 0.9], np.float32)
    targets = ClassSets(labels, ("ant", "bee", "cat"))
    return some_predictions(targets=targets, probabilities=probabilities, thresholds=thresholds, **others)


@pytest.mark.parametrize("kept", [some_predictions(), some_predictions(unreadable=()), some_sets()])
def test_saving_and_loading_preserve_predictions(tmp_path: Path, kept: Predictions) -> None:
    kept.save(tmp_path / "predictions.npz")
    back = Predictions.load(tmp_path / "predictions.npz")
    assert back == kept
    assert (back.several, back.class_names) == (kept.several, kept.class_names)
    for name in ("indices", "labels", "probabilities"):
        assert getattr(back, name).dtype == getattr(kept, name).dtype
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.npz"]


def test_a_file_that_is_no_archive_is_rejected_without_mention_of_pickle(tmp_path: Path) -> None:
    (tmp_path / "predictions.npz").write_text("x")
    with pytest.raises(UserError, match="is broken: broken, truncated or not an") as raised:
        Predictions.load(tmp_path / "predictions.npz")
    assert "allow_pickle" not in str(raised.value)


DAMAGED_CLASSES: list[tuple[dict[str, Any], str]] = [
    ({"labels": np.zeros(6, np.int64)}, r"labels of dtype int64 and shape \(6,\), not \(7\)"),
    ({"labels": np.zeros(7)}, "labels of dtype float64"),
    ({"indices": np.arange(7)[:, None]}, "indices of dtype int64 and shape"),
    ({"probabilities": np.zeros((7, 2), np.float32)}, r"probabilities of .*, not \(7, 3\)"),
    ({"probabilities": np.zeros((7, 3), "U3")}, "probabilities of dtype <U3"),
    ({"class_names": np.arange(3)}, "class_names of dtype int64"),
    ({"class_names": np.array([], dtype=np.str_), "labels": None}, "no labels"),
    ({"split": np.array(["test"])}, "split of dtype"),
]
DAMAGED_SETS: list[tuple[dict[str, Any], str]] = [
    ({"labels": np.zeros((7, 2), np.bool_)}, "labels of dtype bool"),
    ({"labels": np.zeros(7, np.bool_)}, r"labels of dtype bool and shape \(7,\), not \(7, 3\)"),
    ({"thresholds": np.array([0.5], np.float32)}, "thresholds of dtype"),
]


def test_arrays_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    for kept, damages in ((some_predictions(), DAMAGED_CLASSES), (some_sets(), DAMAGED_SETS)):
        for changes, reason in damages:
            kept.save(path)
            with np.load(path) as stored:
                arrays = {**stored, **changes}
            np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
            with pytest.raises(UserError, match=rf"predictions\.npz is broken: .*{reason}.*; remove it"):
                Predictions.load(path)


def test_no_predictions_have_no_score(tmp_path: Path) -> None:
    none = np.array([], dtype=np.int64)
    targets, probabilities = some_predictions().targets.take(none), np.zeros((0, 3), np.float32)
    without = some_predictions(indices=none, targets=targets, probabilities=probabilities)
    without.save(tmp_path / "predictions.npz")
    empty = Predictions.load(tmp_path / "predictions.npz")
    assert empty.confusion.sum() == 0
    with pytest.raises(UserError, match="no predictions of test images"):
        empty.score  # noqa: B018


def test_an_answer_is_every_class_from_its_threshold_on() -> None:
    predictions = some_sets(split="val")
    assert (predictions.answers == (predictions.probabilities >= [0.5, 0.2, 0.9])).all()
    assert predictions.correct.tolist() == (predictions.answers == predictions.labels).all(axis=1).tolist()
    assert predictions.score.right == predictions.correct.sum()
    with pytest.raises(UserError, match="no confusion matrix"):
        _ = predictions.confusion
    without = dataclasses.replace(predictions, targets=ClassSets(np.zeros((7, 3), np.bool_), tuple("abc")))
    with pytest.raises(UserError, match="none of the val images has a class, so they have no mAP"):
        _ = without.score
