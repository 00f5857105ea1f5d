import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli import error_line
from tests.data import write_tree
from tests.models import small_model
from vitascope.cli import main
from vitascope.cli.exits import exiting_if_stopped
from vitascope.data.rows import on_ray
from vitascope.data.rows.on_ray import (
    RayPartWorker,
    WorkerModel,
    check_reachable,
    connected,
    ray_fault,
    share_of,
)
from vitascope.data.rows.parts import Parts
from vitascope.deploy.predict.result_file import PredictTask
from vitascope.errors import UserError
from vitascope.models.engines.runtimes import open_engine
from vitascope.models.weights.loading import save_pretrained

SECONDS = 280
"""After which a wait is given up."""
QUICK = ["--device", "cpu", "--precision", "fp32", "--batch-size", "2"]


HEAD, SMALL, LARGE = {"CPU": 8.0}, {"CPU": 16.0, "GPU": 2.0}, {"CPU": 64.0, "GPU": 8.0}


def test_worker_takes_a_cpu_or_a_gpu_with_its_cores_and_one_that_fits_nowhere_is_rejected() -> None:
    for asked, nodes, share in (
        (("auto", None), [HEAD, {"CPU": 4.0}], (1, 0, 12)),  # a worker per core, which reads by itself
        (("auto", 2), [HEAD, {"CPU": 4.0}, {"memory": 1.0}], (3, 0, 3)),
        (("auto", None), [HEAD, LARGE, LARGE], (8, 1, 16)),  # a worker per GPU, and its cores to read with
        (("cuda", 3), [HEAD, SMALL], (4, 1, 2)),
        (("cuda", None), [SMALL, {"CPU": 2.0, "GPU": 1.0}], (2, 1, 3)),
        (("cpu", None), [SMALL], (1, 0, 16)),
    ):
        assert share_of(*asked, nodes) == share
    for asked, message in (
        (("cuda", None), "the 1 CPUs and the GPU of a worker: they have 8 CPUs and 0 GPUs"),
        (("auto", 8), "the 9 CPUs of a worker"),
    ):
        with pytest.raises(UserError, match=message):
            share_of(*asked, [HEAD])


def test_address_of_another_kind_or_without_ray_is_rejected_at_once(monkeypatch) -> None:
    for address in ("127.0.0.1:1", "no-host.invalid:6379", "127.0.0.1:99999"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        for name in (address, "auto"):
            with pytest.raises(UserError, match=f"Ray at {address} cannot be reached"):
                check_reachable(name)
    for address in ("ray://head:10001", "head", "head:", "http://head:8265"):
        with pytest.raises(UserError, match=r"auto or HOST:PORT, .*`ray job submit`"):
            check_reachable(address)


def test_machine_without_ray_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed (vitascope[ray])")

    def none(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", none)
    with pytest.raises(UserError, match="Ray at auto: Could not find any running Ray"), connected("auto"):
        pass


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_start_that_hangs_ends_at_a_signal_or_after_a_time(signum, monkeypatch, capfd) -> None:
    pytest.importorskip("ray", reason="ray is not installed (vitascope[ray])")
    starting, never = threading.Event(), threading.Event()

    def hanging(**_: object) -> None:
        os.write(2, b"[2026 I 1 1] logging.cc:303: Set ray log level\n")
        starting.set()
        never.wait()

    def stop() -> None:
        starting.wait()
        os.kill(os.getpid(), signum)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", hanging)
    monkeypatch.setattr(on_ray, "START_SECONDS", 0.05)
    with pytest.raises(UserError, match=r"Ray at auto has not answered for 0\.05 s"), connected("auto"):
        pass
    assert starting.wait(60)  # the first start, on a busy machine
    starting.clear()
    threading.Thread(target=stop).start()
    with (
        pytest.raises(SystemExit) as stopped,
        exiting_if_stopped(lambda: "nothing is kept"),
        connected("local"),
    ):
        pass
    never.set()
    assert stopped.value.code == 128 + signum
    assert capfd.readouterr().err == f"vitascope: stopped by {signum.name}; nothing is kept\n"


class Rows:
    """A data set of Ray whose rows end with an error, or never."""

    def __init__(self, ends: threading.Event) -> None:
        self.ends = ends

    def iter_rows(self) -> Iterator[dict[str, int]]:
        yield from ({"part": 0}, {"part": 1})
        self.ends.wait()
        raise ArithmeticError("of Ray")


def test_rows_are_read_while_the_head_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(on_ray, "PROBE_SECONDS", 0.02)
    rows = on_ray.rows_of(cast("Any", Rows(ends)), "127.0.0.1:1")
    assert [next(rows), next(rows)] == [{"part": 0}, {"part": 1}]
    monkeypatch.setattr(on_ray, "LOST_SECONDS", 0.0)
    with pytest.raises(
        UserError, match=r"head of Ray at 127\.0\.0\.1:1 has not answered .* are done are kept"
    ):
        next(rows)
    with socket.create_server(("127.0.0.1", 0)) as head:
        rows = on_ray.rows_of(cast("Any", Rows(ends)), f"127.0.0.1:{head.getsockname()[1]}")
        assert [next(rows), next(rows)] == [{"part": 0}, {"part": 1}]
        threading.Timer(0.1, ends.set).start()
        with pytest.raises(ArithmeticError, match="of Ray"):
            next(rows)


def test_failures_of_ray_are_one_line_and_a_fault_of_ours_keeps_its_traceback() -> None:
    exceptions = pytest.importorskip("ray.exceptions", reason="ray is not installed (vitascope[ray])")
    for reason in (
        "No module named 'vitascope'",
        "No module named 'vitascope.data.rows.on_ray'",
        "Can't get attribute 'RayPartWorker' on <module 'vitascope.data.rows.on_ray'",
    ):
        text = f"\n\x1b[36mray::MapWorker\x1b[39m\nError: {reason} from x\n"
        fault = ray_fault(exceptions.RayActorError(error_msg=text))
        assert isinstance(fault, UserError)
        line = f"a worker cannot load vitascope ({reason}): install the same version on all nodes"
        assert str(fault) == line
    other = exceptions.RayActorError(error_msg="The \x1b[36mactor\x1b[39m died.\nIts node was lost.\n")
    fault = ray_fault(other)
    assert isinstance(fault, UserError)
    assert "Ray failed: The actor died. Its node was lost.; the parts that are done are kept" in str(fault)
    ours = exceptions.RayTaskError("write", "a traceback", ValueError("ours"))
    assert ray_fault(ours) is ours


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("predict model pictures --engine ray", "--engine ray needs a file: --out FILE"),
        ("predict model pictures --ray-address auto", "--ray-address needs --engine ray"),
        ("embed model pictures --out f.npz --ray-address auto", "needs --engine ray"),
        ("predict model pictures --out p.jsonl --engine dask", "'dask'"),
        ("embed model pictures --out f.npz --engine ray --ray-address 127.0.0.1:1", "cannot be reached"),
    ],
)
def test_command_says_in_one_line_what_is_wrong(argv: str, message, tmp_path, monkeypatch, capsys) -> None:
    if "127.0.0.1:1" in argv:
        pytest.importorskip("ray", reason="ray is not installed (vitascope[ray])")
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "pictures", {"a": 1})
    assert message in error_line(argv.split(), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and nine pictures, of which one has vanished."""
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "pictures", {"a": 9})
    save_pretrained(small_model(), tmp_path / "model")
    return tmp_path / "pictures"


def result_of(pictures: Path, **change: object) -> str:
    """The error of a worker that computes the pictures as one part."""
    listed = [(str(pictures / "a" / f"00{number}.png"),) for number in range(9)]
    parts = Parts.create(pictures.parent / "o.parts", listed, batch_size=2, about={})
    digest = open_engine("model").digest
    model = WorkerModel(model="model", digest=digest, precision="fp32", device="cpu")
    worker = RayPartWorker(parts, PredictTask(batch_size=2, workers=0), dataclasses.replace(model, **change))
    return str(worker({"part": [0]})["error"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": {"vitascope": "0.0.1", "torch": "2.0"}}, "the command vitascope 0.0.1, torch 2.0"),
        ({"home": "/no/such/folder"}, "a folder that all nodes share"),
        ({"digest": "f" * 64}, "another model here: SHA-256"),
        ({"model": "no-model"}, "no-model"),
        ({"device": "abacus"}, "abacus"),
    ],
)
def test_worker_that_is_not_like_the_others_reports_it_with_its_node(pictures, change, message) -> None:
    error = result_of(pictures, **change)
    assert message in error
    assert error.startswith(f"{os.uname().nodename}: ")


def test_images_that_a_node_does_not_see_are_not_taken_for_unreadable(pictures: Path) -> None:
    (pictures / "a" / "001.png").unlink()
    assert result_of(pictures) == ""
    shutil.rmtree(pictures.parent / "o.parts")
    shutil.rmtree(pictures)
    assert "000.png to " in (error := result_of(pictures))
    assert "008.png is here: they must be in a folder that all nodes share" in error


@pytest.mark.parametrize("command", ["predict", "embed"])
def test_missing_ray_names_the_extra(command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write_tree(tmp_path / "pictures", {"a": 1})
    out = tmp_path / ("o.jsonl" if command == "predict" else "o.npz")
    assert main([command, "cifar10", str(tmp_path / "pictures"), "--out", str(out), "--engine", "ray"]) == 2
    assert "pip install 'vitascope[ray]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


@pytest.mark.timeout(3 * SECONDS)
def test_two_workers_one_of_them_killed_give_the_file_of_one_process(tmp_path: Path, monkeypatch) -> None:
    """The worker waits for a picture, which is a pipe, when it is killed; the one after it finds a file."""
    pytest.importorskip("ray", reason="ray is not installed (vitascope[ray])")
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "pictures", {"a": 6, "b": 5})
    (tmp_path / "pictures" / "a" / "002.png").write_bytes(b"text")
    save_pretrained(small_model(), tmp_path / "model")
    os.mkfifo(tmp_path / "pipe.png")
    argv = ["predict", "model", "pictures", "pipe.png", *QUICK, "--json", "--out"]
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, *argv, "ray.jsonl", "--engine", "ray"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},  # Ray keeps a token there
    )
    parts = tmp_path / "ray.jsonl.parts"
    try:
        pipe = opened_for_writing(tmp_path / "pipe.png", process)  # another part may wait behind this one
        worker = int((parts / "00002.tries").read_text().split()[0])
        shutil.copy(tmp_path / "pictures" / "b" / "004.png", tmp_path / "file.png")
        os.replace(tmp_path / "file.png", tmp_path / "pipe.png")
        os.kill(worker, signal.SIGKILL)
        os.close(pipe)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert json.loads(out) == {"out": "ray.jsonl", "pictures": 12, "unreadable": 1}
    assert "1 worker died at part 3 of 3" in err
    assert ".cc:" not in err  # Ray's log
    assert "002.png: not a picture that Pillow can read" in err
    assert not parts.exists()
    with pytest.raises(SystemExit):  # with 1, because of the picture that cannot be read
        main([*argv, "one.jsonl", "--workers", "0"])
    assert Path("ray.jsonl").read_bytes() == Path("one.jsonl").read_bytes()


STARTED = """
import sys
from vitascope.data.rows import parts
from vitascope.cli import main

parts.UNIT_IMAGES = 4  # several parts of a few pictures
sys.exit(main(sys.argv[1:]))
"""


def opened_for_writing(pipe: Path, process: subprocess.Popen[str]) -> int:
    """The descriptor of a pipe, once somebody reads it while a process runs."""
    end = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(OSError):  # ENXIO: nobody reads
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
