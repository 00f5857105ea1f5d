"""2N steps equal N steps, a kill and N more steps, bitwise, for every task and way of reading images."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data import read_tree
from tests.forked import ending, fork
from tests.training import (
    assert_bitwise,
    last_state,
    records,
    run_of,
    tiny_config,
    undrawn,
    write_folder,
    write_uneven,
)
from vitascope import runs
from vitascope.cli import main
from vitascope.data.loading import Loader
from vitascope.data.split_record import SplitRecord
from vitascope.errors import UserError
from vitascope.models.weights.loading import from_pretrained
from vitascope.training import loop
from vitascope.training.checkpoint.folders import checkpoints, load_checkpoint_at
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run

pytestmark = pytest.mark.usefixtures("without_figures")

KILLED_AFTER = 8  # in the middle of the second epoch of 5 steps
TRAINED = ("model", "average", "optimizer")

COMMON: dict[str, Any] = {
    **{"epochs": 2, "ema": 0.9, "accumulate": 2, "dropout": 0.1, "drop_path": 0.2, "randaugment": 2},
    **{"erase": 0.5, "crop_scale": 0.5},
}
TASKS: dict[str, dict[str, Any]] = {
    "classify": {"mixup": 0.8, "cutmix": 1.0, "repeats": 3, "three_augment": True, "loss": "bce"},
    "masked": {"task": "masked", "target": "downsampled", "randaugment": 0, "label_smoothing": 0.0},
    "mae": {"task": "masked", "target": "mae", "randaugment": 0, "label_smoothing": 0.0, "decoder_dim": 32},
    "distill": {"mixup": 0.8, "pool": "cls", "patch_size": 4, "progressive": 0.5, "optimizer": "muon"},
    "sampled": {"sampling": "balanced"},
}


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory) -> Path:
    return run_of(tiny_config(data, run=str(tmp_path_factory.mktemp("teacher") / "run"), epochs=1))


@contextlib.contextmanager
def streaming() -> Iterator[None]:
    """No split fits into memory: workers read it again in every epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Loader.__init__.__kwdefaults__, "memory_budget", 0)
        yield


def killed(
    config: TrainConfig,
    after: int = KILLED_AFTER,
    begin: Callable[[], Any] | None = None,
    checkpoint_seconds: float = 0.0,
) -> Path:
    """Start a run, or call `begin`, in a process that is killed by SIGKILL after some steps."""
    config = config.replace(checkpoint_seconds=checkpoint_seconds)
    step = loop.Trainer._training_step

    def or_die(self: loop.Trainer, *arguments):
        if self.step == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    def start() -> None:
        loop.Trainer._training_step = or_die
        (begin or partial(run_of, config))()

    assert ending(fork(start)) == -signal.SIGKILL
    run = Path(config.run or "")
    assert not (run / "model").exists()
    return run


@pytest.fixture(scope="module")
def whole(request, data, teacher, tmp_path_factory) -> TrainConfig:
    """An uninterrupted run of each task, without workers."""
    options = COMMON | TASKS[request.param] | {"workers": 0}
    if request.param == "distill":
        options["teacher"] = str(teacher)
    if request.param == "sampled":
        data = write_uneven(tmp_path_factory.mktemp("data") / "uneven")
    config = tiny_config(data, run=str(tmp_path_factory.mktemp("whole") / "run"), **options)
    with streaming():
        run_of(config)
    return config


@pytest.mark.parametrize(
    ("whole", "workers"),
    [("classify", 0), ("classify", 4), ("masked", 1), ("mae", 1), ("distill", 4), ("sampled", 2)],
    indirect=["whole"],
)
def test_killed_run_resumes_bitwise(whole: TrainConfig, tmp_path, workers: int) -> None:
    with streaming():
        run = killed(whole.replace(run=str(tmp_path / "killed"), workers=workers))
        runs.resume(run)
    assert_bitwise(last_state(run, *TRAINED), last_state(Path(whole.run or ""), *TRAINED))
    assert records(run) == records(Path(whole.run or ""))


def test_run_resumes_bitwise_with_other_engine_options(data, tmp_path) -> None:
    """Without dropout, which a recomputed block would draw twice."""
    options = COMMON | TASKS["classify"] | {"dropout": 0.0, "drop_path": 0.0}
    steady = tiny_config(data, run=str(tmp_path / "steady"), workers=1, **options)
    with streaming():
        run_of(steady)
        run = killed(steady.replace(run=str(tmp_path / "killed")))
        runs.resume(run, workers=0, gradient_checkpointing=True)
    assert_bitwise(last_state(run, *TRAINED), last_state(tmp_path / "steady", *TRAINED))


def test_frozen_run_resumes_bitwise_and_keeps_its_body_unchanged(data, teacher, tmp_path) -> None:
    options = COMMON | {"freeze": True, "optimizer": "sgd", "weights": str(teacher), "lr": 0.1}
    config = tiny_config(data, run=str(tmp_path / "whole"), **options)
    run_of(config)
    run = killed(config.replace(run=str(tmp_path / "killed")))
    runs.resume(run)
    state, before = last_state(run, *TRAINED), from_pretrained(teacher).state_dict()
    assert_bitwise(state, last_state(tmp_path / "whole", *TRAINED))
    changed = {name for name in before if not torch.equal(before[name], state["model"][name])}
    assert changed == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "options", [{"mixup": 0.8, "gradient_checkpointing": True}, {"optimizer": "muon", "layer_decay": 0.5}]
)
def test_lora_run_resumes_bitwise_and_trains_adapters_and_the_head_only(
    data, teacher, tmp_path, options: dict[str, Any]
) -> None:
    options = COMMON | {"lora": 2, "weights": str(teacher), "lr": 0.01, "keep": "last", **options}
    config = tiny_config(data, run=str(tmp_path / "whole"), **options)
    whole = runs.train(config)
    run = killed(config.replace(run=str(tmp_path / "killed")))
    resumed = runs.resume(run)
    state = last_state(run, *TRAINED)
    assert_bitwise(state, last_state(tmp_path / "whole", *TRAINED))
    assert_bitwise(resumed.model.state_dict(), whole.model.state_dict())
    before, after = from_pretrained(teacher).state_dict(), state["model"]
    assert_bitwise(from_pretrained(run / "checkpoints" / "start").state_dict(), before)
    trained = {name for name in after if name not in before or not torch.equal(after[name], before[name])}
    assert all(".adapter." in name or name.startswith("head.") for name in trained)
    assert state["optimizer"]["state"].keys() == trained
    # The finished model is an ordinary one, of the averaged adapters.
    kept, average = resumed.model.state_dict(), state["average"]
    assert kept.keys() == before.keys()
    for name in before:
        layer, expected = f"{name.removesuffix('.weight')}.adapter", average[name]
        if name.endswith(".weight") and f"{layer}.A.weight" in average:
            expected = expected + average[f"{layer}.B.weight"] @ average[f"{layer}.A.weight"]
            assert not torch.equal(kept[name], before[name])
        assert torch.equal(kept[name], expected), name


def test_patience_counts_the_epochs_before_a_kill(data, tmp_path) -> None:
    """At a rate of almost zero, no epoch improves on the first, and patience runs out after the third."""
    options = {"lr": 1e-30, "ema": 0.0, "epochs": 9, "patience": 2}
    config = tiny_config(data, run=str(tmp_path / "whole"), **options)
    run_of(config)
    assert [record["epoch"] for record in Run(tmp_path / "whole").records("stop")] == [3]
    run = killed(config.replace(run=str(tmp_path / "killed")))
    runs.resume(run)
    assert records(run) == records(tmp_path / "whole")
    shutil.rmtree(run / "model")  # as if the run had been killed after its last checkpoint
    runs.resume(run)
    assert records(run) == records(tmp_path / "whole")
    again = TrainConfig.from_yaml(run / "config.yaml").replace(run=str(tmp_path / "again"))
    assert records(run_of(again)) == records(run)


def test_fine_tuning_resumes_bitwise_without_the_initial_weights(data, teacher, tmp_path) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(teacher / "model", weights)
    config = tiny_config(data, run=str(tmp_path / "whole"), **COMMON, weights=str(weights))
    whole = run_of(config)
    run = killed(config.replace(run=str(tmp_path / "killed")))
    begun = killed(config.replace(run=str(tmp_path / "begun")), checkpoint_seconds=300.0)
    assert not checkpoints(begun)
    shutil.rmtree(weights)
    for stopped in (run, begun):
        runs.resume(stopped)
        assert_bitwise(last_state(stopped, *TRAINED), last_state(whole, *TRAINED))


def test_resuming_from_an_older_checkpoint_discards_newer_ones(data, tmp_path, monkeypatch) -> None:
    run = killed(tiny_config(data, run=str(tmp_path / "run"), keep_checkpoints=3))
    older, *_, newest = checkpoints(run)  # the kill may come before the oldest is removed
    step, before = loop.Trainer._training_step, []

    def watched(self: loop.Trainer, *arguments):
        before.append(checkpoints(run))
        return step(self, *arguments)

    monkeypatch.setattr(loop.Trainer, "_training_step", watched)
    runs.resume(older, checkpoint_seconds=300.0)
    assert before[0] == [older]
    assert [path.name for path in checkpoints(run)] == [older.name, "step-00000015"]
    assert not [path for path in (run / "checkpoints").iterdir() if newest.name in path.name]


@pytest.fixture(scope="module")
def once_killed(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("killed") / "run"
    return killed(tiny_config(data, run=str(run)))


@pytest.fixture
def broken_off(once_killed, tmp_path) -> Path:
    """A copy of a killed run."""
    return Path(shutil.copytree(once_killed, tmp_path / "run"))


@pytest.mark.parametrize(
    ("line", "difference"),
    [
        ("embed_dim: 32", "embed_dim was 16, is 32"),
        ("seed: 1", "seed was 0, is 1"),
        ("model_options: {init: timm}", "model_options was {}, is {'init': 'timm'}"),
        ("batch_size: null", "config.yaml: batch_size has no value"),
        ("future: 1", "config.yaml: unknown training option 'future'"),
    ],
)
def test_run_with_edited_options_is_rejected_with_the_difference(broken_off, line, difference) -> None:
    name, file = line.partition(":")[0], broken_off / "config.yaml"
    kept = [text for text in file.read_text().splitlines() if not text.startswith(f"{name}:")]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(UserError) as rejected:
        runs.resume(broken_off)
    assert difference in str(rejected.value)


def test_only_engine_options_may_change_on_resume(broken_off) -> None:
    with pytest.raises(UserError, match="epochs cannot change when a run is resumed: it is 3, not 9"):
        runs.resume(broken_off, epochs=9)


def test_new_images_are_ignored_and_changed_or_missing_ones_are_rejected(tmp_path, caplog) -> None:
    folder = write_folder(tmp_path / "data")
    config = tiny_config(folder, run=str(tmp_path / "whole"))
    whole = run_of(config)
    run = killed(config.replace(run=str(tmp_path / "run")))
    stopped = shutil.copytree(run, tmp_path / "stopped")
    for number in range(20):
        shutil.copy(folder / "dark" / "000.png", folder / "dark" / f"new{number}.png")
    runs.resume(run)
    assert "20 new" in caplog.text
    assert_bitwise(last_state(run, *TRAINED), last_state(whole, *TRAINED))
    image = (folder / "light" / "003.png").read_bytes()
    (folder / "light" / "003.png").write_bytes((folder / "dark" / "003.png").read_bytes())
    with pytest.raises(UserError, match=r"cannot be resumed: .* 1 changed \(.*\), 20 new: light/003\.png"):
        runs.resume(stopped)
    (folder / "light" / "003.png").write_bytes(image)
    (folder / "light" / "004.png").unlink()
    with pytest.raises(UserError, match=r"cannot be resumed: .* 1 missing \(.*\), 20 new: light/004\.png"):
        runs.resume(stopped)
    shutil.rmtree(folder / "dark")
    shutil.copytree(folder / "light", folder / "dim")
    with pytest.raises(UserError, match="classes gone: dark, classes new: dim"):
        runs.resume(stopped)


def test_run_without_some_images_is_resumed_on_request_and_from_then_on_bitwise(tmp_path) -> None:
    folder = write_folder(tmp_path / "data")
    config = tiny_config(folder, run=str(tmp_path / "run"), epochs=4)
    run = killed(config)
    record = SplitRecord.read(run / "split.jsonl.gz")
    for split, count in (("train", 6), ("test", 1)):
        for name in record.parts[split].names[:count]:
            (folder / name).unlink()
    with pytest.raises(UserError, match=r"7 missing .*--missing skip`, or take its best .*checkpoints/best"):
        runs.resume(run)
    again = Path(shutil.copytree(run, tmp_path / "again"))
    whole = runs.resume(run, missing="skip")
    killed(config.replace(run=str(again)), 13, partial(runs.resume, again, missing="skip"))
    resumed = runs.resume(again)  # the images that it skips are recorded
    assert len(whole.evaluation.labels) == len(record.parts["test"].names) - 1
    states = [load_checkpoint_at(checkpoints(path)[-1]) for path in (run, again)]
    assert [step for step, _ in states] == [20, 20]  # as planned: 4 epochs of 5 steps
    assert_bitwise(*(state["model"] for _, state in states))
    assert_bitwise(whole.model.state_dict(), resumed.model.state_dict())
    skipped = SplitRecord.read(run / "split.jsonl.gz").skipped
    assert {split: len(part.names) for split, part in skipped.items()} == {"train": 6, "test": 1}
    assert "7 skipped since the run was resumed (6 train, 1 test)" in Run(run).open_data().note


def test_skipped_images_that_are_back_stay_training_images(tmp_path) -> None:
    folder = write_folder(tmp_path / "data")
    run = killed(tiny_config(folder, run=str(tmp_path / "run")))
    name = SplitRecord.read(run / "split.jsonl.gz").parts["train"].names[0]
    shutil.move(folder / name, tmp_path / "away.png")
    with undrawn():
        assert main(["train", "--resume", str(run), "--missing", "skip"]) == 0
    shutil.move(tmp_path / "away.png", folder / name)
    opened, record = Run(run).open_data(), SplitRecord.read(run / "split.jsonl.gz")
    assert opened.restored.counts()["new"] == 0
    assert folder / name not in opened.splits.train.sources
    assert record.trained_on(read_tree(folder)).sum() == len(opened.splits.train) + 1


def test_part_without_any_image_left_is_not_skipped(tmp_path) -> None:
    folder = write_folder(tmp_path / "data")
    run = killed(tiny_config(folder, run=str(tmp_path / "run")))
    for name in SplitRecord.read(run / "split.jsonl.gz").parts["val"].names:
        (folder / name).unlink()
    with pytest.raises(UserError, match="none of the 2 val images is left: 2 missing"):
        runs.resume(run, missing="skip")
    assert not SplitRecord.read(run / "split.jsonl.gz").skipped


def test_run_locked_by_another_process_is_not_resumed(broken_off) -> None:
    ready, held = os.pipe()

    def hold() -> None:
        with Run(broken_off).lock():
            os.write(held, b"x")
            signal.pause()

    child = fork(hold)
    os.read(ready, 1)
    try:
        with pytest.raises(UserError, match=str(child)):
            runs.resume(broken_off)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert runs.resume(broken_off).run == broken_off
