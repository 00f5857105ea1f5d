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
                      the model of the lowest validation loss so far, and `finished/`, what a finished run
                      was before it got the epochs that it trains now; until their end, its model stays
    diverged/         step.json, the step whose loss was not finite; once it was repeated, its images too, and
                      the model before it
    model/            the finished model
    data.jsonl        the data, where they were a DataFrame
    predictions.npz   its predictions on the images that it is measured on
    folds/            with --folds, the run of each fold, 1, 2, ...
    out_of_fold.csv   with --folds, the prediction of each image by the run that was not trained on it
    figures/          PNGs
    explain/          figures of `vitascope explain`
    report.html       all of this on one page
    probe.html        of a probe: what was compared
    .lock             held while a process trains here

A checkpoint, `checkpoints/step-00001234/`, is complete if it has its manifest, which is written last.
"""

import re
from pathlib import Path

CONFIG = "config.yaml"
PLAN = "plan.json"
SPLIT = "split.jsonl.gz"
ENVIRONMENT = "environment.json"
DATA = "data.jsonl"
METRICS = "metrics.jsonl"
TRACKER = "tracker.json"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
BEST = f"{CHECKPOINTS}/best"
BEFORE = f"{CHECKPOINTS}/finished"
DIVERGED = "diverged"
MODEL = "model"
PREDICTIONS = "predictions.npz"
FIGURES = "figures"
EXPLANATIONS = "explain"
REPORT = "report.html"
PROBE = "probe.html"
FOLDS = "folds"
EXPORTED_SUFFIXES = (".onnx", ".xml", ".pt2")
OUT_OF_FOLD = "out_of_fold.csv"
LOCK = ".lock"
_STEP = re.compile(r"step-(\d{8,})")


def step_of_folder(name: str) -> int | None:
    """The step of a checkpoint folder of this name; None for other names."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def step_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step-{step:08d}"


def is_run(folder: Path) -> bool:
    """Whether this is a run folder, finished or not."""
    return (folder / CONFIG).is_file()


def is_finished(folder: Path) -> bool:
    """Whether this run folder has its finished model."""
    return has_model(folder / MODEL)


def has_model(folder: Path) -> bool:
    """Whether this folder holds a whole model: its configuration is written last."""
    return (folder / "config.json").is_file()
