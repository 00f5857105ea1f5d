"""A tiny data set, the options of a tiny run, and runs without figures."""

import contextlib
import importlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitascope import runs
from vitascope.analysis.report import figures, write
from vitascope.data.datasets import open_data
from vitascope.data.splits import Splits
from vitascope.errors import Interrupted
from vitascope.models.sizes import ModelConfig
from vitascope.training import finishing, loop, resume, train
from vitascope.training.building import build_trainer, prepare
from vitascope.training.checkpoint.folders import load_checkpoint
from vitascope.training.loop import Trainer
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run
from vitascope.training.tasks.classify import Classify


def write_folder(
    root: Path, per_class: int = 12, side: int = 16, classes: tuple[str, ...] = ("dark", "light")
) -> Path:
    """Write noise around a different grey for each class: `root/<class>/<number>.png`."""
    noise = np.random.default_rng(0)
    for index, name in enumerate(classes):
        folder = root / name
        folder.mkdir(parents=True)
        level = 255 * (index + 1) / (len(classes) + 1)
        for number in range(per_class):
            pixels = np.clip(noise.normal(level, 30, (side, side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root


def write_uneven(root: Path) -> Path:
    """As `write_folder`, with 14 and 6 training images (20), of 18 and 8 in all."""
    write_folder(root, per_class=18)
    for number in range(8, 18):
        (root / "light" / f"{number:03}.png").unlink()
    return root


def tiny_config(data: Path | str, **options: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "data": str(data),
        "image_size": 16,
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "epochs": 3,
        "batch_size": 4,
        "device": "cpu",
    }
    if options.get("task") == "masked":
        values |= {"label_smoothing": 0.0, "keep": "last"}  # there are no labels
    if {"minutes", "steps"} & options.keys():
        del values["epochs"]
    return TrainConfig.from_dict(values | options)


def planned(config: TrainConfig, splits: Splits) -> tuple[TrainConfig, ModelConfig]:
    found = prepare(config, splits).plan
    return found.config, found.model


def trainer_of(config: TrainConfig) -> Trainer:
    """A run's trainer, on the CPU, before its first step."""
    splits = open_data(config.data, seed=config.seed)
    return build_trainer(Run(Path(config.run or "run")), prepare(config, splits), torch.device("cpu"))


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Skip figures and report, which take most of a tiny run's time; test_train tests both.

    A report that is rewritten has no new figures; test_write tests those.

    Checkpoints are kept, because tests compare their states; test_train_finish tests their removal.
    """
    importlib.import_module("vitascope.analysis.probing.probe")  # which would keep what is patched here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw_figures", lambda *_: {})
        patch.setattr(figures, "draw_masked_patches", lambda *_: {})
        patch.setattr(write, "write_report", lambda run, **_: run.report)
        patch.setattr(finishing, "remove_checkpoints", lambda run, **_: None)
        yield


def let_losses_be(monkeypatch: pytest.MonkeyPatch, *losses: float) -> list[float]:
    """Let each validation have the next of these losses; returns those to come."""
    validate, coming = Classify.validate, list(losses)
    monkeypatch.setattr(
        Classify, "validate", lambda *arguments: {**validate(*arguments), "loss": coming.pop(0)}
    )
    return coming


@contextlib.contextmanager
def signalled(at: int, signum: int = signal.SIGTERM) -> Iterator[None]:
    """Send this process a signal in a step of a run."""
    step = Trainer._training_step

    def and_stop(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.step == at:
            os.kill(os.getpid(), signum)
        return step(trainer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_training_step", and_stop)
        yield


@contextlib.contextmanager
def interrupted(at: int) -> Iterator[None]:
    """A run that ends by a signal in a step."""
    with signalled(at), pytest.raises(Interrupted):
        yield


def clock(monkeypatch, tick: float = 0.02) -> None:
    """Every look at the clock finds a fiftieth of a second passed."""
    seconds = itertools.count(0, tick)
    for module in (loop, train, resume):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(loop, "seconds_to_read", lambda *_: 0.0)  # which is long on a busy machine


def run_of(config: TrainConfig) -> Path:
    return (runs.pretrain if config.task == "masked" else runs.train)(config).run


def records(run: Path | str) -> list[dict[str, Any]]:
    """The recorded metrics without times."""
    clocks = ("images_per_second", "seconds", "time")
    return [{k: v for k, v in record.items() if k not in clocks} for record in Run.open(run).metrics]


def last_state(run: Path, *names: str) -> dict[str, Any]:
    """The state in the newest checkpoint, or parts of it, and its step; without times."""
    found = load_checkpoint(run)
    assert found is not None
    state = {"step": found[0], **found[1]}
    return {name: state[name] for name in names or state.keys() - {"seconds"}}


def assert_bitwise(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_bitwise(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_bitwise(mine, theirs)
    else:
        assert one == other
