"""Run folders without training: chosen options, metrics and predictions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.models import small_model
from tests.training import tiny_config
from vitascope import layout
from vitascope.data.split_record import RecordedPart, SplitRecord
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.models.weights.loading import save_pretrained
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.run import Run

Image = tuple[str, str, bool]
"""A test image: its content, its class, and whether it is predicted correctly."""

IMAGES: tuple[Image, ...] = (("1", "a", True), ("2", "a", True), ("3", "b", True), ("4", "b", False))

LABELLED = (
    ("1", "a b", (0.9, 0.8, 0.1)),
    ("2", "a", (0.8, 0.1, 0.7)),
    ("3", "b c", (0.6, 0.9, 0.2)),
    ("4", "", (0.1, 0.2, 0.3)),
    ("5", "c", (0.2, 0.4, 0.6)),
)
"""Test images that may have several classes: content, classes, probabilities of a, b and c."""


def write_run(
    folder: Path,
    images: Sequence[Image] | None = IMAGES,
    *,
    classes: tuple[str, ...] = ("a", "b"),
    epochs: int = 2,
    seconds: float | None = 10.0,
    split: str = "test",
    loss: float = 0.5,
    **options: Any,
) -> Run:
    """Write a run folder; without `images` it is unfinished, without `seconds` it has no times of epochs."""
    found, contents = None, []
    if images is not None:
        truths = np.array([classes.index(name) for _, name, _ in images], dtype=np.int64)
        answers = np.where([right for *_, right in images], truths, (truths + 1) % len(classes))
        contents = [content for content, *_ in images]
        found = Predictions(
            split=split,
            indices=np.arange(len(images)),
            targets=ClassIndices(truths, classes),
            probabilities=np.eye(len(classes), dtype=np.float32)[answers],
        )
    return _write(folder, found, contents, "val_accuracy", epochs, seconds, loss, options)


def write_label_run(
    folder: Path,
    images: Sequence[tuple[str, str, Sequence[float]]] | None = LABELLED,
    *,
    classes: tuple[str, ...] = ("a", "b", "c"),
    loss: float = 0.5,
    **options: Any,
) -> Run:
    """As `write_run`, of images that may have several classes, with the thresholds 0.5, 0.5 and 0.65."""
    found, contents = None, []
    if images is not None:
        contents = [content for content, *_ in images]
        found = Predictions(
            split="test",
            indices=np.arange(len(images)),
            targets=ClassSets.of_names([tuple(names.split()) for _, names, _ in images], classes),
            probabilities=np.array([shares for *_, shares in images], dtype=np.float32),
            thresholds=np.array([0.5, 0.5, 0.65], dtype=np.float32),
        )
    return _write(folder, found, contents, "val_map", 2, 10.0, loss, options)


def _write(
    folder: Path,
    found: Predictions | None,
    contents: Sequence[str],
    measure: str,
    epochs: int,
    seconds: float | None,
    loss: float,
    options: dict[str, Any],
) -> Run:
    length = {} if "minutes" in options else {"epochs": 2}
    defaults: dict[str, Any] = {**length, "batch_size": 4, "device": "cpu"}
    task = options.get("task", "classify")
    plan = {"asked": {}, "model": {}, "chosen": {"epochs": "2 epochs"}, "reason": "4 images", "note": ""}
    config = tiny_config(Path("photos"), **{**defaults, "run": str(folder), **options})
    run = Run.create(config.to_dict(), plan)
    writer = run.write_metrics()
    for epoch in range(1, epochs + 1):
        times = {} if seconds is None else {"seconds": seconds * epoch}
        measured = {measure: 0.3 * epoch} if task == "classify" else {}
        writer.record("epoch", 5 * epoch, {"epoch": epoch, "val_loss": 1 / epoch, **measured, **times})
    if found is not None:
        classes, split = found.class_names, found.split
        part = RecordedPart(("",) * len(contents), found.targets, np.array(contents, dtype=np.bytes_))
        empty = part.subset(np.arange(0))
        SplitRecord(classes, {"train": empty, "val": empty, split: part}).write(run.path / layout.SPLIT)
        kept = {"weights": "best", "epoch": epochs, "reason": "they have the lowest validation loss"}
        writer.record("kept", 5 * epochs, kept)
        test = {"split": split, "images": len(contents), "loss": loss, "seconds": 25.0}
        if task == "classify":
            run.save_predictions(found)
            test |= found.score.summary()
        writer.record("test", 5 * epochs, test)
        model = {"class_names": classes, "num_classes": len(classes)}
        if found.thresholds is not None:
            model |= {"outputs": "independent", "thresholds": tuple(found.thresholds.tolist())}
        save_pretrained(small_model(**model), run.model_folder)
    writer.close()
    return Run(folder)
