"""`train`, `pretrain` and `resume`: from a configuration, or a run folder, to a finished run."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from vitascope.data.datasets import described, open_data
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.model.hardware import explaining_memory
from vitascope.model.sizes import ModelConfig
from vitascope.report.wording import counted
from vitascope.run.layout import has_model
from vitascope.run.run import Run
from vitascope.training.checkpoint.folders import (
    checkpoints,
    discard_newer,
    load_checkpoint,
    load_checkpoint_at,
)
from vitascope.training.defaults import resolve_config
from vitascope.training.distributed import (
    by_all,
    by_first,
    is_first,
    join_processes,
    lost_connection,
    rank,
    world_size,
)
from vitascope.training.finish import PretrainResult, TrainResult, finish_pretraining, finish_training
from vitascope.training.loop import Trainer
from vitascope.training.recipes import GROUP_OF, TrainConfig

log = logging.getLogger(__name__)


def train(config: TrainConfig) -> TrainResult:
    """Train a classifier from a configuration; what `vitascope train` calls.

    Under `torchrun` every process calls it, and all return the same.

    Raises:
        UserError: data, model or options that cannot be used.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """
    if config.task != "classify":
        raise UserError(f"this configures the task {config.task!r}: it is for `vitascope pretrain`")
    if config.optimization.freeze and config.weights is None:
        raise UserError("freeze trains a head on features that nothing has learned yet: add --weights MODEL")
    with _new_run(config) as trainer:
        trainer.fit()
        return finish_training(trainer)


def pretrain(config: TrainConfig) -> PretrainResult:
    """Pre-train a body by masked patch prediction; what `vitascope pretrain` calls.

    It keeps the last weights: what predicts is not saved, so that no earlier ones could be measured.

    Raises:
        UserError: data, model or options that cannot be used.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """
    config = config.replace(task="masked", keep="last")
    with _new_run(config) as trainer:
        trainer.fit()
        return finish_pretraining(trainer)


def resume(run: str | os.PathLike[str], **engine: Any) -> TrainResult | PretrainResult:
    """Continue a run from a checkpoint to the same end, with any number of processes.

    On the CPU, with as many processes, the weights become bitwise those of a run that was never stopped.

    Args:
        run: a run folder: its newest whole checkpoint, or its start where there is none; one checkpoint of
            it, `RUN/checkpoints/step-N`, which must be whole; or `auto`, the newest unfinished run in runs/.
        **engine: options of `ExecutionOptions` that are others than the run's: another device, say.

    Raises:
        UserError: no run there, it has finished or is in use, no whole checkpoint, or the data, the classes
            or the model are others by now; options that are not the engine's.
    """
    found, checkpoint = Run.find(run)
    config = TrainConfig.from_dict(dict(found.config))
    for name in engine:
        if GROUP_OF.get(name) != "engine":
            raise UserError(f"{name!r} is decided by the run; a resumed one takes options of the engine only")
    config = config.replace(**engine)
    if config.weights is not None and has_model(found.start):
        config = config.replace(weights=str(found.start))
    if found.finished:
        named = shlex.quote(str(found.path))
        raise UserError(
            f"{found.path}: this run has finished; `vitascope train --weights {named} --data DATA` trains "
            f"its model further, in a new run; `vitascope evaluate {named}` measures it"
        )
    device = join_processes(config.engine.device)
    with _locked(found), explaining_memory():
        config, model_config, splits = by_all(lambda: _opened_again(found, config))
        trainer = Trainer(found, config, model_config, splits, device)
        trainer.restore(load_checkpoint(found.path) if checkpoint is None else load_checkpoint_at(checkpoint))
        if checkpoint is not None and is_first():
            discard_newer(checkpoint)
        _say(trainer)
        trainer.fit()
        return finish_training(trainer) if config.task == "classify" else finish_pretraining(trainer)


def _opened(config: TrainConfig) -> tuple[TrainConfig, ModelConfig, Splits]:
    """The configuration with what the data decide, the model's, and the data."""
    splits = open_data(config.data, seed=config.seed, labelled=config.task == "classify")
    return *resolve_config(config, splits), splits


def _opened_again(run: Run, config: TrainConfig) -> tuple[TrainConfig, ModelConfig, Splits]:
    """As `_opened`, with the data split as the run recorded it.

    The first process compares every image by its content, the others by its name.

    Raises:
        UserError: images that are missing, changed or renamed, or other classes.
    """
    check = ("train", "val", "test") if is_first() else ()
    own = run.open_data(check=check)
    if own.restored is not None and not own.restored.complete:
        raise UserError(
            f"{run.path} cannot be resumed: {own.note}; a run goes on with the same data, or starts anew "
            "with another --run"
        )
    if own.note and is_first():
        log.warning("%s", own.note)
    return *resolve_config(config, own.splits), own.splits


@contextmanager
def _new_run(config: TrainConfig) -> Iterator[Trainer]:
    """A trainer in a run folder of its own; a run that cannot start leaves nothing."""
    device = join_processes(config.engine.device)
    config, model_config, splits = by_all(lambda: _opened(config))
    run = by_first(lambda: Run.create(config.to_dict(), processes=world_size()))
    with _locked(run):
        try:
            with explaining_memory():
                trainer = Trainer(run, config, model_config, splits, device)
            if is_first():
                run.record_split(splits)
        except (UserError, KeyboardInterrupt):
            if is_first():
                shutil.rmtree(run.path)
            raise
        _say(trainer)
        if config.weights is not None:  # which may be gone when the run is resumed
            trainer.save_model(run.start)
        with explaining_memory():
            yield trainer


@contextmanager
def _locked(run: Run) -> Iterator[None]:
    """The run folder for these processes alone."""
    with run.lock() if is_first() else nullcontext():
        by_first(lambda: None)
        with _explaining_lost_processes(run):
            yield


@contextmanager
def _explaining_lost_processes(run: Run) -> Iterator[None]:
    """Turn the backend's error about a process that is gone into one line with the way to continue.

    Raises:
        UserError: another process has ended, or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not lost_connection(error):
            raise
        named = shlex.quote(str(run.path))
        saved = checkpoints(run.path)
        if run.finished:
            advice = f"the model is saved; `vitascope report {named}` draws its figures and report"
        elif saved:
            advice = (
                f"start all processes again with `train --resume {named}`: it continues from {saved[-1].name}"
            )
        else:
            advice = f"start all processes again with `train --resume {named}`: no checkpoint was saved yet"
        reason = re.sub(r"^\[.*?\] *", "", str(error)).partition(". ")[0].partition("\n")[0][:200]
        raise UserError(
            f"process {rank()} of {world_size()} has lost its connection to another process, which has ended "
            f"or hangs: its own message or signal is the cause; {advice} ({reason})"
        ) from error


def _say(trainer: Trainer) -> None:
    """The data, the model and the run, in a few lines."""
    if not is_first():
        return
    config, splits = trainer.config, trainer.splits
    data = "\n       ".join(described(splits))
    parameters = sum(p.numel() for p in trainer.module.parameters())
    start = "" if trainer.step == 0 else f", from step {trainer.step:,}"
    several = f", {world_size()} processes" if world_size() > 1 else ""
    print(
        f"data   {config.data}: {data}\n"
        f"model  {parameters / 1e6:.2f} M parameters: {trainer.model_config.summary}\n"
        f"run    {trainer.run.path}: {counted(config.optimization.epochs, 'epoch')} of "
        f"{counted(trainer.steps_per_epoch, 'step')}"
        f"{start}, {str(trainer.precision).removeprefix('torch.')} on {trainer.device}{several}",
        flush=True,
    )
