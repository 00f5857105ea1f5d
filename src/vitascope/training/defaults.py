"""What the data decide where a `TrainConfig` leaves it open: image size, patch, batch, head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vitascope.data.datasets import Splits, median_size
from vitascope.errors import UserError
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.options import MATTERS_WITH
from vitascope.model.resnet_shapes import total_stride
from vitascope.model.sizes import named_config
from vitascope.training.recipes import TrainConfig
from vitascope.weights.files import CheckpointError
from vitascope.weights.store import adapted, pretrained_config

DEFAULT_MODEL = "vit_ti16"
SMALL_IMAGE = 96
"""Images whose median shorter side is at most this, in pixels, are trained on at their own size."""


def resolve_config(config: TrainConfig, splits: Splits) -> tuple[TrainConfig, ViTConfig]:
    """Fill in what the data decide: the image size, the patch, the head; and the model that follows."""
    base = pretrained_config(config.weights) if config.weights is not None else None
    name = config.model if config.model is not None or base is not None else DEFAULT_MODEL
    chosen: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("image_size", "patch_size", "embed_dim", "depth", "num_heads", "pool")
        if getattr(config, name) is not None
    }
    options = chosen | config.model_options()
    if base is None:
        assert name is not None
        options = default_sizes(config, name, min(median_size(splits.train))) | options
        options["in_channels"] = splits.channels
    options |= {
        "class_names": splits.train.class_names,
        "num_classes": len(splits.train.class_names),
        "dropout": config.dropout,
        "drop_path": config.drop_path,
    }
    if base is not None:
        try:
            model_config = adapted(base, name, str(config.weights), options)
        except CheckpointError as error:
            advice = "; leave out --model to take that of the weights" if name is not None else ""
            raise UserError(f"{error}{advice}") from error
    else:
        assert name is not None
        if not named_config(name).readout.gives_classes:
            options.setdefault("head", "linear")
        model_config = named_config(name, **options)
    refuse_idle(config, model_config)
    resolved = dataclasses.replace(
        config,
        model=name,
        image_size=model_config.image_hw[0],
        patch_size=model_config.patch_hw[0],
        batch_size=config.batch_size or default_batch_size(len(splits.train)),
    )
    return resolved, model_config


def refuse_idle(config: TrainConfig, model_config: ViTConfig) -> None:
    """Refuse options that were asked for and would change nothing.

    Raises:
        UserError: naming the option, and the one that it belongs to.
    """
    for option in config.model_options():
        other, value = MATTERS_WITH.get(option, (None, None))
        if other is not None and model_config.option(other) != value:
            raise UserError(
                f"options: {option} changes nothing with {other}={model_config.option(other)}; add "
                f"{other}={value}, or leave it out"
            )


def default_sizes(config: TrainConfig, model: str, side: int) -> dict[str, int]:
    """Image and patch size where they are left open: small images keep their size, with 8 patches a side."""
    side = config.image_size or side
    if side > SMALL_IMAGE:
        return {"image_size": config.image_size or 224}
    stem = {name: value for name, value in config.model_options().items() if OPTIONS[name] == "embedding"}
    embedding = dataclasses.replace(named_config(model).embedding, **stem)
    smallest = total_stride(embedding.resnet_layers) if embedding.stem == "resnet" else 1
    patch = config.patch_size or max(smallest, side // 8)
    return {"patch_size": patch, "image_size": config.image_size or max(1, round(side / patch)) * patch}


def default_batch_size(images: int) -> int:
    """128, or the largest smaller power of two, down to 8, that gives an epoch at least 4 steps."""
    return max(8, min(128, 2 ** int(math.log2(max(1, images / 4)))))
