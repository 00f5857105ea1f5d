"""What the data decide where a `TrainConfig` leaves it open: image size, patch, batch, head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vitascope.data.datasets import Splits, median_size
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig, named_config
from vitascope.training.recipes import TrainConfig
from vitascope.weights.store import from_pretrained

DEFAULT_MODEL = "vit_ti16"
SMALL_IMAGE = 96
"""Images whose median shorter side is at most this, in pixels, are trained on at their own size."""


def resolve_config(config: TrainConfig, splits: Splits) -> tuple[TrainConfig, ViTConfig]:
    """Fill in what the data decide: the image size, the patch, the head; and the model that follows."""
    base = from_pretrained(config.weights).config if config.weights is not None else None
    name = config.model if config.model is not None or base is not None else DEFAULT_MODEL
    image_size, patch_size = config.image_size, config.patch_size
    if base is None:
        side = image_size or min(median_size(splits.train))
        if side <= SMALL_IMAGE:
            patch_size = patch_size or max(1, side // 8)
            image_size = image_size or max(1, round(side / patch_size)) * patch_size
        image_size = image_size or 224
    chosen: dict[str, Any] = {
        "image_size": image_size,
        "patch_size": patch_size,
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "pool": config.pool,
    }
    options = {key: value for key, value in chosen.items() if value is not None}
    options |= {
        "class_names": splits.train.class_names,
        "num_classes": len(splits.train.class_names),
        "dropout": config.dropout,
        "drop_path": config.drop_path,
    }
    if name is not None:
        named_config(name)  # an unknown name is refused before anything else
        channels = base.in_channels if base is not None else splits.channels
        model_config = named_config(name, in_channels=channels, **options)
        if base is not None:
            check_same_body(base, model_config, f"{config.weights} and {name}")
    else:
        assert base is not None
        model_config = dataclasses.replace(base, **options)
    resolved = dataclasses.replace(
        config,
        model=name,
        image_size=model_config.image_hw[0],
        patch_size=model_config.patch_hw[0],
        batch_size=config.batch_size or default_batch_size(len(splits.train)),
    )
    return resolved, model_config


def check_same_body(weights: ViTConfig, model: ViTConfig, which: str) -> None:
    """Refuse weights for another architecture in the words of the configuration, not of its tensors."""
    names = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "pool")
    differing = [
        f"{name} {getattr(weights, name)} and {getattr(model, name)}"
        for name in names
        if getattr(weights, name) != getattr(model, name)
    ]
    if differing:
        raise UserError(
            f"{which} do not fit: {', '.join(differing)}; leave out --model to take that of the weights"
        )


def default_batch_size(images: int) -> int:
    """128, or the largest smaller power of two, down to 8, that gives an epoch at least 4 steps."""
    return max(8, min(128, 2 ** int(math.log2(max(1, images / 4)))))
