"""`vitascope similar`: its table, picture, exit status and errors."""

import json
from pathlib import Path

import pytest

from tests.analysis.explain.figures import coarse
from tests.cli import error_line, exit_status

QUICK = ["--device", "cpu", "--workers", "0", "--precision", "fp32"]
PICTURE = "data/red/0.png"

pytestmark = pytest.mark.usefixtures("own_cache")


def similar(*argv: object) -> int:
    return exit_status("similar", *argv, *QUICK)


def test_table_has_rank_similarity_label_and_image(here, capsys) -> None:
    assert similar("runs/tiny", PICTURE, "data", "-k", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "similarity", "label", "image"]
    assert lines[1].split() == ["1", "1.0000", "red", PICTURE]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert lines[4] == "20 images compared, 19 of them computed now"  # the picture is computed before
    assert len(lines) == 5
    assert similar("runs/tiny", PICTURE, "data") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 12 + 1
    assert lines[-1] == "20 images compared, 0 of them computed now"


def test_table_leaves_out_what_the_data_lack(here, tmp_path, capsys) -> None:
    for name in ("one.png", "two\n.png"):
        (tmp_path / name).write_bytes(here.picture.read_bytes())
        Path(tmp_path / "split" / "train" / "red").mkdir(parents=True, exist_ok=True)
        (tmp_path / "split" / "train" / "red" / name).write_bytes(here.picture.read_bytes())
    assert similar("runs/tiny", PICTURE, tmp_path / "split") == 0
    assert capsys.readouterr().out.splitlines()[0].split() == [
        "rank",
        "similarity",
        "label",
        "split",
        "image",
    ]
    (tmp_path / "flat").mkdir()
    for name in ("one.png", "two\n.png"):
        (tmp_path / name).rename(tmp_path / "flat" / name)
    assert similar("runs/tiny", PICTURE, tmp_path / "flat") == 0
    header, *rows, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["rank", "similarity", "image"]
    assert len(rows) == 2  # a line break in a name breaks no row


def test_json_has_every_value(here, tmp_path, capsys) -> None:
    out = tmp_path / "found.png"
    with coarse():
        assert similar("runs/tiny", PICTURE, "data", "-k", "2", "--json", "--out", out) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found.pop("nearest")
    counts = {"images": 20, "unreadable": 0, "computed": 19}
    assert found == {"picture": PICTURE, **counts, "out": str(out)}
    assert first.pop("index") in range(20)
    assert first == {"rank": 1, "similarity": 1.0, "label": "red", "split": "all", "image": PICTURE}
    assert second["rank"] == 2
    assert out.is_file()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["data", PICTURE, "runs/tiny"], "runs/tiny is a model, and no images: the model comes first"),
        (["runs/tiny", "data", PICTURE], "data is a folder, and no picture: the model comes first"),
        ([PICTURE, "data/red/1.png", "data"], f"{PICTURE}: not a checkpoint"),
        (["runs/tiny", "nowhere.png", "data"], "nowhere.png: no such file"),
        (["runs/tiny", "broken.jpg", "data"], "broken.jpg: not a picture"),
        (["runs/tiny", PICTURE], "DATA"),
        (["runs/tiny", PICTURE, "nowhere"], "nowhere: no such folder"),
        (["runs/tiny", PICTURE, "nowhere.npy"], "nowhere.npy: no such file"),
        (["runs/tiny", PICTURE, "data", "-k", "0"], "k must be at least 1, not 0"),
        (["runs/tiny", PICTURE, "data", "-k", "few"], "-k"),
        (["runs/tiny", PICTURE, "data", "--layer", "4"], "no layer 4: the model has 1, 0 to 0"),
        (["runs/tiny", PICTURE, "data", "--pool", "max"], "invalid choice 'max' for argument '--pool'"),
        (["runs/tiny", PICTURE, "data", "--columns", "label=x"], "columns is about a table"),
        (["runs/tiny", PICTURE, "data", "--out", "f.jpg"], "the name has to end in .png"),
        (["runs/tiny", PICTURE, "other", "--out", PICTURE], "is the PICTURE, which would be lost"),
        (["runs/tiny", PICTURE, "data", "--out", "data/f.png"], "would be an image of data; choose another"),
    ],
)
def test_bad_requests_are_one_line(here, argv: list[str], reason: str, capsys) -> None:
    before = here.picture.read_bytes()
    assert reason in error_line(["similar", *argv, *QUICK], capsys)
    assert not list(here.root.rglob("f.*"))
    assert here.picture.read_bytes() == before
