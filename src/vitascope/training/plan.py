"""From what a run is asked for to what it does: `inspect` the data and the weights, then `resolve`.

A plan has a value for every option, and the model's configuration; nothing is decided after it but what the
machine decides: device, precision, the parts of a batch, and the length of a run with a budget of time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitascope.data.datasets import greatest_value, sampled_sizes
from vitascope.data.splits import Splits
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.formatting import counted, listed
from vitascope.models.config import OPTIONS, ViTConfig
from vitascope.models.configuration import options_of, traits
from vitascope.models.options import AppliesWith, pair
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import ModelConfig, architecture_record, config_of, named_config
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.transfer import adapted
from vitascope.training.options.groups import (
    UNSMOOTHED,
    Architecture,
    Classifies,
    Optimization,
)
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run
from vitascope.training.schedule import small_size
from vitascope.training.tasks.losses import LOSSES, Losses
from vitascope.training.tasks.masked import body_config, check_encoder
from vitascope.training.whitening import SIDE

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a plan depends on, of the data and of the weights to start from."""

    images: int
    """The number of training images."""
    height: int
    """Median of the training images, pixels; sizes in words are height x width, as `image_size` is."""
    width: int
    one_size: bool
    """Whether all of those that were looked at have this height and width."""
    sides: tuple[int, int]
    """The shortest and the longest side of those."""
    channels: int
    class_names: tuple[str, ...]
    greatest: int | None
    """The greatest value in training images of more than 8 bits; None without any, or if not asked for."""
    kind: Losses = LOSSES[ClassIndices]
    """The losses of the labels; any, where there are none."""
    weights: ModelConfig | None
    """The configuration of the weights; None for random ones."""
    shards: int = 0
    """The number of shards of the training images; 0 for files of their own."""

    @property
    def few(self) -> bool:
        """Whether each image is shown so often that a weak augmentation lets the model learn it."""
        return self.images < FEW_IMAGES

    @property
    def photographs(self) -> bool:
        """Whether the images are too large to keep their size."""
        return min(self.height, self.width) > SMALL_IMAGE

    def __str__(self) -> str:
        spread = "" if self.one_size else ", with sides from {:,} to {:,}".format(*self.sides)
        return f"{counted(self.images, 'image')} of about {self.height}x{self.width} pixels{spread}"


def inspect(data: Splits, weights: ModelConfig | None = None, *, levels: bool = True) -> Facts:
    """The facts of opened data and of the model to start from; reads the headers of up to 100 images, and all
    training images of more than 8 bits if `levels` depend on them.

    Raises:
        UserError: none of these images can be read.
    """
    sizes = sampled_sizes(data.train)
    height, width = map(int, np.median(sizes, axis=0))
    return Facts(
        images=len(data.train),
        height=height,
        width=width,
        one_size=bool((sizes == sizes[0]).all()),
        sides=(int(sizes.min()), int(sizes.max())),
        channels=data.channels,
        class_names=data.train.class_names,
        greatest=greatest_value(data.train) if levels else None,
        kind=LOSSES[ClassIndices if data.train.targets is None else type(data.train.targets)],
        weights=weights,
        shards=data.train.shard_files,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does."""

    options: TrainConfig
    """With a value for each of `DECIDED`."""
    model: ModelConfig
    chosen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The options that the data have decided, with their values in words."""
    reason: str = ""
    """The facts that decided them, in words."""
    note: str = ""
    """A cheaper way to do the same; empty if there is none."""
    start: tuple[str, ...] = ()
    """The choices of `weights=auto`, each with its reason."""

    def explained(self) -> list[str]:
        """The start, the decisions of the data with their reason, the note; without those that are empty."""
        chosen = f"{', '.join(self.chosen.values())}: for {self.reason}" if self.chosen else ""
        return [line for line in (*self.start, chosen, self.note) if line]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the options, which a run records in a file of their own."""
        return {
            "model": architecture_record(self.model),
            "chosen": dict(self.chosen),
            "reason": self.reason,
            "note": self.note,
            "start": list(self.start),
        }

    @classmethod
    def of_run(cls, run: Run, config: TrainConfig) -> Plan:
        """The recorded plan of a run, with its configuration; UserError for invalid options."""
        with options_of(run.config_file):
            for name in DECIDED:
                if config.option(name) is None:
                    raise UserError(f"{name} has no value, and a run records one")
        with options_of(run.plan_file):
            model = config_of(run.plan["model"])
        texts = {name: run.plan[name] for name in ("chosen", "reason", "note")}
        return cls(options=config, model=model, start=tuple(run.plan["start"]), **texts)


WORDS = {
    "levels": "levels {0[0]:,} to {0[1]:,}",
    "image_size": "{0[0]}x{0[1]} pixels",
    "patch_size": "patches of {0[0]}x{0[1]}",
    "epochs": "{} epochs",
    "batch_size": "batches of {}",
    "crop_scale": "crops of {:.0%} or more",
    "shift": "shifts of {:.1%}",
    "randaugment": "RandAugment of {}",
    "erase": "erasing {:.0%}",
}
"""The options that the data decide where nothing is named, in words, in the order of their announcement."""
NO_CHANGE = {"crop_scale": 1.0, "shift": 0.0, "randaugment": 0, "erase": 0.0}
"""Values of augmentation that change nothing, which need no mention."""


def resolve(asked: TrainConfig, facts: Facts) -> Plan:
    """Decide everything that a configuration leaves open.

    Raises:
        UserError: options that contradict each other, the task, the data or the weights.
    """
    _check_task(asked, facts)
    _check_streams(asked, facts)
    model, name = _model(asked, facts)
    decided = _decided(asked, facts, model)
    by_weights = set() if asked.weights is None else {"image_size", "patch_size"}
    chosen = {
        name: words.format(decided[name])
        for name, words in WORDS.items()
        if asked.option(name) is None and name not in by_weights
        if decided[name] not in (None, NO_CHANGE.get(name))
    }
    if (batch_size := asked.optimization.batch_size) not in (None, decided["batch_size"]):
        chosen["batch_size"] = (
            f"batches of {decided['batch_size']} instead of {batch_size:,}, which is more than the "
            "training images"
        )
    return Plan(
        options=TrainConfig(**asked.to_dict() | decided | {"model": name}),
        model=model,
        chosen=chosen,
        reason=str(facts),
        note=_enlargement(asked, model, facts),
    )


def _decided(asked: TrainConfig, facts: Facts, model: ModelConfig) -> dict[str, Any]:
    """The options that follow from the data and the model, by name."""
    optimization, masking = asked.optimization, asked.masking
    width = optimization.lr_width or model.embed_dim
    # Photographs show their object at any size and place, small images usually in the middle. Who asks for
    # the whole picture gets it in the training too.
    cropped = facts.photographs and asked.fit in (None, "crop")
    by_images = {
        "levels": (0, facts.greatest) if facts.greatest else None,
        "crop_scale": 0.35 if cropped else 1.0,
        "shift": 0.0 if cropped else 0.125,
        "randaugment": 2 if facts.few else 0,
        "erase": 0.25 if facts.few else 0.0,
    }
    named = {name: asked.option(name) for name in by_images if asked.option(name) is not None}
    return {
        **(by_images | named),
        "image_size": model.image_hw,
        "patch_size": model.patch_hw if isinstance(model, ViTConfig) else None,
        "epochs": _epochs(optimization, facts.images),
        "batch_size": _batch_size(optimization, facts.images, isinstance(model, ViTConfig)),
        "lr": optimization.lr * min(1.0, width / model.embed_dim),
        "lr_width": None,  # that of the model from now on
        "corrupt": masking.share if asked.task == "masked" else masking.corrupt,
        "loss": _loss(asked, facts),
        "label_smoothing": 0.0 if optimization.loss in UNSMOOTHED else optimization.label_smoothing,
        "whiten": _whiten(asked, model),
    }


DECIDED = ("batch_size", "crop_scale", "shift", "randaugment", "erase")
"""Options that a run has no value without; recorded by every run."""


def _check_task(asked: TrainConfig, facts: Facts) -> None:
    """Reject options of the other task, a loss of other labels, a fitted head with class weights, and a
    frozen body of random features."""
    if asked.optimization.steps == 0 and asked.balance.balances:
        raise UserError(
            "steps=0 fits a head that counts all images alike: leave out class_weights and sampling, or set "
            "more steps"
        )
    if asked.task == "masked":
        for name, trait in traits(type(asked), Classifies).items():
            if asked.option(name) != trait.off:
                raise UserError(f"{name} {trait.reason}; leave it out")
    elif asked.optimization.loss not in (None, *facts.kind.criteria):
        raise UserError(
            f"loss={asked.optimization.loss} is not for images of {facts.kind.images}, whose losses are "
            f"{listed(facts.kind.criteria)}: leave it out"
        )
    elif asked.weights is None and (asked.optimization.freeze or asked.optimization.lora is not None):
        name = "freeze" if asked.optimization.freeze else "lora"
        raise UserError(f"{name} needs a body that is trained already: set weights")


def _model(asked: TrainConfig, facts: Facts) -> tuple[ModelConfig, str | None]:
    """The configuration of the model, and its named size."""
    base, wanted = facts.weights, asked.architecture
    name = wanted.model or (DEFAULT_MODEL if base is None else None)
    options = {**wanted.chosen(), **wanted.model_options}
    is_vit = _is_vit(asked, facts)
    if base is None and name is not None:
        options = _default_sizes(asked, name, facts) | options
        options["in_channels"] = facts.channels
    options |= _derived_options(asked, facts, is_vit)
    if base is not None:
        try:
            model = adapted(base, name, str(asked.weights), options)
        except CheckpointError as error:
            advice = "leave out the model to use that of the weights"
            if name is None:
                advice = "leave that out to train the body as it is, or pre-train another one"
            raise UserError(f"{error}; {advice}") from error
    else:
        model = named_config(name or DEFAULT_MODEL, **options)
    if isinstance(model, ViTConfig):
        if asked.task == "masked":
            model = body_config(model)
        _check_vit(asked, model)
    return model, name


def _check_vit(asked: TrainConfig, model: ViTConfig) -> None:
    """Reject options that have no effect on a model, or that it does not support."""
    for option in asked.architecture.model_options:
        needs = traits(ViTConfig, AppliesWith).get(option)
        if needs is not None and not needs.holds(model.option(needs.option)):
            raise UserError(
                f"model_options: {option} has no effect with {needs.option}="
                f"{model.option(needs.option)}; add {needs.option}={needs.value}, or leave it out"
            )
    if asked.execution.gradient_checkpointing and model.block.token_merging:
        raise UserError("token_merging does not go with gradient_checkpointing: leave one of them out")
    if asked.task == "masked" and asked.masking.target == "mae":
        check_encoder(model)
    if asked.optimization.progressive:
        try:
            model.grid_of(small_size(model))
        except UserError as error:
            raise UserError(
                f"progressive resizing begins with smaller images: {error}; set progressive=0"
            ) from error


def _enlargement(asked: TrainConfig, config: ModelConfig, facts: Facts) -> str:
    """The cost of images that weights enlarge much, and a smaller size; empty if there is nothing to say."""
    if (
        asked.weights is None
        or asked.architecture.image_size is not None
        or not isinstance(config, ViTConfig)
    ):
        return ""
    patch_h, patch_w = config.patch_hw
    count = max(LEAST_PATCHES, math.ceil(facts.height / patch_h), math.ceil(facts.width / patch_w))
    smaller = (count * patch_h, count * patch_w)
    if 2 * max(smaller) > min(config.image_hw) or patch_h != patch_w:
        return ""
    try:  # not all positions allow other sizes
        cost = config.flops / dataclasses.replace(config, image_size=smaller).flops
    except UserError:
        return ""
    H, W = config.image_hw
    return (
        f"the images of about {facts.height}x{facts.width} pixels are enlarged to {H}x{W}, the size of the "
        f"weights; image_size={smaller[0]} needs {1 / cost:.1%} of the computation"
    )


def _loss(asked: TrainConfig, facts: Facts) -> str | None:
    """The loss of labels; pre-training has none."""
    if asked.task == "masked" or asked.optimization.loss is not None:
        return asked.optimization.loss
    return facts.kind.criteria[0]


def _whiten(asked: TrainConfig, model: ModelConfig) -> str:
    """Whether the first convolution whitens; `UserError` if that is asked for and cannot be."""
    option = asked.optimization.whiten
    need = ""
    if asked.weights is not None:
        need = "random weights: leave out weights"
    elif not isinstance(model, ViTConfig) or model.embedding.stem != "tokenizer":
        need = "a tokenizer: add model_options stem=tokenizer"
    elif not model.embedding.patch_bias:
        need = "convolutions with biases: leave out patch_bias"
    elif model.tokenizer_pools[0]:
        need = "a first layer that does not pool: add model_options tokenizer_pooling=[1, 2]"
    elif model.tokenizer_channels[1] < (fewest := 2 * model.in_channels * SIDE**2):
        need = f"at least {fewest} channels in the first layer: add model_options tokenizer_widths"
    if option == "on" and need:
        raise UserError(f"whiten=on needs {need}; or leave it out")
    return "off" if need else {"auto": "on"}.get(option, option)


def _check_streams(asked: TrainConfig, facts: Facts) -> None:
    """Reject streams of images that are in too few shards."""
    if asked.streams is None:
        return
    size = _batch_size(asked.optimization, facts.images, _is_vit(asked, facts))
    most = min(facts.shards, size // 2)  # each part has pairs, which mixup mixes
    if asked.streams > most:
        where = f"{facts.shards:,} shards, in batches of {size:,}" if facts.shards else "files of their own"
        advice = f"set it to {most:,} or less" if most > 1 else "leave it out"
        raise UserError(
            f"streams={asked.streams} divides shards, and the training images are in {where}: {advice}"
        )


def _epochs(length: Optimization, images: int) -> int | None:
    """The epochs of a run whose length is not given otherwise; by default, more for fewer images."""
    if length.steps is not None or length.minutes is not None:
        return None
    if length.lengths:
        return length.epochs
    return length.epochs or max(FEWEST_EPOCHS, min(MOST_EPOCHS, round(IMAGES_SHOWN / images)))


def _derived_options(config: TrainConfig, facts: Facts, is_vit: bool) -> dict[str, Any]:
    """The model options that follow from the task, the data and other training options."""
    asked, teacher = config.architecture, config.distillation.teacher
    vit_options = {"dropout": asked.dropout, "drop_path": asked.drop_path}
    if not is_vit:
        foreign = vit_options | {
            "gradient_checkpointing": config.execution.gradient_checkpointing,
            "lora": config.optimization.lora is not None,
            "distillation token for the teacher": teacher is not None,
            "patches to hide in pre-training": config.task == "masked",
        }
        wrong = [name for name, value in foreign.items() if value]
        wrong += [name for name in asked.chosen() if name != "image_size"] + list(asked.model_options)
        if wrong:
            raise UserError(
                f"{asked.model or config.weights} is a CNN, which has no {', '.join(wrong)}; leave it out, "
                "use the recipe cnn, or choose a Vision Transformer"
            )
    if config.task == "masked":
        return vit_options | {"head": "none"}
    classes = {"class_names": facts.class_names, "num_classes": len(facts.class_names)}
    classes |= {"outputs": facts.kind.targets.outputs, "thresholds": ()}
    if not is_vit:
        return classes
    if teacher is not None:
        vit_options["distillation_token"] = True
    return vit_options | classes


def _default_sizes(asked: TrainConfig, model: str, facts: Facts) -> dict[str, Any]:
    """Image and patch size: small images keep their size, with 8 patches per side, as far as possible. They
    are square, unless all images have one shape, of which a square would cut something off.

    A masked autoencoder normalizes each patch by its own variance, so a patch has more than one pixel.
    """
    wanted = asked.architecture
    size = pair(wanted.image_size) if wanted.image_size else (facts.height, facts.width)
    side = min(size)
    if not (wanted.image_size or (facts.one_size and max(size) <= SMALL_IMAGE)):
        size = side, side
    small, config = side <= SMALL_IMAGE, named_config(model)
    if not isinstance(config, ViTConfig):
        return {"image_size": size if small else LARGE_IMAGE}
    embedding = dataclasses.replace(config.embedding, **_of_group("embedding", wanted))
    if embedding.stem == "tokenizer":
        tokenizer = dataclasses.replace(config.tokenizer, **_of_group("tokenizer", wanted))
        if not (small or wanted.image_size):
            size, side = (FROM_SCRATCH, FROM_SCRATCH), FROM_SCRATCH
        halvings = min(len(tokenizer.pooling), max(1, side // LEAST_PATCHES).bit_length() - 1)
        return _tiled(size, wanted.patch_size or 2 ** max(1, halvings))
    if small:
        smallest = 2 if asked.task == "masked" and asked.masking.target == "mae" else 1
        if embedding.stem == "resnet":
            smallest = ResNetConfig(layers=embedding.resnet_layers).stride
        return _tiled(size, wanted.patch_size or max(smallest, side // LEAST_PATCHES // smallest * smallest))
    return {"image_size": LARGE_IMAGE}


def _tiled(size: tuple[int, int], patch: int | tuple[int, int]) -> dict[str, Any]:
    """Patches, and the nearest size of the images that they tile."""
    sides = zip(size, pair(patch), strict=True)
    return {
        "patch_size": patch,
        "image_size": [max(1, round(side / length)) * length for side, length in sides],
    }


def _of_group(group: str, asked: Architecture) -> dict[str, Any]:
    """The model options of a group that are asked for."""
    return {name: value for name, value in asked.model_options.items() if OPTIONS[name] == group}


def _is_vit(asked: TrainConfig, facts: Facts) -> bool:
    """Whether the model is a ViT: that which is named, else that of the weights."""
    name = asked.architecture.model or (DEFAULT_MODEL if facts.weights is None else None)
    return isinstance(facts.weights if name is None else named_config(name), ViTConfig)


def _batch_size(asked: Optimization, images: int, is_vit: bool) -> int:
    """The batch size; the default one if there is none, or if it is more than the images.

    Recorded lengths are steps of the recorded batch size.
    """
    most = 64 if asked.optimizer == "muon" and is_vit else 128  # it learns more in many steps
    default, size = default_batch_size(images, most), asked.batch_size
    fits = size is not None and (asked.lengths or size <= max(images, default))
    return size if size is not None and fits else default


def default_batch_size(images: int, most: int = 128) -> int:
    """`most`, or the largest smaller power of two, at least 8, with 4 steps per epoch."""
    return max(8, min(most, 2 ** int(math.log2(max(1, images / 4)))))
