"""The run folder: what a training run leaves behind, and where.

runs/digits/
    config.yaml       every option: `vitascope train --config` of it reproduces the run
    split.jsonl.gz    which image was in which part of the split, by name and content
    environment.json  when and by which command it was started, versions, the machine
    metrics.jsonl     one line a logged step, an epoch, and the final test; see `Recorder`
    events.out...     the same for TensorBoard
    checkpoints/      what `--resume` continues from
    model/            the finished model
    predictions.npz   what that model says of the images that it is measured on
    figures/          what it learned, as pictures
    report.html       all of this on a page
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from torch.utils.tensorboard import SummaryWriter

from vitascope.data.split_record import record_of
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.report.records import CONFIG, ENVIRONMENT, METRICS, SPLIT, read_metrics
from vitascope.storage import settle, write_json
from vitascope.training.environment import describe_environment
from vitascope.training.recipes import TrainConfig

__all__ = [
    "CONFIG",
    "Recorder",
    "create_run",
    "find_run",
    "lasting_path",
    "lasting_paths",
    "open_run",
    "record_split",
]

PLACES = ("data", "weights", "teacher")
"""Options that name files."""


def create_run(config: TrainConfig) -> Path:
    """A new run folder with its `config.yaml` and `environment.json`.

    Paths of data, weights and a teacher are written as `lasting_path` gives them.

    The default name is `runs/<data>`, with the first free number if that is taken.

    Raises:
        UserError: the named folder exists: a run is never overwritten; a device that this machine lacks.
    """
    environment = describe_environment(config.engine.device)
    if config.run is not None:
        folder = Path(config.run)
        if folder.exists():
            raise UserError(
                f"{folder} exists, and a run is never overwritten; choose another --run, or continue it "
                f"with `vitascope train --resume {folder}`"
            )
        folder.mkdir(parents=True)
    else:
        base = Path("runs") / (Path(config.data).expanduser().resolve().name or "data")
        folder, number = base, 1
        while True:
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
                folder = base.with_name(f"{base.name}-{number}")
    (folder / CONFIG).write_text(config.replace(**lasting_paths(config)).to_yaml(), encoding="utf-8")
    write_json(folder / ENVIRONMENT, environment)
    return folder


def lasting_paths(config: TrainConfig) -> dict[str, str]:
    """The options of `PLACES` that are given, as `lasting_path` gives them."""
    return {name: lasting_path(value) for name in PLACES if (value := config.option(name)) is not None}


def lasting_path(ref: str) -> str:
    """A DATA or MODEL argument that means the same in every folder: a path here becomes an absolute one.

    A path in the home folder begins with `~`, which names no person. What is no path here stays as it is.
    """
    path = Path(ref).expanduser()
    if ref in ("", "digits") or not path.exists():
        return ref
    absolute, home = Path(os.path.abspath(path)), Path.home()
    return str(Path("~") / absolute.relative_to(home)) if absolute.is_relative_to(home) else str(absolute)


def record_split(run: Path, splits: Splits, data: str) -> None:
    """Write which image is in which part of the split that a run begins with, for `open_run_data`."""
    place = Path(data).expanduser()
    from_run = os.path.relpath(place, run) if splits.root is not None and place.exists() else ""
    aside = run / f".{SPLIT}"
    record_of(splits, from_run).write(aside)
    settle(aside, run / SPLIT)


def open_run(folder: str | os.PathLike[str]) -> tuple[Path, TrainConfig]:
    """A run folder that exists, and its configuration.

    Raises:
        UserError: not a run folder.
    """
    run = Path(folder)
    if not (run / CONFIG).is_file():
        raise UserError(f"{folder}: not a run folder (it has no {CONFIG})")
    return run, TrainConfig.from_yaml(run / CONFIG)


def find_run(ref: str | os.PathLike[str]) -> tuple[Path, Path | None]:
    """What `--resume` names: a run folder, and the checkpoint if it is one of its checkpoints.

    Args:
        ref: a run folder, `RUN/checkpoints/step-N`, or `auto` for the newest unfinished run in runs/.

    Raises:
        UserError: nothing to resume there.
    """
    path = Path(ref)
    if str(ref) == "auto":
        unfinished = [
            config.parent
            for config in Path("runs").glob(f"*/{CONFIG}")
            if not (config.parent / "model" / "config.json").is_file()
        ]
        if not unfinished:
            raise UserError("runs: no unfinished run to resume")
        return max(unfinished, key=_last_written), None
    if path.parent.name == "checkpoints" and (path.parent.parent / CONFIG).is_file():
        return path.parent.parent, path
    return path, None


def _last_written(run: Path) -> float:
    return max(path.stat().st_mtime for path in (run / CONFIG, run / METRICS) if path.exists())


class Recorder:
    """Writes metrics to `metrics.jsonl` and to TensorBoard's event file.

    Each line has its `kind` and the `step`, counted from 1, that it comes after, and beside them:

    - `step`: `loss`, the mean over that step's images, and `lr`;
    - `epoch`: `epoch`, counted from 1; `train_loss` and `train_accuracy`, the means over the epoch's steps as
      they were taken, on augmented images and, where these are mixed, by their own classes; `val_loss` and
      `val_accuracy`; `val_majority`, the share of its commonest class; `images_per_second`. Distillation adds
      `train_agree`, the share of images in which the student says what its teacher says; of masked patches,
      accuracy is the share of right colours, if any;
    - `test`: `split`, `images`, `loss`, `accuracy`, `seconds`, and of a classifier `correct`, `unreadable`,
      `accuracy_low` and `accuracy_high` (the 95% interval), `balanced_accuracy` and `majority`.

    Args:
        run: the run folder.
        step: the step that the run continues from: whatever was recorded after it is dropped, since those
            steps will be done, and recorded, again. So is a test, since a finished run is not continued.
    """

    def __init__(self, run: Path, step: int = 0) -> None:
        path = run / METRICS
        kept = read_metrics(run) if path.exists() else []
        kept = [record for record in kept if record["step"] <= step and record["kind"] != "test"]
        aside = run / f".{METRICS}"
        aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(aside, path)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(run), purge_step=step + 1 if step else None)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line: `kind` is "step", "epoch" or "test"; numbers also go to TensorBoard as kind/name."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush both files."""
        self._file.close()
        self._events.close()
