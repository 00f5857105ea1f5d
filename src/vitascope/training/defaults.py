"""Defaults that depend on the data: image size, patch size, batch size, head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vitascope.data.datasets import median_size
from vitascope.data.splits import Splits
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.options import DEPENDENT_OPTIONS
from vitascope.model.resnet_config import ResNetConfig
from vitascope.model.sizes import ModelConfig, named_config
from vitascope.training.distributed import print_first
from vitascope.training.options import Architecture, AugmentationOptions, Optimization
from vitascope.training.recipes import TrainConfig
from vitascope.training.schedule import small_size
from vitascope.training.tasks.masked import body_config
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import pretrained_config
from vitascope.weights.transfer import adapted

DEFAULT_MODEL = "vit_ti16"
SMALL_IMAGE = 96
"""Images whose median shorter side is at most this, in pixels, keep their size."""
LARGE_IMAGE = 224
"""Input size for larger images, pixels."""
FROM_SCRATCH = 64
"""Input size of a model with a tokenizer for larger images, pixels."""
IMAGES_SHOWN = 1_000_000
"""Images, with repetitions, that a run without a length is trained on, within these numbers of epochs."""
FEWEST_EPOCHS, MOST_EPOCHS = 20, 200
LEAST_PATCHES = 8
"""Patches per side of small images."""
FEW_IMAGES = 20_000
"""With fewer training images, each is shown so often that a weak augmentation lets the model learn it."""


def resolve_config(config: TrainConfig, splits: Splits) -> tuple[TrainConfig, ModelConfig]:
    """The configuration with all defaults filled in, and that of the model."""
    base = pretrained_config(config.weights) if config.weights is not None else None
    asked = config.architecture
    name = asked.model or (DEFAULT_MODEL if base is None else None)
    options = asked.chosen() | asked.model_options()
    is_vit = isinstance(base if name is None else named_config(name), ViTConfig)
    if base is None and name is not None:
        options = _default_sizes(config, name, min(median_size(splits.train))) | options
        options["in_channels"] = splits.channels
    options |= _derived_options(config, splits, is_vit)
    if base is None:
        assert name is not None
        model_config = named_config(name, **options)
    else:
        try:
            model_config = adapted(base, name, str(config.weights), options)
        except CheckpointError as error:
            advice = "leave out the model to use that of the weights"
            if name is None:
                advice = "leave that out to train the body as it is, or pre-train another one"
            raise UserError(f"{error}; {advice}") from error
    if isinstance(model_config, ViTConfig):
        for option in asked.model_options():
            other, value = DEPENDENT_OPTIONS.get(option, (None, None))
            if other is not None and model_config.option(other) != value:
                raise UserError(
                    f"options: {option} has no effect with {other}={model_config.option(other)}; add "
                    f"{other}={value}, or leave it out"
                )
        if config.engine.gradient_checkpointing and model_config.block.token_merging:
            raise UserError("token_merging does not go with gradient_checkpointing: leave one of them out")
        if config.task == "masked":
            model_config = body_config(model_config)
        if config.optimization.progressive:
            try:
                model_config.grid_of(small_size(model_config))
            except UserError as error:
                raise UserError(
                    f"progressive resizing begins with smaller images: {error}; set progressive=0"
                ) from error
    resolved = config.replace(
        model=name,
        image_size=model_config.image_hw[0],
        patch_size=model_config.patch_hw[0] if isinstance(model_config, ViTConfig) else None,
        batch_size=_batch_size(config.optimization, len(splits.train)),
        epochs=_epochs(config.optimization, len(splits.train)),
        **_augmentation(config.augmentation, splits),
        corrupt=config.masking.share if config.task == "masked" else config.masking.corrupt,
    )
    return resolved, model_config


NO_CHANGE = {"crop_scale": 1.0, "shift": 0.0, "randaugment": 0, "erase": 0.0}
"""Values of augmentation that change nothing, which need no mention."""


def chosen_by_data(asked: TrainConfig, resolved: TrainConfig, splits: Splits) -> str:
    """The options that the images have decided, in words; empty if there are none."""
    values = {
        "model": "{}",
        "image_size": "{0}x{0} pixels",
        "patch_size": "patches of {}",
        "epochs": "{} epochs",
        "batch_size": "batches of {}",
        "crop_scale": "crops of {:.0%} or more",
        "shift": "shifts of {:.1%}",
        "randaugment": "RandAugment of {}",
        "erase": "erasing {:.0%}",
    }
    by_weights = () if asked.weights is None else ("model", "image_size", "patch_size")
    chosen = [
        words.format(resolved.option(name))
        for name, words in values.items()
        if name not in by_weights
        and asked.option(name) is None
        and resolved.option(name) not in (None, NO_CHANGE.get(name))
    ]
    if not chosen:
        return ""
    height, width = median_size(splits.train)
    return f"{', '.join(chosen)}: for {counted(len(splits.train), 'image')} of about {width}x{height} pixels"


def enlargement(asked: TrainConfig, config: ModelConfig, splits: Splits) -> str:
    """The cost of images that weights enlarge much, and a smaller size; empty if there is nothing to say."""
    if (
        asked.weights is None
        or asked.architecture.image_size is not None
        or not isinstance(config, ViTConfig)
    ):
        return ""
    (height, width), (patch_h, patch_w) = median_size(splits.train), config.patch_hw
    count = max(LEAST_PATCHES, math.ceil(height / patch_h), math.ceil(width / patch_w))
    smaller = (count * patch_h, count * patch_w)
    if 2 * max(smaller) > min(config.image_hw) or patch_h != patch_w:
        return ""
    try:  # not all positions allow other sizes
        cost = config.flops / dataclasses.replace(config, image_size=smaller).flops
    except UserError:
        return ""
    H, W = config.image_hw
    return (
        f"the images of about {width}x{height} pixels are enlarged to {W}x{H}, the size of the weights; "
        f"image_size={smaller[0]} needs {1 / cost:.1%} of the computation"
    )


def _augmentation(asked: AugmentationOptions, splits: Splits) -> dict[str, float]:
    """The options of augmentation that follow from the images: from their number, and from their size.

    Photographs show their object at any size and place, small images usually in the middle.
    """
    few, photographs = len(splits.train) < FEW_IMAGES, min(median_size(splits.train)) > SMALL_IMAGE
    values = {
        "crop_scale": 0.35 if photographs else 1.0,
        "shift": 0.0 if photographs else 0.125,
        "randaugment": 2 if few else 0,
        "erase": 0.25 if few else 0.0,
    }
    return {name: value for name, value in values.items() if getattr(asked, name) is None}


def _epochs(length: Optimization, images: int) -> int | None:
    """The epochs of a run whose length is not given otherwise; by default, more for fewer images."""
    if length.steps is not None or length.minutes is not None:
        return None
    if length.lengths:
        return length.epochs
    return length.epochs or max(FEWEST_EPOCHS, min(MOST_EPOCHS, round(IMAGES_SHOWN / images)))


def _derived_options(config: TrainConfig, splits: Splits, is_vit: bool) -> dict[str, Any]:
    """The model options that follow from the task, the data and other training options."""
    asked, teacher = config.architecture, config.distillation.teacher
    vit_options = {"dropout": asked.dropout, "drop_path": asked.drop_path}
    cnn = f"{asked.model or config.weights} is a CNN, which has no"
    if config.task == "masked":
        if not is_vit:
            raise UserError(f"{cnn} patches to hide: pre-training needs a Vision Transformer")
        return vit_options | {"head": "none"}
    classes = {"class_names": splits.train.class_names, "num_classes": len(splits.train.class_names)}
    if teacher is not None:
        if not is_vit:
            raise UserError(f"{cnn} distillation token; leave out the teacher")
        pool = asked.pool
        if pool is None and config.weights is None:
            pool = named_config(asked.model or DEFAULT_MODEL).option("pool")
        if pool not in (None, "cls"):
            raise UserError(
                f"a teacher trains a token beside the class token, and pool={pool} has none: add "
                "pool=cls or use the recipe distill"
            )
        vit_options["distillation_token"] = True
    if is_vit:
        return vit_options | classes
    vit_options["gradient_checkpointing"] = config.engine.gradient_checkpointing
    wrong = [name for name, value in vit_options.items() if value]
    wrong += [name for name in asked.chosen() if name != "image_size"] + list(asked.model_options())
    if wrong:
        raise UserError(f"{cnn} {', '.join(wrong)}; leave it out, or use the recipe cnn")
    return classes


def _default_sizes(asked: TrainConfig, model: str, side: int) -> dict[str, int]:
    """Image and patch size: small images keep their size, with 8 patches per side, as far as possible.

    A masked autoencoder normalizes each patch by its own variance, so a patch has more than one pixel.
    """
    wanted = asked.architecture
    side = wanted.image_size or side
    small, config = side <= SMALL_IMAGE, named_config(model)
    if not isinstance(config, ViTConfig):
        return {"image_size": side if small else LARGE_IMAGE}
    embedding = dataclasses.replace(config.embedding, **_of_group("embedding", wanted))
    if embedding.stem == "tokenizer":
        tokenizer = dataclasses.replace(config.tokenizer, **_of_group("tokenizer", wanted))
        side = side if small else wanted.image_size or FROM_SCRATCH
        halvings = min(tokenizer.num_layers, max(1, side // LEAST_PATCHES).bit_length() - 1)
        patch = wanted.patch_size or 2 ** max(1, halvings)
        return {"patch_size": patch, "image_size": max(1, round(side / patch)) * patch}
    if small:
        smallest = 2 if asked.task == "masked" and asked.masking.target == "mae" else 1
        if embedding.stem == "resnet":
            smallest = ResNetConfig(layers=embedding.resnet_layers).stride
        patch = wanted.patch_size or max(smallest, side // LEAST_PATCHES // smallest * smallest)
        return {"patch_size": patch, "image_size": max(1, round(side / patch)) * patch}
    return {"image_size": LARGE_IMAGE}


def _of_group(group: str, asked: Architecture) -> dict[str, Any]:
    """The model options of a group that are asked for."""
    return {name: value for name, value in asked.model_options().items() if OPTIONS[name] == group}


def _batch_size(asked: Optimization, images: int) -> int:
    """The batch size that fits the images; recorded lengths are steps of the recorded one."""
    recorded = asked.batch_size if asked.lengths else None
    return recorded or fitting_batch_size(asked.batch_size, images)


def fitting_batch_size(batch_size: int | None, images: int) -> int:
    """The batch size, or the default one, if there is none or it is more than the images; this is printed."""
    default = default_batch_size(images)
    if batch_size is not None and batch_size > max(images, default):
        print_first(
            f"batch size {batch_size:,} is more than the {counted(images, 'training image')}: {default} is "
            "used instead"
        )
        return default
    return batch_size or default


def default_batch_size(images: int) -> int:
    """128, or the largest smaller power of two, at least 8, with 4 steps per epoch."""
    return max(8, min(128, 2 ** int(math.log2(max(1, images / 4)))))
