"""The output of `vitascope evaluate` for images that may have several classes."""

import json

import numpy as np

from vitascope.cli.evaluate import evaluation_json, evaluation_lines
from vitascope.data.label_measures import LabelScore
from vitascope.data.targets import ClassSets
from vitascope.training.evaluation.measure import Evaluation


def evaluation(N: int = 60) -> Evaluation:
    """Of four classes: the last occurs in no image, and the others are predicted better and better."""
    draw = np.random.default_rng(0)
    truth = draw.random((N, 4)) < (0.2, 0.3, 0.4, 0.0)
    shares = np.where(truth, 0.8, 0.2) + draw.normal(size=(N, 4)) * (0.5, 0.3, 0.05, 0.1)
    return Evaluation(
        split="test",
        indices=np.arange(N),
        targets=ClassSets(truth, ("cat", "dog", "cow", "absent")),
        probabilities=shares.clip(0, 1).astype(np.float32),
        thresholds=np.array([0.6, 0.5, 0.5, 0.5], np.float32),
        loss=0.25,
        unreadable=("cut.png: broken",),
    )


def test_json_has_the_measures_of_all_and_of_each_class() -> None:
    found = json.loads(json.dumps(evaluation_json(evaluation()), allow_nan=False))
    assert found["classes"] == ["cat", "dog", "cow", "absent"]
    assert (found["images"], found["unreadable"]) == (60, 1)
    score = evaluation().score
    assert isinstance(score, LabelScore)
    assert found["map"] == score.estimates["map"].value
    assert found["map_low"] < found["map"] < found["map_high"]
    assert found["map_constant"] < found["map"]
    assert found["positives"] == score.positives.tolist()
    assert found["ap"][-1] is None
    assert found["ap"][:3] == score.ap[:3].tolist()
    assert np.mean(found["ap"][:3]) == found["map"]
    low, ap, high = (np.array(found[name][:3]) for name in ("ap_low", "ap", "ap_high"))
    assert ((low <= ap) & (ap <= high)).all()
    assert found["thresholds"] == [np.float32(0.6), 0.5, 0.5, 0.5]
    assert "confusion" not in found


def test_lines_have_the_numbers_of_the_json_and_the_worst_class_first() -> None:
    found = evaluation_json(evaluation())
    printed = list(evaluation_lines(evaluation(), ""))
    assert printed[0] == "left out: cut.png: broken"
    assert printed[-1].endswith("1 of 4 classes: absent")
    assert printed[1] == f"test: mAP {found['map']:.2%} of 60 images; loss 0.250"
    rows = [line.split() for line in printed]
    assert ["mAP", f"{found['map']:.2%}"] in [row[:2] for row in rows]
    named = [row for row in rows if row[0] in ("cat", "dog", "cow", "absent")]
    assert [row[0] for row in named] == ["cat", "dog", "cow"]
    for row, k in zip(named, range(3), strict=True):
        values = (found[name] for name in ("positives", "ap", "f1", "f1_tuned", "thresholds"))
        count, ap, f1, tuned, threshold = (value[k] for value in values)  # type: ignore[index]
        assert (row[1], row[2]) == (str(count), f"{ap:.1%}")
        assert row[-3:] == [f"{f1:.1%}", f"{tuned:.1%}", f"{threshold:.2f}"]


def test_a_model_no_better_than_a_constant_answer_gets_advice() -> None:
    asleep = evaluation()
    asleep.probabilities[:] = 0.3
    assert any(
        line.endswith("; start from trained weights")
        for line in evaluation_lines(asleep, "start from trained weights")
    )
