"""Reports of finished runs, of interrupted ones and of those whose data are missing."""

import dataclasses
import errno
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.analysis.report import Reader, leave_empty
from tests.analysis.report.runs import write_run
from tests.models import small_model, small_resnet
from tests.training import tiny_config, write_folder
from vitascope import explain, runs
from vitascope.analysis.report import classification, internals, overview, thumbnails, write
from vitascope.analysis.report.write import write_report
from vitascope.cli import main
from vitascope.data.measures import surest
from vitascope.data.split_record import SplitRecord
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.models.weights.loading import save_pretrained
from vitascope.training.run.run import Run

STRANGE = '<b>&"$x$'
ALL = {
    "trained",
    "curves",
    "classes",
    "confusion",
    "calibration",
    "mistakes",
    "trust",
    "attention",
    "learned",
    "configuration",
    "environment",
}
ABOUT_PREDICTIONS = {"classes", "confusion", "calibration", "trust", "mistakes"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A finished run and its data; it learns nothing, so that half of its predictions are wrong."""
    root = tmp_path_factory.mktemp("a, place & more")
    data = write_folder(root / "photos", per_class=20, side=8, classes=(STRANGE, "light"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        enough(monkeypatch)
        runs.train(tiny_config(data, run=str(root / "run"), epochs=2, lr=1e-30, keep="last"))
    return root


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "FEW", 1)
    monkeypatch.setattr(overview, "FEW", 1)


@pytest.fixture(autouse=True)
def few(monkeypatch, request) -> None:
    if "only" not in request.node.name:
        enough(monkeypatch)


@pytest.fixture
def quick(monkeypatch) -> None:
    leave_empty(monkeypatch, overview, classification, internals)


def sections(page: Path) -> set[str]:
    return {attributes["id"] for name, attributes in read(page).elements if name == "section"}


def read(page: Path) -> Reader:
    reader = Reader(page.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


def report_of(run: Path, config: dict[str, str] | None = None, **predictions: object) -> Reader:
    file = run / "config.yaml"
    for old, new in (config or {}).items():
        text = file.read_text("utf-8")
        assert old in text
        file.write_text(text.replace(old, new), "utf-8")
    if predictions:
        Run(run).save_predictions(dataclasses.replace(Run(run).predictions, **predictions))
    return read(write_report(Run(run)))


def answers(run: Path, *, right: bool) -> np.ndarray:
    labels = Run(run).predictions.labels
    return np.eye(2, dtype=np.float32)[labels if right else 1 - labels]


def test_training_writes_a_report_of_everything(made) -> None:
    page = made / "run" / "report.html"
    assert sections(page) == ALL
    test = json.loads((made / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    shown_text = read(page).text
    assert f"{test['accuracy']:.2%} of {test['images']} test images correct" in shown_text
    assert "32 train, 4 val, 4 test" in shown_text
    assert "Always guessing the most frequent class would reach 50.00%." in shown_text
    assert f"{test['balanced_accuracy']:.2%}balanced accuracy: mean recall of the classes" in shown_text
    assert f"{test['macro_f1']:.2%}macro F1: mean over the classes" in shown_text
    assert "top-5" not in shown_text  # of two classes
    assert "Stopped early" not in shown_text
    assert "Balanced by" not in shown_text


@pytest.mark.parametrize("weights", [None, "somewhere/model"])
def test_model_no_better_than_the_most_frequent_class_gets_a_hint(run, quick, weights) -> None:
    changed = {"weights: null": f"weights: {weights}"} if weights else {}
    for right in (True, False):
        text = report_of(run, changed, probabilities=answers(run, right=right)).text
        warned = "This model is no better than always guessing the most frequent class" in text
        assert warned == (not right)
        assert ("need trained weights: --weights cifar10" in text) == (warned and weights is None)
        changed = {}


def test_early_stopping_balanced_classes_and_one_epoch_are_shown(run, quick) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "stop", "step": 18, "epoch": 12, "best_epoch": 7}) + "\n")
    text = report_of(run, {"class_weights: []": "class_weights: [balanced]", "epochs: 2": "epochs: 1"}).text
    assert "Stopped earlyafter epoch 12; the lowest validation loss was that of epoch 7" in text
    assert "Class weightsbalanced" in text
    assert "1 epoch, batches of" in text
    assert "1 epochs" not in text


def test_report_is_in_the_language_of_the_reader(run, quick, monkeypatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    page = read(write_report(Run(run)))
    assert ("html", {"lang": "zh-CN"}) in page.elements
    for words in (
        "混淆矩阵",
        " 张测试图像的准确率为",
        "置信度最高的错误预测",
        "平衡准确率",
        "2 个 epoch，批大小",
    ):
        assert words in page.text
    titles = re.findall(r"<h2>(.*?)</h2>", run.joinpath("report.html").read_text(encoding="utf-8"))
    assert len(titles) == len(sections(run / "report.html"))
    assert [title for title in titles if re.search("[A-Za-z]{2}", title)] == []


def test_report_needs_no_other_files_and_describes_its_pictures(made) -> None:
    text = (made / "run" / "report.html").read_text(encoding="utf-8")
    elements = Reader(text).elements
    places = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}
    for name, attributes in elements:
        assert name not in ("script", "link", "iframe", "object", "embed", "base")
        assert not [key for key in attributes if key.startswith("on")]
        for key in places & attributes.keys():
            assert str(attributes[key]).startswith(("data:image/", "#")), (name, attributes[key])
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text
    assert "http" not in re.sub(r'"data:[^"]*"', "", text)
    for kind, description, least in (("img", "alt", 11), ("svg", "aria-label", 6)):
        described = [attributes[description] for name, attributes in elements if name == kind]
        assert len(described) >= least
        assert all(described)
    names = [str(attributes["id"]) for _, attributes in elements if "id" in attributes]
    assert len(names) == len(set(names))
    referred = set(re.findall(r'(?:href="|url\()#([\w-]+)', text))
    assert referred
    assert referred <= set(names)


def test_class_names_and_values_are_escaped(made, run, monkeypatch) -> None:
    leave_empty(monkeypatch, overview, internals)
    (run / "environment.json").write_text(
        json.dumps({"cpu": "<img src=x>", "started": "2026-01-02T03:04:05"})
    )
    page = report_of(run, {"optimizer: adamw": "optimizer: '<script>alert(1)</script>'"})
    assert not [name for name, _ in page.elements if name in ("b&", "script")]
    assert f"{STRANGE}, predicted as light:" in page.text or f"light, predicted as {STRANGE}:" in page.text
    assert "<script>alert(1)</script>" in page.text
    assert "<img src=x>" in page.text
    assert "2026-01-02 03:04" in page.text


def test_rewritten_report_is_identical(run, monkeypatch) -> None:
    leave_empty(monkeypatch, overview, internals)
    first = write_report(Run(run), device="cpu").read_bytes()
    assert write_report(Run(run), device="cpu").read_bytes() == first
    assert not (run / ".report.html").exists()


def test_most_confident_mistakes_and_the_worst_pair_are_shown(made, run, quick, monkeypatch) -> None:
    probabilities = np.array([[0.01, 0.99], [0.3, 0.7], [0.6, 0.4], [0.2, 0.8]], dtype=np.float32)
    assert Run(run).predictions.labels.tolist() == [0, 0, 1, 1]
    text = report_of(run, probabilities=probabilities).text
    assert f"{STRANGE}, predicted as light: 2 of 2" in text
    assert text.index("light (99.0%), true: ") < text.index("light (70.0%), true: ")
    assert "All 3 mistakes" in text
    assert "light (80.0%)" not in text
    monkeypatch.setattr(classification, "MISTAKES", 1)
    assert "light (70.0%), true: " not in report_of(run).text


def test_mistakes_stand_beside_the_evidence_for_both_classes(run, quick, monkeypatch) -> None:
    asked = []

    def heatmap(model, images, method, target):
        asked.append((method, target))
        return explain.heatmap(model, images, method, target)

    monkeypatch.setattr(thumbnails, "heatmap", heatmap)
    write_report(Run(run))
    predictions = Run(run).predictions
    places = surest(predictions.confidences, ~predictions.correct, classification.MISTAKES)
    targets = [predictions.classes[places].tolist(), predictions.labels[places].tolist()]
    assert [target for method, target in asked if method == "gradient-rollout"] == targets
    alts = [attributes.get("alt") for name, attributes in read(run / "report.html").elements if name == "img"]
    for kind in ("predicted", "true"):
        assert alts.count(f"the evidence for the {kind} class") == len(places) > 0


def test_the_floor_of_a_smoothed_training_loss_is_stated(run, quick) -> None:
    target = torch.tensor([[0.95, 0.05]], dtype=torch.float64)  # of two classes and a smoothing of 0.1
    floor = float(F.cross_entropy(target.log(), torch.tensor([0]), label_smoothing=0.1))
    assert f"which keeps it above {floor:.2f}, and" in report_of(run).text
    assert "which keeps it above" not in report_of(run, {"loss: cross_entropy": "loss: bce"}).text
    other = {"loss: bce": "loss: cross_entropy", "label_smoothing: 0.1": "label_smoothing: 0.0"}
    assert "which keeps it above" not in report_of(run, other).text


def test_a_report_of_only_a_few_test_images_says_so_and_shows_no_calibration(run, quick) -> None:
    page = write_report(Run(run)).read_text("utf-8")
    assert "accuracy of only 4 images" in page
    assert "expected calibration error" not in page
    assert 'id="calibration"' not in page


@pytest.mark.parametrize("split", ["test", "val"])
def test_measures_of_the_images_that_set_them_say_so(tmp_path, split: str, monkeypatch, quick) -> None:
    images = [(str(n), "ab"[n % 2], n % 7 > 0) for n in range(40)]
    run = write_run(tmp_path / "run", images, split=split)
    words = "These images also set the temperature, and the sets or thresholds"
    assert (words in read(write_report(run)).text) == (split == "val")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert ("温度以及集合或阈值也是用这些图像确定的" in read(write_report(run)).text) == (split == "val")


def test_a_classifier_without_mistakes_has_no_such_section(run, quick) -> None:
    text = report_of(run, probabilities=answers(run, right=True)).text
    assert sections(run / "report.html") == ALL - {"mistakes"}
    assert "There are no mistakes" in text


def test_resnet_report_has_the_sections_that_need_no_attention(run, quick) -> None:
    shutil.rmtree(run / "model")
    names = (STRANGE, "light")
    save_pretrained(small_resnet(class_names=names, num_classes=2, image_size=16), run / "model")
    page = write_report(Run(run))
    assert sections(page) == ALL - {"attention", "learned"}
    assert "attention" not in read(page).text.partition("Configuration")[0].lower()


def test_run_without_recorded_predictions_is_reported(run, quick) -> None:
    (run / "predictions.npz").unlink()
    (run / "environment.json").unlink()
    page = write_report(Run(run))
    assert sections(page) == ALL - ABOUT_PREDICTIONS
    shown_text = read(page).text
    assert "did not record its environment" in shown_text


@pytest.mark.parametrize("epochs", [0, 1])
def test_unfinished_run_shows_its_progress_and_how_to_resume(run, epochs: int) -> None:
    shutil.rmtree(run / "model")
    (run / "predictions.npz").unlink()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [record for record in records if record["kind"] == "epoch"][:epochs]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "start": ["weights=cifar10", "the head alone"]}))
    page = write_report(Run(run))
    expected = {"trained", "configuration", "environment"} | ({"curves"} if epochs else set())
    assert sections(page) == expected
    shown_text = read(page).text
    assert f"trained for {epochs} of 2 epochs." in shown_text
    assert "weights=cifar10; the head alone" in shown_text
    assert "This run has not finished" in shown_text
    assert "vitascope train --resume" in shown_text


@pytest.fixture
def away(made) -> Iterator[Path]:
    (made / "photos").rename(made / "away")
    yield made / "away"
    (made / "away").rename(made / "photos")


def rejected(run: Path, capsys, *words: str) -> str:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["report", str(run), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    return err


def test_existing_report_is_kept_if_the_data_are_missing(made, run, away, capsys) -> None:
    error = rejected(run, capsys)
    for part in (f"{made / 'photos'}: no such folder", f"remove {run / 'report.html'}", "as data"):
        assert part in error


def test_data_option_reads_moved_data(made, run, away, monkeypatch, capsys, quick) -> None:
    monkeypatch.setattr(write, "draw_figures", lambda *_: {})
    assert main(["report", str(run), "--data", str(away)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "<img" in (run / "report.html").read_text()


def test_other_data_than_the_run_was_measured_on_are_rejected(run, tmp_path, capsys) -> None:
    others = write_folder(tmp_path / "others", per_class=30, side=9, classes=(STRANGE, "light"))
    error = rejected(run, capsys, "--data", str(others))
    assert "none of the 4 images that the model was measured on exists" in error


def test_report_redraws_the_figures(made, run, quick) -> None:
    figures = {path.name: path.read_bytes() for path in (run / "figures").iterdir()}
    shutil.rmtree(run / "figures")
    assert main(["report", str(run)]) == 0
    assert {path.name: path.read_bytes() for path in (run / "figures").iterdir()} == figures


@pytest.mark.parametrize("place", ["draw_figures", "page"])
def test_full_disk_keeps_the_old_report_and_gives_advice(run, monkeypatch, capsys, place: str, quick) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write, "draw_figures", full if place == "draw_figures" else lambda *_: {})
    if place == "page":
        monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: path.touch() or full())
    error = rejected(run, capsys)
    assert error.startswith(f"vitascope: error: {run}: figures or report cannot be written: No space left")
    assert "make room" in error


def test_missing_data_are_named_and_the_other_sections_written(made, run, away, capsys, quick) -> None:
    data = made / "photos"
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{run / 'report.html'}\n"
    assert err.startswith(f"vitascope: the report has no pictures: {data}: no such folder")
    page = read(run / "report.html")
    assert sections(run / "report.html") == ALL
    assert f"The images are not shown: {data}: no such folder" in page.text
    assert not [name for name, _ in page.elements if name == "img"]


def test_changed_data_are_not_shown(made, run, quick) -> None:
    kept = Run(run).predictions
    backwards = np.arange(len(kept.labels))[::-1]
    for changed in (
        {"targets": kept.targets.take(backwards)},
        {"targets": kept.targets, "indices": kept.indices + 1000},
        {"indices": kept.indices, "split": "val"},
    ):
        page = report_of(run, **changed)
        assert "the data have changed" in page.text
        assert not [name for name, _ in page.elements if name == "img"]


def test_pictures_match_their_predictions_after_images_were_deleted_or_broken(
    made, run, tmp_path, quick
) -> None:
    photos = Path(shutil.copytree(made / "photos", tmp_path / "photos"))
    record = SplitRecord.read(run / "split.jsonl.gz")
    tested = record.parts["test"].names
    (photos / record.parts["train"].names[0]).unlink()
    (photos / tested[1]).unlink()
    place = {f"data: {made / 'photos'}": f"data: {photos}"}
    wrong = answers(run, right=False)
    text = report_of(run, place, probabilities=wrong, unreadable=("x.png: broken",)).text
    shown = [name in text.rpartition("most confident first")[2] for name in tested]
    assert shown == [True, False, True, True]
    assert "1 image cannot be read any more" in text
    assert "1 image could not be read" in text
    assert "2 missing (1 train, 1 test)" in text
    assert "32 train, 4 val, 4 test" in text  # the counts of the training
    (photos / tested[0]).write_bytes(b"no picture")
    assert "2 images cannot be read any more" in report_of(run).text


def test_many_classes_show_the_worst_pairs_instead_of_a_matrix(made, run, quick) -> None:
    names = tuple(f"class {k}" for k in range(61))
    wide = np.full((4, 61), 1e-3, dtype=np.float32)
    wide[:, 60] = 0.9
    targets = ClassIndices(Run(run).predictions.labels, names)
    page = report_of(run, targets=targets, probabilities=wide)
    assert "too large to read" in page.text
    assert "class 0, predicted as class 60: 2 of 2" in page.text
    assert "100.00%top-5 accuracy: true class among the five most probable" in page.text
    assert not [
        name for name, attributes in page.elements if "Confusion" in str(attributes.get("aria-label"))
    ]


def test_pre_training_shows_hidden_patches_and_no_predictions(made, tmp_path, quick) -> None:
    result = runs.pretrain(tiny_config(made / "photos", run=str(tmp_path / "pre"), epochs=1, task="masked"))
    assert result.report == tmp_path / "pre" / "report.html"
    assert sections(result.report) == ALL - ABOUT_PREDICTIONS | {"masked"}
    shown_text = read(result.report).text
    assert "hidden patches" in shown_text
    assert "vitascope pretrain --config" in shown_text


@pytest.mark.parametrize(
    "options",
    [
        {"stem": "resnet", "resnet_layers": (1, 1), "resnet_width": 4, "positions": "relative"},
        {"patch_size": 16, "pool": "mean"},
    ],
)
def test_any_vision_transformer_has_a_report(run, options, monkeypatch) -> None:
    leave_empty(monkeypatch, overview, classification)
    shutil.rmtree(run / "model")
    values = {"class_names": (STRANGE, "light"), "num_classes": 2, "image_size": 16, **options}
    save_pretrained(small_model(**values), run / "model")
    without = {"learned"} if options.get("positions") == "relative" else set()  # and no patches of pixels
    assert sections(write_report(Run(run))) == ALL - without


def test_folder_that_is_not_a_run_is_rejected(tmp_path, capsys) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        write_report(Run(tmp_path / "nothing"))
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
