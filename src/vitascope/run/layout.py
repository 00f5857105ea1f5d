"""The names of the files in a run folder.

`runs/digits/` of a finished run:

    config.yaml       every option: `vitascope train --config` of it repeats the run
    plan.json         what was asked for, the model, and what the data have decided
    split.jsonl.gz    the images of each split, by name and content
    environment.json  start time, command, versions, machine
    metrics.jsonl     one line per recorded step and epoch, and the final test; see `MetricsWriter`
    events.out...     the same for TensorBoard
    tracker.json      the ids of the run in experiment trackers
    checkpoints/      the states that `--resume` continues from, while the run is unfinished, and `best/`,
                      the model of the lowest validation loss so far
    model/            the finished model
    data.jsonl        the data, where they were a DataFrame
    predictions.npz   its predictions on the images that it is measured on
    figures/          PNGs
    explain/          figures of `vitascope explain`
    report.html       all of this on one page
    probe.html        of a probe: what was compared
    .lock             held while a process trains here
"""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.yaml"
PLAN = "plan.json"
SPLIT = "split.jsonl.gz"
ENVIRONMENT = "environment.json"
DATA = "data.jsonl"
METRICS = "metrics.jsonl"
TRACKER = "tracker.json"
CHECKPOINTS = "checkpoints"
BEST = f"{CHECKPOINTS}/best"
MODEL = "model"
PREDICTIONS = "predictions.npz"
FIGURES = "figures"
EXPLANATIONS = "explain"
REPORT = "report.html"
PROBE = "probe.html"
LOCK = ".lock"


def is_run(folder: Path) -> bool:
    """Whether this is a run folder, finished or not."""
    return (folder / CONFIG).is_file()


def is_finished(folder: Path) -> bool:
    """Whether this run folder has its finished model."""
    return has_model(folder / MODEL)


def has_model(folder: Path) -> bool:
    """Whether this folder holds a whole model: its configuration is written last."""
    return (folder / "config.json").is_file()
