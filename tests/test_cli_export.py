"""`vitascope export`: its files, its output and the program that it prints."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitascope as vs
from tests.data import noise
from tests.exported import NAMES, exportable_model, write_copies
from vitascope.cli import main


def exported(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Save a small model, export it and return the printed text."""
    vs.save_pretrained(exportable_model(), folder / "small")
    Image.fromarray(noise(50, 40)).save(folder / "cat.jpg")
    assert main(["export", "small", "--data", "cat.jpg", *words]) == 0
    return capsys.readouterr().out


def answer_of(script: str, folder: Path) -> str:
    """The output of the printed program."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=280)
    return ended.stdout.strip()


def predicted(capsys: pytest.CaptureFixture[str], model: str) -> str:
    """The label that `vitascope predict` prints."""
    assert main(["predict", model, "cat.jpg", "--precision", "fp32", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    return str(row["predictions"][0]["label"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("format", "library", "names"),
    [("onnx", "onnxscript", ["small.onnx"]), ("openvino", "openvino", ["small.xml", "small.bin"])],
)
def test_file_is_written_and_the_printed_program_prints_the_label_of_predict(
    format: str, library: str, names: list[str], folder: Path, exported_file, capsys, monkeypatch
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    write_copies(monkeypatch, exported_file(Path(names[0]).suffix))
    printed = exported(folder, capsys, "--format", format)
    text, script = printed.split("To use it without vitascope:\n")
    files = [f"{name}  {(folder / name).stat().st_size:,} bytes" for name in names]
    *first, takes, gives, compared, _ = text.splitlines()
    assert first == files
    assert takes == "takes pictures of any size, uint8 (batch, height, width, 3)"
    assert gives == "returns probabilities and logits, float32 (batch, 5)"
    assert compared.startswith("compared with the model on images of cat.jpg: same top-1 class for 1 of 1 ")
    label = answer_of(script, folder)
    assert label in NAMES
    assert label == predicted(capsys, "small")
    assert label == predicted(capsys, names[0])
    before = (folder / names[0]).read_bytes()
    assert main(["export", "small", "--format", format]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert (folder / names[0]).read_bytes() == before


def test_file_of_features_is_for_embed_alone(folder: Path, capsys, monkeypatch) -> None:
    for library in ("onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason=f"{library} is not installed (vitascope[onnx])")
    monkeypatch.setenv("VITASCOPE_CACHE", str(folder / "cache"))
    printed = exported(folder, capsys, "--features")
    text, script = printed.split("To use it without vitascope:\n")
    assert text.startswith("small-features.onnx  ")
    assert (
        "returns features, float32 (batch, 16)\ncompared with the model on images of cat.jpg: features"
        in text
    )
    assert answer_of(script, folder) == "(1, 16)"
    assert main(["embed", "small-features.onnx", "cat.jpg", "--out", "f.npz"]) == 0
    assert main(["embed", "small", "cat.jpg", "--out", "own.npz", "--precision", "fp32"]) == 0
    found, own = (vs.Embeddings.load(name) for name in ("f.npz", "own.npz"))
    np.testing.assert_allclose(found.features, own.features, atol=5e-3)
    found.check_model("small")
    capsys.readouterr()
    for words in (
        ["predict", "small-features.onnx", "cat.jpg"],
        ["evaluate", "small-features.onnx", "--data", "."],
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "no head for classes: it returns features" in err
        assert err.count("\n") == 1
    assert main(["embed", "small-features.onnx", "cat.jpg", "--out", "g.npz", "--layer", "0"]) == 2
    assert "an exported model has one representation: leave out layer and pool" in capsys.readouterr().err
