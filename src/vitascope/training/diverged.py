"""The step at which a run diverged, so that it can be repeated: its number, seed, images, and the weights before.

A run reads its losses late, and not of every step, so that the device never waits. When one is not finite, the
run records the step. Every draw is a function of the seed and of counters, so a resumed run repeats the steps
since its newest checkpoint as they were: up to the recorded one, it looks at every step before that changes a
weight, and records the first with a loss or a gradient that is not finite, with its images.
"""

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from vitascope.errors import UserError
from vitascope.layout import DIVERGED
from vitascope.serialization import read_record
from vitascope.storage import make_folder, write_json

_FILE = "step.json"


class DivergenceError(UserError):
    """A loss or a weight that is not finite."""


def record_step(run: Path, step: int, **values: Any) -> None:
    """Write down what is known of a step of a run, counted from 1; no file can hold NaN as JSON."""
    make_folder(run / DIVERGED)
    write_json(run / DIVERGED / _FILE, {"step": step, **values})


def recorded_step(run: Path) -> int:
    """The step that a run has recorded; 0 for one that has not diverged."""
    return int(read_record(run / DIVERGED / _FILE, {"step": int}).get("step", 0))


def forget_step(run: Path) -> None:
    """Remove the record of a run that came by the step."""
    shutil.rmtree(run / DIVERGED, ignore_errors=True)


def worst_value(loss: float, gradients: Iterable[Tensor]) -> float:
    """The loss, or NaN where a gradient is not finite; waits for the device."""
    return loss if all(bool(values.isfinite().all()) for values in gradients) else math.nan
