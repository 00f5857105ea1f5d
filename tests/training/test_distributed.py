"""Three processes over gloo against one: same batches, same losses; processes that torchrun starts again."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forked import in_group, torchrun
from tests.models import small_model
from tests.training import (
    assert_bitwise,
    interrupted,
    run_of,
    signalled,
    tiny_config,
    undrawn,
    write_folder,
    write_uneven,
)
from tests.training.checkpoint import save_checkpoint
from vitascope import runs
from vitascope.cache import cache_folder
from vitascope.errors import Interrupted, UserError
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.training import distributed, holding, loop, optimizers
from vitascope.training.checkpoint.folders import checkpoints, load_checkpoint_at
from vitascope.training.distributed import Exchange, _own_part, gather, rank, sum_over_processes
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run

# 20 training images in batches of 6: the last of an epoch has 2, so that one process gets none. The rate
# rises all the time: at the full rate, Adam's first steps magnify rounding in any run. No bias of the keys:
# its gradient is only rounding, which Adam turns into steps of the full rate.
SHARED: dict[str, Any] = {
    **{"batch_size": 6, "epochs": 2, "precision": "fp32", "lr": 1e-3, "warmup_epochs": 5.0, "ema": 0.9},
    "color_jitter": 0.4,
}
OF_WEIGHTS = dict.fromkeys(("image_size", "patch_size", "embed_dim", "depth", "num_heads"))
NO_KEY_BIAS: dict[str, Any] = {"model_options": {"qkv_bias": "no_key"}}
MIXED: dict[str, Any] = {
    **{"accumulate": 2, "class_weights": "balanced", "repeats": 3, "mixup": 0.8, "cutmix": 1.0},
    **{"randaugment": 2, "erase": 0.5, "epochs": 1},
    **NO_KEY_BIAS,
}
KINDS: dict[str, dict[str, Any]] = {
    "mixed": MIXED,
    "muon": {**MIXED, "optimizer": "muon"},
    "mae": {
        **{"task": "masked", "target": "mae", "decoder_dim": 32, "decoder_depth": 1, "patch_size": 4},
        **{"lr": 1e-4, **NO_KEY_BIAS},
    },
    # 2 images for 3 processes
    "lora": {**OF_WEIGHTS, "data": "few", "mixup": 0.8, "weights": "weights", "lora": 2},
    "probe": {
        **{**OF_WEIGHTS, "weights": "weights", "freeze": True, "flip": 0.0, "crop_scale": 1.0},
        **{"color_jitter": 0.0, "epochs": 1},
    },
    # No epoch improves on the first: it stops after the second.
    "patient": {"lr": 1e-30, "ema": 0.0, "epochs": 5, "patience": 1},
}
RUNS = {"patient": "ddp", "mae": "fsdp", "lora": "fsdp", "probe": "ddp"}
# Either half of these is by three processes.
BEGUN = {"stopped": ("mixed", "fsdp"), "resumed": ("muon", "ddp")}
FC1 = "encoder.blocks.0.mlp.fc1.weight"


def config_of(root: Path, name: str, kind: str, **options: Any) -> TrainConfig:
    options = {"data": "data", **SHARED, **KINDS[kind], **options}
    places = {option: str(root / options[option]) for option in ("data", "weights") if option in options}
    return tiny_config(**options | places, run=str(root / "runs" / name))


def train_each(configs: dict[str, TrainConfig]) -> None:
    """What each process does: "stopped" runs get a SIGTERM, in the second process alone, after half their
    steps; "resumed" ones exist."""
    torch.set_num_threads(1)
    for name, config in configs.items():
        if name == "resumed":
            runs.resume(str(config.run))
        elif name == "stopped":
            with signalled(2) if rank() == 1 else nullcontext(), pytest.raises(Interrupted, match="SIGTERM"):
                runs.train(config)
        else:
            run_of(config)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("distributed")
    write_uneven(root / "data")
    for split in ("train", "val", "test"):
        write_folder(root / "few" / split, per_class=1)
    save_pretrained(small_model(image_size=16, patch_size=8), root / "weights")
    with undrawn(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "RECORD_EVERY", 1)
        patch.setenv("VITASCOPE_FEATURES_GB", "0")
        patch.setattr(optimizers, "has_bf16", lambda device: False)  # its rounding exceeds the tolerance
        for kind in KINDS:
            run_of(config_of(root, kind, kind))
        configs = {f"{kind}-3": config_of(root, f"{kind}-3", kind, parallel=it) for kind, it in RUNS.items()}
        for name, (kind, layout) in BEGUN.items():
            configs[name] = config_of(root, name, kind, parallel=layout)
        with interrupted(2):
            runs.train(configs["resumed"])
        output = root / "output.txt"
        assert torchrun(3, output, train_each, configs) == 0, output.read_text()[-4000:]
        assert len(checkpoints(root / "runs" / "stopped")) == 1
        runs.resume(root / "runs" / "stopped")
    return root


def losses(run: Path) -> list[tuple[int, float]]:
    names = ("loss", "train_loss", "val_loss")
    return [(record["step"], record[name]) for record in Run(run).metrics for name in names if name in record]


def assert_same_losses(one: Path, other: Path, count: int) -> None:
    assert len(losses(one)) == count
    assert [step for step, _ in losses(one)] == [step for step, _ in losses(other)]
    expected = pytest.approx([loss for _, loss in losses(one)], rel=1e-6)
    assert [loss for _, loss in losses(other)] == expected


@pytest.mark.parametrize("kind", RUNS)
def test_three_processes_reproduce_the_losses_of_one(place, kind: str) -> None:
    steps = {"lora": 2, "probe": 4}.get(kind, 8)
    epochs = 1 if kind == "probe" else 2
    assert_same_losses(place / "runs" / kind, place / "runs" / f"{kind}-3", steps + 2 * epochs + 1)


@pytest.mark.parametrize("kind", ["lora", "probe"])
def test_three_processes_save_the_model_of_one(place, kind: str) -> None:
    """With merged adapters, and with a head on a frozen body."""
    folders = (place / "runs" / kind, place / "runs" / f"{kind}-3", place / "weights")
    one, three, start = (from_pretrained(folder).state_dict() for folder in folders)
    assert one.keys() == start.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(three[name], tensor, rtol=1e-4, atol=1e-5)
        if kind == "probe" and not name.startswith("head."):
            assert torch.equal(three[name], start[name])
    assert torch.equal(one[FC1], start[FC1]) == (kind == "probe")


def test_three_processes_stop_early_together(place) -> None:
    for run in ("patient", "patient-3"):
        stop = {"kind": "stop", "step": 8, "epoch": 2, "best_epoch": 1}
        assert Run(place / "runs" / run).records("stop") == [stop]


@pytest.mark.parametrize("begun", BEGUN)
def test_run_resumes_with_another_number_of_processes(place, begun: str) -> None:
    """`stopped` starts with three processes and resumes with one, `resumed` the other way round."""
    whole, run = place / "runs" / BEGUN[begun][0], place / "runs" / begun
    assert_same_losses(whole, run, 4 + 2 + 1)
    for name, tensor in from_pretrained(whole).state_dict().items():
        torch.testing.assert_close(from_pretrained(run).state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


# The start


def test_processes_have_keys_apart_from_those_before_a_restart() -> None:
    store = dist.HashStore()
    for key in ("name-0", "name-1", "answer-of-a-dead-process"):
        store.set(f"vitascope/{key}", "of-a-dead-process")
    with ThreadPoolExecutor(3) as pool:
        second, third, first = pool.map(lambda rank: _own_part(store, rank, 3), (1, 2, 0))
    first.set("address", "here")
    assert (second.get("address"), third.get("address")) == (b"here", b"here")
    assert not store.check(["address"])


def test_process_without_the_others_stops_with_the_reason_of_torch(monkeypatch) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    monkeypatch.setattr(distributed, "agents_store", lambda: store)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    for name, value in {"LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="did not connect to each other: ") as caught:
        distributed.join_processes("cpu")
    assert "\n" not in str(caught.value)


def test_run_that_a_restart_finds_incomplete_is_removed_and_begins_anew(tmp_path) -> None:
    run = Run.create(TrainConfig(run=str(tmp_path / "run"), device="cpu").to_dict())
    launch: Any = SimpleNamespace(begun=str(run.path))
    assert holding.begun_run(launch) is None  # it has not recorded its split
    assert not run.path.exists()


# A process that dies


def lose_the_second(run: Path) -> int:
    """What both processes do: they take a step together, then the second dies. Returns 3 for the error."""
    try:
        with holding.held(Run(run)):
            assert gather(dist.get_rank()) == [0, 1]
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            sum_over_processes({"loss": torch.tensor(1.0)})
    except UserError as error:
        print(error, flush=True)
        return 3
    return 0


def test_survivors_of_a_dead_process_explain_how_to_resume(tmp_path, capfd) -> None:
    endings = in_group(2, partial(lose_the_second, tmp_path), tmp_path / "store")
    assert endings == [3, -signal.SIGKILL]
    message = capfd.readouterr().out
    assert message.startswith("process 0 of 2 has lost its connection to another process")
    assert message.count("\n") == 1
    resume = f"start all processes again with `train --resume {tmp_path}`: "
    assert f"{resume}no checkpoint was saved yet" in message


def test_the_way_on_after_a_lost_connection_depends_on_what_is_saved(tmp_path, monkeypatch) -> None:
    def advice() -> str:
        with pytest.raises(UserError) as lost, holding.held(Run(tmp_path)):
            raise dist.DistNetworkError("[rank 0] Connection closed by peer. And more")
        assert str(lost.value).endswith("(Connection closed by peer)")
        return str(lost.value)

    with pytest.raises(dist.DistNetworkError):  # no other process
        advice()
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda value, group=None: [value])
    assert "start all processes again with `train --resume" in advice()
    save_checkpoint(tmp_path, 12, {"weights": torch.zeros(1)})
    assert f"`train --resume {tmp_path}`: it continues from step-00000012" in advice()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert "torchrun starts all processes again: it continues from step-00000012" in advice()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert f"the model is saved; `vitascope report {tmp_path}` draws" in advice()
    with pytest.raises(RuntimeError, match="a fault of ours"), holding.held(Run(tmp_path)):
        raise RuntimeError("a fault of ours")


def test_processes_agree_a_step_later_without_waiting_for_each_other(tmp_path: Path) -> None:
    def work() -> None:
        exchange, rank = Exchange(), torch.distributed.get_rank()
        assert exchange.largest(float(rank), 5.0) == (0.0, 0.0)
        assert exchange.largest(0.0, 0.0) == (1.0, 5.0)
        exchange.forget()
        assert exchange.largest(0.0, 3.0) == (0.0, 0.0)
        assert exchange.largest(0.0, 0.0) == (0.0, 3.0)
        exchange.forget()

    assert in_group(2, work, tmp_path / "meeting") == [0, 0]
    assert Exchange().largest(1.0, 2.0) == (1.0, 2.0)


OPTIONS: dict[str, Any] = {
    **{"ema": 0.9, "dropout": 0.1, "mixup": 0.8, "randaugment": 2, "checkpoint_seconds": 0.0},
    **{"keep_checkpoints": 3, "parallel": "fsdp", "epochs": 1},
}


def killing(victim: int, lose: Callable[[loop.Trainer], object] | None = None) -> None:
    """Kill a process of the first attempt before the last step of the run `killed`."""
    step, is_first = loop.Trainer._training_step, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def or_die(self: loop.Trainer, *arguments):
        if is_first and self.run.name == "killed" and (self.step, rank()) == (4, victim):
            if lose is not None:
                lose(self)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    loop.Trainer._training_step = or_die
    torch.set_num_threads(1)


def train_two(config: TrainConfig, whole: Path, *killed: Any) -> None:
    """What each process does: train a run that loses a process, and an undisturbed one."""
    killing(*killed)
    with undrawn():
        runs.train(config)
        runs.train(config.replace(run=str(whole), checkpoint_seconds=300.0))


def lose_the_machine(trainer: loop.Trainer) -> None:
    """Of a run in a store: its local copy is gone, after the upload of the last checkpoint."""
    trainer.checkpoint_writer.wait()
    shutil.rmtree(cache_folder())


def final_state(run: Path) -> dict[str, Any]:
    step, state = load_checkpoint_at(checkpoints(run)[-1])
    assert step == 5
    return {name: state[name] for name in ("model", "average", "optimizer")}


def resumed_steps(output: Path) -> list[int]:
    """The steps that the run `killed` was resumed from: at most every second step of two processes has a
    checkpoint, and the last one is perhaps incomplete."""
    return [int(step) for step in re.findall(r"killed: .* from step (\d+),", output.read_text())]


def test_killed_run_restarts_by_itself_and_ends_bitwise_as_an_undisturbed_one(data, tmp_path) -> None:
    killed, whole, output = tmp_path / "killed", tmp_path / "whole", tmp_path / "output.txt"
    config = tiny_config(data, run=str(killed), **OPTIONS)
    assert torchrun(2, output, train_two, config, whole, 1, restarts=1) == 0, output.read_text()[-4000:]
    assert_bitwise(final_state(killed), final_state(whole))
    validations = [[record["val_loss"] for record in Run(run).records("epoch")] for run in (killed, whole)]
    assert validations[0] == validations[1]
    (step,) = resumed_steps(output)
    assert step in (2, 4)


def test_run_in_a_store_restarts_on_another_machine_bitwise(data, tmp_path, s3_store) -> None:
    url, whole, output = f"{s3_store.url}/killed", tmp_path / "whole", tmp_path / "output.txt"
    arguments = (tiny_config(data, run=url, **OPTIONS), whole, 0, lose_the_machine)
    assert torchrun(2, output, train_two, *arguments, restarts=1) == 0, output.read_text()[-4000:]
    assert resumed_steps(output) == [4]
    assert_bitwise(from_pretrained(url).state_dict(), from_pretrained(whole).state_dict())


def resume_chosen(chosen: Path) -> None:
    killing(victim=0)
    with undrawn():
        runs.resume(chosen)


def test_restart_continues_from_the_newest_checkpoint_not_from_the_one_first_chosen(data, tmp_path) -> None:
    run, output = tmp_path / "killed", tmp_path / "output.txt"
    with undrawn():
        runs.train(tiny_config(data, run=str(run), **OPTIONS | {"keep_checkpoints": 20}))
    whole = final_state(run)
    (run / "model" / "config.json").unlink()  # the run is unfinished
    chosen = run / "checkpoints" / "step-00000002"
    assert torchrun(1, output, resume_chosen, chosen, restarts=1) == 0, output.read_text()[-4000:]
    first, second = resumed_steps(output)
    assert (first == 2, second in (3, 4)) == (True, True)
    assert_bitwise(final_state(run), whole)
