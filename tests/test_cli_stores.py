"""Commands on stores: the same answers as on the disk, faults of the server in one line, and resumption."""

import gc
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cli import SHAPE, SHORT, error_line
from tests.forked import ending, fork
from tests.models import small_model
from tests.stores import BUCKET, Store
from tests.training import assert_bitwise, tiny_config, undrawn, write_folder
from vitascope import network
from vitascope.__main__ import main as installed
from vitascope.analysis.evaluate import evaluate
from vitascope.cli import main
from vitascope.data.features.embed import Embeddings, embed
from vitascope.data.formats import shards
from vitascope.data.loading import Loader
from vitascope.data.pack import pack
from vitascope.data.split_record import SplitRecord
from vitascope.errors import Interrupted
from vitascope.models.engines.compute import Compute
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.stored_model import _copied
from vitascope.remote import cache
from vitascope.remote.stores import StoreError, find_object, list_folder
from vitascope.runs import resume, train
from vitascope.training.loop import Trainer

QUICK = ["--device", "cpu", "--workers", "2", "--precision", "fp32", "--batch-size", "4"]


@pytest.fixture(autouse=True)
def _one_look_per_test() -> Iterator[None]:
    yield
    _copied.cache_clear()


@pytest.fixture
def photos(store: Store) -> str:
    """A folder of images and a model beside it, on the disk and in the store; its URL."""
    return photos_in(store)


def photos_in(store: Store, per_class: int = 10) -> str:
    write_folder(store.folder / "photos", per_class=per_class)
    save_pretrained(small_model(num_classes=2, class_names=("dark", "light")), store.folder / "model")
    store.add("model")
    return store.add("photos")


EACH_STORE = pytest.mark.parametrize(("store", "fails"), [("http", False), ("s3", True)], indirect=["store"])
"""A store, and whether every third request fails."""


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@EACH_STORE
def test_predictions_equal_those_of_local_files(store: Store, photos: str, fails: bool) -> None:
    root = store.folder
    assert main(["predict", f"{root}/model", f"{root}/photos", "--out", f"{root}/local.jsonl", *QUICK]) == 0
    store.server.every_third_fails = fails
    assert main(["predict", f"{store.url}/model", photos, "--out", f"{root}/there.jsonl", *QUICK]) == 0
    expected = [
        row | {"image": str(row["image"]).replace(f"{root}/photos", photos)}
        for row in lines(root / "local.jsonl")
    ]
    assert len(expected) == 20
    assert lines(root / "there.jsonl") == expected


@EACH_STORE
def test_features_equal_those_of_local_files(store: Store, photos: str, fails: bool) -> None:
    local = embed(store.folder / "model", store.folder / "photos", compute=Compute(device="cpu", cache=False))
    store.server.every_third_fails = fails
    there = embed(f"{store.url}/model", photos, compute=Compute(device="cpu", cache=False))
    assert np.array_equal(there.features, local.features)
    assert there.made == local.made
    assert there.labels is not None
    assert np.array_equal(there.labels, local.labels)
    assert there.images.tolist() == [
        str(name).replace(f"{store.folder}/photos", photos) for name in local.images
    ]


@EACH_STORE
def test_training_equals_that_on_local_files(store: Store, photos: str, fails: bool) -> None:
    with undrawn():
        local = train(tiny_config(store.folder / "photos", run=f"{store.folder}/local"))
        store.server.every_third_fails = fails
        there = train(tiny_config(photos, run=f"{store.folder}/there"))
    one, other = (from_pretrained(result.run).state_dict() for result in (local, there))
    assert_bitwise(one, other)
    records = [SplitRecord.read(result.run / "split.jsonl.gz") for result in (local, there)]
    assert records[0].parts["test"].names == records[1].parts["test"].names


def test_training_stops_when_the_server_is_gone_and_is_resumed(web_store: Store, monkeypatch) -> None:
    store = web_store
    write_folder(store.folder / "photos", per_class=10)
    pack(str(store.folder / "photos"), store.folder / "shards")
    data, read = store.add("shards"), cache.read
    options = {"workers": 1, "epochs": 3}
    monkeypatch.setitem(Loader.__init__.__kwdefaults__, "memory_budget", 0)  # images are read in every epoch
    checkpoints = store.folder / "cut" / "checkpoints"

    def gone_soon(*args: object) -> bytes:
        if any(checkpoints.glob("step-*")):
            store.server.gone = True
            shutil.rmtree(store.folder / "cache", ignore_errors=True)
        return read(*args)

    with undrawn():
        whole = train(tiny_config(data, run=f"{store.folder}/whole", **options))
        with monkeypatch.context() as patch:
            patch.setattr(shards.cache, "read", gone_soon)
            with pytest.raises(StoreError, match="does not answer as it should"):
                train(tiny_config(data, run=f"{store.folder}/cut", **options | {"workers": 0}))
        store.server.gone = False
        resumed = resume(f"{store.folder}/cut", workers=1)
    assert_bitwise(*(from_pretrained(result.run).state_dict() for result in (whole, resumed)))


def test_server_that_is_gone_stops_a_prediction_that_is_resumed(s3_store: Store, monkeypatch, capsys) -> None:
    monkeypatch.setattr("vitascope.remote.cache.AHEAD", 4)
    store, photos, root = s3_store, photos_in(s3_store, per_class=20), s3_store.folder
    command = ["predict", f"{root}/model", photos, "--out", f"{root}/p.jsonl", *QUICK]
    answer = type(store.server).__call__

    def gone_soon(self, environ, start_response):
        self.gone = self.gone or "light/01" in environ["PATH_INFO"]
        return answer(self, environ, start_response)

    with monkeypatch.context() as patch:
        patch.setattr(type(store.server), "__call__", gone_soon)
        line = error_line(command, capsys)
    assert "does not answer as it should" in line
    assert not (root / "p.jsonl").exists()
    store.server.gone = False
    assert main([*command, "--resume"]) == 0
    assert main(["predict", f"{root}/model", photos, "--out", f"{root}/q.jsonl", *QUICK]) == 0
    assert (root / "p.jsonl").read_bytes() == (root / "q.jsonl").read_bytes()


COMMANDS = {
    "predict": ["predict", "model", "URL", *QUICK],
    "embed": ["embed", "model", "URL", "--out", "f.npz", "--no-cache", *QUICK],
    "train": ["train", "--data", "URL", "--run", "run", *SHAPE, *SHORT],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_content_that_hardly_arrives_is_one_line(web_store: Store, command: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(web_store.folder)
    url = photos_in(web_store)
    monkeypatch.setattr(network, "LIMIT", 0.3)
    monkeypatch.setattr("vitascope.remote.stores.PATIENCE", 0.0)
    web_store.server.drips = True
    argv = [url if word == "URL" else word for word in COMMANDS[command]]
    assert main(argv) == 2
    web_store.server.drips = False
    assert "does not answer as it should: no answer within" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("command", "signum"), [("predict", signal.SIGINT), ("embed", signal.SIGTERM)])
def test_signal_ends_a_command_whose_requests_hang(
    web_store: Store, command: str, signum: signal.Signals, monkeypatch
) -> None:
    monkeypatch.chdir(web_store.folder)
    url = photos_in(web_store)
    web_store.server.drips = True

    def run() -> int:
        signal.alarm(20)
        sys.argv = ["vitascope", *(url if word == "URL" else word for word in COMMANDS[command])]
        status = installed()
        threading._shutdown()  # as the interpreter's end
        return status

    child = fork(run)
    assert web_store.server.dripping.wait(20)
    os.kill(child, signum)
    assert ending(child) == 128 + signum
    web_store.server.drips = False


def test_run_that_waits_for_a_batch_is_stopped_with_everything_saved(web_store: Store, monkeypatch) -> None:
    root, steps = web_store.folder, []
    url = photos_in(web_store)
    monkeypatch.setitem(Loader.__init__.__kwdefaults__, "memory_budget", 0)  # images are read in every epoch
    step = Trainer._training_step

    def hangs_soon(self: Trainer, *args: object) -> object:
        steps.append(self.step)
        if len(steps) == 3:
            shutil.rmtree(root / "cache", ignore_errors=True)
            web_store.server.drips = True
            threading.Thread(target=interrupt).start()
        return step(self, *args)

    def interrupt() -> None:
        assert web_store.server.dripping.wait(20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    with undrawn():
        whole = train(tiny_config(url, run=f"{root}/whole", workers=0))
        shutil.rmtree(root / "cache")
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_training_step", hangs_soon)
            with pytest.raises(Interrupted, match="everything is saved"):
                train(tiny_config(url, run=f"{root}/cut", workers=0))
        web_store.server.drips = False
        resumed = resume(f"{root}/cut", workers=0)
    assert_bitwise(*(from_pretrained(result.run).state_dict() for result in (whole, resumed)))


def test_results_are_written_to_a_store(s3_store: Store, capsys) -> None:
    root = s3_store.folder
    write_folder(root / "photos", per_class=6)
    save_pretrained(small_model(num_classes=2, class_names=("dark", "light")), root / "model")
    url = f"{s3_store.url}/results/p.jsonl"
    command = ["predict", f"{root}/model", f"{root}/photos", *QUICK, "--out"]
    s3_store.server.every_third_fails = True
    assert main([*command, url]) == 0
    assert main([*command, f"{root}/local.jsonl"]) == 0
    found, _ = list_folder(f"{s3_store.url}/results")
    assert [each.url for each in found] == [url, f"{url}.fingerprint.json"]
    assert cache.read(found[0]) == (root / "local.jsonl").read_bytes()
    assert not list((root / "cache" / "remote" / "outputs").glob("*"))
    assert error_line([*command, url], capsys) == (
        f"vitascope: error: {url} exists: continue it with --resume, or choose another file\n"
    )
    assert main([*command, url, "--resume"]) == 0
    assert "0 of them now" in capsys.readouterr().err


def test_features_are_written_to_a_store(s3_store: Store) -> None:
    root = s3_store.folder
    write_folder(root / "photos", per_class=6)
    url = f"{s3_store.url}/results/f.npy"  # with another file beside it
    found = embed(small_model(), root / "photos", out=url, compute=Compute(device="cpu"))
    local = embed(small_model(), root / "photos", compute=Compute(device="cpu"))
    assert np.array_equal(found.features, local.features)
    folder = cache.copied(list_folder(f"{s3_store.url}/results")[0], f"{s3_store.url}/results")
    assert np.array_equal(Embeddings.load(folder / "f.npy").features, local.features)
    left = root / "cache" / "remote" / "outputs"
    assert list(left.glob("*"))  # that of `found`
    del found
    gc.collect()
    assert not list(left.glob("*"))


def test_interrupted_upload_is_resumed(s3_store: Store, capsys) -> None:
    root = s3_store.folder
    write_folder(root / "photos", per_class=6)
    save_pretrained(small_model(num_classes=2, class_names=("dark", "light")), root / "model")
    url = f"{s3_store.url}/p.csv"
    command = ["predict", f"{root}/model", f"{root}/photos", *QUICK, "--out", url]
    with pytest.MonkeyPatch.context() as patch:

        def gone(*_: object) -> None:
            s3_store.server.gone = True
            find_object(url)

        patch.setattr("vitascope.remote.outputs.upload", gone)
        assert "does not answer" in error_line(command, capsys)
    s3_store.server.gone = False
    assert error_line(command, capsys).startswith(
        f"vitascope: error: {url} exists: continue it with --resume"
    )
    assert main([*command, "--resume"]) == 0
    assert find_object(url) is not None


def test_missing_bucket_for_results_is_found_before_the_work(s3_store: Store, capsys) -> None:
    write_folder(s3_store.folder / "photos", per_class=1)
    command = ["predict", "cifar10", f"{s3_store.folder}/photos", *QUICK, "--out"]
    assert "no such bucket" in error_line([*command, "s3://none/p.jsonl"], capsys)
    assert "the name is missing" in error_line([*command, f"s3://{BUCKET}"], capsys)


def test_run_in_a_store_is_evaluated_on_its_own_images(s3_store: Store) -> None:
    store, photos = s3_store, photos_in(s3_store)
    with undrawn():
        run = train(tiny_config(photos, run=f"{store.folder}/run")).run
    here = evaluate(run, device="cpu")
    there = evaluate(store.add("run"), device="cpu")
    assert there.accuracy == here.accuracy
    assert np.array_equal(there.confusion, here.confusion)
    weights = from_pretrained(f"{store.url}/run/model/model.safetensors")
    assert_bitwise(weights.state_dict(), from_pretrained(run).state_dict())


@pytest.mark.parametrize(
    "command",
    [
        ["export", "cifar10", "--out", "s3://bucket/x.onnx"],
        ["explain", "cifar10", "--out", "https://host/x.png"],
        ["pack", "digits", "gs://bucket/shards"],
    ],
    ids=lambda command: command[0],
)
def test_commands_that_write_local_files_alone_reject_urls(
    command: list[str], tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert "this is written to local files only" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_report_of_a_run_in_a_store_is_rejected(capsys) -> None:
    assert "into local runs only" in error_line(["report", "s3://bucket/run"], capsys)
