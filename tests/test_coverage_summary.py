"""The summary of line coverage at the end of `make test`."""

from pathlib import Path
from types import SimpleNamespace

from tests.coverage_summary import PACKAGE, summary


def analysis(path: str) -> tuple[str, list[int], list[int], list[int], str]:
    """Ten lines per file, of which all ran; of models/vit.py none."""
    lines = list(range(10))
    return path, lines, [], lines * (Path(path) == PACKAGE / "models" / "vit.py"), ""


def test_every_folder_has_its_share_and_low_ones_are_named(monkeypatch) -> None:
    lines = list(summary(SimpleNamespace(analysis2=analysis)))
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {line.split()[0] for line in lines} == folders | {"root"}
    assert [line.split()[0] for line in lines if "100.0%" not in line] == ["models"]
    assert not any("below" in line for line in lines)
    monkeypatch.setattr("tests.coverage_summary.LOW", 0.995)
    assert [line for line in summary(SimpleNamespace(analysis2=analysis)) if line.endswith(", below 100%")]
