"""A run folder, from its creation to its report."""

import dataclasses
import datetime
import functools
import logging
import os
import shlex
import shutil
import statistics
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from vitascope import layout
from vitascope.arguments import NamesFile, Range, checked
from vitascope.data.datasets import read_data
from vitascope.data.split_record import Restored, SplitRecord, record_of, restore
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.table_options import TABLE_SUFFIXES, TableOptions, is_table
from vitascope.errors import Interrupted, UserError
from vitascope.models.configuration import options_of, traits
from vitascope.models.options import MAX_MEMBERS
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.builtin import built_in
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.stored_model import local_model
from vitascope.remote import url_name
from vitascope.remote.stores import StoreError
from vitascope.serialization import explaining_faults, read_record, yaml_text
from vitascope.storage import WriteError, check_local, explaining_failure, locked, replacing, write_json
from vitascope.training.options.groups import SetsLength
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.environment import describe_environment
from vitascope.training.run.metrics import MetricsWriter, read_metrics
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.stored_run import StoredRun
from vitascope.training.run.trackers import Tracker

log = logging.getLogger(__name__)

LARGER_START = "facebook/dinov2-small"
"""A body on the hub that is recommended to start from."""
_Task = Literal["classify", "masked", "probe"]


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run, opened again.

    Attributes:
        splits: as in training; an image that no longer exists is replaced by a `Gone`.
        restored: how the images were found. None for a run without a record of its split, whose `splits` are
            those that its data and seed give now.
        note: one line about what differs, or why this is unknown; empty if nothing differs.
    """

    splits: Splits
    restored: Restored
    note: str

    def test_images(self, class_names: tuple[str, ...] | None = None) -> ImageSet:
        """The unchanged images among those that the run's model is measured on.

        Labels are indices into `class_names`, by default the run's. It is a `UserError` if no image is left
        unchanged, or one has a class of another name.
        """
        final = self.splits.measured
        names = final.class_names if class_names is None else class_names
        images = self.restored.present(self.restored.record.measured, names)
        if len(images) < len(final):
            log.warning(
                "measured on %s of the run's %s %s images: those that exist unchanged",
                *(f"{len(images):,}", f"{len(final):,}", images.name),
            )
        return images


@dataclasses.dataclass(init=False, repr=False)
class Run:
    """A run folder. `Run.open` and `Run.create` make sure that it is one.

    `config`, `environment` and `predictions` are read on first use and kept; everything else on each use. A
    broken file is a `UserError`.

    Attributes:
        path: the folder; `layout` describes its files, whose paths are attributes too.
        start: the model folder that an unfinished run started from, if it did not start at random.
        best: the model folder of the lowest validation loss so far, while the run is unfinished.
        before: what a finished run was before it got more epochs, until their end.
        ref: the run as an argument: its folder, or its URL.
        store: what connects the local copy to a store, of a run that is worked on there.
    """

    path: Path

    @checked
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.ref = str(path)
        self.store: StoredRun | None = None
        self.config_file = self.path / layout.CONFIG
        self.plan_file = self.path / layout.PLAN
        self.metrics_file = self.path / layout.METRICS
        self.checkpoints = self.path / layout.CHECKPOINTS
        self.start, self.best = self.checkpoints / "start", self.path / layout.BEST
        self.before = self.path / layout.BEFORE
        self.model_folder = self.path / layout.MODEL
        self.figures = self.path / layout.FIGURES
        self.report = self.path / layout.REPORT
        self.probe = self.path / layout.PROBE
        self._tracker: Tracker | None = None

    def __repr__(self) -> str:
        return f"Run({self.path})"

    @classmethod
    @checked
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """An existing run, to read; another folder is a `UserError`. Of a URL, its files are copied."""
        run = cls(local_model(folder))
        run.ref = str(folder)
        run._check_exists()
        return run

    @classmethod
    def at(cls, ref: str | os.PathLike[str]) -> Self:
        """The run of a folder, or of a URL by its local copy, to work on; it may be absent."""
        if not (isinstance(ref, str) and url_name(ref)):
            return cls(ref)
        store = StoredRun(ref)
        run = cls(store.path)
        run.ref, run.store = store.url, store
        return run

    @property
    def url(self) -> str | None:
        """The URL of a run that is worked on in a store."""
        return None if self.store is None else self.store.url

    @property
    def name(self) -> str:
        """The name of its folder."""
        return (
            self.path.resolve().name
            if self.ref == str(self.path)
            else self.ref.rstrip("/").rpartition("/")[2]
        )

    @classmethod
    @checked
    def create(
        cls,
        config: Mapping[str, Any],
        plan: Mapping[str, Any] | None = None,
        *,
        processes: int = 1,
        keep_data: bool = False,
    ) -> "Run":
        """Create a run folder with its `config.yaml`, `plan.json` and `environment.json`.

        Args:
            config: every option by name. `run` is the folder; None takes `runs/<data>`, with the first free
                number if that exists. Of a URL, the local copy is created, and uploaded with the first
                checkpoint. Paths are written as `lasting_path` gives them.
            plan: see `plan`.
            processes: that train together.
            keep_data: move the file of the data into the folder.

        Raises:
            UserError: the folder exists, because a run is never overwritten; it cannot be created; the
                device does not exist.
        """
        environment = describe_environment(config["device"], processes)
        place = Path(config["data"]).expanduser().resolve()
        name = place.stem if place.suffix.lower() in TABLE_SUFFIXES else place.name
        data = os.fsencode(name).decode(errors="replace")
        default = Path("runs") / (data or "data")
        run = cls(default) if config["run"] is None else new_run(config["run"])
        path = run.path
        if os.fsencode(path).decode(errors="replace") != str(path):
            raise UserError(f"{path}: a run folder needs a name in UTF-8, for safetensors and TensorBoard")
        with explaining_failure(path, "the run folder", "make room, or choose another folder"):
            path = _new_folder(run, numbered=config["run"] is None)
            if config["run"] is None:
                run = cls(path)
            try:
                if keep_data:
                    config = {**config, "data": shutil.move(config["data"], path / layout.DATA)}
                run._write_config({**config, **lasting_paths(config)})
                if plan is not None:
                    write_json(run.plan_file, dict(plan))
                write_json(path / layout.ENVIRONMENT, environment)
            except BaseException:  # Ctrl-C too: what is left would refuse the same command
                shutil.rmtree(path, ignore_errors=True)
                raise
        return run

    @classmethod
    def of_model(cls, ref: str | os.PathLike[str]) -> Self | None:
        """The run of a model, which is the run folder or the finished or best model in one; or None."""
        path = Path(ref)
        for owner in (path, path.parent, path.parent.parent):
            if layout.is_run(owner) and path in (owner, owner / layout.MODEL, owner / layout.BEST):
                return cls(owner)
        return None

    @classmethod
    @checked
    def find(cls, ref: str | os.PathLike[str]) -> tuple[Self, Path | None]:
        """The run to resume, and its checkpoint if `ref` is one.

        Args:
            ref: a run folder, `RUN/checkpoints/step-N`, or `auto` for the newest unfinished run in runs/. Of
                a URL, the local copy is made as new as the store.

        Raises:
            UserError: no run there.
        """
        run, path = cls.at(ref), Path(ref)
        if run.store is not None:
            run.store.fetch()
            run.check_unfinished()
            run._check_exists()
            return run, None
        if str(ref) == "auto":
            runs = (cls(config.parent) for config in Path("runs").glob(f"*/{layout.CONFIG}"))
            unfinished = [run for run in runs if not run.finished]
            if not unfinished:
                raise UserError("runs: no unfinished run to resume")

            def last_written(run: Run) -> float:
                files = (run.config_file, run.metrics_file)
                return max(file.stat().st_mtime for file in files if file.exists())

            return max(unfinished, key=last_written), None
        if path.parent.name == layout.CHECKPOINTS and layout.is_run(path.parent.parent):
            return cls(path.parent.parent), path
        return cls.open(path), None

    @property
    def exists(self) -> bool:
        """Whether this is a run folder."""
        return layout.is_run(self.path)

    def _check_exists(self) -> None:
        if not self.exists:
            raise UserError(f"{self.ref}: not a run folder (it has no {layout.CONFIG})")

    @property
    def finished(self) -> bool:
        """Whether the finished model is saved, the last file that training needs to write, and no more epochs
        have begun, which the configuration says; in a store, if the run is there."""
        if self.store is not None:
            return self.store.complete
        before = self.before / layout.CONFIG
        begun = before.is_file() and before.read_bytes() != self.config_file.read_bytes()
        return layout.is_finished(self.path) and not begun

    def check_unfinished(self) -> None:
        """Reject to resume a run that has finished."""
        if self.finished:
            named = shlex.quote(self.ref)
            undrawn = f"; `vitascope report {named}` draws its figures and its report, which are missing"
            raise UserError(
                f"{self.ref}: this run has finished; `vitascope train --resume {named} --epochs MORE` goes "
                "on; "
                f"`vitascope train --weights {named} --data DATA` trains its model further, in a new run"
                + undrawn
                * (self.store is None and not self.report.is_file())
            )

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the URL of a run in a store in place of its local copy into the errors of the work on it.

        An error of this machine, such as a full disk, names the local copy too.
        """
        try:
            yield
        except StoreError:  # it names both
            raise
        except UserError as error:
            is_local = self.store is not None and isinstance(error.__cause__, OSError | WriteError)
            copy = f"; the local copy is {self.path}" if is_local else ""
            error.args = (str(error).replace(str(self.path), self.ref) + copy,)
            raise
        except Interrupted as stop:
            raise Interrupted(self.ref, stop.signum, finished=stop.finished) from stop

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run as the only process; see `storage.locked`. The end also ends `start_tracker`."""
        with locked(self.path / layout.LOCK):
            exit_code = 1
            try:
                yield
                exit_code = 0
            finally:
                if self._tracker is not None:
                    self._tracker.finish(exit_code)
                    self._tracker = None

    def start_tracker(self, name: str | None) -> None:
        """Log the metrics to an experiment tracker too, while the run is held; None for no tracker.

        A resumed run continues its run in the tracker.

        Raises:
            UserError: the tracker is not installed, or cannot start a new run.
        """
        if name is None:
            return
        path = self.path / layout.TRACKER
        runs = read_record(path, {}, others=str)
        self._tracker = Tracker(name, self.path.resolve().name, self.config, runs.get(name))
        write_json(path, {**runs, name: self._tracker.run_id})

    def model(self) -> VisionModel:
        """Load the finished model, in evaluation mode, on the CPU."""
        return from_pretrained(self.model_folder)

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """Every option by name."""
        self._check_exists()
        members, length = Range(ge=0, le=MAX_MEMBERS), Range(gt=0)
        types = {
            **dict.fromkeys(traits(TrainConfig, NamesFile), str | None),
            **dict.fromkeys(traits(TrainConfig, SetsLength), Annotated[float | None, length]),
            **{"task": _Task, "data": str, "seed": Annotated[int, Range(ge=0, lt=2**63)]},
            **{"steps": Annotated[int | None, Range(ge=0)], "lengths": tuple[tuple[int, int], ...]},
            **dict.fromkeys(("folds", "fold"), Annotated[int | None, members]),
        }
        return read_record(self.config_file, types, ("task", "data", "seed"))

    @property
    def plan(self) -> Mapping[str, Any]:
        """`asked` options, the `model`, what the data have `chosen`, and why; the choices of `weights=auto`,
        `start`, which probes and runs of version 0.2.0 lack."""
        types = {"asked": Mapping, "model": Mapping, "chosen": Mapping[str, str], "reason": str, "note": str}
        plan = read_record(self.plan_file, {**types, "start": tuple[str, ...]}, types)
        return {"start": (), **plan}

    @property
    def table(self) -> TableOptions:
        """How the data are read, if they are a table."""
        names = [field.name for field in dataclasses.fields(TableOptions)]
        with options_of(self.config_file):
            return TableOptions(**{name: self.config[name] for name in names if name in self.config})

    def record_options(self, **options: Any) -> None:
        """Change options in `config.yaml` that the run itself has chosen."""
        advice = f"make room, then run `vitascope train --resume {shlex.quote(str(self.path))}`"
        with explaining_failure(self.config_file, "the configuration", advice):
            self._write_config({**self.config, **options})
        del self.config  # read again on the next use

    def _write_config(self, values: Mapping[str, Any]) -> None:
        with replacing(self.config_file) as aside:
            aside.write_text(yaml_text(values), "utf-8")

    @property
    def classifies(self) -> bool:
        """Whether the run learns classes; otherwise, it learns hidden patches."""
        return bool(self.config["task"] != "masked")

    @property
    def probes(self) -> bool:
        """Whether the run is that of a probe: a classifier on frozen features, without epochs."""
        return bool(self.config["task"] == "probe")

    @property
    def members(self) -> "list[Run]":
        """The runs of the folds, of a run with `folds`; none of other runs."""
        folds = 0 if self.config.get("fold") is not None else self.config.get("folds") or 0
        return [Run(self.path / layout.FOLDS / str(number + 1)) for number in range(folds)]

    @property
    def better_start(self) -> str:
        """Weights to start from, for a run that has learned little; empty if it had such a start."""
        weights, larger = self.config.get("weights"), f"such as {LARGER_START}"
        if not weights:
            return (
                "few images need trained weights: --weights cifar10, which comes with vitascope, or those "
                f"of a larger model, {larger}"
            )
        if built_in(weights) is not None:
            return f"few images may need the weights of a larger model, {larger}"
        return ""

    @functools.cached_property
    def environment(self) -> Mapping[str, Any]:
        """Start time, command, versions and machine; empty if there is no `environment.json`."""
        path = self.path / layout.ENVIRONMENT
        values = read_record(path, {"started": str}, others=str | int | float)
        with explaining_faults(path):
            datetime.datetime.fromisoformat(values.get("started", "2000-01-01"))
        return values

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of the metrics so far, in order; `MetricsWriter` describes them."""
        if not self.metrics_file.is_file():
            return []
        return read_metrics(self.metrics_file, ("accuracy", "correct") if self.classifies else ())

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind: "step", "epoch" or "test"."""
        return [record for record in self.metrics if record["kind"] == kind]

    @property
    def epochs_done(self) -> float:
        """The number of epochs so far; of a run with folds, the mean of its runs."""
        runs = [run.records("epoch") for run in self.members or [self]]
        return statistics.mean(records[-1]["epoch"] if records else 0 for records in runs)

    @property
    def planned_epochs(self) -> float | None:
        """The length of the run in epochs; None before the first validation if steps or minutes set it."""
        config, epochs = self.config, self.records("epoch")
        if config.get("epochs") is not None and not config.get("lengths"):
            return config["epochs"]
        if self.finished:
            return self.epochs_done or (0 if config.get("steps") == 0 else None)
        steps = config["lengths"][-1][1] if config.get("lengths") else config.get("steps")
        if steps is None or not epochs:
            return None
        return float(f"{steps * epochs[-1]['epoch'] / epochs[-1]['step']:.3g}")

    def write_metrics(self, step: int = 0) -> MetricsWriter:
        """A writer that continues the metrics after a step."""
        return MetricsWriter(self.metrics_file, step, self._tracker)

    @functools.cached_property
    def predictions(self) -> Predictions | None:
        """Predictions of the finished classifier on its test images; None if the run has none."""
        path = self.path / layout.PREDICTIONS
        predictions = Predictions.load(path) if path.is_file() else None
        return predictions if predictions is not None and len(predictions.labels) else None

    def save_predictions(self, predictions: Predictions) -> None:
        """Write the predictions of the finished classifier."""
        predictions.save(self.path / layout.PREDICTIONS)

    def record_split(self, splits: Splits) -> None:
        """Write which image is in which split."""
        data = Path(self.config["data"]).expanduser()
        is_beside = splits.root is not None and data.exists()
        if self.store is not None:  # whose local copy is in different places
            is_beside = is_beside and data.is_relative_to(self.path.absolute())
        from_run = os.path.relpath(data, self.path) if is_beside else ""
        self._write_split(record_of(splits, from_run))

    def _write_split(self, record: SplitRecord) -> None:
        path = self.path / layout.SPLIT
        with replacing(path) as aside:
            record.write(aside)

    def skip_missing(self) -> bool:
        """Record that the run goes on without missing or changed images; returns whether there are any.

        Raises:
            UserError: no image of a part is left.
        """
        restored = self.open_data(check=("train", "val", "test")).restored
        if not restored.complete:
            self._write_split(restored.remaining())
        return not restored.complete

    @property
    def split_file(self) -> Path:
        """The record of the split; a run without it has not begun."""
        return self.path / layout.SPLIT

    def split_record(self) -> SplitRecord:
        """Which image was in which split; a UserError if there is no record."""
        if not self.split_file.is_file():
            raise UserError(
                f"{self.split_file}: missing: the run had not begun, or it is damaged; start it again"
            )
        return SplitRecord.read(self.split_file)

    @checked
    def open_data(self, data: str | None = None, *, check: Collection[str] | None = None) -> RunData:
        """Open the run's data, split as in training.

        Args:
            data: where the data are now; None for where they were, relative to the run (a copied project has
                its own) or absolutely.
            check: splits whose images are compared with the record by content, not by name alone; None for
                the split that the finished model is measured on.

        Raises:
            UserError: the data are gone, or are others; the record is damaged.
        """
        where = str(self.config["data"]) if data is None else data
        table = self.table if data is None or is_table(data) else self.table.of_images()
        record = self.split_record()
        where, notes = self._place(where, record) if data is None else (where, [])
        table = self._moved(table, where)
        inventory = read_data(where, table)
        if self.config.get("fold") is not None:  # its test images are among those to train on
            sets = tuple(images for images in inventory.sets if images.name != "test")
            inventory = dataclasses.replace(inventory, sets=sets)
        restored = restore(record, inventory, [record.measured] if check is None else check)
        if not any((places >= 0).any() for places in restored.found.values()):
            raise UserError(
                f"{where}: contains none of the {record.images():,} images that {self.path} was trained and "
                "tested on; these are other data"
            )
        if changes := restored.note():
            notes.append(f"{where} has changed since {self.path} began: {changes}")
        return RunData(restored.as_recorded(), restored, "; ".join(notes))

    def _place(self, recorded: str, record: SplitRecord) -> tuple[str, list[str]]:
        """Where the data are, and a line if there are others: beside the run as then, else as recorded."""
        beside = Path(os.path.normpath(self.path.absolute() / record.place))
        first = Path(recorded).expanduser()
        if not record.place or not os.path.exists(beside):  # also where the name is too long for a path
            return recorded, []
        if not os.path.exists(first):
            return str(beside), []
        if first.samefile(beside):
            return recorded, []
        return str(beside), [f"uses the data beside the run, {beside}, not those in {recorded}"]

    def _moved(self, table: TableOptions, where: str) -> TableOptions:
        """How data are read that may have been moved together with their images and the decisions on them."""
        recorded = os.path.expanduser(str(self.config["data"]))
        where = os.path.expanduser(where)
        same = os.path.exists(where) and os.path.exists(recorded) and os.path.samefile(where, recorded)
        for name in ("images", "audit") if not same else ():
            if (place := getattr(table, name)) is not None:
                place = os.path.relpath(os.path.expanduser(place), os.path.dirname(recorded))
                beside = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(where)), place))
                if os.path.exists(beside):
                    moved: dict[str, Any] = {name: beside}
                    table = dataclasses.replace(table, **moved)
        return table

    @checked
    def test_images(self, class_names: tuple[str, ...] | None = None) -> ImageSet:
        """The images of `RunData.test_images`; logs how the data differ."""
        opened = self.open_data()
        if opened.note:
            log.warning("%s", opened.note)
        return opened.test_images(class_names)


def load_with_run(model: VisionModel | str | os.PathLike[str]) -> tuple[VisionModel, Run | None]:
    """A model, loaded if it is a MODEL reference, and its run if that is a run folder."""
    if not isinstance(model, str | os.PathLike):
        return model, None
    run = Run(model)
    return from_pretrained(model), run if run.exists else None


def _new_folder(run: Run, *, numbered: bool) -> Path:
    """Create the folder; if it exists and may be numbered, with the first free number."""
    path = folder = run.path
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if not numbered:
                raise _exists(run) from error
        number += 1
        folder = path.with_name(f"{path.name}-{number}")


def new_run(ref: str | os.PathLike[str]) -> Run:
    """The run of a folder or URL that is not created yet; a UserError if anything is there."""
    run = Run.at(ref)
    if run.store is None:
        check_local(run.path)
    if run.path.exists() or (run.store is not None and not run.store.is_new()):
        raise _exists(run)
    return run


def _exists(run: Run) -> UserError:
    resume = f"vitascope train --resume {shlex.quote(run.ref)}{' --epochs MORE' * run.finished}"
    return UserError(
        f"{run.ref} exists, and a run is never overwritten; choose another folder, or continue a training "
        f"with `{resume}`"
    )


def lasting_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """The options that may name files, as `lasting_path` gives them, without those that are None.

    The name of a built-in model stays as it is, also beside a folder of the same name.
    """
    refs = {
        name: str(value) for name in traits(TrainConfig, NamesFile) if (value := config.get(name)) is not None
    }
    names = {name for name, ref in refs.items() if name != "data" and built_in(ref) is not None}
    return {name: ref if name in names else lasting_path(ref) for name, ref in refs.items()}


def lasting_path(ref: str) -> str:
    """A DATA or MODEL argument that means the same in every working directory.

    A path becomes absolute; in the home folder it begins with `~`, which names no person. An argument that
    is not a path here is returned unchanged.
    """
    path = Path(ref).expanduser()
    if ref in ("", "digits") or not path.exists():
        return ref
    absolute, home = Path(os.path.abspath(path)), Path.home()
    return str(Path("~") / absolute.relative_to(home)) if absolute.is_relative_to(home) else str(absolute)
