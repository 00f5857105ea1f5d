"""What a run recorded: the files of a run folder that a report is made from."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from vitascope.data.datasets import list_images, open_data
from vitascope.data.split_record import Restored, SplitRecord, restore
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.storage import settle

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
PREDICTIONS = "predictions.npz"
SPLIT = "split.jsonl.gz"


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a finished classifier says of the split that it is measured on.

    Attributes:
        split: the split's name.
        class_names: of the K classes.
        indices: which of the split's images could be read, int64 (N,).
        labels: their true classes, int64 (N,).
        probabilities: the model's, float32 (N, K).
        unreadable: why the other images could not be read, each with its path.
    """

    split: str
    class_names: tuple[str, ...]
    indices: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    unreadable: tuple[str, ...] = ()

    @property
    def guesses(self) -> npt.NDArray[np.int64]:
        """The most probable class of each image, (N,)."""
        return self.probabilities.argmax(axis=1)

    @property
    def confidences(self) -> npt.NDArray[np.float32]:
        """The probability of that class, (N,)."""
        return self.probabilities.max(axis=1)

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether that class is the true one, (N,)."""
        return self.guesses == self.labels


def save_predictions(run: Path, predictions: Predictions) -> Path:
    """Write a run's `predictions.npz`, whole or not at all; texts are NumPy's, so that nothing is pickled."""
    path = run / PREDICTIONS
    aside = path.with_name(f".{path.name}")
    with aside.open("wb") as file:
        np.savez_compressed(
            file,
            split=np.array(predictions.split),
            class_names=_texts(predictions.class_names),
            indices=predictions.indices,
            labels=predictions.labels,
            probabilities=predictions.probabilities,
            unreadable=_texts(predictions.unreadable),
        )
    return settle(aside, path)


def load_predictions(run: Path) -> Predictions | None:
    """A run's predictions; None where it recorded none.

    Raises:
        UserError: a file that is broken.
    """
    path = run / PREDICTIONS
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            return Predictions(
                split=str(stored["split"]),
                class_names=tuple(stored["class_names"].tolist()),
                indices=stored["indices"],
                labels=stored["labels"],
                probabilities=stored["probabilities"],
                unreadable=tuple(stored["unreadable"].tolist()),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        # What is no archive NumPy takes for a pickle, and says how to trust it: no advice of ours.
        reason = str(error).split(". If you trust")[0]
        raise UserError(f"{path} is broken ({reason}); remove it to have the rest") from error


def _texts(texts: Sequence[str]) -> npt.NDArray[np.str_]:
    return np.array(texts, dtype=np.str_)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run, in order; a last line that a crash cut off is left out."""
    records = []
    for line in (run / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder, read.

    Attributes:
        folder: where it is.
        config: the options of `config.yaml`.
        metrics: the records of `metrics.jsonl`; none where nothing has been recorded yet.
        environment: what `environment.json` says of the machine; empty where there is none.
        predictions: of a finished classifier; None where it recorded none.
    """

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    predictions: Predictions | None

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end: the finished model is the last that it writes."""
        return (self.folder / "model" / "config.json").is_file()

    @property
    def classifies(self) -> bool:
        """Whether classes are learned; otherwise, hidden patches."""
        return self.config["task"] == "classify"

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind: "step", "epoch" or "test"."""
        return [record for record in self.metrics if record["kind"] == kind]


def read_run(folder: Path) -> Run:
    """Everything that a run folder says in words and numbers.

    Raises:
        UserError: not a run folder, or a file of it that is broken.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: not a run folder (it has no {CONFIG})")
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        environment = folder / ENVIRONMENT
        machine = json.loads(environment.read_text(encoding="utf-8")) if environment.is_file() else {}
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: its {CONFIG} or {ENVIRONMENT} is broken: {reason}") from error
    if not isinstance(config, dict) or not {"task", "data", "seed"} <= config.keys():
        raise UserError(
            f"{folder / CONFIG}: not the configuration of a run (it names no task, data and seed)"
        )
    metrics = read_metrics(folder) if (folder / METRICS).is_file() else []
    return Run(folder, config, metrics, machine, load_predictions(folder))


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run, opened again.

    Attributes:
        splits: as they were in training; `Gone` is in the place of an image that is not to be had any more.
        restored: how they were found; None of a run that did not record its split, whose `splits` are those
            that its data and seed give now.
        note: in one line, what differs, or that this cannot be told; empty where nothing does.
    """

    splits: Splits
    restored: Restored | None
    note: str


def open_run_data(
    run: Path,
    data: str,
    *,
    now: str | None = None,
    seed: int,
    labelled: bool,
    check: Collection[str] | None = None,
) -> RunData:
    """Open the data of a run, split as the run recorded it.

    Args:
        run: the run folder.
        data: the DATA argument of the run.
        now: where the data are now; None for `data`, or for as far from the run as they were.
        seed: of the run.
        labelled: whether the run learned classes.
        check: parts of the split whose images are compared by their content too, not by name alone; None is
            the part that the finished model is measured on.

    Raises:
        UserError: the data are gone, or others; a record that is damaged.
    """
    path = run / SPLIT
    if not path.is_file():
        where = data if now is None else now
        splits = open_data(where, seed=seed, labelled=labelled)
        note = (
            f"{run}: an older run, without a record of its split: whether the images of {where} are still "
            "those that it was trained and tested on cannot be verified"
        )
        return RunData(splits, None, note)
    record = SplitRecord.read(path)
    where = find_data(run, data, record) if now is None else now
    restored = restore(record, list_images(where, seed=seed), [record.final] if check is None else check)
    if not any((found >= 0).any() for found in restored.found.values()):
        raise UserError(
            f"{where}: none of the {record.images():,} images that {run} was trained and tested on is there; "
            "these are other data"
        )
    changes = restored.note()
    note = f"{where} has changed since {run} began: {changes}" if changes else ""
    return RunData(restored.as_recorded(), restored, note)


def find_data(run: Path, data: str, record: SplitRecord) -> str:
    """A run's DATA argument where its data lie now: where they were, or as far from the run as they were."""
    if record.place and not Path(data).expanduser().exists():
        moved = Path(os.path.normpath(run.absolute() / record.place))
        if moved.exists():
            return str(moved)
    return data


def without_home(text: str) -> str:
    """A text without the home folder's path, which names a person: `~` instead."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
