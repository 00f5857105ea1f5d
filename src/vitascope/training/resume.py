"""A run that was begun: resumed, or given more epochs, by its recorded plan and some changes."""

import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from vitascope.errors import UserError
from vitascope.training import distributed
from vitascope.training.distributed import Launch
from vitascope.training.finishing import Reporter
from vitascope.training.folds import train_folds
from vitascope.training.holding import device_of, lasting_ref, recorded_config
from vitascope.training.more_epochs import lengthen
from vitascope.training.options.recipes import GROUP_OF, TrainConfig
from vitascope.training.restoring import data_again, restored
from vitascope.training.results import PretrainResult, TrainResult
from vitascope.training.run.run import Run, lasting_paths


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
