"""`vitascope next`: the pictures to label next, of a body and of a run."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli import exit_status
from tests.data import write_picture
from vitascope.analysis.labelling import order
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.weights.loading import from_pretrained

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def pool(place: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without labels: pictures of noise, a copy of one, a broken one, and one of the run."""
    monkeypatch.chdir(place.root)
    for number in range(6):
        write_picture(tmp_path / "pool" / f"{number}.png", size=(40, 40), seed=number)
    shutil.copy(tmp_path / "pool" / "0.png", tmp_path / "pool" / "copy.png")
    shutil.copy("data/red/0.png", tmp_path / "pool" / "labelled.png")
    (tmp_path / "pool" / "broken.png").write_bytes(b"none")
    return tmp_path / "pool"


def names(printed: str) -> list[str]:
    return [Path(line.split()[0]).name for line in printed.splitlines()[1:-1]]


def test_body_offers_every_picture_but_copies_with_a_reason(pool: Path, capsys) -> None:
    assert exit_status("next", "cifar10", str(pool)) == 1  # one picture cannot be read
    printed = capsys.readouterr()
    assert len(names(printed.out)) == 7
    assert len({"0.png", "copy.png"} & set(names(printed.out))) == 1
    assert "typical of" in printed.out
    assert printed.out.splitlines()[-1] == "7 of 8 images"
    assert "broken.png" in printed.err


def test_run_offers_what_it_is_unsure_of_and_none_of_its_images(pool: Path, monkeypatch, capsys) -> None:
    (pool / "broken.png").unlink()
    assert exit_status("next", "runs/tiny", str(pool), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["labelled"], len(found["next"])) == (8, 1, 6)
    assert "labelled.png" not in {Path(row["image"]).name for row in found["next"]}
    assert [len(row["copies"]) for row in found["next"]].count(1) == 1
    # After 50 labels it offers what the run is unsure of, by the probabilities that it predicts.
    monkeypatch.setattr(order, "FEW", 5)
    assert exit_status("next", "runs/tiny", str(pool), "--json") == 0
    row = json.loads(capsys.readouterr().out)["next"][0]
    engine = TorchEngine(from_pretrained("runs/tiny"), precision="fp32", device="cpu")
    (probabilities,) = engine.predict([engine.pixels(row["image"])]).probabilities
    high, low = probabilities.topk(2).values.tolist()
    assert row["reason"].endswith(f", {high:.0%} to {low:.0%}")
    assert exit_status("next", "runs/tiny", "data") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of ")


def test_paths_and_tasks_are_written(pool: Path, tmp_path: Path, capsys) -> None:
    (pool / "broken.png").unlink()
    for file in ("list.txt", "tasks.json"):
        assert exit_status("next", "cifar10", str(pool), "--count", "3", "--out", str(tmp_path / file)) == 0
    printed = names(capsys.readouterr().out)[:3]
    paths = (tmp_path / "list.txt").read_text().splitlines()
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    assert [Path(path).name for path in paths] == printed
    assert [task["data"]["image"] for task in tasks] == paths
    assert all(task["data"]["reason"].startswith("typical of") for task in tasks)
    assert exit_status("next", "cifar10", str(pool), "--out", str(tmp_path / "list.csv")) == 2
    assert "FILE.txt" in capsys.readouterr().err


def test_path_with_a_line_break_is_a_task_only(tmp_path: Path, capsys) -> None:
    write_picture(tmp_path / "pool" / "a\nb.png")
    command = ("next", "cifar10", str(tmp_path / "pool"), "--out")
    assert exit_status(*command, str(tmp_path / "list.txt")) == 2
    assert "line break" in capsys.readouterr().err
    assert exit_status(*command, str(tmp_path / "tasks.json")) == 0
