"""The command line in tests: a folder with data and a run, exit statuses, the line of an error."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vitascope.cli import main

SHAPE = ["--image-size", "16", "--patch-size", "8", "--embed-dim", "16", "--depth", "1", "--num-heads", "2"]
SHORT = [
    "--recipe",
    "base",
    "--epochs",
    "1",
    "--batch-size",
    "8",
    "--precision",
    "fp32",
    "--device",
    "cpu",
    "--workers",
    "0",
]


def colours(root: Path, classes: dict[str, tuple[int, int, int]], count: int = 10) -> Path:
    """Folders of pictures, each class in one colour under a little noise."""
    draw = np.random.default_rng(0)
    for name, colour in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.clip(np.array(colour) + draw.integers(-30, 31, (16, 16, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{number}.png")
    return root


def write_place(root: Path) -> Path:
    """Write data and train a tiny model on them, whose run has what the command printed."""
    colours(root / "data", {"red": (200, 40, 40), "blue": (40, 40, 200)})
    colours(root / "other", {"green": (40, 200, 40), "grey": (120, 120, 120), "white": (220, 220, 220)})
    (root / "broken.jpg").write_bytes(b"not a picture")
    with contextlib.chdir(root), contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["train", "--data", "data", "--run", "runs/tiny", *SHAPE, *SHORT]) == 0
    (root / "printed.txt").write_text(out.getvalue(), encoding="utf-8")
    return root


def place_at(root: Path) -> SimpleNamespace:
    """The folder of `write_place`, its run, what it printed, and a picture."""
    run, picture = root / "runs" / "tiny", root / "data" / "red" / "0.png"
    printed = (root / "printed.txt").read_text(encoding="utf-8")
    return SimpleNamespace(root=root, run=run, picture=picture, printed=printed)


@pytest.fixture(scope="session")
def _trained_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `place` is a copy of."""
    from tests.training import undrawn  # imports torch

    with undrawn():
        return write_place(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def place(_trained_place: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder with data and a finished run of a tiny model, without figures and report."""
    root = tmp_path_factory.mktemp("place")
    shutil.copytree(_trained_place, root, dirs_exist_ok=True)
    return place_at(root)


@pytest.fixture
def here(place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The same folder, as the working directory."""
    monkeypatch.chdir(place.root)
    return place


def exit_status(*argv: object) -> int:
    """The exit status of a command, returned or raised."""
    try:
        return main([*map(str, argv)])
    except SystemExit as stop:
        return int(stop.code or 0)


def error_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error message of a rejected request: one line, status 2, and at most the next command after it."""
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line, *after = err.splitlines(keepends=True)
    assert line.startswith("vitascope: error: ")
    assert line.endswith("\n")
    assert [each.split()[0] for each in after] in ([], ["next"])
    return line
