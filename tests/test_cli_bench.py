"""`vitascope bench`: its output and its errors."""

import json
from pathlib import Path

import pytest

from tests.model import small_model
from vitascope.cli import main
from vitascope.predict import throughput
from vitascope.weights.loading import save_pretrained


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small matrix products, because large ones take long, and bf16 on any machine."""
    monkeypatch.setattr(throughput, "CPU_PRODUCT", 64)
    monkeypatch.setattr(throughput, "has_bf16", lambda device: True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_pretrained(small_model(), tmp_path_factory.mktemp("model") / "small"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["bench", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_bench_prints_a_line_for_each_batch_and_precision(folder: str, capsys) -> None:
    status, out, _ = run(
        capsys, folder, "--batch-sizes", "1", "2", "2", "--seconds", "0.01", "--device", "cpu"
    )
    assert status == 0
    first, machine, _, header, *rows, _, ceiling = out.splitlines()
    assert first == f"{folder}: 3 blocks of width 16, 32x32 pixels in patches of 8, on cpu"
    assert "threads on" in machine
    assert header.split()[:3] == ["batch", "precision", "images/s"]
    assert [row.split()[:2] for row in rows] == [[size, name] for size in "12" for name in ("fp32", "bf16")]
    assert [row.endswith("<- auto") for row in rows] == [True, False, True, False]  # too small for bf16
    assert ceiling.startswith("The ceiling: GFLOP per second of this machine's matrix products: ")
    assert "in fp32" in ceiling
    assert "in bf16" in ceiling


def test_bench_prints_json(folder: str, capsys) -> None:
    status, out, _ = run(
        capsys, folder, "--precisions", "fp32", "--batch-sizes", "3", "--seconds", "0.01", "--json"
    )
    found = json.loads(out)
    (row,) = found["rows"]
    assert status == 0
    assert (found["model"], row["batch_size"], row["precision"]) == (folder, 3, "fp32")
    assert row["slowest"] <= row["images_per_second"] <= row["fastest"]
    assert row["steps"] >= 1
    assert found["left_out"] == []
    assert row["share_of_ceiling"] > 0
    assert found["threads"] >= 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--seconds", "0"], "--seconds must be above 0, not 0"),
        (["--batch-sizes", "0"], "a batch has at least 1 image, not 0"),
        (["--batch-sizes"], "nothing to measure"),
        (["--precisions", "int8"], "int8"),
        (["--device", "nonsense"], "nonsense"),
    ],
)
def test_bench_rejects_invalid_options(folder: str, words: list[str], complaint: str, capsys) -> None:
    status, out, err = run(capsys, folder, *words)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_bench_names_a_missing_model(tmp_path: Path, capsys) -> None:
    status, _, err = run(capsys, str(tmp_path / "none"))
    assert status == 2
    assert "none" in err
