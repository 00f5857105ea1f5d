"""The last line of a command is a command that runs, also after an error with a way out."""

import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli import SHAPE, SHORT, exit_status
from tests.exported import copied_exports
from tests.models.text import write_clip
from tests.training import undrawn
from vitascope.cli import COMMANDS, main
from vitascope.cli.next_command import NEXT, next_command, way_out
from vitascope.cli.parsing import parse
from vitascope.cli.ship import Serve
from vitascope.models.engines.runtimes import open_engine

PICTURE = "data/red/0.png"
FILLED = {"FOLDER": "data", "PICTURE": PICTURE, "NAME": "vit_ti16", "MORE": "2"}
"""The words of a line that are the reader's."""
TINY = ["--epochs", "1", "--image-size", "16", "--device", "cpu"]
"""Options that make a suggested training short."""
SUGGESTED = [
    f"train --data data --run runs/again {shlex.join([*SHAPE, *SHORT])}",
    f"pretrain --data data --run runs/pre --epochs 1 {shlex.join(SHAPE)} --device cpu",
    "probe runs/tiny --data data --run runs/probe",
    "zero-shot clip zero --classes 'a cat' dog",
    "evaluate runs/tiny",
    "calibrate runs/tiny data --out calibrated",
    f"explain runs/tiny {PICTURE} --method rollout",
    "explain runs/tiny --compare",
    "explain runs/tiny --method positions",
    "report runs/tiny",
    "compare runs/tiny runs/twin",
    f"similar runs/tiny {PICTURE} data",
    f"predict runs/tiny {PICTURE}",
    "predict runs/tiny data --out predictions.csv",
    f"predict model.onnx {PICTURE}",
    f"predict clip {PICTURE} --classes 'a cat' dog",
    "label data --out labels.csv --no-open",
    "next runs/tiny data --count 3",
    "embed runs/tiny data --out features.npz",
    "export runs/tiny",
    "export runs/tiny --features",
    "page runs/tiny --unproved",
    "convert runs/tiny converted",
    "compress runs/tiny merged --merge 1",
    "compress runs/tiny pruned --heads 1",
    "audit data --out audit --body runs/tiny",
    "pack data shards",
    "models",
]


@pytest.fixture
def fresh(place: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the folder, in which a test may write."""
    monkeypatch.chdir(shutil.copytree(place.root, tmp_path / "fresh"))


def line_of(command: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> list[str]:
    """The words of the last line that a command prints, which names the next one."""
    assert exit_status(*shlex.split(command)) == status, capsys.readouterr().err
    out, err = capsys.readouterr()
    label, *words = shlex.split(err.splitlines()[-1])
    assert label == "next"
    assert "next" not in out
    return [FILLED.get(word, word) for word in words]


def runs(program: str, *words: str) -> None:
    """Run a suggested command, or what there is of one that never ends."""
    if program == "python":
        assert words[:2] == ("-m", "webbrowser")
        assert Path(words[2]).is_file()
    elif words[0] == "serve":
        serve = parse(Serve, "serve", words[1:])
        assert all(open_engine(ref, device="cpu") for ref in (*serve.models, serve.beside) if ref)
    else:
        short = TINY if words[0] == "train" and "--resume" not in words else []
        assert exit_status(*words, *short) == 0, words


def test_every_command_that_ends_has_a_line() -> None:
    assert NEXT.keys() == COMMANDS.keys() - {"serve", "mcp", "learn"}
    assert {command.split()[0] for command in SUGGESTED} == NEXT.keys()


@pytest.mark.parametrize("command", SUGGESTED)
def test_suggested_command_runs(command: str, fresh: None, exported_file, monkeypatch, capsys) -> None:
    if "model.onnx" in command:
        monkeypatch.setitem(FILLED, "model.onnx", str(exported_file(".onnx")))
        command = command.replace("model.onnx", FILLED["model.onnx"])
    if "clip" in command:
        pytest.importorskip("transformers")
        write_clip(Path("clip"))
    if "twin" in command:
        assert exit_status("train", "--config", "runs/tiny/config.yaml", "--run", "runs/twin") == 0
    monkeypatch.setattr("vitascope.deploy.labelling.label.serve_session", lambda *_, **__: None)  # no end
    exports = nullcontext() if "--features" in command else copied_exports(exported_file(".onnx"))
    with undrawn(), exports:
        runs(*line_of(command, capsys))


def test_output_for_programs_has_no_such_line(fresh: None, capsys) -> None:
    assert main(["predict", "runs/tiny", PICTURE, "--json"]) == 0
    assert "next" not in "".join(capsys.readouterr())


def test_error_with_a_way_out_names_the_command(fresh: None, capsys) -> None:
    with undrawn():
        runs(*line_of("train --data data --run runs/tiny", capsys, status=2))


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ("make room, then run `vitascope report 'a b'`: full", "vitascope report 'a b'"),
        ("this needs mcp: pip install 'vitascope[mcp]'", "pip install 'vitascope[mcp]'"),
        ("the format of `vitascope train --recipe base`", ""),
        ("a; `vitascope train x; rm y`: no images", "vitascope train 'x;' rm y"),
        ("a; `vitascope train 'x`: no images", ""),
        ("column 'pip install evil': no labels", ""),
        ("nearest: --run; see `vitascope train --help`", ""),
    ],
)
def test_way_out_is_what_a_message_says_to_run(message: str, command: str) -> None:
    assert way_out(message) == command


def test_name_that_a_terminal_would_obey_and_thousands_of_names_are_in_no_command() -> None:
    assert next_command("predict", {"model": "cifar10", "picture": "a b.jpg"}) == (
        "vitascope explain cifar10 'a b.jpg'"
    )
    assert next_command("predict", {"model": "cifar10", "picture": "\x1b[31m.jpg"}) == ""
    assert next_command("explain", {"model": "cifar10", "data": ("a.jpg",) * 5000}) == ""


@pytest.mark.parametrize(("redirected", "status"), [("> /dev/full", 2), (">&-", 0)])
def test_output_that_is_full_or_closed_ends_without_a_traceback(redirected: str, status: int) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = f"{shlex.quote(sys.executable)} -m vitascope.cli models {redirected}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
