"""`vitascope export --int8`: its files, its output and its errors."""

import re
from pathlib import Path

import pytest

import vitascope as vs
from tests.data import write_tree
from tests.exported import NAMES, exportable_model, write_copies
from vitascope.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return vs.save_pretrained(exportable_model(), tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of class folders."""
    return write_tree(tmp_path_factory.mktemp("data"), dict.fromkeys(NAMES, 10), size=(32, 32))


def test_int8_file_is_written_and_its_comparison_printed(
    model, data, exported_file, tmp_path, capsys, monkeypatch
) -> None:
    pytest.importorskip("nncf", reason="NNCF is not installed (vitascope[openvino])")
    write_copies(monkeypatch, exported_file(".xml"))
    out = tmp_path / "small.xml"
    words = ["--format", "openvino", "--data", str(data), "--out", str(out), "--max-drop", "1"]
    assert main(["export", str(model), "--int8", *words, "--images", "7"]) == 0
    printed = capsys.readouterr().out
    files = [out, out.with_suffix(".bin")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert printed.startswith("".join(f"{file}  {file.stat().st_size:,} bytes\n" for file in files))
    assert "5 layers in int8; ranges from 7 images" in printed
    row = r"^ *(fp32|int8) +[\d.]+% +[\d.]+% to [\d.]+% +([\d,]+) +[\d,.]+$"
    rows = re.findall(row, printed, re.MULTILINE)
    assert [name for name, _ in rows] == ["fp32", "int8"]
    assert rows[1][1] == f"{sum(file.stat().st_size for file in files):,}"
    loss = (
        r"int8 loses -?[\d.]+% of the accuracy, 95% interval -[\d.]+% to [\d.]+%, on 10 test and val images"
    )
    assert re.search(loss, printed)
    assert re.search(r"the same prediction for \d+ of 10, ", printed)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--int8"], "is not a run.*give data"),
        (["--int8", "--format", "torch", "--data", "digits"], "onnx, openvino"),
        (["--calibration", "digits"], "--calibration needs --int8"),
        (["--int8", "--features"], "--features is for files in float32, .*: omit one"),
    ],
)
def test_invalid_request_is_rejected_in_one_line(words, complaint, model, tmp_path, capsys) -> None:
    assert main(["export", str(model), "--out", str(tmp_path / "a.onnx"), *words]) == 2
    err = capsys.readouterr().err
    assert re.search(complaint, err)
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
