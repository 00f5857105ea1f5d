"""`train`, `pretrain` and `resume`: from a configuration, or a run folder, to a finished run.

A run opens the data, resolves the configuration, creates the run folder and the trainer, trains, tests the
model, saves it, and writes the report.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import torch

from vitascope.arguments import checked
from vitascope.data.datasets import open_data
from vitascope.data.decisions import decided_in
from vitascope.data.folds import copies_across, fold_names
from vitascope.data.frames import DataFrame, data_place
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.layout import DATA, has_model
from vitascope.models.configuration import options_of
from vitascope.models.hardware import explaining_memory, reuse_freed_memory, suitable_threads, without_tf32
from vitascope.models.lora import add_adapters
from vitascope.models.vision_model import VisionModel, build
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.preprocess import default_preprocess, preprocess_of
from vitascope.models.weights.transfer import transfer
from vitascope.remote.stores import is_url
from vitascope.storage import explaining_failure
from vitascope.training import distributed
from vitascope.training.announcement import announce_data, announce_run, other_starts
from vitascope.training.checkpoint import folders
from vitascope.training.checkpoint.folders import remove_checkpoints, to_resume
from vitascope.training.distributed import Launch, restarts_left
from vitascope.training.evaluation.measure import Evaluation, data_frame, html_table
from vitascope.training.evaluation.novelty import Novelty
from vitascope.training.folds import CrossValidation, compared, train_members
from vitascope.training.identity import check_folder_is_shared, check_plan_and_data, check_versions
from vitascope.training.keywords import ResumeKeywords, TrainKeywords
from vitascope.training.linear.head import set_head
from vitascope.training.loop import Trainer
from vitascope.training.more_epochs import finished_if_failed, lengthen
from vitascope.training.optimizers import freeze_body
from vitascope.training.options.recipes import (
    AUTO,
    BUILT_IN,
    FEW_TO_START,
    GROUP_OF,
    TrainConfig,
    check_named,
    configuration,
)
from vitascope.training.placement import Placement, images_at_once, place
from vitascope.training.plan import Plan, inspect, resolve
from vitascope.training.run.run import Run, RunData, lasting_paths, new_run
from vitascope.training.run.trackers import check_tracker
from vitascope.training.schedule import Schedule
from vitascope.training.selection import Selection, select_weights
from vitascope.training.signals import stopped_at_once
from vitascope.training.tasks.classify import (
    Classify,
    Distill,
    balanced_weights,
    class_weights_of,
)
from vitascope.training.tasks.losses import LOSSES
from vitascope.training.tasks.masked import Masked, MaskedAutoencoding
from vitascope.training.tasks.task import Finished, PatchEvaluation, Task
from vitascope.training.tasks.teachers import open_teacher
from vitascope.training.whitening import whiten

if TYPE_CHECKING:
    import pandas

    from vitascope.models.config import ViTConfig
    from vitascope.training.start import Start

DIGITS_BASELINE = 354 / 360
"""Test accuracy of scikit-learn's `SVC()` with its own defaults on `digits`, where it trains on all 80%.

Recorded, because scikit-learn takes as long to import as a small run to train; a test fits it again.
"""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """A finished run."""

    run: Path
    """The run folder; of a run in a store its local copy, which lasts as long as this result."""
    model: VisionModel
    """The finished model, in evaluation mode, on the CPU."""
    evaluation: Any
    """Of the model on the test images, or on the validation images if there are no test images."""
    seconds: float
    """Time in the training loop, with validation, over all processes that worked on the run."""
    figures: dict[str, Path]
    """Paths of the figures, by name."""
    report: Path
    url: str | None = None
    """Of a run in a store, where it is there."""

    def to_dataframe(self) -> pandas.DataFrame:
        """The metrics of the run, one row per epoch; UserError without pandas."""
        return data_frame(Run(self.run).records("epoch")).drop(columns="kind").set_index("epoch")

    def __repr__(self) -> str:
        words = self.evaluation.in_words()
        return f"{type(self).__name__}({self.url or str(self.run)!r}, {words}, {self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        return html_table({"run": self.url or self.run, **self.evaluation.summary(), "seconds": self.seconds})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult(RunResult):
    """A finished classifier."""

    evaluation: Evaluation


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PretrainResult(RunResult):
    """A finished pre-training; `train(weights=result.run)` fine-tunes its model, which has no head."""

    model: VisionTransformer
    evaluation: PatchEvaluation


def train(
    config: TrainConfig | None = None, *, recipe: str | None = None, **options: Unpack[TrainKeywords]
) -> TrainResult:
    """Train a classifier, as `vitascope train` does.

    Under `torchrun` every process calls this function, and gets the same result.

    Args:
        config: the configuration; None starts from a recipe.
        recipe: name of the recipe; None selects one by the options and the number of images, as
            `options.recipes.configuration` does.
        **options: changes of the configuration: `train(data="photos/", epochs=20)`. `data` may be a pandas
            DataFrame, a table whose paths are relative to `images` or to the working directory; the run
            keeps it.

    Raises:
        UserError: data, model or options that cannot be used.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """
    return cast("TrainResult", _run(_asked(config, recipe, options), "classify", options))


def pretrain(
    config: TrainConfig | None = None, *, recipe: str | None = None, **options: Unpack[TrainKeywords]
) -> PretrainResult:
    """Pre-train a model without a head by masked patch prediction, as `vitascope pretrain` does.

    The finished model has the last weights.

    Args:
        config, recipe, options: as for `train`.

    Raises:
        UserError: data, model or options that cannot be used.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """
    task = {"task": "masked"} if config is None and recipe is None else {}
    asked = _asked(config, recipe, {**task, **options})
    return cast("PretrainResult", _run(asked, "masked", options))


def _asked(config: TrainConfig | None, recipe: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is asked for: its recipe, and options by name; a configuration names all of them."""
    if config is None:
        return {"recipe": recipe, **options}
    if not isinstance(config, TrainConfig):
        raise UserError(
            f"config must be a TrainConfig, not a {type(config).__name__}; name options: data=..."
        )
    if recipe is not None:
        raise UserError("a configuration contains every option already; leave out recipe")
    return {"recipe": "base", **config.replace(**options).to_dict()}


@checked
def resume(
    run: str | PathLike[str],
    *,
    missing: Literal["error", "skip"] = "error",
    **options: Unpack[ResumeKeywords],
) -> TrainResult | PretrainResult:
    """Resume an interrupted run, with any number of processes.

    A finished run with `epochs` gets more of them: from its last checkpoint if it kept that (`keep_state`),
    else from its model, with an optimizer that begins anew. The new epochs have a schedule of their own, with
    warm-up and decay; only a constant rate goes on from a checkpoint as if there had been no end. The model
    that is kept is the best of all epochs by the rule of `keep`. If the new epochs diverge, or fail before
    their first checkpoint, the run is what it was.

    On a CPU, with the same number of processes, the final weights are bitwise identical to those of an
    uninterrupted run. A run that skips missing images ends with other weights: it takes as many steps as
    planned, at the same learning rates, but the order is drawn anew from the images that are left, and the
    validation loss is that of the validation images that are left. The images that it skips are recorded, so
    that it is resumed bitwise from then on.

    Args:
        run: a run folder or its URL, for its newest valid checkpoint, or its start if it has none; one of
            the checkpoints of a local run, `RUN/checkpoints/step-N`; or `auto` for the newest unfinished run
            in runs/.
        missing: `skip` resumes the run without the images that are missing or changed, from now on; `error`
            rejects data in which there are any.
        **options: changes of execution options, such as `device="cuda"`; other options are as recorded.

    Raises:
        UserError: no such run, a finished one or one in use, no valid checkpoint, changes of the data, the
            classes or the model, or options that are not execution options.
        Interrupted: by SIGINT or SIGTERM, after saving a checkpoint.
    """
    started = time.monotonic()
    unfinished, checkpoint = Run.find(run)
    recorded = _recorded_options(unfinished)
    epochs = options.pop("epochs", None) if unfinished.finished else None
    execution: dict[str, Any] = {
        name: value for name, value in options.items() if GROUP_OF.get(name) == "execution"
    }
    changed = recorded.replace(**options)
    lasting = [config.replace(**lasting_paths(config.to_dict())) for config in (recorded, changed)]
    for name in options.keys() - execution.keys():
        before, now = (config.option(name) for config in lasting)
        if now != before:
            raise UserError(
                f"{name} cannot change when a run is resumed: it is {before!r}, not {now!r}; leave it out"
            )
    if epochs is None:
        unfinished.check_unfinished()
    device = _join(recorded.replace(**execution))
    if unfinished.members:
        if epochs is not None:
            raise UserError(f"{unfinished.path}: its runs are done; more epochs need a new run with folds")
        config = recorded.replace(**execution)
        return _by_folds(unfinished, config, _data_again(unfinished).splits, execution)
    if epochs is not None:
        if missing == "error":
            distributed.by_first(lambda: _data_again(unfinished))
        distributed.by_first(lambda: lengthen(unfinished, recorded, epochs))
        unfinished = Run(unfinished.path)  # other processes have read its options before
    config = _recorded_options(unfinished).replace(**execution)
    launch = Launch()
    if distributed.by_first(lambda: launch.begun) is not None:
        checkpoint = None  # restarted by torchrun: the newest checkpoint is of this launch
    distributed.by_first(lambda: launch.note(_lasting_ref(unfinished)))
    distributed.by_first(lambda: _take_over(unfinished))
    return _continue(unfinished, checkpoint, config, device, missing=missing, started=started)


def _lasting_ref(run: Run) -> str:
    return str(run.path.absolute()) if run.store is None else run.ref


def _take_over(run: Run) -> None:
    """Become the writer of a run in a store, and only then fetch what it has: another writer stops."""
    if run.store is None:
        return
    with run.lock():  # which no process of this machine holds
        run.store.claim()
    run.store.fetch()
    run.check_unfinished()


def _join(config: TrainConfig) -> torch.device:
    """Join torchrun's processes, if there are any; returns the device of this one."""
    device = distributed.join_processes(config.execution.device)
    check_versions()
    return device


def _recorded_options(run: Run) -> TrainConfig:
    with options_of(run.config_file):
        return TrainConfig.from_dict(run.config)


def _continue(
    run: Run,
    checkpoint: Path | None,
    config: TrainConfig,
    device: torch.device,
    *,
    missing: str,
    started: float,
) -> TrainResult | PretrainResult:
    """Restore a run from a checkpoint, or from its newest one, and train to its end."""
    with _locked(run), explaining_memory(), finished_if_failed(run):
        if missing == "skip":
            config = distributed.by_first(lambda: _skip_missing(run, config))
        opened = distributed.by_all(lambda: _open_again(config, run))
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
        return _finish(trainer)


# Start


@dataclasses.dataclass(frozen=True)
class Opened:
    """A run before its trainer."""

    plan: Plan
    splits: Splits
    weights: VisionModel | None
    """The model to start from; None for random weights."""


def _run(asked: dict[str, Any], task: str, named: Collection[str]) -> TrainResult | PretrainResult:
    """Create a run, train and finish it; a run that cannot start leaves no folder.

    Named options that do nothing are rejected; those of a recipe or a recorded configuration are not.
    Processes that torchrun has restarted go on with the run that those before them created.
    """
    started = time.monotonic()
    frame = asked.pop("data") if isinstance(asked.get("data"), DataFrame) else None
    first = configuration(asked)
    check_named(first, named)
    if any(since for since, _ in first.optimization.lengths[:1]):  # of a run that got more epochs
        asked["lengths"] = ()  # all in one go
        first = configuration(asked)
    if first.task != task:
        recipe = asked["recipe"]
        what = "this configuration" if recipe in (None, "base") else f"the recipe {recipe}"
        other = "pretrain" if first.task == "masked" else "train"
        raise UserError(f"{what} is for `vitascope {other}`, in Python `{other}`")
    device = _join(first)
    launch = Launch()
    begun = distributed.by_first(lambda: _begun(launch))
    if begun is not None:
        run, _ = distributed.by_all(lambda: Run.find(begun))
        distributed.by_all(run.check_unfinished)
        config = distributed.by_all(lambda: _recorded_options(run))
        return _continue(run, None, config, device, missing="error", started=started)
    if first.folds is not None and first.fold is None:
        _check_folds(first)
    if first.run is not None:  # an error comes before anything that takes time
        distributed.by_first(lambda: new_run(str(first.run)))
    if frame is None:
        run, opened = _create(asked, False, device, started)
    else:
        with data_place(frame, first.table) as place:
            run, opened = _create({**asked, "data": place}, True, device, started)
    if run.members:
        run.record_split(opened.splits)
        return _by_folds(run, opened.plan.options, opened.splits, {})
    distributed.by_first(lambda: launch.note(_lasting_ref(run)))
    with _locked(run), explaining_memory():
        trainer = _start(run, opened, device, started)
        announce_run(trainer)
        if opened.weights is not None:  # which may be gone when the run is resumed
            trainer.save_model(run.start)
        trainer.fit()
        return _finish(trainer)


def _check_folds(config: TrainConfig) -> None:
    """Reject runs by fold that others would have to write into, or in several processes."""
    if distributed.world_size() > 1:
        raise UserError(
            f"folds={config.folds} trains one run after another in one process: leave out torchrun"
        )
    if config.run is not None and is_url(config.run):
        raise UserError(f"folds={config.folds} needs a run folder on this machine, not {config.run}")


def _by_folds(run: Run, config: TrainConfig, splits: Splits, execution: Mapping[str, Any]) -> TrainResult:
    """Train the runs of the folds, as far as they are not finished, and finish the run of them all."""
    from vitascope.analysis.report.write import redraw_figures, write_report

    with _locked(run):
        names = fold_names(splits.train.folds)
        train_members(run, names, config, train, lambda member: resume(member.path, **execution))
        crossed, device = CrossValidation.of(run, splits.train), config.execution.device
        seconds = sum(member.records("test")[-1]["seconds"] for member in run.members)
        tested, model = crossed.tested, crossed.ensemble(run, device)
        alone = [{"images": len(each.targets), **each.score.summary()} for each in crossed.predictions]
        values = [score[tested.targets.value] for score in alone]
        print(f"folds  {tested.in_words()}; by fold {min(values):.2%} to {max(values):.2%}")
        print(f"       {crossed.temperature}")
        if absent := len(splits.train) - len(tested.indices):
            print(f"       {counted(absent, 'image')} without a prediction: unreadable, or of a rare class")
        if copies := copies_across(splits.train):
            found = counted(copies, "image")
            print(f"       too good: {found} with a copy in another fold; columns fold= draws other folds")
        final = tested
        if splits.test is not None:
            final, others = compared(model, splits.test, device)
            values = [each.summary()[tested.targets.value] for each in others]
            print(f"test   {final.in_words()}; its models alone {min(values):.2%} to {max(values):.2%}")
        with explaining_failure(run.path, "the ensemble", to_resume(run.path)):
            crossed.write(run, splits)
            writer = run.write_metrics()
            for fold, score in enumerate(alone):
                writer.record("fold", fold + 1, score)
            writer.record("out_of_fold", 0, {**tested.summary(), "copies_across": copies})
            writer.record("test", 0, {**final.summary(), "seconds": round(seconds, 2)})
            writer.close()
            run.save_predictions(final)
            save_pretrained(model, run.model_folder)
        redraw_figures(run, final, splits.measured, device)
        report = write_report(run, splits=splits, device=device)
    figures = {path.stem: path for path in sorted(run.figures.glob("*.png"))}
    made: dict[str, Any] = {"run": run.path, "model": model.eval().cpu(), "seconds": seconds}
    return TrainResult(evaluation=final, figures=figures, report=report, **made)


def _start(run: Run, opened: Opened, device: torch.device, started: float) -> Trainer:
    """The trainer of a new run, and the records that make its folder complete; where this fails, the folder
    is removed."""
    options = opened.plan.options
    try:
        with explaining_memory():  # as a UserError
            trainer = build_trainer(run, opened, device)
            announce_data(trainer)
            if options.optimization.minutes is not None:
                distributed.print_first("run    measuring the speed of this machine")
                trainer.start_budget(options.optimization.minutes, time.monotonic() - started)
        if distributed.is_first():
            run.record_options(accumulate=trainer.parts)
            run.record_split(opened.splits)
        distributed.by_first(lambda: run.start_tracker(options.execution.tracker))
        distributed.by_first(lambda: None if run.store is None else run.store.upload())
    except (UserError, KeyboardInterrupt):
        if distributed.is_first():
            shutil.rmtree(run.path)
        raise
    return trainer


def _begun(launch: Launch) -> str | None:
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


def _create(
    asked: Mapping[str, Any], keep_data: bool, device: torch.device, started: float
) -> tuple[Run, Opened]:
    """Open the data and create the run folder, which perhaps takes the file of the data."""
    splits = distributed.by_all(lambda: _open_splits(asked))
    start = None
    if configuration(asked).weights == AUTO:
        start = distributed.by_first(lambda: _start_of(asked, splits, device, started))
    opened = distributed.by_all(lambda: _open(asked, splits, start))
    check_plan_and_data(opened.plan, opened.splits)
    plan, config = opened.plan, opened.plan.options.to_dict()
    before = configuration(asked).to_dict()
    places = lasting_paths(before) | ({"data": DATA} if keep_data else {})
    named = {
        name: value for name, value in (before | places).items() if name in asked or GROUP_OF[name] in asked
    }
    recorded = {"asked": {"recipe": asked["recipe"], "options": named}, **plan.to_dict()}
    processes = distributed.world_size()
    run = distributed.by_first(lambda: Run.create(config, recorded, processes=processes, keep_data=keep_data))
    if keep_data:
        plan = dataclasses.replace(plan, options=plan.options.replace(data=run.config["data"]))
    return run, dataclasses.replace(opened, plan=plan)


def _open_splits(asked: Mapping[str, Any]) -> Splits:
    """The data of a new run."""
    first = configuration(asked)
    if first.execution.tracker is not None:
        check_tracker(first.execution.tracker)
    labelled = first.task == "classify"
    folds = {"folds": first.folds, "fold": first.fold}
    splits = open_data(first.data, seed=first.seed, labelled=labelled, table=first.table, **folds)
    return splits.identified() if distributed.is_first() else splits  # which records and announces them


def _start_of(asked: Mapping[str, Any], splits: Splits, device: torch.device, started: float) -> Start:
    """The start of a run with `weights=auto`; a named way to train is kept."""
    from vitascope.training.start import best_start  # scipy delays the start of training

    config = configuration(asked)
    chosen, teacher = config.optimization, config.distillation.teacher
    named = asked["recipe"] is not None or teacher is not None or "optimization" in asked
    named = named or chosen.freeze or chosen.lora is not None
    return best_start(config, splits.train, _given(splits), named=named, device=str(device), began=started)


def _given(splits: Splits) -> int:
    """The number of images that are given to train on, with those drawn from them for other splits."""
    return len(splits.train) + sum(len(splits.parts[name]) for name in splits.drawn)


def _open(asked: Mapping[str, Any], splits: Splits, start: Start | None = None) -> Opened:
    """The weights and the plan of a new run."""
    decided = asked if start is None else start.of(asked)
    config = configuration(decided, _given(splits), splits.channels)
    if config.optimization.lengths:  # a run with minutes is repeated, whatever time that takes
        config = config.replace(minutes=None)
    opened = prepare(config, splits)
    if start is None:
        return opened
    return dataclasses.replace(opened, plan=dataclasses.replace(opened.plan, start=start.reasons))


def prepare(config: TrainConfig, splits: Splits) -> Opened:
    """Load the weights of a configuration, and make its plan for opened data."""
    weights = None if config.weights is None else from_pretrained(config.weights)
    if config.levels is None and weights is not None:
        config = config.replace(levels=preprocess_of(weights).levels)
    facts = inspect(splits, None if weights is None else weights.config, levels=config.levels is None)
    return Opened(resolve(config, facts), splits, weights)


def _open_again(config: TrainConfig, run: Run) -> Opened:
    """The recorded plan, the data and the weights of a resumed run."""
    if config.execution.tracker is not None:
        check_tracker(config.execution.tracker)
    data = _data_again(run)
    if data.note and distributed.is_first():
        log.warning("%s", data.note)
    # The weights may be gone; the run has a copy of those that it started from.
    start = run.start if has_model(run.start) else config.weights
    return Opened(Plan.of_run(run, config), data.splits, from_pretrained(start) if start else None)


def _data_again(run: Run) -> RunData:
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


@contextmanager
def _locked(run: Run) -> Iterator[None]:
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


def build_trainer(run: Run, opened: Opened, device: torch.device) -> Trainer:
    """The trainer of a run before its first step."""
    reuse_freed_memory()
    without_tf32(device)
    plan, splits = opened.plan, opened.splits
    model = start_model(opened).to(device)
    if plan.options.optimization.steps == 0:
        from vitascope.training.start import fitted_head  # scipy delays the start of training

        set_head(model, *distributed.by_first(lambda: fitted_head(model, splits.train, plan.options)))
    placement = place(plan, model, device)
    task = make_task(plan.options, model, splits, placement)
    return Trainer(run, plan, model, task, splits, placement)


def start_model(opened: Opened) -> VisionModel:
    """The model before the first step, random or with trained weights."""
    options, config, weights = opened.plan.options, opened.plan.model, opened.weights
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = build(config)
    if isinstance(model, VisionTransformer):
        model.encoder.checkpointing = options.execution.gradient_checkpointing
    if weights is None:
        ours = default_preprocess(config).fitted(options.fit or "crop")
        model.preprocess = dataclasses.replace(ours, levels=options.levels)
        if options.optimization.whiten == "on":
            whiten(cast("VisionTransformer", model), opened.splits.train)
        return model
    theirs = preprocess_of(weights).at_size(config.image_hw)
    theirs = theirs if options.fit is None else theirs.fitted(options.fit)
    model.preprocess = dataclasses.replace(theirs, levels=options.levels)
    more = any(since for since, _ in options.optimization.lengths[:1])
    source = "its finished model" if more else str(options.weights)
    notes = transfer(weights, model, source)
    if opened.splits.channels == 3 and config.in_channels == 1:
        notes.append("this model is grey: colour images are converted to grey")
    rank = options.optimization.lora
    if rank is not None and isinstance(model, VisionTransformer):
        freeze_body(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            add_adapters(model.encoder, rank)
    few = len(opened.splits.train) <= FEW_TO_START and options.weights == BUILT_IN
    advice = other_starts(opened.splits) if few and not opened.plan.start and options.fold is None else []
    distributed.print_first(
        f"start  from {source}: {'; '.join(notes)}" + "".join(f"\n       {line}" for line in advice)
    )
    return model


def make_task(options: TrainConfig, model: VisionModel, splits: Splits, placement: Placement) -> Task:
    """The task of a run."""
    preprocess, device = preprocess_of(model), placement.device
    if options.task == "masked":
        kind = MaskedAutoencoding if options.masking.target == "mae" else Masked
        return kind(masking=options.masking, config=cast("ViTConfig", model.config), preprocess=preprocess)
    weights = class_weights_of(options.balance, splits.train)
    weights = None if weights is None else weights.to(device)
    for images in (splits.val, splits.measured):
        images.truth.check_measurable(images.noun)
    loss = options.optimization.loss or "cross_entropy"
    truth = splits.train.truth
    balance = weights
    if options.balance.sampling == "balanced":
        balance = balanced_weights(splits.train, "balanced sampling").to(device)
        balance = balance if weights is None else balance * weights
    smoothing = options.optimization.label_smoothing
    criterion = (preprocess, smoothing, loss, weights, LOSSES[type(truth)], truth.partial, balance)
    distillation = options.distillation
    if distillation.teacher is None:
        return Classify(*criterion)
    teacher = open_teacher(
        distillation.teacher,
        splits.train.class_names,
        outputs=model.config.outputs,
        device=device,
        precision=placement.precision,
    )
    return Distill(*criterion, options=distillation, teacher=teacher)


# Finish


def _finish(trainer: Trainer) -> TrainResult | PretrainResult:
    """Test and save the finished model, remove the checkpoints, draw the figures, write the report."""
    run, config, final = trainer.run, trainer.config, trainer.splits.measured
    images = images_at_once(trainer.batch_size, trainer.parts)
    with stopped_at_once(run), suitable_threads(trainer.model_config, trainer.device, images):
        distributed.by_first(lambda: _remove_drawn(run))
        kept = select_weights(trainer)
        distributed.print_first(kept.in_words())
        model = from_pretrained(run.checkpoints / kept.weights).to(trainer.device)
        loader, seconds = trainer.loader(final), trainer.seconds
        module, precision = trainer.trained, trainer.precision
        finished = Finished(
            run, config, model, module, loader, trainer.val_loader, trainer.known_images,
            precision, seconds,
        )  # fmt: skip
        distributed.print_first(f"evaluating {counted(len(final), final.noun)}")
        novelties = trainer.task.calibrate(finished)
        tested = trainer.task.test(finished)
        if note := decided_in(trainer.splits.notes, final.name):
            distributed.print_first(f"       after decisions: {note}")
        if (
            config.task == "classify"
            and config.data == "digits"
            and final.name == "test"
            and config.fold is None
        ):
            distributed.print_first(f"       {DIGITS_BASELINE:.2%} scikit-learn's SVC() on the same split")
        distributed.by_first(lambda: _save(trainer, model, kept, novelties, tested))
        figures, report = distributed.by_first(lambda: _draw(trainer, finished, tested))
        if run.store is not None:
            later = f"`vitascope train --resume {shlex.quote(run.ref)}` on this machine uploads it"
            distributed.by_first(partial(run.store.finish, later))
    made: dict[str, Any] = {"run": run.path, "model": model.cpu(), "seconds": trainer.seconds}
    made |= {"figures": figures, "report": report, "url": run.url}
    result = (TrainResult if config.task == "classify" else PretrainResult)(evaluation=tested, **made)
    if run.store is not None and distributed.is_first():
        run.store.remove_with(result)
    return result


def _remove_drawn(run: Run) -> None:
    """Remove figures and report of an earlier end, so that none is beside another model."""
    shutil.rmtree(run.figures, ignore_errors=True)
    run.report.unlink(missing_ok=True)


def _save(
    trainer: Trainer,
    model: VisionModel,
    kept: Selection,
    novelties: Sequence[Novelty],
    tested: Evaluation | PatchEvaluation,
) -> None:
    """Write which weights were kept, the results, the predictions and the model."""
    run = trainer.run
    with explaining_failure(run.path, "the finished model", to_resume(run.path)):
        writer = run.write_metrics(trainer.step)
        writer.record("kept", trainer.step, dataclasses.asdict(kept))
        for novelty in novelties:
            writer.record("novelty", trainer.step, novelty.to_dict())
        writer.record("test", trainer.step, {**tested.summary(), "seconds": round(trainer.seconds, 2)})
        writer.close()
        if isinstance(tested, Evaluation):
            run.save_predictions(tested)
        save_pretrained(model, run.model_folder)
        if run.before.exists():  # of a finished run that got more epochs
            shutil.rmtree(run.before)
    if run.store is None:  # otherwise, an upload that fails is repeated from the last one
        keep = trainer.config.execution.keep_state
        remove_checkpoints(run.path, keep_state=keep)
        if keep:
            size = sum(file.stat().st_size for file in run.checkpoints.rglob("*") if file.is_file())
            print(f"state  {run.checkpoints}: {size / 1e6:,.0f} MB, for --resume with more epochs")


def _draw(trainer: Trainer, finished: Finished, tested: Any) -> tuple[dict[str, Path], Path]:
    """Draw the figures and write the report; once the model is saved, a later command can repeat both."""
    from vitascope.analysis.report.write import write_report  # matplotlib delays the start of training

    run = trainer.run
    later = f"make room, then run `vitascope report {shlex.quote(str(run.path))}`"
    advice = f"the model is saved in {run.model_folder}: {later}"
    with explaining_failure(run.path, "the figures", advice):
        figures = trainer.task.draw(finished, tested)
    distributed.print_first("writing the report")
    with explaining_failure(run.path, "the report", advice):
        return figures, write_report(run, splits=trainer.splits, device=str(trainer.device))
