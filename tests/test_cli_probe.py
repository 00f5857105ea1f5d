"""`vitascope probe`: its output, exit status and errors."""

import json
from pathlib import Path

import pytest

from tests.cli import error_line, exit_status
from vitascope.analysis.probing import probe as module
from vitascope.cli import main
from vitascope.training.run.run import Run

QUICK = ["--device", "cpu", "--workers", "0", "--precision", "fp32"]


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and no report and page; tests/probing tests these."""
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "write_report", lambda run, **_: run.report)
    monkeypatch.setattr(module, "write_page", lambda run, *_: run.probe)


def probe(*argv: object) -> int:
    return exit_status("probe", *argv, *QUICK)


def test_table_forecast_and_paths_are_printed(here, tmp_path, capsys) -> None:
    run = tmp_path / "probe"
    assert probe("runs/tiny", "cifar10", "--data", "data", "--run", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data    18 images to fit and select on, 2 to test on, 2 classes"
    assert lines[1].startswith("body    tiny: ")
    assert lines[2].startswith("body    cifar10: 2 representations of 20 images, 20 computed now, ")
    head = lines[4].split()
    assert head[:4] == ["body", "layer", "pooling", "classifier"]
    table = lines[5 : lines.index("", 5)]
    assert len(table) == 13
    assert table[-1].startswith("and ")
    words = {line.split()[0]: line for line in lines[lines.index("", 5) + 1 :]}
    saved = {"head"} if "nearest" in words["best"] else set()  # a saved model has a linear head
    assert set(words) == {"best", "test", "labels", "answers", "model", "probe", "report"} | saved
    assert lines[-1] == f"report  {run}/report.html"
    assert Run.open(run).finished
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0


def test_json_has_every_classifier(here, tmp_path, capsys) -> None:
    argv = ["--data", "data", "--run", tmp_path / "p", "--layers", "-1", "--pools", "mean", "--json"]
    assert probe("runs/tiny", *argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == str(tmp_path / "p")
    assert len(found["scores"]) == 4
    assert {each["layer"] for each in found["scores"]} == {"0"}
    assert {each["pooling"] for each in found["scores"]} == {"mean"}
    assert all(low <= value <= high for each in found["scores"] for value, low, high in [each["test"]])


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["data", "--data", "runs/tiny"], "runs/tiny is a model, and no images"),
        (["data", "--data", "other"], "data: not a model"),
        (["runs/tiny"], "--data"),
        (["--data", "data"], "MODEL"),
        (["runs/tiny", "--data", "nowhere"], "nowhere"),
        (["runs/tiny", "--data", "data", "--layers", "1"], "tiny: "),
        (["runs/tiny", "--data", "data", "--pools", "map"], "--pools"),
        (["runs/tiny", "--data", "data", "--run", "data"], "data exists, and a run is never overwritten"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], reason: str, here, capsys) -> None:
    assert reason in error_line(["probe", *argv], capsys)
