"""A run in the hands of these processes: joined, found again after a restart, locked."""

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from vitascope.errors import UserError
from vitascope.models.configuration import options_of
from vitascope.training import distributed
from vitascope.training.checkpoint import folders
from vitascope.training.distributed import Launch, restarts_left
from vitascope.training.identity import check_folder_is_shared, check_versions
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run


def device_of(config: TrainConfig) -> torch.device:
    """Join torchrun's processes, if there are any; returns the device of this one."""
    device = distributed.join_processes(config.execution.device)
    check_versions()
    return device


def recorded_config(run: Run) -> TrainConfig:
    """The options of a run; UserError if its file is broken."""
    with options_of(run.config_file):
        return TrainConfig.from_dict(run.config)


def lasting_ref(run: Run) -> str:
    """The place of a run, which other processes find from wherever they are."""
    return str(run.path.absolute()) if run.store is None else run.ref


def begun_run(launch: Launch) -> str | None:
    """The run that this launch began before torchrun restarted its processes, if there is one; a run that was
    not complete enough to be resumed is removed, and begins anew."""
    begun = launch.begun
    if begun is None:
        return None
    run = Run.at(begun)
    if run.store is not None:
        run.store.fetch()
    if not run.exists:
        return None
    if not run.split_file.is_file():
        shutil.rmtree(run.path)
        return None
    return begun


@contextmanager
def held(run: Run) -> Iterator[None]:
    """Hold the run folder, and explain lost connections to other processes in one line."""
    with run.named(), run.lock() if distributed.is_first() else nullcontext():
        distributed.by_first(lambda: None)
        if run.store is not None:
            check_folder_is_shared(run.path)
        try:
            yield
        except RuntimeError as error:
            if not distributed.lost_connection(error):
                raise
            named, saved = shlex.quote(str(run.path)), folders.checkpoints(run.path)
            where = f"it continues from {saved[-1].name}" if saved else "no checkpoint was saved yet"
            advice = (
                f"torchrun starts all processes again: {where}"
                if restarts_left()
                else f"start all processes again with `train --resume {named}`: {where}"
            )
            if run.finished:
                advice = f"the model is saved; `vitascope report {named}` draws its figures and report"
            reason = re.sub(r"^\[.*?\] *", "", str(error)).partition(". ")[0].partition("\n")[0][:200]
            raise UserError(
                f"process {distributed.rank()} of {distributed.world_size()} has lost its connection to "
                "another process, which has ended or hangs: its own message or signal is the cause; "
                f"{advice} ({reason})"
            ) from error
