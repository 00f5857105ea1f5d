"""A run that was begun: resumed, or given more epochs, by its recorded plan and some changes.

It goes on from its checkpoint, on the data and the weights that it had.
"""

import logging
import math
import shlex
import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from vitascope.errors import UserError
from vitascope.layout import has_model
from vitascope.models.hardware import explaining_memory
from vitascope.models.weights.loading import from_pretrained
from vitascope.training import distributed
from vitascope.training.announcement import announce_data, announce_run
from vitascope.training.building import Opened, build_trainer
from vitascope.training.checkpoint import folders
from vitascope.training.distributed import Launch
from vitascope.training.finishing import Reporter, finish
from vitascope.training.folds import train_folds
from vitascope.training.holding import device_of, held, lasting_ref, recorded_config
from vitascope.training.identity import check_plan_and_data
from vitascope.training.more_epochs import finished_if_failed, lengthen
from vitascope.training.options.recipes import GROUP_OF, TrainConfig
from vitascope.training.plan import Plan
from vitascope.training.results import PretrainResult, TrainResult
from vitascope.training.run.run import Run, RunData, lasting_paths
from vitascope.training.run.trackers import check_tracker
from vitascope.training.schedule import Schedule

log = logging.getLogger(__name__)


def resume_run(
    run: str | PathLike[str],
    options: Mapping[str, Any],
    *,
    missing: str = "error",
    reporter: Reporter,
    begin: Callable[[TrainConfig], object],
) -> TrainResult | PretrainResult:
    """Resume a run, or give it more epochs.

    Args:
        run: its folder, its URL, one of its checkpoints, or `auto`.
        options: changes of execution options, and `epochs` of a finished run.
        missing: `skip` goes on without images that are missing or changed.
        reporter: draws the figures and writes the report.
        begin: starts the run of a fold that has not begun.
    """
    started = time.monotonic()
    unfinished, checkpoint = Run.find(run)
    recorded = recorded_config(unfinished)
    changes = dict(options)
    epochs = changes.pop("epochs", None) if unfinished.finished else None
    execution: dict[str, Any] = {
        name: value for name, value in changes.items() if GROUP_OF.get(name) == "execution"
    }
    changed = recorded.replace(**changes)
    lasting = [config.replace(**lasting_paths(config.to_dict())) for config in (recorded, changed)]
    for name in changes.keys() - execution.keys():
        before, now = (config.option(name) for config in lasting)
        if now != before:
            raise UserError(
                f"{name} cannot change when a run is resumed: it is {before!r}, not {now!r}; leave it out"
            )
    if epochs is None:
        unfinished.check_unfinished()
    device = device_of(recorded.replace(**execution))
    if unfinished.members:
        if epochs is not None:
            raise UserError(f"{unfinished.path}: its runs are done; more epochs need a new run with folds")
        config = recorded.replace(**execution)

        def resume(member: Run) -> object:
            return resume_run(member.path, execution, reporter=reporter, begin=begin)

        return train_folds(unfinished, config, data_again(unfinished).splits, reporter, begin, resume)
    if epochs is not None:
        if missing == "error":
            distributed.by_first(lambda: data_again(unfinished))
        distributed.by_first(lambda: lengthen(unfinished, recorded, epochs))
        unfinished = Run(unfinished.path)  # other processes have read its options before
    config = recorded_config(unfinished).replace(**execution)
    launch = Launch()
    if distributed.by_first(lambda: launch.begun) is not None:
        checkpoint = None  # restarted by torchrun: the newest checkpoint is of this launch
    distributed.by_first(lambda: launch.note(lasting_ref(unfinished)))
    distributed.by_first(lambda: _take_over(unfinished))
    return restored(
        unfinished, checkpoint, config, device, missing=missing, started=started, reporter=reporter
    )


def _take_over(run: Run) -> None:
    """Become the writer of a run in a store, and only then fetch what it has: another writer stops."""
    if run.store is None:
        return
    with run.lock():  # which no process of this machine holds
        run.store.claim()
    run.store.fetch()
    run.check_unfinished()


def restored(
    run: Run,
    checkpoint: Path | None,
    config: TrainConfig,
    device: torch.device,
    *,
    missing: str,
    started: float,
    reporter: Reporter,
) -> TrainResult | PretrainResult:
    """Restore a run from a checkpoint, or from its newest one, and train to its end."""
    with held(run), explaining_memory(), finished_if_failed(run):
        if missing == "skip":
            config = distributed.by_first(lambda: _skip_missing(run, config))
        opened = distributed.by_all(lambda: _opened_again(config, run))
        check_plan_and_data(opened.plan, opened.splits)
        trainer = build_trainer(run, opened, device)
        state = (
            folders.load_checkpoint(run.path)
            if checkpoint is None
            else folders.load_checkpoint_at(checkpoint)
        )
        if state is None and run.before.exists() and not has_model(run.start):
            raise UserError(
                f"{run.path}: the state that its epochs begin with is gone; the run is finished, as before"
            )
        trainer.restore(state)
        distributed.by_first(lambda: None if run.store is None else run.store.check_writer())
        if checkpoint is not None and distributed.is_first():
            folders.discard_newer(checkpoint)
            if run.store is not None:  # so that no other machine resumes from them
                run.store.try_to_upload()
        distributed.by_first(lambda: run.start_tracker(config.execution.tracker))
        if config.optimization.minutes is not None:
            trainer.start_budget(config.optimization.minutes, time.monotonic() - started)
        announce_data(trainer)
        announce_run(trainer)
        trainer.fit()
        return finish(trainer, reporter)


def _opened_again(config: TrainConfig, run: Run) -> Opened:
    """The recorded plan, the data and the weights of a resumed run."""
    if config.execution.tracker is not None:
        check_tracker(config.execution.tracker)
    data = data_again(run)
    if data.note and distributed.is_first():
        log.warning("%s", data.note)
    # The weights may be gone; the run has a copy of those that it started from.
    start = run.start if has_model(run.start) else config.weights
    return Opened(Plan.of_run(run, config), data.splits, from_pretrained(start) if start else None)


def data_again(run: Run) -> RunData:
    """The data of a run, as they were.

    Raises:
        UserError: images are missing or changed.
    """
    # The first process compares all images by content, the others by name.
    data = run.open_data(check=("train", "val", "test") if distributed.is_first() else ())
    if not data.restored.complete:
        best = f", or take its best model so far, {run.best}" if has_model(run.best) else ""
        raise UserError(
            f"{run.path} cannot be resumed: {data.note}; restore the data, resume with the images that are "
            f"left by `vitascope train --resume {shlex.quote(str(run.path))} --missing skip`{best}"
        )
    return data


def _skip_missing(run: Run, config: TrainConfig) -> TrainConfig:
    """Record that a run goes on without its missing images, in as many steps as planned."""
    record, options = run.split_record(), config.optimization
    if not run.skip_missing():
        return config
    if options.lengths or options.batch_size is None or not (options.epochs or options.steps):
        return config
    per_epoch = math.ceil(len(record.parts["train"].names) / options.batch_size)
    lengths = Schedule.of(options, options.batch_size, per_epoch).lengths
    run.record_options(lengths=[list(pair) for pair in lengths])
    return config.replace(lengths=lengths)
