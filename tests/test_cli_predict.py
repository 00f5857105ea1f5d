"""`vitascope predict` on folders and into files: its output, exit status and `--resume`."""

import contextlib
import csv
import importlib
import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli import error_line, exit_status
from tests.forked import ending, fork
from tests.models import labelling_model, small_model
from vitascope.cli import main
from vitascope.data.rows import parts
from vitascope.data.rows.parts import PartRows, Parts
from vitascope.models.weights.loading import save_pretrained

RUN = ["predict", "runs/tiny"]
QUICK = ["--device", "cpu", "--workers", "1", "--batch-size", "4"]


def status(*argv: str) -> int:
    return exit_status(*RUN, *argv, *QUICK)


def lines(path: Path | str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def images(path: Path | str) -> list[object]:
    return [row["image"] for row in lines(path)]


EVERY = [f"data/{name}/{number}.png" for name in ("blue", "red") for number in range(10)]


def test_folder_is_printed_like_its_pictures(here, capsys) -> None:
    assert status("data/red", "data/blue/3.png") == 0
    out, err = capsys.readouterr()
    note, counts, _ = err.splitlines()
    assert note.endswith("at 1% false alarms need 99 validation images, and the model was calibrated on 2")
    assert counts.startswith("11 images, ")
    shown = [line for line in out.splitlines() if not line.startswith(" ")]
    assert shown == [*EVERY[10:], "data/blue/3.png"]
    assert status(*shown) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("labels", [True, False])
def test_a_table_gets_a_row_per_row_in_its_order(here, capsys, labels: bool) -> None:
    out, order = (
        f"rows-{labels}.jsonl",
        ["data/red/3.png", "data/blue/1.png", "data/red/3.png", "data/blue/0.png"],
    )
    table = ["image,label", *(f"{path},x" for path in order)] if labels else ["image", *order]
    (here.root / "table.csv").write_text("\n".join(table))
    assert status("table.csv", "--out", out) == 0
    assert images(out) == order
    assert f"4 images in {out}, " in (err := capsys.readouterr().err)
    assert err.splitlines()[-2].endswith(("fp32", "bf16"))
    assert status("table.csv", "data/red/0.png") == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert shown == [*order, "data/red/0.png"]
    for method in ("integrated-gradients", "heads", "all"):
        assert f"table.csv is a table, and {method}" in error_line(
            ["explain", "runs/tiny", "table.csv", "--method", method], capsys
        )


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_columns_of_a_table_are_kept_on_request_row_by_row(here, tmp_path, capsys, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (vitascope[parquet])")
    rows = [("3.png", "a", "=x"), ("broken.png", "b", "-1"), ("3.png", "", "y, z")]
    (tmp_path / "t.csv").write_text('img,label,error\n3.png,a,=x\nbroken.png,b,-1\n3.png,,"y, z"\n')
    (tmp_path / "3.png").write_bytes((here.root / "data/red/3.png").read_bytes())
    (tmp_path / "broken.png").write_bytes(b"")
    out, asked = (
        tmp_path / f"o{suffix}",
        [str(tmp_path / "t.csv"), "--columns", "image=img", "--keep-columns"],
    )
    assert status(*asked, "--out", str(out)) == 1
    capsys.readouterr()
    if suffix == ".jsonl":
        found = [(Path(row["image"]).name, *row["table"].values()) for row in lines(out)]
        assert list(lines(out)[0]["table"]) == ["img", "label", "error"]
        kept = out.read_bytes()
        assert "columns kept was" in error_line(
            [*RUN, *asked[:3], "--out", str(out), "--resume", *QUICK], capsys
        )
        assert status(*asked, "--out", str(out), "--resume") == 1
        assert out.read_bytes() == kept
        (tmp_path / "t.csv").write_text("img,label,error\n3.png,a,=x\nbroken.png,b,-1\n3.png,,other\n")
        assert "the column error had other cells; use the same" in error_line(
            [*RUN, *asked, "--out", str(out), "--resume", *QUICK], capsys
        )
    elif suffix == ".csv":
        with open(out, newline="", encoding="utf-8") as file:
            read = list(csv.DictReader(file))
        judged = ["unknown", "set", "familiarity"]
        assert list(read[0]) == ["image", "label", "score", *judged, "img", "label (table)", "error (table)"]
        found = [(Path(row["image"]).name, row["label (table)"], row["error (table)"]) for row in read]
        found = [(name, name, label, cell.removeprefix("'")) for name, label, cell in found]
    else:
        read = importlib.import_module("pyarrow.parquet").read_table(out).to_pylist()
        found = [
            (Path(row["image"]).name, row["img"], row["label (table)"], row["error (table)"]) for row in read
        ]
    assert found == [(row[0], *row) for row in rows]


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (["data", "--keep-columns", "--json"], "--keep-columns is about a table"),
        (["t.csv", "data", "--keep-columns", "--json"], "--keep-columns is about a table"),
        (["t.csv", "--keep-columns"], "--keep-columns needs --out FILE or --json"),
        (["data", "--columns", "image=a"], "--columns is about a table"),
        (["t.csv", "--columns", "label=a"], "predict reads no labels"),
        (["t.csv", "--labels", "one"], "predict reads no labels"),
        (["t.csv"], "no column of image paths among a, b; name it: columns image="),
        (["s3://bucket/t.csv"], "a table in a store"),
    ],
)
def test_what_is_no_request_for_a_table_is_one_line(here, capsys, asked: list[str], line: str) -> None:
    (here.root / "t.csv").write_text("a,b\n1,2\n")
    assert line in error_line([*RUN, *asked], capsys)


def test_labels_above_the_threshold_are_printed_and_none_is_named(here, capsys) -> None:
    model = labelling_model(0.3, 0.9, 0.6, class_names=("ant", "bee", "cat"))
    save_pretrained(model, here.root / "labelling")
    argv = ["predict", "labelling", "data/red/1.png", *QUICK]
    for options, shown in (
        ([], ["bee", "cat"]),
        (["--threshold", "0.2"], ["bee", "cat", "ant"]),
        (["--threshold", "0.2", "--top-k", "1"], ["bee"]),
    ):
        assert main([*argv, *options]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == shown
    assert main([*argv, "--threshold", "0.95"]) == 0
    assert capsys.readouterr().out == (
        "data/red/1.png\n  none of the classes; the most probable one is bee, 90.00%\n"
    )
    assert main([*argv, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["labels"] == ["bee", "cat"]
    assert row["probabilities"].keys() == {"ant", "bee", "cat"}


def test_json_of_a_folder_has_one_line_per_picture_with_the_same_predictions(here, capsys) -> None:
    assert status("data", "--json", "--top-k", "1") == 0
    streamed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status(*EVERY, "--json", "--top-k", "1") == 0
    assert streamed == json.loads(capsys.readouterr().out)
    assert [row["image"] for row in streamed] == EVERY


def test_result_file_equals_the_printed_json_and_the_summary_counts(here, tmp_path, capsys) -> None:
    assert status("data", "--json") == 0
    printed = capsys.readouterr().out
    out = tmp_path / "o.jsonl"
    assert status("data", "--out", str(out), "--json") == 0
    assert out.read_text("utf-8") == printed
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "pictures": 20, "unreadable": 0}


def test_unreadable_picture_is_named_in_line_and_message_with_status_1(here, tmp_path, capsys) -> None:
    out = tmp_path / "o.jsonl"
    for argv in (["broken.jpg", "data/red"], ["broken.jpg", "data/red", "--out", str(out)]):
        assert status(*argv) == 1
        printed, err = capsys.readouterr()
        assert "1 of 11 images could not be read:\n  broken.jpg: not a picture" in err
        assert "Traceback" not in err
    assert printed == ""
    first, *others = lines(out)
    assert first.keys() == {"image", "error"}
    assert len(others) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(
    ("signum", "suffix"),
    [(signal.SIGINT, ".jsonl"), (signal.SIGTERM, ".jsonl"), (signal.SIGKILL, ".parquet")],
)
def test_stopped_job_keeps_its_parts_and_is_resumed(
    signum: signal.Signals, suffix: str, here, tmp_path, monkeypatch, capsys
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(parts, "UNIT_IMAGES", 4)
    out, argv = tmp_path / f"o{suffix}", ["data", "--out", str(tmp_path / f"o{suffix}")]
    write = Parts.write

    def stop_in_the_third(folder: Parts, part: int, results: PartRows) -> None:
        if part == 2:
            os.kill(os.getpid(), signum)
        write(folder, part, results)

    def predict() -> int:
        monkeypatch.setattr(Parts, "write", stop_in_the_third)
        with (tmp_path / "err").open("w") as err_file, contextlib.redirect_stderr(err_file):
            return status(*argv)

    # The signal goes to a child, because this process has other handlers.
    killed = signum == signal.SIGKILL
    assert ending(fork(predict)) == (-signum if killed else 128 + signum)
    if not killed:
        assert (tmp_path / "err").read_text() == (
            f"vitascope: stopped by {signum.name}; kept: 2 finished parts of {out}; repeat the command "
            "with --resume to continue\n"
        )
    assert not out.exists()
    assert f"{out}.parts exists" in error_line([*RUN, *argv, *QUICK], capsys)
    assert status(*argv, "--resume") == 0
    assert "20 images in" in (err := capsys.readouterr().err)
    assert ", 12 of them now, " in err
    assert status("data", "--out", str(tmp_path / f"whole{suffix}")) == 0
    assert out.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_finished_file_is_counted_again_when_resumed(here, tmp_path, capsys) -> None:
    argv = ["broken.jpg", "data/red", "--out", str(tmp_path / "o.csv")]
    assert status(*argv) == 1
    assert status(*argv, "--resume") == 1
    err = capsys.readouterr().err
    assert "11 images in" in err
    assert ", 0 of them now, " in err
    assert err.count("1 of 11 images could not be read:\n  broken.jpg: not a picture") == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["none"], "none: no images found"),
        (["data", "nowhere.jpg"], "nowhere.jpg: no such file"),
        (["data", "--top-k", "0"], "top_k must be at least 1, not 0"),
        (["data", "--resume"], "--resume needs a file: --out FILE"),
        (["data", "--out", "o.txt"], "o.txt: a result file ends in .jsonl, .parquet, .csv"),
        (["data", "--threshold", "0.3"], "a threshold is for models that predict any number of classes"),
        (["data", "--threshold", "30"], "threshold must be in [0, 1], not 30"),
        (["data", "--probabilities"], "--probabilities needs --out FILE or --json"),
        (["data", "--out", "o.csv", "--top-k", "2"], "has the most probable class of each image: leave out"),
        (["data", "--out", "nowhere/o.jsonl"], "nowhere: no such folder"),
        (["data", "--out", "data"], "data: a result file ends in"),
        (["data", "--workers", "-1"], "workers must be at least 0, not -1"),
        (["data", "--batch-size", "0"], "batch_size must be in [1, 100000], not 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_request_is_rejected_in_one_line_and_writes_nothing(
    argv: list[str], message: str, here, capsys
) -> None:
    (here.root / "none").mkdir(exist_ok=True)
    before = sorted(here.root.rglob("*"))
    assert message in error_line([*RUN, *argv], capsys)
    assert sorted(here.root.rglob("*")) == before


def test_control_characters_in_class_names_are_escaped(here, capsys) -> None:
    names = ("\x1b[2Jred", "blue\u202e\n" + "x" * 2_000_000)
    save_pretrained(small_model(num_classes=2, class_names=names), "hostile")
    for images in (["data/red/1.png"], ["data/red"]):
        with contextlib.suppress(SystemExit):
            assert main(["predict", "hostile", *images, *QUICK]) == 0
        out = capsys.readouterr().out
        assert "  \\x1b[2Jred " in out
        assert "  blue\\u202e xxx" in out
        assert all(len(line) < 200 and line.isprintable() for line in out.splitlines())
    with contextlib.suppress(SystemExit):
        assert main(["predict", "m" * 5000, "data/red/1.png"]) == 2
    error = capsys.readouterr().err
    assert len(error) < 1600
    assert error.endswith("mmm: no such model: File name too long\n")
