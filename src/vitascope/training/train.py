"""A new run: open the data, load the weights, resolve, train, judge, save."""

import dataclasses
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from vitascope.data.datasets import open_data
from vitascope.data.frames import DataFrame, data_place
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.layout import DATA
from vitascope.models.hardware import explaining_memory
from vitascope.training import distributed
from vitascope.training.announcement import announce_data, announce_run
from vitascope.training.building import Opened, build_trainer, prepare_request
from vitascope.training.distributed import Launch
from vitascope.training.finishing import Reporter, finish
from vitascope.training.folds import check_folds, train_folds
from vitascope.training.holding import begun_run, device_of, held, lasting_ref, recorded_config
from vitascope.training.identity import check_plan_and_data
from vitascope.training.loop import Trainer
from vitascope.training.options.recipes import AUTO, TrainConfig
from vitascope.training.plan import Request, Start
from vitascope.training.results import PretrainResult, TrainResult
from vitascope.training.resume import restored, resume_run
from vitascope.training.run.run import Run, lasting_paths, new_run
from vitascope.training.run.trackers import check_tracker


def run_training(
    config: TrainConfig | None,
    recipe: str | None,
    options: Mapping[str, Any],
    *,
    task: str,
    reporter: Reporter,
) -> TrainResult | PretrainResult:
    """Create a run, train and finish it; a run that cannot start leaves no folder.

    Processes that torchrun has restarted go on with the run that those before them created.

    Args:
        config: the configuration; None starts from a recipe.
        recipe: its name; None leaves it to the options and the data.
        options: named ones; `data` may be a pandas DataFrame.
        task: of the function that was called.
        reporter: draws the figures and writes the report.
    """
    started = time.monotonic()
    frame = options["data"] if isinstance(options.get("data"), DataFrame) else None
    named = {name: value for name, value in options.items() if frame is None or name != "data"}
    request = Request.of(config, recipe, named)
    _check_task(request, task)
    asked = request.config
    device, launch = device_of(asked), Launch()
    begun = distributed.by_first(lambda: begun_run(launch))
    if begun is not None:
        run, _ = distributed.by_all(lambda: Run.find(begun))
        distributed.by_all(run.check_unfinished)
        recorded = distributed.by_all(lambda: recorded_config(run))
        return restored(run, None, recorded, device, missing="error", started=started, reporter=reporter)
    if asked.folds is not None and asked.fold is None:
        check_folds(asked)
    if asked.run is not None:  # an error comes before anything that takes time
        distributed.by_first(lambda: new_run(str(asked.run)))
    if asked.execution.tracker is not None:
        distributed.by_all(lambda: check_tracker(str(asked.execution.tracker)))
    with nullcontext() if frame is None else data_place(frame, asked.table) as place:
        if place is not None:
            request = request.on(place)
        splits = distributed.by_all(lambda: _opened_data(request.config))
        start = _start(request, splits, device, started)
        run, parts = _created(request, splits, start, keep_data=place is not None)
    if run.members:
        run.record_split(splits)

        def begin(member: TrainConfig) -> object:
            return run_training(member, None, {}, task=task, reporter=reporter)

        def resume(member: Run) -> object:
            return resume_run(member.path, {}, reporter=reporter, begin=begin)

        return train_folds(run, parts.plan.config, splits, reporter, begin, resume)
    distributed.by_first(lambda: launch.note(lasting_ref(run)))
    with held(run), explaining_memory():
        trainer = _trainer(run, parts, device, started)
        announce_run(trainer)
        if parts.weights is not None:  # which may be gone when the run is resumed
            trainer.save_model(run.start)
        trainer.fit()
        return finish(trainer, reporter)


def _check_task(request: Request, task: str) -> None:
    """Reject a recipe or a configuration of the other function."""
    if request.config.task != task:
        what = "this configuration" if request.recipe in (None, "base") else f"the recipe {request.recipe}"
        other = "pretrain" if task == "classify" else "train"
        raise UserError(f"{what} is for `vitascope {other}`, in Python `{other}`")


def _opened_data(config: TrainConfig) -> Splits:
    """The data of a new run, with the identities of the images where they are recorded and announced."""
    labelled, folds = config.task == "classify", {"folds": config.folds, "fold": config.fold}
    splits = open_data(config.data, seed=config.seed, labelled=labelled, table=config.table, **folds)
    return splits.identified() if distributed.is_first() else splits


def _start(request: Request, splits: Splits, device: torch.device, started: float) -> Start:
    """The recipe and the weights: with `weights=auto` by a comparison; a named way to train is kept."""
    images = len(splits.train) + sum(len(splits.parts[name]) for name in splits.drawn)
    config = request.config
    if config.weights != AUTO:
        return Start.usual(request, images, splits.channels)
    ways = config.distillation.teacher, config.optimization.lora, config.optimization.freeze or None
    named = request.recipe is not None or any(way is not None for way in ways)
    named = named or vars(config.optimization).keys() <= request.options.keys()  # as a group

    def compared() -> Start:
        from vitascope.training.start import best_start  # scipy delays the start of training

        return best_start(config, splits.train, images, named=named, device=str(device), began=started)

    return distributed.by_first(compared)


def _created(request: Request, splits: Splits, start: Start, *, keep_data: bool) -> tuple[Run, Opened]:
    """Resolve the request, and create the run folder, which perhaps takes the file of the data."""
    parts = distributed.by_all(lambda: prepare_request(request, splits, start))
    check_plan_and_data(parts.plan, splits)
    values = request.config.to_dict()
    values |= lasting_paths(values) | ({"data": DATA} if keep_data else {})
    named = {name: values[name] for name in request.options}
    recorded = {"asked": {"recipe": request.recipe, "options": named}, **parts.plan.to_dict()}
    config, processes = parts.plan.config.to_dict(), distributed.world_size()
    run = distributed.by_first(lambda: Run.create(config, recorded, processes=processes, keep_data=keep_data))
    if keep_data:
        plan = dataclasses.replace(parts.plan, config=parts.plan.config.replace(data=run.config["data"]))
        parts = dataclasses.replace(parts, plan=plan)
    return run, parts


def _trainer(run: Run, parts: Opened, device: torch.device, started: float) -> Trainer:
    """The trainer and the records of a new run; where this fails, its folder is removed."""
    config = parts.plan.config
    try:
        with explaining_memory():  # as a UserError
            trainer = build_trainer(run, parts, device)
            announce_data(trainer)
            if config.optimization.minutes is not None:
                distributed.print_first("run    measuring the speed of this machine")
                trainer.start_budget(config.optimization.minutes, time.monotonic() - started)
        if distributed.is_first():
            run.record_options(accumulate=trainer.parts)
            run.record_split(parts.splits)
        distributed.by_first(lambda: run.start_tracker(config.execution.tracker))
        distributed.by_first(lambda: None if run.store is None else run.store.upload())
    except (UserError, KeyboardInterrupt):
        if distributed.is_first():
            shutil.rmtree(run.path)
        raise
    return trainer
