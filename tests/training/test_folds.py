"""Training by folds: every image is predicted by a model that has not seen it, and the models are one."""

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from tests.training import signalled, tiny_config, undrawn, write_folder
from tests.training.test_several_labels import write_table
from vitascope.analysis.evaluate import evaluate
from vitascope.analysis.report import figures, write
from vitascope.analysis.report.comparison import RunComparison
from vitascope.analysis.report.overview import training
from vitascope.data.targets import ClassIndices
from vitascope.errors import Interrupted, UserError
from vitascope.models.engines.runtimes import open_engine
from vitascope.models.ensemble import Ensemble
from vitascope.models.weights.loading import from_pretrained
from vitascope.runs import resume, train
from vitascope.training.results import TrainResult
from vitascope.training.run.run import Run


def run(data: Path, folder: Path, **options: Any) -> TrainResult:
    with undrawn():
        return train(tiny_config(data, run=str(folder), folds=3, **{"epochs": 2} | options))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos", per_class=15)


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return run(photos, tmp_path_factory.mktemp("runs") / "run", lr=3e-3)


def test_each_image_has_the_prediction_of_the_run_that_has_not_seen_it(trained: TrainResult) -> None:
    whole = Run(trained.run)
    assert trained.evaluation.score.total == 30
    names, labels = whole.split_record().parts["train"].names, trained.evaluation.labels
    with open(trained.run / "out_of_fold.csv", newline="") as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    for number, member in enumerate(whole.members, 1):
        record, alone = member.split_record(), member.predictions
        assert alone is not None
        assert not set(record.parts["test"].names) & set(record.parts["train"].names)
        factor = 1 / trained.model.trust.temperature  # type: ignore[union-attr]
        wanted = ClassIndices.sharpened(alone.probabilities, factor)
        for row, name in enumerate(record.parts["test"].names):
            place = names.index(name)
            np.testing.assert_allclose(trained.evaluation.probabilities[place], wanted[row], atol=1e-5)
            assert labels[place] == alone.labels[row]
            assert rows[name]["fold"] == str(number)
            assert rows[name]["prediction"] == alone.class_names[alone.classes[row]]
            assert rows[name]["label"] == alone.class_names[alone.labels[row]]
    table = np.array([[row["dark"], row["light"]] for row in rows.values()], np.float64)
    table /= table.sum(axis=1, keepdims=True)  # which float32 rounds
    truth = [row["label"] for row in rows.values()]
    assert log_loss(truth, table) == pytest.approx(trained.evaluation.loss, abs=1e-6)
    assert roc_auc_score([label == "light" for label in truth], table[:, 1]) == roc_auc_score(
        labels, trained.evaluation.probabilities[:, 1]
    )
    assert [record["images"] for record in whole.records("fold")] == [10, 10, 10]


def test_the_report_and_a_comparison_have_the_images_and_epochs_of_the_folds(trained: TrainResult) -> None:
    whole = Run(trained.run)
    rows = dict(training(whole, None, whole.open_data().splits, "")["rows"])
    assert rows["Images"] == "30 in 3 folds"
    assert rows["Training"].startswith("2 epochs in each fold, on average, batches of 4")
    compared = RunComparison.of([whole, whole.members[0]])
    assert [run["epochs"] for run in compared.to_dict()["runs"]] == [2, 2]
    assert [run.progress for run in compared.runs] == ["2", "2"]


def test_the_model_predicts_and_is_not_measured_on_what_it_has_seen(trained, photos: Path) -> None:
    model = from_pretrained(trained.run)
    assert isinstance(model, Ensemble)
    picture = photos / "light" / "003.png"

    def probabilities(ref: Path) -> np.ndarray:
        engine = open_engine(ref)
        return engine.probabilities(torch.from_numpy(engine.pixels(picture))[None])[0].numpy()

    alone = [probabilities(member.path) for member in Run(trained.run).members]
    factor = float(model.sharpness[0])
    mean = ClassIndices.sharpened(np.mean(alone, axis=0)[None], factor)[0]
    np.testing.assert_allclose(probabilities(trained.run), mean, atol=1e-4)
    with pytest.raises(UserError, match=r"have seen all images between them.*set data"):
        evaluate(trained.run)
    assert evaluate(trained.run, photos).trained_on == 30


def test_a_stopped_training_goes_on_to_the_same_model(trained, photos, tmp_path) -> None:
    with pytest.raises(Interrupted) as stop, signalled(at=3):
        run(photos, tmp_path / "run", lr=3e-3)
    assert stop.value.command == f"vitascope train --resume {tmp_path / 'run'}"
    assert not Run(tmp_path / "run").finished
    with undrawn():
        resumed = resume(tmp_path / "run")
    state = trained.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in resumed.model.state_dict().items())
    with pytest.raises(UserError, match="its runs are done"):
        resume(tmp_path / "run", epochs=9)


def test_a_run_that_was_killed_before_its_figures_is_drawn_when_resumed(photos, tmp_path: Path) -> None:
    drawn: list[str] = []

    def killed(run: Run, **_: object) -> Path:
        raise KeyboardInterrupt

    def written(run: Run, **_: object) -> Path:
        drawn.append(run.name)
        run.report.touch()
        return run.report

    with undrawn(), pytest.MonkeyPatch.context() as monkeypatch:  # undone before `undrawn` is
        monkeypatch.setattr(write, "write_report", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(photos, run=str(tmp_path / "run"), folds=3, epochs=1))
        member = Run(tmp_path / "run").members[0]
        assert member.finished
        with pytest.raises(UserError, match=f"`vitascope report {member.path}` draws its figures"):
            resume(member.path)
        monkeypatch.setattr(write, "write_report", written)
        for place in (figures, write):
            monkeypatch.setattr(
                place, "draw_figures", lambda run, *_: drawn.append(f"figures {run.name}") or {}
            )
        resume(tmp_path / "run")
    assert drawn == [f"{what}{run}" for run in ("1", "2", "3", "run") for what in ("figures ", "")]


def test_minutes_too_short_for_a_fold_are_those_of_all_and_leave_no_folder(photos, tmp_path) -> None:
    with pytest.raises(UserError, match=r"minutes=3e-05, shared by 3 folds, is too short"):
        train(tiny_config(photos, run=str(tmp_path / "run"), folds=3, minutes=3e-5))
    assert not (tmp_path / "run").exists()


def test_images_that_change_between_the_runs_are_noticed(photos: Path, tmp_path: Path) -> None:
    data = shutil.copytree(photos, tmp_path / "photos")
    with pytest.raises(Interrupted), signalled(at=3):
        run(data, tmp_path / "run")
    (data / "dark" / "004.png").unlink()
    with pytest.raises(UserError, match=r"cannot be resumed: .*1 missing"):
        resume(tmp_path / "run")


def test_the_table_has_unknown_labels_and_no_formulas_and_copies_are_said_beside_the_result(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, pictures = ["image,=SUM(A1),light,fold"], sorted(photos.rglob("*.png"))
    copy = shutil.copy(pictures[-2], tmp_path / "copy.png")
    for number, path in enumerate([*pictures, copy]):
        light = int(number >= 15)
        lines.append(f"{path},{1 - light},{light if number % 5 else -1},={number % 3}")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    result = run(tmp_path / "t.csv", tmp_path / "run", epochs=1)
    with open(result.run / "out_of_fold.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["image", "fold", "label", "prediction", "unknown", "'=SUM(A1)", "light"]
    assert {row["fold"] for row in rows} == {"'=0", "'=1", "'=2"}
    assert sum(row["unknown"] == "light" for row in rows) == 7
    printed = capsys.readouterr().out
    assert "2 images with a copy in another fold" in printed
    assert "fold   3 of 3: =2" in printed
    assert Run(result.run).records("out_of_fold")[-1]["copies_across"] == 2
    thresholds = result.model.config.thresholds
    for row in rows:
        predicted = row["prediction"].split(";")
        assert ("light" in predicted) == (float(row["light"]) >= thresholds[1])
        assert not any(cell.startswith("=") for cell in row.values())


def test_images_of_several_classes_and_test_images_of_their_own(tmp_path: Path) -> None:
    table = write_table(tmp_path / "several")
    lines = table.read_text().splitlines()
    rows = [f"{line},{'test' if n % 5 == 0 else 'train'}" for n, line in enumerate(lines[1:])]
    table.write_text("\n".join([f"{lines[0]},split", *rows]) + "\n")
    result = run(table, tmp_path / "run", epochs=1)
    assert (result.evaluation.split, result.evaluation.score.total) == ("test", 12)
    assert Run(result.run).records("out_of_fold")[-1]["images"] == 48
    assert len(result.model.config.thresholds) == 3
    assert evaluate(result.run).score.total == 12


def test_folds_that_cannot_be_are_one_line(photos: Path) -> None:
    for options, message in (
        ({"folds": 1}, "folds"),
        ({"folds": 40}, "folds"),
        ({"folds": 16}, "class 'dark' has 15 images; .*; 16 folds need one each, so at least 16"),
        ({"fold": 0}, "fold=0 is not one of folds=None"),
        ({"folds": 2, "run": "s3://bucket/run"}, "needs a run folder on this machine"),
    ):
        with pytest.raises(UserError, match=message) as rejected:
            train(tiny_config(photos, **options))
        assert "\n" not in str(rejected.value)
