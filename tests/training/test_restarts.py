"""Processes that torchrun starts again: a killed run ends as an undisturbed one, and resumes only itself."""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import torchrun
from tests.training import assert_bitwise, tiny_config, undrawn
from vitascope.cache import cache_folder
from vitascope.errors import UserError
from vitascope.options.recipes import TrainConfig
from vitascope.run.run import Run
from vitascope.training import loop, train
from vitascope.training.checkpoint.folders import checkpoints, load_checkpoint_at
from vitascope.training.distributed import rank
from vitascope.weights.loading import from_pretrained

OPTIONS: dict[str, Any] = {
    **{"ema": 0.9, "dropout": 0.1, "mixup": 0.8, "randaugment": 2, "checkpoint_seconds": 0.0},
    **{"keep_checkpoints": 3, "parallel": "fsdp", "epochs": 3},
}
KILLS = ((8, 1), (13, 0))
"""Step and rank of the process that is killed, in each attempt: in the middle of epochs of 5 steps."""


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def killing(kills: tuple[tuple[int, int], ...]) -> None:
    """Kill a process of each of the first attempts before it computes some step of the run `killed`."""
    step = loop.Trainer._training_step

    def or_die(self: loop.Trainer, *arguments):
        if self.run.path.name == "killed" and (self.step, rank()) in kills[attempt() : attempt() + 1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    loop.Trainer._training_step = or_die


def train_two(config: TrainConfig) -> None:
    """What each process does: train a run in which two attempts are killed, and an undisturbed one."""
    torch.set_num_threads(1)
    killing(KILLS)
    folder = Path(config.run or "")
    with undrawn():
        train.train(config.replace(run=str(folder / "killed")))
        train.train(config.replace(run=str(folder / "whole")))


def final_state(run: Path) -> dict[str, Any]:
    step, state = load_checkpoint_at(checkpoints(run)[-1])
    assert step == 15
    return {name: state[name] for name in ("model", "average", "optimizer")}


def validations(run: Path) -> list[float]:
    return [record["val_loss"] for record in Run(run).records("epoch")]


def resumed_steps(output: Path) -> list[int]:
    """The steps that the run `killed` was resumed from: at most every second step of two processes has a
    checkpoint, and the last one is perhaps incomplete."""
    return [int(step) for step in re.findall(r"killed: .* from step (\d+),", output.read_text())]


def test_run_killed_twice_restarts_by_itself_and_ends_bitwise_as_an_undisturbed_one(data, tmp_path) -> None:
    config, output = tiny_config(data, run=str(tmp_path), **OPTIONS), tmp_path / "output.txt"
    assert torchrun(2, output, train_two, config, restarts=2) == 0, output.read_text()[-4000:]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert_bitwise(final_state(killed), final_state(whole))
    assert validations(killed) == validations(whole)
    first, second = resumed_steps(output)
    assert (first in (6, 8), second in (10, 12)) == (True, True)


def resume_chosen(chosen: Path) -> None:
    """Resume from a chosen checkpoint; the first attempt is killed later."""
    killing(((8, 0),))
    with undrawn():
        train.resume(chosen)


def reject_existing(config: TrainConfig) -> None:
    """Each of two attempts is rejected: the run is of another launch."""
    with pytest.raises(UserError, match="killed exists, and a run is never overwritten"):
        train.train(config)
    if attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_restart_continues_from_the_newest_checkpoint_not_from_the_one_first_chosen(data, tmp_path) -> None:
    run, output = tmp_path / "killed", tmp_path / "output.txt"
    config = tiny_config(data, run=str(run), **OPTIONS | {"keep_checkpoints": 20})
    with undrawn():
        train.train(config)
    whole = final_state(run)
    (run / "model" / "config.json").unlink()  # the run is unfinished
    chosen = run / "checkpoints" / "step-00000004"
    assert torchrun(1, output, resume_chosen, chosen, restarts=1) == 0, output.read_text()[-4000:]
    first, second = resumed_steps(output)
    assert (first == 4, second in (7, 8)) == (True, True)
    assert_bitwise(final_state(run), whole)
    output = tmp_path / "rejected.txt"
    assert torchrun(1, output, reject_existing, config, restarts=1) == 0, output.read_text()[-4000:]


def train_in_a_store(config: TrainConfig, folder: Path) -> None:
    """The first attempt loses its machine: the first process is killed, and the cache is gone."""
    torch.set_num_threads(1)
    step = loop.Trainer._training_step

    def or_die(self: loop.Trainer, *arguments):
        if self.run.url is not None and (self.step, rank(), attempt()) == (8, 0, 0):
            self.checkpoint_writer.wait()
            shutil.rmtree(cache_folder())
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    loop.Trainer._training_step = or_die
    with undrawn():
        train.train(config)
        train.train(config.replace(run=str(folder / "whole")))


def test_run_in_a_store_restarts_on_another_machine_bitwise(data, tmp_path, s3_store) -> None:
    url, output = f"{s3_store.url}/run", tmp_path / "output.txt"
    config = tiny_config(data, run=url, **OPTIONS | {"epochs": 2})
    assert torchrun(2, output, train_in_a_store, config, tmp_path, restarts=1) == 0, output.read_text()[
        -4000:
    ]
    assert f"run    {url}: 2 epochs of 5 steps, from step 8," in output.read_text()
    assert_bitwise(from_pretrained(url).state_dict(), from_pretrained(tmp_path / "whole").state_dict())


def die_before_the_run_is_complete(config: TrainConfig) -> None:
    """The first attempt is killed before it has recorded its split."""
    if attempt() == 0:
        Run.record_split = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with undrawn():
        assert train.train(config).run == Path(config.run or "")


def test_run_killed_before_it_was_complete_begins_anew(data, tmp_path) -> None:
    config, output = tiny_config(data, run=str(tmp_path / "run"), epochs=1), tmp_path / "output.txt"
    status = torchrun(1, output, die_before_the_run_is_complete, config, restarts=1)
    assert status == 0, output.read_text()[-4000:]
    assert Run(tmp_path / "run").split_record() is not None
