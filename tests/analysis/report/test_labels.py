"""The report of images that may have several classes."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.explain.figures import assert_shows_something, coarse, drawn, texts
from tests.analysis.report import Reader, leave_empty
from tests.analysis.report.runs import LABELLED, write_label_run
from tests.data import noise
from tests.models import law, small_model
from vitascope.analysis.explain import plots
from vitascope.analysis.report import classification, internals, labels, overview
from vitascope.analysis.report.charts import EXTREMES, draw_precision_recall, extreme_classes
from vitascope.analysis.report.figures import draw_figures
from vitascope.analysis.report.page import render
from vitascope.analysis.report.write import write_report
from vitascope.data.average_precision import average_precision, precision_recall
from vitascope.data.label_measures import LabelScore, mistake_confidences
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.targets import ClassSets
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.run import Run

NAMES = ("<a>", "b", "c")
HEADER = {"name": "n", "result": "r", "resume": None, "measured_on_val": False, "warning": "", "tiles": []}


def predictions(K: int = 3) -> Predictions:
    """Those of `LABELLED`, or random ones of K classes."""
    if K == 3:
        names, shares = [row[1].split() for row in LABELLED], [row[2] for row in LABELLED]
        truth = np.array([[letter in row for letter in "abc"] for row in names])
        thresholds = np.array([0.5, 0.5, 0.65], np.float32)
        return Predictions(
            "test", np.arange(5), ClassSets(truth, NAMES), np.array(shares, np.float32), thresholds
        )
    draw = np.random.default_rng(0)
    targets = ClassSets(draw.random((40, K)) < 0.3, tuple(f"class {k}" for k in range(K)))
    return Predictions("test", np.arange(40), targets, draw.random((40, K)).astype(np.float32))


def score_of(found: Predictions) -> LabelScore:
    assert isinstance(found.score, LabelScore)
    return found.score


def pictures(side: int = 16) -> ImageSet:
    return ImageSet("test", [noise(side, side, seed=seed) for seed in range(5)], predictions().targets)


@law
@given(N=st.integers(1, 50), digits=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_area_under_the_steps_of_precision_is_the_average_precision(N: int, digits: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    truth, scores = draw.random(N) < 0.4, draw.random(N).round(digits)
    truth[0] = True
    recall, precision = precision_recall(truth, scores)
    assert recall[-1] == 1
    assert precision[-1] == truth[scores >= scores[truth].min()].mean()
    area = (np.diff(recall, prepend=0) * precision).sum()
    np.testing.assert_allclose(area, average_precision(truth, scores, np.ones((N, 1), np.int32))[0])


def test_confidence_in_a_mistake_is_that_of_the_surest_one() -> None:
    truth = np.array([[True, False], [True, False], [True, True]])
    answers = np.array([[True, True], [False, True], [True, True]])
    shares = np.array([[0.9, 0.7], [0.1, 0.6], [0.9, 0.9]])
    np.testing.assert_allclose(mistake_confidences(truth, answers, shares), [0.7, 0.9, 0])


def test_classes_come_worst_first_and_absent_ones_are_counted() -> None:
    found = predictions(30)
    found.targets.labels[:, 4] = False
    section = labels._classes(found, score_of(found))
    rows = section["rows"] + section["rest"]
    assert section["absent"] == 1
    assert len(rows) == 29
    assert len(section["rest"]) == 9
    shares = [float(row[2].rstrip("%")) for row in rows]
    assert shares == sorted(shares)
    for name, images, *_, constant, _, _, threshold in rows:
        count = int(found.labels[:, found.class_names.index(name)].sum())
        assert (images, constant, threshold) == (str(count), f"{count / 40:.1%}", "0.50")


def test_pairs_show_what_independent_classes_would_share() -> None:
    section = labels._pairs(predictions())
    assert section["together"] == [("<a>, b", "1", "0.8", "1.25", "2"), ("b, c", "1", "0.8", "1.25", "0")]
    assert section["confused"] == [("c", "<a>", "1", "50.0%")]


def test_wrong_and_missed_classes_are_ordered_by_confidence_and_named() -> None:
    found, model = predictions(), small_model(class_names=NAMES, num_classes=3)
    wrong = labels._mistakes(found, "wrong", model, None)
    assert (wrong["total"], wrong["images"]) == (2, 2)
    assert [entry["mistakes"] for entry in wrong["listed"]] == ["c (70.0%)", "<a> (60.0%)"]
    assert wrong["listed"][1]["true"] == "b (90.0%), c (20.0%)"
    missed = labels._mistakes(found, "missed", model, None)
    assert [entry["mistakes"] for entry in missed["listed"]] == ["c (20.0%)", "c (60.0%)"]
    assert [entry["predicted"] for entry in missed["listed"]] == ["b (90.0%), <a> (60.0%)", "no class"]


def test_without_mistakes_there_are_no_sections_about_them() -> None:
    perfect = predictions()
    perfect.probabilities[:] = perfect.labels
    found = labels.labels(perfect, small_model(class_names=NAMES, num_classes=3), None)
    assert found["wrong_labels"] is None
    assert found["missed_labels"] is None
    assert "No class is predicted in place of another" in render(HEADER, found)


def test_page_shows_the_pictures_of_mistakes_under_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_empty(monkeypatch, labels, classification)
    model = small_model(class_names=NAMES, num_classes=3)
    model.preprocess = default_preprocess(model.config)
    read = Reader(render(HEADER, labels.labels(predictions(), model, pictures())))
    assert read.open == []
    assert [name for name, _ in read.elements].count("img") == 8  # 4 mistakes, each twice
    shown = " ".join(read.text.split())
    for text in ("wrong: c (70.0%) true: <a> (80.0%)", "missed: c (60.0%) predicted: no class"):
        assert text in shown or text.replace(") ", ")") in shown, text
    assert shown.count("attention rollout") == 1
    anchors = [attributes["id"] for name, attributes in read.elements if name == "section"]
    assert anchors == [
        *("measures", "labels", "precision_recall", "pairs", "pair_calibration"),
        *("wrong_labels", "missed_labels"),
    ]


def test_report_of_a_run_has_the_measures_beside_those_of_a_constant_answer(tmp_path, monkeypatch) -> None:
    leave_empty(monkeypatch, overview, labels, classification, internals)
    run = write_label_run(tmp_path / "run")
    read = Reader(write_report(run).read_text(encoding="utf-8"))
    tiles = [attributes for _, attributes in read.elements if attributes.get("class") == "tile"]
    assert len(tiles) <= 8
    score = score_of(run.predictions)
    for name in ("map", "micro_map", "macro_f1_tuned", "micro_f1_tuned", "exact"):
        each = score.estimates[name]
        assert re.search(rf"{each.value:.2%}[^%]*; constant answer {each.constant:.1%}", read.text), name
    for row in (*score.rows(), *score.class_rows(("a", "b", "c"))):
        assert "".join(row) in "".join(read.text.split("\n")), row
    assert "Images with exactly their classes" not in read.text  # no curve of them is recorded
    assert "Mean average precision over the classes." in read.text
    assert "wrongtruepredicted" in read.text  # without the images, a table


@pytest.mark.parametrize("K", [3, 12])
def test_curves_of_the_worst_and_the_best_classes_are_drawn(tmp_path: Path, K: int) -> None:
    found = predictions(K)
    score = score_of(found)
    figure = draw_precision_recall(found, score)
    assert_shows_something(drawn(figure, tmp_path))
    lines = figure.axes[0].get_lines()
    worst, best = extreme_classes(score)
    assert len(lines) == len(worst) + len(best) == min(K, 2 * EXTREMES)
    assert {line.get_linestyle() for line in lines[: len(worst)]} == {"-"}
    assert {line.get_linestyle() for line in lines[len(worst) :]} == ({"--"} if best else set())
    for line, k in zip(lines, [*worst, *best], strict=True):
        assert f"{found.class_names[k]}, AP {score.ap[k]:.1%}" in texts(figure)
        x, y = line.get_data()
        np.testing.assert_allclose((np.diff(x) * y[1:]).sum(), score.ap[k])
    if best:
        assert max(score.ap[worst]) <= min(score.ap[best])


def test_figures_show_right_wrong_and_missed_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[plots.LabelsCaption] = []
    whole = plots.draw_grid
    monkeypatch.setattr(plots, "draw_grid", lambda *given: captions.extend(given[1]) or whole(*given))
    run, model = Run(tmp_path), small_model(class_names=NAMES, num_classes=3)
    model.preprocess = default_preprocess(model.config)
    run.config_file.write_text("task: classify\ndata: digits\nseed: 0\nkeep: best\n")
    with coarse():
        made = draw_figures(run, model, pictures(), predictions())
    assert set(made) == {"precision_recall", "predictions", "attention", "positions", "filters"}
    third = next(caption for caption in captions if [name for name, _ in caption.wrong] == ["<a>"])
    assert ([name for name, _ in third.right], [name for name, _ in third.missed]) == (["b"], ["c"])


def test_captions_of_several_classes_have_the_colours_of_the_truth(tmp_path: Path) -> None:
    many = plots.LabelsCaption(wrong=tuple((f"w{k}", 0.9) for k in range(9)))
    captions = [
        plots.LabelsCaption((("cat", 0.9), ("dog", 0.8)), wrong=(("$x$", 0.7),), missed=(("cow", 0.1),)),
        plots.LabelsCaption(),
        many,
    ]
    figure = plots.draw_grid([noise(8, 8)] * 3, captions, "title")
    assert_shows_something(drawn(figure, tmp_path))
    written = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert written["cat 90%\ndog 80%"] == plots.RIGHT
    assert written["$x$ 70%"] == plots.WRONG
    assert written["missed cow 10%"] == plots.SERIES[1]
    assert "no class" in written
    assert len(many.lines()) == plots.MAX_LINES
    assert "and 5 more" in written
    boxes = [text.get_window_extent() for text in figure.axes[0].texts[:3]]  # from below
    for below, above in itertools.pairwise(boxes):
        assert below.y1 <= above.y0 + 1


def test_training_section_shows_how_many_classes_an_image_has(tmp_path: Path) -> None:
    images = pictures()
    found = overview.training(write_label_run(tmp_path / "run"), None, Splits(images, images, None, 3), "")
    assert ("Classes per image", "1.20 on average, 0 to 2, in train") in found["rows"]
