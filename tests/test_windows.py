"""The commands without what Windows lacks: see `pretended_windows`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli import SHAPE

RUN = """
import json, sys
import tests.pretended_windows
from vitascope.cli import main
print(json.dumps([main(command) for command in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for level, name in enumerate(("cat", "döner→")):
        (folder / name).mkdir()
        for number in range(12):
            pixels = random.integers(0, 100, (16, 16, 3)) + 100 * level
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


def run_there(commands: list[list[str]], folder: Path) -> tuple[list[int], str]:
    """The exit statuses of commands, run one after the other on the pretended system, and what they print."""
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)], cwd=folder, env=environment, encoding="cp1252",
        capture_output=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    *lines, statuses = done.stdout.splitlines()
    return json.loads(statuses), "\n".join([*lines, done.stderr])


def test_commands_work_with_what_windows_has(photos: Path, tmp_path: Path) -> None:
    data = str(photos)
    training = [
        "train",
        "--data",
        data,
        "--recipe",
        "base",
        *SHAPE,
        "--epochs",
        "1",
        "--workers",
        "1",
        "--run",
        "run",
    ]
    commands = [
        training,
        ["predict", "run", data, "--out", "out.jsonl", "--workers", "1"],
        ["evaluate", "run"],
        ["explain", "run", f"{data}/cat/1.png", "--out", "cat.png"],
        ["embed", "run", data, "--out", "features.npz"],
        ["probe", "run", "--data", data, "--run", "probe"],
        ["export", "run", "--format", "torch"],
        ["page", "run", "--unproved"],
    ]
    statuses, text = run_there(commands, tmp_path)
    assert statuses == [0] * len(commands), text
    assert "d\xf6ner\\u2192: 12" in text  # the code page has no arrow
    assert len((tmp_path / "out.jsonl").read_text("utf-8").splitlines()) == 24


def test_what_needs_another_system_says_so(photos: Path, tmp_path: Path) -> None:
    commands = {
        "WSL": ["serve"],
        "leave it out": ["predict", "cifar10", str(photos), "--out", "out.jsonl", "--engine", "ray"],
    }
    statuses, text = run_there(list(commands.values()), tmp_path)
    assert statuses == [2, 2], text
    for line, way_out in zip(text.splitlines(), commands, strict=True):
        assert "Linux" in line
        assert "macOS" in line
        assert way_out in line
