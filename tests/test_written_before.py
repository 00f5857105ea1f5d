"""Runs, models, exported files and predictions that earlier versions wrote open.

See `written_by_0_1_0/` and `written_with_options/`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import vitascope as vs
from tests.training import undrawn
from vitascope.cli import main

WRITTEN = Path(__file__).parent / "written_by_0_1_0"
WITH_OPTIONS = Path(__file__).parent / "written_with_options"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a copy of the files, which commands may change."""
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "written"))
    monkeypatch.chdir(folder)
    return folder


def records(run: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def test_unfinished_run_resumes_to_its_planned_end(here: Path) -> None:
    before = records("unfinished")
    with undrawn():
        assert main(["train", "--resume", "unfinished", "--checkpoint-seconds", "300"]) == 0
    after = records("unfinished")
    assert after[: len(before)] == before
    assert [line["epoch"] for line in after if line["kind"] == "epoch"] == [1, 2, 3]
    assert after[-1]["kind"] == "test"
    assert after[-1]["step"] == 63
    assert vs.evaluate("unfinished").accuracy == after[-1]["accuracy"]


def test_run_by_time_with_options_that_have_moved_resumes(here: Path) -> None:
    with undrawn():
        assert main(["train", "--resume", "minutes", "--checkpoint-seconds", "300"]) == 0
    last = records("minutes")[-1]
    assert last["kind"] == "test"
    assert last["step"] > 7  # type: ignore[operator]


def test_finished_run_evaluates_to_its_recorded_result(here: Path) -> None:
    recorded = records("finished")[-1]
    evaluation = vs.evaluate("finished")
    assert evaluation.changes is not None
    assert not any(evaluation.changes.values())
    # Another processor may round a picture between two classes to the other one.
    assert abs(evaluation.summary()["correct"] - int(recorded["correct"])) <= 2  # type: ignore[call-overload]
    assert evaluation.loss == pytest.approx(recorded["loss"], abs=1e-3)


def test_finished_run_is_reported_explained_and_compared(here: Path) -> None:
    assert main(["report", "finished"]) == 0
    assert (here / "finished" / "report.html").stat().st_size > 10_000
    explained = ["explain", "finished", "images/0.png", "--method", "attention", "--out", "attention.png"]
    assert main(explained) == 0
    assert (here / "attention.png").exists()
    assert main(["compare", "finished", "unfinished", "--out", "compared.html"]) == 0
    assert "finished" in (here / "compared.html").read_text()


def test_finished_run_is_repeated_by_its_config(here: Path) -> None:
    command = ["train", "--config", "finished/config.yaml", "--run", "again"]
    with undrawn():
        assert main(command) == 0
    ours, theirs = records("again"), records("finished")
    assert [(line["kind"], line["step"]) for line in ours] == [
        (line["kind"], line["step"]) for line in theirs
    ]
    losses = [[line["val_loss"] for line in lines if line["kind"] == "epoch"] for lines in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


def test_pretrained_model_starts_a_run(here: Path) -> None:
    small = ["--image-size", "8", "--patch-size", "4", "--steps", "2", "--run", "tuned"]
    with undrawn():
        assert main(["train", "--data", "digits", "--weights", "pretrained", *small]) == 0
    assert records("tuned")[-1]["kind"] == "test"


def test_model_folder_gives_the_same_logits() -> None:
    model = vs.from_pretrained(WRITTEN / "options")
    with np.load(WRITTEN / "options.npz") as stored, torch.no_grad():
        logits = model(torch.from_numpy(stored["pixels"])).numpy()
        np.testing.assert_allclose(logits, stored["logits"], rtol=1e-4, atol=1e-5)
    assert model.config.class_names == ("one", "two", "three")


def test_exported_file_predicts_and_its_predictions_are_resumed(here: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (vitascope[onnx])")
    every = (here / "predictions.jsonl").read_text().splitlines()
    (here / "predictions.jsonl").write_text("\n".join(every[:2]) + "\n")
    images = [f"images/{number}.png" for number in range(4)]
    command = ["predict", "digits.onnx", *images, "--top-k", "2", "--out", "predictions.jsonl", "--resume"]
    assert main(command) == 0
    resumed = (here / "predictions.jsonl").read_text().splitlines()
    assert resumed[:2] == every[:2]
    for line, stored in zip(map(json.loads, resumed), map(json.loads, every), strict=True):
        assert line["image"] == stored["image"]
        scores = [{one["label"]: one["score"] for one in row["predictions"]} for row in (line, stored)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.fixture
def with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a copy of the run whose model options are texts."""
    folder = Path(shutil.copytree(WITH_OPTIONS, tmp_path / "written"))
    monkeypatch.chdir(folder)
    return folder


TEXTS = {"init": "mimetic", "layer_scale": 0.1, "position_prefix": False}
"""The model options of this run."""


def test_run_with_texts_as_model_options_is_resumed_reported_and_compared(with_options: Path) -> None:
    assert vs.Run.open("unfinished").config["model_options"] == TEXTS
    again = ["train", "--config", "unfinished/config.yaml", "--run"]
    with undrawn():
        assert main(["train", "--resume", "unfinished"]) == 0
        assert main([*again, "same"]) == 0
        assert main([*again, "other", "--model-options", "init=paper"]) == 0
    assert records("unfinished")[-1]["step"] == 6
    assert vs.from_pretrained("unfinished").config.block.layer_scale == 0.1
    assert vs.compare(["unfinished", "same"]).options == {}
    assert vs.compare(["unfinished", "other"]).options == {"model_options": (TEXTS, {"init": "paper"})}
    assert main(["report", "unfinished"]) == 0
    report = (with_options / "unfinished" / "report.html").read_text()
    assert "init=mimetic, layer_scale=0.1, position_prefix=false" in report


def test_run_with_texts_as_model_options_resumes_without_its_plan(with_options: Path) -> None:
    Path("unfinished/plan.json").unlink()
    same = [f"{name}={json.dumps(value)}" for name, value in reversed(TEXTS.items()) if name != "init"]
    with undrawn():
        resumed = ["train", "--resume", "unfinished", "--model-options", *same, "init=mimetic"]
        assert main(resumed) == 0
    vs.Run.open("unfinished").record_options(workers=0)
    assert "options:" not in (with_options / "unfinished" / "config.yaml").read_text().splitlines()
    assert vs.TrainConfig.from_yaml("unfinished/config.yaml").architecture.model_options == TEXTS
