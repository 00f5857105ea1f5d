"""Several runs side by side: differences, results, seeds, and paired tests."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.analysis.report.runs import IMAGES, LABELLED, write_label_run, write_run
from vitascope.analysis.report.comparison import RunComparison
from vitascope.data.average_precision import mean_average_precision, paired_difference
from vitascope.errors import UserError
from vitascope.training.run.run import Run


def images(right: str, first: int = 0) -> list[tuple[str, str, bool]]:
    """Test images of class a: `1` for each one that is predicted correctly, `0` for the others."""
    return [(f"content {first + place}", "a", mark == "1") for place, mark in enumerate(right)]


def compared(*runs: Run) -> RunComparison:
    return RunComparison.of(runs)


def test_only_differing_options_are_listed_with_a_value_per_run(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one", lr=0.1, seed=3), write_run(tmp_path / "two", depth=4, seed=3)]
    found = compared(*runs)
    assert (found.options, found.environment) == ({"depth": (2, 4), "lr": (0.1, 0.001)}, {})
    assert ("lr", "0.1", "0.001") in found.difference_rows()
    # What runs record themselves is no difference.
    runs = [write_run(tmp_path / "three", minutes=1.0, lengths=((0, 9),), validations=20)]
    runs.append(write_run(tmp_path / "four", minutes=2.0, lengths=((0, 18),), validations=19))
    assert compared(*runs).options == {"minutes": (1.0, 2.0)}


def test_option_that_an_older_run_lacks_differs_only_if_it_is_set(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, tracker=None) for name in ("new", "old")]
    lines = runs[1].config_file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(("tracker", "keep_checkpoints"))]
    runs[1].config_file.write_text("".join(kept))
    assert compared(*runs).options == {"keep_checkpoints": (2, None)}


def test_times_of_other_machines_get_a_note(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    path = runs[1].path / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "cpu": "another", "torch": "3.0"}))
    found = compared(*runs)
    assert set(found.environment) == {"cpu", "torch"}
    assert found.notes() == ["Training times cannot be compared: the runs differ in cpu."]


def test_results_are_those_of_the_run_folders(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "one"), write_run(tmp_path / "two", images("0010")))
    one, two = found.runs
    predictions = Run(tmp_path / "one").predictions
    assert (one.result, one.score) == (0.75, predictions.score)
    assert (one.seconds, one.progress) == (25.0, "2")
    config = Run(tmp_path / "one").model().config
    assert (one.parameters, one.flops) == (config.num_parameters, config.flops)
    head, first, _ = found.results()
    row = dict(zip(head, first, strict=True))
    assert row["test accuracy"] == "75.00%"
    assert row["95% interval"] == "{:.1%} to {:.1%}".format(*predictions.score.interval)
    assert row["training time"] == "25.0 s"
    assert found.best == "one"
    assert two.result == 0.25


def test_paired_test_counts_images_that_one_run_alone_has_right(tmp_path: Path) -> None:
    best, other = images("1111111101"), images("1000000010")
    found = compared(write_run(tmp_path / "other", other), write_run(tmp_path / "best", best))
    (test,) = found.paired
    assert (test.run, found.best) == ("other", "best")
    assert (test.images, test.only_best, test.only_run) == (10, 8, 1)
    assert test.p == pytest.approx(binomtest(1, 9).pvalue)
    assert test.verdict == "worse"
    assert found.summary == "Highest accuracy: best, 90.00%."


def test_of_equal_accuracies_the_lower_loss_is_best(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "first", loss=0.6), write_run(tmp_path / "second", loss=0.4))
    assert found.best == "second"
    assert found.summary == "Highest accuracy: second, 75.00%. Not significantly different: first."
    assert [test.run for test in found.paired] == ["first"]


SOME = [("x", "a", True), ("y", "b", False), ("z", "a", True)]


@pytest.mark.parametrize(
    ("mine", "theirs", "counts"),
    [
        (SOME, SOME[::-1], (3, 0, 0)),
        (images("11111111"), images("00001111", first=4), (4, 4, 0)),
        ([SOME[0], ("y", "a", True)], [("x", "b", False), ("y", "a", True)], (1, 0, 0)),
        (SOME[:1] * 3, SOME[:1] * 2, (2, 0, 0)),
        ([("unreadable", "a", True), SOME[0]], [("unreadable", "a", True), SOME[0]], (1, 0, 0)),
    ],
    ids=["another order", "some in common", "another class", "copies one by one", "unreadable"],
)
def test_images_are_paired_by_content_and_class(tmp_path: Path, mine, theirs, counts) -> None:
    (test,) = compared(write_run(tmp_path / "one", mine), write_run(tmp_path / "two", theirs)).paired
    assert (test.images, test.only_best, test.only_run) == counts
    assert test.p == pytest.approx(0.125 if counts[1] else 1.0)
    assert test.verdict == "not significant"


def test_reason_without_a_paired_test_is_stated(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "best", images("1111")),
        write_run(tmp_path / "others", images("1110", first=100)),
        write_run(tmp_path / "classes", images("1110"), classes=("a", "b", "c")),
        write_run(tmp_path / "mixed", images("1110")),
    ]
    another = write_run(tmp_path / "another").path
    shutil.copy(another / "split.jsonl.gz", runs[3].path)
    verdicts = {test.run: test.verdict for test in compared(*runs).paired}
    assert verdicts == {
        "others": "no test: no test image in common",
        "classes": "no test: other classes, such as c",
        "mixed": "no test: the predictions of mixed do not fit its record of the split",
    }


def test_runs_that_differ_in_their_seed_only_are_averaged(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "s0", images("1111"), seed=0),
        write_run(tmp_path / "s1", images("1110"), seed=1),
        write_run(tmp_path / "s2", None, seed=2),
        write_run(tmp_path / "lr", images("1110"), lr=0.1),
    ]
    found = compared(*runs)
    (group,) = found.groups
    assert (group["runs"], group["seeds"], group["results"]) == (["s0", "s1"], [0, 1], [1.0, 0.75])
    assert group["std"] == pytest.approx(0.25 / 2**0.5)
    assert "s0, s1 (seeds 0, 1): mean 87.50%, lowest 75.00%, highest 100.00%" in found.text()


@pytest.mark.parametrize("epochs", [0, 1])
def test_unfinished_run_has_its_progress_and_no_result(tmp_path: Path, epochs: int) -> None:
    found = compared(write_run(tmp_path / "one"), write_run(tmp_path / "two", None, epochs=epochs))
    two = found.runs[1]
    assert (two.progress, two.seconds) == (f"{epochs} of 2", 10.0 if epochs else None)
    assert (two.result, two.parameters) == (None, None)
    assert (found.best, found.paired) == (None, ())
    assert found.notes() == ["two has not finished."]
    assert "two" in found.text()


def test_pre_trainings_and_validation_images_get_notes(tmp_path: Path) -> None:
    targets = {"one": "mean_color", "two": "pixels"}
    found = compared(*(write_run(tmp_path / name, task="masked", target=t) for name, t in targets.items()))
    assert found.results()[0] == ("run", "epochs", "test loss", "training time", "parameters", "MFLOPs")
    assert (found.best, found.paired) == (None, ())
    assert found.notes() == ["Losses of different targets cannot be compared."]
    found = compared(write_run(tmp_path / "three"), write_run(tmp_path / "four", split="val"))
    assert found.notes() == ["four: measured on the validation images, which also selected the weights."]
    assert "accuracy" in found.results()[0]


def test_folders_of_the_same_name_are_named_by_their_paths(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "one" / "run"), write_run(tmp_path / "two" / "run"))
    assert [run.name for run in found.runs] == [str(tmp_path / "one" / "run"), str(tmp_path / "two" / "run")]


def test_runs_that_cannot_be_compared_are_rejected(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", task="masked")
    for runs in ([one], [one, Run(one.path.parent / "." / "one")]):
        with pytest.raises(UserError, match=r"a comparison takes 2 to 24 different runs, not .*one"):
            compared(*runs)
    with pytest.raises(UserError, match=r"measured .*one by accuracy, .*two by correct colours"):
        compared(one, two)
    with pytest.raises(UserError, match=r"measured .*new by the classes of images, .*two by correct colours"):
        compared(write_run(tmp_path / "new", None, epochs=0), two)
    for name, images in (("several", LABELLED), ("unfinished", None)):
        with pytest.raises(UserError, match=rf"measured .*one by accuracy, .*{name} by mAP"):
            compared(one, write_label_run(tmp_path / name, images))


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "predictions.npz", "split.jsonl.gz"])
def test_broken_file_is_named(tmp_path: Path, name: str) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two")]
    (runs[1].path / name).write_bytes(b"{[\n{[\n")
    with pytest.raises(UserError, match=f"two/{name}".replace(".", r"\.")):
        compared(*runs)


def test_plain_values_are_json_with_the_curves_and_a_table_for_pandas(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "one", lr=0.1), write_run(tmp_path / "two", images("0010")))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["best"] == "one"
    assert plain["options"] == {"lr": [0.1, 0.001]}
    curve = {"epoch": 1, "step": 5, "seconds": 10.0, "val_loss": 1.0, "val_accuracy": 0.3}
    assert curve.items() <= plain["runs"][0]["curve"][0].items()
    assert plain["runs"][0]["correct"] == sum(right for *_, right in IMAGES)
    assert plain["paired"][0]["run"] == "two"
    pytest.importorskip("pandas")
    table = found.to_dataframe()
    assert (list(table.index), list(table["accuracy"])) == (["one", "two"], [0.75, 0.25])


def test_runs_of_several_classes_are_compared_by_map(tmp_path: Path) -> None:
    first = write_label_run(tmp_path / "first")
    perfect = [(content, names, [float(c in names) for c in "abc"]) for content, names, _ in LABELLED]
    found = compared(first, write_label_run(tmp_path / "perfect", perfect))
    assert (found.measure, found.best) == ("mAP", "perfect")
    assert found.summary.startswith("Highest mAP: perfect, 100.00%.")
    predictions = first.predictions
    score = predictions.score
    head, row, _ = found.results()
    cells = dict(zip(head, row, strict=True))
    assert cells["test mAP"] == f"{score.estimates['map'].value:.2%}"
    assert cells["macro F1"] == f"{score.estimates['macro_f1_tuned'].value:.2%}"
    (test,) = found.paired
    assert test.images == 5
    assert test.difference == pytest.approx(score.estimates["map"].value - 1)
    assert test.interval[0] < test.difference < test.interval[1]
    assert "(bootstrap), against perfect" in found.text()
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["runs"][0]["map"] == score.estimates["map"].value
    assert values["runs"][0]["accuracy"] == pytest.approx(0.4)
    assert [epoch["val_map"] for epoch in values["runs"][0]["curve"]] == [0.3, 0.6]


def test_classes_in_another_order_are_the_same_classes(tmp_path: Path) -> None:
    turned = [(content, names, shares[::-1]) for content, names, shares in LABELLED]
    runs = (
        write_label_run(tmp_path / "one"),
        write_label_run(tmp_path / "two", turned, classes=("c", "b", "a")),
    )
    (test,) = compared(*runs).paired
    assert (test.images, test.p, test.difference) == (5, 1.0, 0.0)


def test_difference_of_maps_is_significant_only_if_it_is_large() -> None:
    draw = np.random.default_rng(0)
    truth = draw.random((200, 3)) < 0.3
    shares = draw.random((200, 3)) + 0.3 * truth
    better, alike = shares + 0.3 * truth, shares + 0.02 * draw.normal(size=(200, 3))
    large, small = (paired_difference(truth, other, shares) for other in (better, alike))
    expected = mean_average_precision(truth, better) - mean_average_precision(truth, shares)
    assert large.value == pytest.approx(expected)
    assert large.p < 1e-4 < 0.05 < small.p
    assert large.low > 0 > small.low
    back = paired_difference(truth, shares, better)
    assert (back.value, back.low, back.high) == pytest.approx((-large.value, -large.high, -large.low))
