"""More epochs for a finished run, which stays what it is until their model is saved, or they fail."""

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from vitascope import layout
from vitascope.errors import DivergenceError, UserError
from vitascope.models.heads import scale_logits
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.storage import WriteError, explaining_failure, replacing
from vitascope.training import distributed
from vitascope.training.checkpoint import folders
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.metrics import read_metrics
from vitascope.training.run.run import Run
from vitascope.training.tasks.task import Monitor

_CHANGED = (layout.METRICS, layout.SPLIT, layout.CONFIG)
"""What new epochs change beside model and checkpoints; the last one says that they have begun."""


def lengthen(run: Run, config: TrainConfig, epochs: int) -> None:
    """Record that a finished run has so many epochs, and keep what it is until the new model is saved.

    Raises:
        UserError: a run in a store; no more epochs than it has had. The run stays finished.
    """
    if run.store is not None:
        raise UserError(f"{run.ref}: a run in a store gets no more epochs; copy it, and resume the copy")
    validations, tests = run.records("epoch"), run.records("test")
    config.replace(epochs=epochs, steps=None, minutes=None)  # which checks the number
    kept = run.records("kept")[-1:]
    if not tests or not any(record["epoch"] == kept[0]["epoch"] for record in validations if kept):
        raise UserError(
            f"{run.path}: its head is fitted, without epochs; train another run, with weights={run.path}"
            if config.optimization.steps == 0
            else f"{run.metrics_file} does not say how many epochs are done: restore it"
        )
    done, per_epoch = tests[-1]["step"], round(validations[-1]["step"] / validations[-1]["epoch"])
    if epochs * per_epoch <= done:
        raise UserError(
            f"{run.path}: {done / per_epoch:g} of its epochs are done, so epochs={epochs} adds none: give "
            "the number of all"
        )
    changes: dict[str, Any] = {"epochs": epochs, "steps": None, "minutes": None, "progressive": 0.0}
    states = folders.checkpoints(run.path)[-1:]
    if states and config.optimization.schedule == "constant":
        changes |= {"warmup_steps": 0, "warmup_epochs": None}
    if not states:  # the norms of its tokenizer are folded into the model
        changes |= {"whiten": "off"}
    with run.lock(), explaining_failure(run.path, "the start of more epochs", "make room, and repeat this"):
        shutil.rmtree(run.before, ignore_errors=True)  # of a process that was killed before they began
        folders.remove_checkpoints(run.path, keep_state=True)
        run.before.parent.mkdir(exist_ok=True)
        with replacing(run.before) as aside:
            aside.mkdir()
            for name in _CHANGED:
                shutil.copy2(run.path / name, aside)
            for state in states:
                shutil.copytree(state, aside / state.name, copy_function=_link)
        if config.weights is not None or not states:
            _write_uncalibrated(run, run.start)
        run.record_options(**changes, lengths=[[done, epochs * per_epoch]], validations=0)


def _link(source: str, target: str) -> None:
    """Link a file that nothing changes, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_uncalibrated(run: Run, folder: Path) -> None:
    """Write the finished model as it was trained, without its temperature."""
    model = from_pretrained(run.model_folder)
    if model.trust is not None:
        sharper = torch.full((len(model.config.class_names),), model.trust.temperature)
        scale_logits(cast("nn.Module", model.head), sharper)
        model.trust = None
    save_pretrained(model, folder)


def best_before(run: Run, monitor: Monitor) -> tuple[float, int]:
    """The best validation value of the finished run, and its step. Its model is written as the best so far,
    unless the last one is kept in any case: then the value only counts for patience."""
    records = read_metrics(run.before / layout.METRICS)
    (*_, kept) = (record for record in records if record["kind"] == "kept")
    epochs = [record for record in records if record["kind"] == "epoch"]
    if run.config["keep"] != "last":
        _write_uncalibrated(run, run.best)
        epochs = [record for record in epochs if record["epoch"] == kept["epoch"]]
    values = [record[f"val_{monitor.name}"] for record in epochs]
    best = max(values) if monitor.higher else min(values)
    return best, epochs[values.index(best)]["step"]


def seconds_before(run: Run) -> float:
    """The training time of the finished run."""
    records = read_metrics(run.before / layout.METRICS)
    return float(next(record["seconds"] for record in records if record["kind"] == "test"))


@contextmanager
def finished_if_failed(run: Run) -> Iterator[None]:
    """Make the run finished again, as it was, where its new epochs fail: before their first checkpoint, or
    because they diverge. A disk without room loses nothing: the run is resumed."""
    try:
        yield
    except UserError as error:
        if distributed.is_first() and run.before.exists():
            begun = any(not (run.before / state.name).exists() for state in folders.checkpoints(run.path))
            full = isinstance(error.__cause__, OSError | WriteError)
            if isinstance(error, DivergenceError) or not (begun or full):
                restore_finished(run)
        raise


def restore_finished(run: Run) -> None:
    """Take back the epochs that a finished run got, and what they have written."""
    advice = f"make room, then run `vitascope train --resume {shlex.quote(str(run.path))}`"
    with explaining_failure(run.path, "the finished run", advice):
        states = list(run.before.glob("step-*"))
        for state in folders.checkpoints(run.path):
            if not (run.before / state.name).exists():
                shutil.rmtree(state)
        for state in states:
            if not (run.checkpoints / state.name).exists():
                state.rename(run.checkpoints / state.name)
        for name in _CHANGED:
            with replacing(run.path / name) as aside:
                shutil.copy2(run.before / name, aside)
        with suppress(AttributeError):
            del run.config  # read again on the next use
        shutil.rmtree(run.before)
        folders.remove_checkpoints(run.path, keep_state=bool(states))
