"""A run folder in a store: as a local one, also after a kill, on another machine, while the store is gone."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli import error_line
from tests.models import small_model
from tests.stores import BUCKET, Store
from tests.training import assert_bitwise, records, tiny_config, undrawn
from vitascope import layout
from vitascope.analysis.probing.probe import probe
from vitascope.cache import cache_folder
from vitascope.cli import main
from vitascope.errors import UserError
from vitascope.models.engines.compute import Compute
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.stored_model import _copied
from vitascope.remote.stores import RemoteObject, StoreError, exists, list_folder, walk
from vitascope.runs import resume, train
from vitascope.storage import WriteError, explaining_failure
from vitascope.training.loop import Trainer
from vitascope.training.run import stored_run
from vitascope.training.run.run import Run
from vitascope.training.run.stored_run import OtherWriterError, StoredRun

OPTIONS: dict[str, Any] = {
    **{"checkpoint_seconds": 0.0, "ema": 0.9, "mixup": 0.8, "dropout": 0.1, "workers": 0, "epochs": 2},
    "batch_size": 10,
}
"""Every step has a checkpoint."""
KILLED_AT, STEPS = 3, 4
"""In the middle of the second epoch."""


class Killed(BaseException):
    """What ends a run as a signal would, which nothing catches."""


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with undrawn():
        return train(tiny_config(data, run=str(tmp_path_factory.mktemp("runs") / "run"), **OPTIONS)).run


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    with undrawn():
        yield
    _copied.cache_clear()


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    compute = Trainer._training_step

    def acting(self: Trainer, *arguments: Any) -> Any:
        if self.step == step:
            act()
        return compute(self, *arguments)

    monkeypatch.setattr(Trainer, "_training_step", acting)


@contextmanager
def ended() -> Iterator[None]:

    def kill() -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):  # noqa: PT012
        at_step(patch, KILLED_AT, kill)
        yield


@pytest.fixture(scope="module")
def ended_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ended") / "run"
    with undrawn(), ended():
        train(tiny_config(data, run=str(run), **OPTIONS))
    return run


@pytest.fixture
def url(s3_store: Store) -> str:
    return f"{s3_store.url}/runs/one"


@pytest.fixture
def killed(ended_run: Path, url: str) -> StoredRun:
    """A run in the store that was ended in the middle, with its local copy."""
    run = StoredRun(url)
    shutil.copytree(ended_run, run.path)
    run.upload()
    return run


def forget() -> None:
    shutil.rmtree(cache_folder(), ignore_errors=True)
    _copied.cache_clear()


def saved_steps(url: str) -> list[int]:
    folders = list_folder(f"{url}/checkpoints")[1]
    return [int(folder.rpartition("-")[2]) for folder in folders if "/step-" in folder]


def assert_finished(url: str, whole: Path) -> None:
    """Check that a run in the store is complete, without checkpoints, and bitwise that of the disk."""
    assert not exists(f"{url}/checkpoints")
    names = {each.url.removeprefix(f"{url}/") for each in walk(url)}
    assert {"config.yaml", "plan.json", "split.jsonl.gz", "metrics.jsonl", "predictions.npz"} <= names
    assert_bitwise(from_pretrained(url).state_dict(), from_pretrained(whole).state_dict())
    ours, expected = ([record for record in records(run) if record["kind"] != "step"] for run in (url, whole))
    assert ours == expected


def test_run_in_a_store_ends_as_a_local_one(data, whole, url, s3_store, capsys) -> None:
    s3_store.server.every_third_fails = True
    result = train(tiny_config(data, run=url, **OPTIONS | {"checkpoint_seconds": 0.5}))
    assert f"run    {url}: 2 epochs" in capsys.readouterr().out
    s3_store.server.every_third_fails = False
    assert_finished(url, whole)
    assert result.url == url
    assert len(result.to_dataframe()) == 2
    local = result.run
    assert local.is_relative_to(cache_folder())
    del result
    assert not local.exists()
    picture = str(next(data.rglob("*.png")))
    for command in (["predict", url, picture], ["evaluate", url, "--json"]):
        assert main(command) == 0, capsys.readouterr().err
    assert main(["compare", url, str(whole), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["run"] for run in compared["runs"]] == ["one", "run"]


@pytest.mark.parametrize("half_uploaded", [False, True])
def test_killed_run_is_resumed_on_another_machine_from_its_newest_whole_checkpoint(
    data, whole, url, monkeypatch, capsys, half_uploaded: bool
) -> None:
    write = stored_run.upload

    def broken_off(path: Path, place: str) -> None:
        if half_uploaded and place.endswith(f"step-{KILLED_AT:08}/manifest.json"):
            raise StoreError(f"{place}: broken off")
        write(path, place)

    with monkeypatch.context() as patch, ended():
        patch.setattr(stored_run, "upload", broken_off)
        train(tiny_config(data, run=url, **OPTIONS))
    assert ("not uploaded" in capsys.readouterr().err) == half_uploaded
    assert saved_steps(url)[-2:] == [KILLED_AT - 1, KILLED_AT]
    assert exists(f"{url}/checkpoints/best/config.json")
    forget()
    resume(url)
    assert f"from step {KILLED_AT - half_uploaded}," in capsys.readouterr().out
    assert_finished(url, whole)


def test_copy_that_is_older_than_the_store_is_replaced_and_a_newer_one_resumed(
    whole, killed, url, monkeypatch
) -> None:
    shutil.rmtree(killed.path / "checkpoints" / f"step-{KILLED_AT:08}")
    (killed.path / "mine").touch()
    with ended():  # the first step after the newest checkpoint
        resume(url)
    assert not (killed.path / "mine").exists()
    monkeypatch.setattr(stored_run, "download", lambda *_: pytest.fail("nothing is missing now"))
    resume(url)
    assert_finished(url, whole)


def test_training_goes_on_while_the_store_is_gone(data, whole, url, s3_store, monkeypatch, capsys) -> None:
    for step, gone in ((STEPS - 4, True), (STEPS - 2, False)):
        at_step(monkeypatch, step, partial(setattr, s3_store.server, "gone", gone))
    train(tiny_config(data, run=url, **OPTIONS))
    lines = [line for line in capsys.readouterr().err.splitlines() if "not uploaded" in line]
    assert lines
    assert all("and the next checkpoint uploads what is missing" in line for line in lines)
    assert_finished(url, whole)


def test_store_that_is_gone_at_the_end_leaves_the_run_here_and_resuming_uploads_it(
    data, whole, url, s3_store, monkeypatch, capsys
) -> None:
    at_step(monkeypatch, STEPS - 1, partial(setattr, s3_store.server, "gone", True))
    config = s3_store.folder / "config.yaml"
    config.write_text(tiny_config(data, run=url, **OPTIONS).to_yaml())
    assert main(["train", "--config", str(config)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    local = StoredRun(url).path
    assert (
        f"the finished run is in {local}: `vitascope train --resume {url}` on this machine uploads it" in line
    )
    s3_store.server.gone = False
    assert main(["train", "--resume", url, "--device", "cpu"]) == 0
    assert f"model  {url}/model\n" in capsys.readouterr().out
    assert exists(f"{url}/model/config.json")
    assert "this run has finished" in error_line(["train", "--resume", url], capsys)


def test_url_of_a_run_is_never_overwritten(data, killed, url, s3_store) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=rf"^{url} exists, and a run is never overwritten"):
            train(tiny_config(data, run=url))
        forget()
    (s3_store.folder / "other").write_text("mine")
    s3_store.add("other")
    with pytest.raises(UserError, match="other exists, and a run is never overwritten"):
        train(tiny_config(data, run=f"{s3_store.url}/other"))
    for place, error in {
        f"s3://{BUCKET}": "the name is missing",
        "https://host/run": "a web server is read only",
        "ftp://host/run": "unknown scheme ftp://",
        "s3://none/run": "no such bucket",
    }.items():
        with pytest.raises(UserError, match=error):
            train(tiny_config(data, run=place))
    assert not list(cache_folder().glob("remote/runs/*/*"))
    with pytest.raises(UserError, match="not a run folder"):
        resume(f"{s3_store.url}/nothing")


def test_copy_of_another_run_is_not_taken_for_that_of_the_store(killed, url) -> None:
    file = killed.path / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"started": "2020-01-01T00:00:00"}))
    with pytest.raises(UserError, match=f"is another run than the one in {killed.path}"):
        resume(url)


def test_probe_is_uploaded_when_it_is_complete(data, url) -> None:
    result = probe(small_model(), str(data), run=url, compute=Compute(device="cpu", cache=False))
    assert result.url == url
    assert not exists(f"{url}/checkpoints")
    assert Run.open(url).probes
    assert_bitwise(from_pretrained(url).state_dict(), result.model.state_dict())
    with pytest.raises(UserError, match="one exists, and a run is never overwritten"):
        probe(small_model(), str(data), run=url)


def test_hidden_files_of_a_sharded_checkpoint_are_uploaded_and_fetched(url) -> None:
    run = StoredRun(url)
    folder = run.path / "checkpoints" / "step-00000002"
    folder.mkdir(parents=True)
    names = ["state.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"]
    for name in names:
        (folder / name).write_text(name)
    (folder / "manifest.json").write_text(json.dumps({"files": dict.fromkeys(names)}))
    (run.path / "config.yaml").write_text("task: classify")
    (run.path / ".lock").touch()
    run.upload()
    forget()
    again = StoredRun(url)
    again.fetch()
    assert all((folder / name).read_text() == name for name in names)
    again.upload()
    assert not exists(f"{url}/.lock")


def test_writer_whose_run_is_resumed_elsewhere_stops_with_one_line(data, url, monkeypatch) -> None:
    at_step(monkeypatch, 2, lambda: StoredRun(url).claim())
    with pytest.raises(
        OtherWriterError, match=rf"^{url} is written by process \d+ on .*, so this process stops"
    ):
        train(tiny_config(data, run=url, **OPTIONS))
    assert max(saved_steps(url)) <= 2


def test_run_that_another_machine_writes_is_taken_over(whole, killed, url, monkeypatch, tmp_path) -> None:
    """While it is fetched, a file grows in the store, by an upload that had begun before."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("VITASCOPE_CACHE", str(tmp_path / "elsewhere"))
        live = StoredRun(url)
    live.path.mkdir(parents=True)
    events = live.path / "events.out.tfevents.1"
    events.write_text("1")
    live.upload()
    events.write_text("12")
    forget()
    fetch, began = stored_run.download, []

    def while_written(found: RemoteObject, path: Path) -> None:
        began.append(found)
        if len(began) == 1:
            live._upload(iter([events.name]))
        fetch(found, path)

    monkeypatch.setattr(stored_run, "download", while_written)
    monkeypatch.setattr(stored_run, "PAUSE", 0.0)

    def stop() -> None:
        with pytest.raises(OtherWriterError, match="is written by process"):
            live.upload()

    at_step(monkeypatch, KILLED_AT, stop)
    resume(url)
    assert len(began) > 1
    assert_finished(url, whole)


def test_resume_that_is_rejected_lets_the_other_machine_go_on(killed, url) -> None:
    killed.claim()
    forget()
    killed.path.mkdir(parents=True)
    with pytest.raises(UserError, match="lr cannot change when a run is resumed"):
        resume(url, lr=1.0)
    killed.check_writer()


def test_process_uploads_nothing_after_another_has_claimed_or_finished_the_run(url) -> None:
    first, second = StoredRun(url), StoredRun(url)
    first.path.mkdir(parents=True)
    (first.path / "config.yaml").write_text("a")
    first.upload()
    second.claim()
    (first.path / "config.yaml").write_text("another")
    for upload in (first.upload, first.try_to_upload, lambda: first.finish("again")):
        with pytest.raises(OtherWriterError, match="is written by process"):
            upload()
    assert [each.size for each in walk(url)] == [1]
    second.finish("again")
    assert [each.size for each in walk(url)] == [7]
    for upload in (first.upload, first.try_to_upload):
        with pytest.raises(OtherWriterError, match="was finished or removed by another process"):
            upload()


def test_run_that_was_killed_in_its_first_upload_may_be_started_again(url) -> None:
    run = StoredRun(url)
    assert run.is_new()
    run.path.mkdir(parents=True)
    (run.path / "plan.json").write_text("{}")
    run.upload()  # all but the configuration, which comes last
    assert StoredRun(url).is_new()
    (run.path / "config.yaml").write_text("a")
    run.upload()
    assert not StoredRun(url).is_new()


@pytest.mark.parametrize("kind", [OSError, WriteError, UserError])
def test_error_of_this_machine_names_the_local_copy_too(kind: type[Exception]) -> None:
    run = Run.at("s3://bucket/run")
    with pytest.raises(UserError) as found, run.named(), explaining_failure(run.path, "it", "make room"):
        raise kind(f"{run.path}/plan.json: no space")
    assert "s3://bucket/run/plan.json: no space" in str(found.value)
    assert str(found.value).endswith(f"; the local copy is {run.path}") is (kind is not UserError)


def test_broken_manifest_in_a_store_is_one_line() -> None:
    for manifest in (b"", b"[]", b'{"files": 5}', b'{"files": ["../x"]}', b"[" * 10**5):
        with pytest.raises(
            UserError, match=r"^s3://bucket/run/checkpoints/step-00000001/manifest\.json is br"
        ):
            StoredRun("s3://bucket/run")._files_of(1, manifest)


def test_store_has_a_run_once_it_has_the_files_of_its_start(url, monkeypatch) -> None:
    """An interrupted first upload is no run, which would be resumed without the record of its data."""
    run = StoredRun(url)
    sent: list[str] = []
    start = ["config.yaml", "environment.json", "plan.json", "split.jsonl.gz"]
    for name in (*start, f"{layout.CHECKPOINTS}/{layout.step_name(4)}/weights", "model/config.json"):
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    monkeypatch.setattr(
        stored_run, "upload", lambda path, target: sent.append(target.removeprefix(f"{url}/"))
    )
    run.upload()
    sent.remove(".writer")
    assert sorted(sent[: len(start)]) == start
    assert sent[len(start) - 1] == "config.yaml"
    assert sent[-1] == "model/config.json"
