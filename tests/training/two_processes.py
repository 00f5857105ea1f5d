"""What each of two processes does in test_distributed.py.

`main(FOLDER)` trains each `<name>.yaml` there as `FOLDER/runs/<name>`.
One whose name begins with "stopped" gets a SIGTERM, in the second process alone, after half its steps; one
that begins with "resumed" resumes an existing run.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.training import undrawn
from vitascope.errors import Interrupted
from vitascope.options.recipes import TrainConfig
from vitascope.training import loop, train
from vitascope.training.distributed import rank

RECORDED = 1
STOP_AFTER = 5


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    loop.RECORD_EVERY = RECORDED
    with undrawn():
        for path in sorted(folder.glob("*.yaml")):
            run(path)


def run(path: Path) -> None:
    if path.stem.startswith("resumed"):
        train.resume(path.parent / "runs" / path.stem)
    elif path.stem.startswith("stopped"):
        stop_in_the_middle(TrainConfig.from_yaml(path))
    else:
        config = TrainConfig.from_yaml(path)
        (train.pretrain if config.task == "masked" else train.train)(config)


def stop_in_the_middle(config: TrainConfig) -> None:
    step = loop.Trainer._training_step

    def and_stop(self: loop.Trainer, *arguments):
        if self.step == STOP_AFTER and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    loop.Trainer._training_step = and_stop
    try:
        with pytest.raises(Interrupted, match="SIGTERM"):
            train.train(config)
    finally:
        loop.Trainer._training_step = step
