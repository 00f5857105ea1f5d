"""`vitascope embed`: its output, exit status, files and errors."""

import json
import os
import signal

import numpy as np
import pytest

from tests.cli import error_line, exit_status
from tests.forked import ending, fork
from vitascope.data.features.embed import Embeddings
from vitascope.models.engines.engine import TorchEngine

QUICK = ["--device", "cpu", "--workers", "0", "--precision", "fp32"]

pytestmark = pytest.mark.usefixtures("own_cache")


def embed(*argv: object) -> int:
    return exit_status("embed", *argv, *QUICK)


def test_summary_counts_images_and_those_that_were_computed(here, tmp_path, capsys) -> None:
    assert embed("runs/tiny", "data", "--out", tmp_path / "f.npz") == 0
    assert f"20 images in {tmp_path}/f.npz, 20 of them computed now; " in capsys.readouterr().out
    assert embed("runs/tiny", "data", "--out", tmp_path / "g.npz", "--json") == 0
    counts = {"out": f"{tmp_path}/g.npz", "images": 20, "unreadable": 0, "computed": 0}
    assert json.loads(capsys.readouterr().out) == counts
    first, second = (Embeddings.load(tmp_path / name) for name in ("f.npz", "g.npz"))
    assert np.array_equal(first.features, second.features)
    assert first.made["model"] == "tiny"
    assert embed("runs/tiny", "data", "--out", tmp_path / "h.npz", "--json", "--no-cache") == 0
    assert json.loads(capsys.readouterr().out)["computed"] == 20


def test_layer_and_pool_are_those_that_are_named(here, tmp_path) -> None:
    assert embed("runs/tiny", "data", "--out", tmp_path / "f.npy", "--layer", "-1", "--pool", "mean") == 0
    made = Embeddings.load(tmp_path / "f.npy").made
    assert (made["layer"], made["pool"]) == (0, "mean")


def test_unreadable_images_are_named_with_status_1(here, tmp_path, capsys) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.png").write_bytes(b"broken")
    (folder / "fine.png").write_bytes(here.picture.read_bytes())
    assert embed("runs/tiny", folder, "--out", tmp_path / "f.npz") == 1
    out, err = capsys.readouterr()
    assert out.startswith("1 image in ")
    lines = err.splitlines()
    assert lines[0] == "12 of 13 images could not be read:"
    assert lines[1].startswith(f"  {folder}/00.png: not a picture")
    assert lines[-1] == "  and 2 more"
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (
            ["data", "runs/tiny", "--out", "f.npz"],
            "runs/tiny is a model, and no images: the model comes",
        ),
        (["data", "runs/tiny/model", "--out", "f.npz"], "runs/tiny/model is a model, and no images"),
        (["data", "other", "--out", "f.npz"], "data: not a model"),
        (["runs/tiny", "nowhere", "--out", "f.npz"], "nowhere: no such folder"),
        (["runs/tiny", "data"], "--out"),
        (["runs/tiny", "data", "--out", "f.csv"], "f.csv: a file of features ends in .npz, .npy, .parquet"),
        (["runs/tiny", "data", "--out", "f.npz", "--layer", "4"], "no layer 4: the model has 1, 0 to 0"),
        (
            ["runs/tiny", "data", "--out", "f.npz", "--pool", "max"],
            "invalid choice 'max' for argument '--pool'",
        ),
        (["runs/tiny", "data", "--out", "f.npz", "--columns", "label=x"], "columns is about a table"),
        (["runs/tiny", "data", "--out", "nowhere/f.npz"], "nowhere: no such folder"),
    ],
)
def test_bad_requests_are_one_line(here, argv: list[str], reason: str, capsys) -> None:
    assert reason in error_line(["embed", *argv, *QUICK], capsys)
    assert not list(here.root.glob("f.*"))


def test_stopped_command_continues_with_the_cached_features(here, tmp_path, capfd) -> None:
    argv = ["runs/tiny", "data", "--out", tmp_path / "f.npz", "--batch-size", "4", "--json"]

    def stopped() -> int:
        compute, calls = TorchEngine.features, []

        def features(*args: object, **options: object) -> object:
            calls.append(1)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return compute(*args, **options)  # type: ignore[arg-type]

        TorchEngine.features = features  # type: ignore[method-assign,assignment]
        return embed(*argv)

    assert ending(fork(stopped)) == 128 + signal.SIGTERM
    err = capfd.readouterr().err
    assert "stopped by SIGTERM; repeat the command to continue with the cached features" in err
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert embed(*argv) == 0
    assert json.loads(capfd.readouterr().out)["computed"] == 8  # of the 20, three batches were complete


def test_killed_process_leaves_a_cache_that_the_next_one_uses(here, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr("vitascope.data.features.cache.CHUNK_BYTES", 1)
    argv = ["runs/tiny", "data", "--batch-size", "4", "--json"]

    def killed() -> int:
        compute, calls = TorchEngine.features, []

        def features(*args: object, **options: object) -> object:
            calls.append(1)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return compute(*args, **options)  # type: ignore[arg-type]

        TorchEngine.features = features  # type: ignore[method-assign,assignment]
        return embed(*argv, "--out", tmp_path / "f.npz")

    assert ending(fork(killed)) == -signal.SIGKILL
    assert embed(*argv, "--out", tmp_path / "g.npz") == 0
    assert json.loads(capfd.readouterr().out)["computed"] < 20
    assert len(Embeddings.load(tmp_path / "g.npz").features) == 20
