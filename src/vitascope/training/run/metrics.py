"""Metrics of a run, as lines of JSON, for TensorBoard and for a tracker."""

import importlib.util
import json
import shlex
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

from vitascope.arguments import Range
from vitascope.serialization import check_record, explaining_faults, parse_json
from vitascope.storage import explaining_failure, replacing
from vitascope.training.run.trackers import Tracker

_LARGEST = 1e15
"""What is drawn or formatted overflows with more."""
_OF_IMAGES = ("correct", "noticed")
_POSITIVE = Annotated[float, Range(gt=0, le=_LARGEST)]
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("kind", "split", "class", "pictures", "weights", "reason"), str),
    **dict.fromkeys(("step", "unreadable", *_OF_IMAGES), Annotated[int, Range(ge=0, le=_LARGEST)]),
    **dict.fromkeys(("epoch", "area", "seconds"), Annotated[float, Range(ge=0, le=_LARGEST)]),
    **{"images": Annotated[int, Range(ge=1, le=_LARGEST)], "best_epoch": _POSITIVE},
}
"""The types of values by name; others are numbers."""
_NEEDED = {
    "epoch": ("epoch",),
    "stop": ("epoch", "best_epoch"),
    "kept": ("weights", "epoch", "reason"),
    "novelty": ("images", "noticed", "area"),
    "test": ("split", "images", "loss", "seconds"),
}
"""By kind, what a record has at least besides its step."""


def read_metrics(path: Path, of_test: Collection[str] = ()) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order, without a last line that a crash cut off.

    Args:
        path: the file.
        of_test: what records of the kind `test` have, besides what all of them do.

    Raises:
        UserError: another line is not a record that `MetricsWriter` writes; the file cannot be read.
    """
    records = []
    with explaining_faults(path):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        with explaining_faults(f"line {number} of {path}", "remove this line"):
            try:
                record = parse_json(line.decode())
            except ValueError:
                if number == len(lines):
                    break
                raise
            records.append(_checked(record, of_test))
    return records


def _checked(record: object, of_test: Collection[str]) -> dict[str, Any]:
    """A record that has what its kind needs, and values of the types of their names."""
    values = check_record(record, _TYPES, ("kind", "step"), others=float)
    kind, types = values["kind"], dict[str, Any]()
    if kind != "kept":
        types["epoch"] = _POSITIVE  # steps are divided by it
    if "images" in values:
        types |= dict.fromkeys(_OF_IMAGES, Annotated[int, Range(ge=0, le=values["images"])])
    return check_record(values, types, (*_NEEDED.get(kind, ()), *(of_test if kind == "test" else ())))


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
