"""Metrics of a run, as lines of JSON, for TensorBoard and for a tracker."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from vitascope.errors import UserError
from vitascope.serialization import parse_json
from vitascope.storage import explaining_failure, replacing
from vitascope.training.run.trackers import Tracker

_NEEDED = {
    "epoch": {"epoch"},
    "stop": {"epoch", "best_epoch"},
    "kept": {"weights", "epoch", "reason"},
    "novelty": {"images", "noticed", "area"},
    "test": {"split", "images", "loss", "seconds"},
}
"""By kind, what a record has at least besides its step."""
_TEXTS = {"kind", "split", "class", "pictures", "weights", "reason"}
_LEAST = {
    **{"step": 0, "images": 1, "correct": 0, "noticed": 0, "area": 0, "unreadable": 0, "seconds": 0},
    **{"epoch": 0, "best_epoch": math.ulp(0)},  # the latter more than 0
}
"""The least value of the numbers that have one; `_LARGEST` is the largest of them."""
_LARGEST = 1e15
"""What is drawn or formatted overflows with more."""
_WHOLE = {"step", "images", "correct", "noticed", "unreadable"}
_NUMBERS = {"lr", "loss", "accuracy", "map", *_LEAST}
"""Values that are numbers, beside those of training and validation; others may be either."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order, without a last line that a crash cut off.

    Raises:
        UserError: another line is not a record that `MetricsWriter` writes; the file cannot be read.
    """
    records = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line.decode())
        except ValueError:
            if number == len(lines):
                break
            record = None
        if not _is_record(record):
            start = line[:80].decode(errors="backslashreplace")
            raise UserError(
                f"{path} is broken: line {number}, {start!r}, is not a record of a run; remove this line"
            )
        records.append(record)
    return records


def _is_record(record: object) -> bool:
    """Whether a record has what its kind needs, and each value the type and the range of its name."""
    if not isinstance(record, dict) or not all(_fits(name, value) for name, value in record.items()):
        return False
    if record.get("epoch") == 0 and record.get("kind") != "kept":  # steps are divided by the others
        return False
    needed = {"kind", "step"} | _NEEDED.get(record.get("kind", ""), set())
    most = record.get("images", _LARGEST)
    return needed <= record.keys() and max(record.get(name, 0) for name in ("correct", "noticed")) <= most


def _fits(name: str, value: object) -> bool:
    if name in _TEXTS:
        return isinstance(value, str)
    if isinstance(value, str):
        return name not in _NUMBERS and not name.startswith(("train_", "val_"))
    if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else int | float):
        return False
    return name not in _LEAST or _LEAST[name] <= value <= _LARGEST


class MetricsWriter:
    """Writes records to `metrics.jsonl`, and their numbers to TensorBoard's event file, if TensorBoard is
    installed, and to a tracker, if there is one.

    Each record has its `kind`, the `step` after which it was made, counted from 1, and by kind:

    - `step`: `loss`, the mean over the step's images, and `lr`;
    - `epoch`, of each validation: `epoch`, counted from 1, a fraction within an epoch; `train_loss` and
      `train_accuracy`, means over the steps since the validation before, on augmented images (and, if these
      are mixed, by their own classes; the loss by its class weights, if there are any); `val_loss`,
      where the training balances classes `val_weighted_loss`, by which weights are selected,
      `val_accuracy` and `val_balanced_accuracy`; `val_majority`, the share of the most frequent class; where
      images may have several classes, accuracies are the shares of images with exactly their classes above
      0.5, and `val_map`, the mean average precision, takes the place of the last two;
      `images_per_second`; `seconds`, the training time so far, with validation, over all processes that
      worked on the run. Distillation adds
      `train_agree`, the share of images for which student and teacher predict the same class. In masked
      patch prediction, accuracy is the share of correctly predicted colours, where colours are predicted;
    - `stop`, of a run that early stopping has ended: `epoch`, the last one, and `best_epoch`, that of the
      lowest validation loss;
    - `kept`: the `weights` of the finished model, `best` or `last`, their `epoch` and the `reason`;
    - `novelty`, of each kind of pictures that a classifier was not taught: the name of the `class` that is
      left out, or of the `pictures`; `images`, and of these the `noticed` ones; `area`, under the ROC curve;
    - `test`: `split`, `images`, `loss`, `accuracy`, `seconds`, and for a classifier `correct`, `unreadable`,
      `accuracy_low` and `accuracy_high` (the 95% interval), `top5_accuracy` with more than 5 classes,
      `balanced_accuracy`, `macro_f1` and `majority`. Where images may have several classes, the last of
      these, from `accuracy_low` on, are replaced by each measure of `LabelScore.estimates` under its name,
      with its interval (`map_low`, `map_high`) and the value of a constant answer (`map_constant`).

    Records after `step`, from which the run resumes, are removed, because those steps are done again. So are
    the last three kinds, because only unfinished runs are resumed. It is a `UserError` if the files cannot be
    written.
    """

    def __init__(self, path: Path, step: int = 0, tracker: Tracker | None = None) -> None:
        self._path, self._tracker = path, tracker
        kept = read_metrics(path) if path.exists() else []
        kept = [
            record
            for record in kept
            if record["step"] <= step and record["kind"] not in ("kept", "novelty", "test")
        ]
        with self._explaining_failure():
            with replacing(path) as aside:
                aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")
            self._events: Any = None
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter  # takes a second to import

                self._events = SummaryWriter(str(path.parent), purge_step=step + 1 if step else None)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write one record; its numbers also go to TensorBoard and the tracker as kind/name, or with a class
        or other pictures as kind/class/name."""
        with self._explaining_failure():
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        tag = "/".join([kind, *(values[name] for name in ("class", "pictures") if name in values)])
        numbers = {f"{tag}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        for name, value in numbers.items() if self._events else ():
            self._events.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.log(numbers, step)

    def close(self) -> None:
        """Flush both files; the tracker stays open."""
        with self._explaining_failure():
            self._file.close()
            if self._events:
                self._events.close()

    def _explaining_failure(self) -> AbstractContextManager[None]:
        run = shlex.quote(str(self._path.parent))
        advice = f"make room, then run `vitascope train --resume {run}`"
        return explaining_failure(self._path, "the metrics", advice)
