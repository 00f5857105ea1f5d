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
    # Without dropout, which a recomputed block would draw twice.
    "sampled": {"sampling": "balanced", "dropout": 0.0, "drop_path": 0.0},
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
    [("classify", 2), ("masked", 0), ("mae", 0), ("distill", 0), ("sampled", 0)],
    indirect=["whole"],
)
def test_killed_run_resumes_bitwise(whole: TrainConfig, tmp_path, workers: int) -> None:
    engine = {} if whole.architecture.dropout else {"gradient_checkpointing": True, "workers": 1}
    with streaming():
        run = killed(whole.replace(run=str(tmp_path / "killed"), workers=workers))
        runs.resume(run, **engine)
    assert_bitwise(last_state(run, *TRAINED), last_state(Path(whole.run or ""), *TRAINED))
    assert records(run) == records(Path(whole.run or ""))


def test_frozen_run_resumes_bitwise_without_its_initial_weights_and_keeps_its_body_unchanged(
    data, teacher, tmp_path
) -> None:
    weights = Path(shutil.copytree(teacher / "model", tmp_path / "weights"))
    before = from_pretrained(weights).state_dict()
    options = COMMON | {"freeze": True, "optimizer": "sgd", "weights": str(weights), "lr": 0.1}
    config = tiny_config(data, run=str(tmp_path / "whole"), **options)
    whole = last_state(run_of(config), *TRAINED)
    run = killed(config.replace(run=str(tmp_path / "killed")))
    begun = killed(config.replace(run=str(tmp_path / "begun")), after=2, checkpoint_seconds=300.0)
    assert not checkpoints(begun)
    shutil.rmtree(weights)
    for stopped in (run, begun):
        runs.resume(stopped)
        assert_bitwise(last_state(stopped, *TRAINED), whole)
    changed = {name for name in before if not torch.equal(before[name], whole["model"][name])}
    assert changed == {"head.weight", "head.bias"}


def test_lora_run_resumes_bitwise_and_trains_adapters_and_the_head_only(data, teacher, tmp_path) -> None:
    options = COMMON | {"lora": 2, "weights": str(teacher), "lr": 0.01, "keep": "last", "mixup": 0.8}
    options |= {"optimizer": "muon", "layer_decay": 0.5, "gradient_checkpointing": True}
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
def once_killed(tmp_path_factory) -> TrainConfig:
    root = tmp_path_factory.mktemp("killed")
    config = tiny_config(write_folder(root / "data"), run=str(root / "run"))
    killed(config)
    return config


@pytest.fixture
def broken_off(once_killed, tmp_path) -> Path:
    data = shutil.copytree(once_killed.data, tmp_path / "data")
    run = Path(shutil.copytree(once_killed.run, tmp_path / "run"))
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(f"data: {once_killed.data}", f"data: {data}"))
    return run


def test_run_with_edited_options_is_rejected_with_the_difference(broken_off) -> None:
    file = broken_off / "config.yaml"
    text = file.read_text()
    for line, difference in {
        "embed_dim: 32": "embed_dim was 16, is 32",
        "seed: 1": "seed was 0, is 1",
        "model_options: {init: timm}": "model_options was {}, is {'init': 'timm'}",
        "batch_size: null": "config.yaml: batch_size has no value",
        "future: 1": "config.yaml: unknown training option 'future'",
    }.items():
        name = line.partition(":")[0]
        kept = [other for other in text.splitlines() if not other.startswith(f"{name}:")]
        file.write_text("\n".join([*kept, line]))
        with pytest.raises(UserError) as rejected:
            runs.resume(broken_off)
        assert difference in str(rejected.value)


def test_only_engine_options_may_change_on_resume(broken_off) -> None:
    with pytest.raises(UserError, match="epochs cannot change when a run is resumed: it is 3, not 9"):
        runs.resume(broken_off, epochs=9)


def test_new_images_are_ignored_and_changed_or_missing_ones_are_rejected(
    once_killed, broken_off, tmp_path, caplog
) -> None:
    whole = run_of(once_killed.replace(run=str(tmp_path / "whole")))
    folder, stopped = tmp_path / "data", shutil.copytree(broken_off, tmp_path / "stopped")
    for number in range(20):
        shutil.copy(folder / "dark" / "000.png", folder / "dark" / f"new{number}.png")
    runs.resume(broken_off)
    assert "20 new" in caplog.text
    assert_bitwise(last_state(broken_off, *TRAINED), last_state(whole, *TRAINED))
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


def test_run_without_some_images_is_resumed_on_request_and_from_then_on_bitwise(broken_off, tmp_path) -> None:
    folder, record = tmp_path / "data", SplitRecord.read(broken_off / "split.jsonl.gz")
    for split, count in (("train", 6), ("test", 1)):
        for name in record.parts[split].names[:count]:
            (folder / name).unlink()
    with pytest.raises(UserError, match=r"7 missing .*--missing skip`, or take its best .*checkpoints/best"):
        runs.resume(broken_off)
    again = Path(shutil.copytree(broken_off, tmp_path / "again"))
    whole = runs.resume(broken_off, missing="skip")
    config = tiny_config(folder, run=str(again))
    killed(config, 12, partial(runs.resume, again, missing="skip"))
    resumed = runs.resume(again)  # the images that it skips are recorded
    assert len(whole.evaluation.labels) == len(record.parts["test"].names) - 1
    states = [load_checkpoint_at(checkpoints(path)[-1]) for path in (broken_off, again)]
    assert [step for step, _ in states] == [15, 15]  # as planned: 3 epochs of 5 steps
    assert_bitwise(*(state["model"] for _, state in states))
    assert_bitwise(whole.model.state_dict(), resumed.model.state_dict())
    skipped = SplitRecord.read(broken_off / "split.jsonl.gz").skipped
    assert {split: len(part.names) for split, part in skipped.items()} == {"train": 6, "test": 1}
    assert "7 skipped since the run was resumed (6 train, 1 test)" in Run(broken_off).open_data().note


def test_skipped_images_that_are_back_stay_training_images(broken_off, tmp_path) -> None:
    folder, name = tmp_path / "data", SplitRecord.read(broken_off / "split.jsonl.gz").parts["train"].names[0]
    shutil.move(folder / name, tmp_path / "away.png")
    with undrawn():
        assert main(["train", "--resume", str(broken_off), "--missing", "skip"]) == 0
    shutil.move(tmp_path / "away.png", folder / name)
    opened, record = Run(broken_off).open_data(), SplitRecord.read(broken_off / "split.jsonl.gz")
    assert opened.restored.counts()["new"] == 0
    assert folder / name not in opened.splits.train.sources
    assert record.trained_on(read_tree(folder)).sum() == len(opened.splits.train) + 1


def test_part_without_any_image_left_is_not_skipped(broken_off, tmp_path) -> None:
    for name in SplitRecord.read(broken_off / "split.jsonl.gz").parts["val"].names:
        (tmp_path / "data" / name).unlink()
    with pytest.raises(UserError, match="none of the 2 val images is left: 2 missing"):
        runs.resume(broken_off, missing="skip")
    assert not SplitRecord.read(broken_off / "split.jsonl.gz").skipped


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
