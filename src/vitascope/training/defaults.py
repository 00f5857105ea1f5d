"""What the data decide where a `TrainConfig` leaves it open: image size, patch, batch, head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vitascope.data.datasets import median_size
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.options import DEPENDENT_OPTIONS
from vitascope.model.resnet_config import ResNetConfig
from vitascope.model.sizes import ModelConfig, named_config
from vitascope.training.options import Architecture
from vitascope.training.recipes import TrainConfig
from vitascope.training.tasks.masked import body_config
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import pretrained_config
from vitascope.weights.transfer import adapted

DEFAULT_MODEL = "vit_ti16"
SMALL_IMAGE = 96
"""Images whose median shorter side is at most this, in pixels, are trained on at their own size."""
LARGE_IMAGE = 224
"""The size of all others, pixels."""


def resolve_config(config: TrainConfig, splits: Splits) -> tuple[TrainConfig, ModelConfig]:
    """Fill in what the data decide: the image size, the patch, the head; and the model that follows.

    Raises:
        UserError: a model that cannot be built, or options that would change nothing.
    """
    base = pretrained_config(config.weights) if config.weights is not None else None
    asked = config.architecture
    name = asked.model if asked.model is not None or base is not None else DEFAULT_MODEL
    options = asked.chosen() | asked.model_options()
    is_vit = isinstance(named_config(name) if name is not None else base, ViTConfig)
    if base is None:
        assert name is not None
        side = min(median_size(splits.train))
        options = (vit_sizes if is_vit else cnn_sizes)(asked, name, side) | options
        options["in_channels"] = splits.channels
    options |= _from_training(config, splits, is_vit)
    if base is not None:
        try:
            model_config = adapted(base, name, str(config.weights), options)
        except CheckpointError as error:
            advice = "; leave out --model to take that of the weights" if name is not None else ""
            raise UserError(f"{error}{advice}") from error
    else:
        assert name is not None
        model_config = named_config(name, **options)
    if isinstance(model_config, ViTConfig):
        refuse_idle(asked, model_config)
        if config.task == "masked":
            model_config = body_config(model_config)
    batch_size = config.optimization.batch_size or default_batch_size(len(splits.train))
    steps = config.optimization.epochs * math.ceil(len(splits.train) / batch_size)
    ema = config.optimization.ema
    resolved = config.replace(
        model=name,
        image_size=model_config.image_hw[0],
        patch_size=model_config.patch_hw[0] if isinstance(model_config, ViTConfig) else None,
        batch_size=batch_size,
        ema=default_ema(steps) if ema is None else ema,
    )
    return resolved, model_config


def _from_training(config: TrainConfig, splits: Splits, is_vit: bool) -> dict[str, Any]:
    """Options of the model that the task, the data and the engine decide.

    Raises:
        UserError: what only a Vision Transformer has, asked of a CNN.
    """
    asked = config.architecture
    of_vits = {
        "dropout": asked.dropout,
        "drop_path": asked.drop_path,
        "gradient_checkpointing": config.engine.gradient_checkpointing,
    }
    if config.task == "masked" and is_vit:
        return of_vits | {"head": "none"}
    if config.task == "masked":
        raise UserError(
            f"{asked.model or config.weights} is a CNN, which has no patches to hide: pre-training needs a "
            "Vision Transformer"
        )
    classes = {"class_names": splits.train.class_names, "num_classes": len(splits.train.class_names)}
    if config.distillation.teacher is not None:
        if not is_vit:
            raise UserError(
                f"{asked.model or config.weights} is a CNN, which has no token for a teacher to teach; leave "
                "out --teacher"
            )
        if asked.pool not in (None, "cls"):
            raise UserError(
                f"a teacher teaches a token beside the class token, and --pool {asked.pool} has none: add "
                "--pool cls, or take --recipe distill"
            )
        of_vits["distillation_token"] = True
    if is_vit:
        return of_vits | classes
    wrong = [name for name, value in of_vits.items() if value]
    wrong += [name for name in asked.chosen() if name != "image_size"] + list(asked.model_options())
    if wrong:
        raise UserError(
            f"{asked.model or config.weights} is a CNN, which has no {', '.join(wrong)}; leave it out, or "
            "take --recipe cnn"
        )
    return classes


def refuse_idle(asked: Architecture, model_config: ViTConfig) -> None:
    """Refuse options that were asked for and would change nothing.

    Raises:
        UserError: naming the option, and the one that it belongs to.
    """
    for option in asked.model_options():
        other, value = DEPENDENT_OPTIONS.get(option, (None, None))
        if other is not None and model_config.option(other) != value:
            raise UserError(
                f"options: {option} changes nothing with {other}={model_config.option(other)}; add "
                f"{other}={value}, or leave it out"
            )


def vit_sizes(asked: Architecture, model: str, side: int) -> dict[str, int]:
    """Image and patch size where they are left open: small images keep their size, with 8 patches a side."""
    side = asked.image_size or side
    if side > SMALL_IMAGE:
        return {"image_size": asked.image_size or LARGE_IMAGE}
    config = named_config(model)
    assert isinstance(config, ViTConfig)
    stem = {name: value for name, value in asked.model_options().items() if OPTIONS[name] == "embedding"}
    embedding = dataclasses.replace(config.embedding, **stem)
    smallest = ResNetConfig(layers=embedding.resnet_layers).stride if embedding.stem == "resnet" else 1
    patch = asked.patch_size or max(smallest, side // 8 // smallest * smallest)
    return {"patch_size": patch, "image_size": asked.image_size or max(1, round(side / patch)) * patch}


def cnn_sizes(asked: Architecture, model: str, side: int) -> dict[str, int]:
    """The image size where it is left open: small images keep theirs."""
    return {"image_size": asked.image_size or (side if side <= SMALL_IMAGE else LARGE_IMAGE)}


def default_batch_size(images: int) -> int:
    """128, or the largest smaller power of two, down to 8, that gives an epoch at least 4 steps."""
    return max(8, min(128, 2 ** int(math.log2(max(1, images / 4)))))


def default_ema(steps: int) -> float:
    """A running average over about a fiftieth of a run's steps, 10,000 at most."""
    return round(1 - 1 / min(10_000, max(1, steps / 50)), 5)
