"""A tiny data set and the options of a tiny run."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitascope.training.recipes import TrainConfig


def write_folder(
    root: Path, per_class: int = 12, side: int = 16, classes: tuple[str, ...] = ("dark", "light")
) -> Path:
    """Noise around a grey of its own for each class: `root/<class>/<number>.png`."""
    noise = np.random.default_rng(0)
    for index, name in enumerate(classes):
        folder = root / name
        folder.mkdir(parents=True)
        level = 255 * (index + 1) / (len(classes) + 1)
        for number in range(per_class):
            pixels = np.clip(noise.normal(level, 30, (side, side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root


def tiny_config(data: Path, **options: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "data": str(data),
        "image_size": 16,
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "epochs": 3,
        "batch_size": 4,
        "device": "cpu",
    }
    if options.get("task") == "masked":
        values["label_smoothing"] = 0.0  # there are no labels
    return TrainConfig.from_dict(values | options)
