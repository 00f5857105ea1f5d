"""Run folders without training: chosen options, metrics and predictions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.model import small_model
from tests.training import tiny_config
from vitascope.data.split_record import RecordedPart, SplitRecord
from vitascope.data.targets import ClassIndices
from vitascope.run import layout
from vitascope.run.predictions import Predictions
from vitascope.run.run import Run
from vitascope.weights.saving import save_pretrained

Image = tuple[str, str, bool]
"""A test image: its content, its class, and whether it is predicted correctly."""

IMAGES: tuple[Image, ...] = (("1", "a", True), ("2", "a", True), ("3", "b", True), ("4", "b", False))


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
    defaults: dict[str, Any] = {"epochs": 2, "batch_size": 4, "device": "cpu"}
    task = options.get("task", "classify")
    plan = {"asked": {}, "model": {}, "chosen": {"epochs": "2 epochs"}, "reason": "4 images", "note": ""}
    config = tiny_config(Path("photos"), **{**defaults, "run": str(folder), **options})
    run = Run.create(config.to_dict(), plan)
    writer = run.write_metrics()
    for epoch in range(1, epochs + 1):
        times = {} if seconds is None else {"seconds": seconds * epoch}
        accuracy = {"val_accuracy": 0.3 * epoch} if task == "classify" else {}
        writer.record("epoch", 5 * epoch, {"epoch": epoch, "val_loss": 1 / epoch, **accuracy, **times})
    if images is not None:
        truths = np.array([classes.index(name) for _, name, _ in images], dtype=np.int64)
        answers = np.where([right for *_, right in images], truths, (truths + 1) % len(classes))
        found = Predictions(
            split=split,
            indices=np.arange(len(images)),
            targets=ClassIndices(truths, classes),
            probabilities=np.eye(len(classes), dtype=np.float32)[answers],
        )
        contents = np.array([content for content, *_ in images], dtype=np.bytes_)
        part = RecordedPart(("",) * len(images), found.targets, contents)
        empty = part.subset(np.arange(0))
        SplitRecord(classes, {"train": empty, "val": empty, split: part}).write(run.path / layout.SPLIT)
        test = {"split": split, "images": len(images), "loss": loss, "seconds": 25.0}
        if task == "classify":
            run.save_predictions(found)
            test |= {"correct": found.score.right, "accuracy": found.score.right / len(images)}
        writer.record("test", 5 * epochs, test)
        save_pretrained(small_model(class_names=classes, num_classes=len(classes)), run.model_folder)
    writer.close()
    return Run(folder)
