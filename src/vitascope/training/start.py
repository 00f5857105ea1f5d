"""What a run starts from: the parts that a configuration names, and what it may be continued with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import torch

from vitascope.data.augment import Augmentation
from vitascope.data.decoding import source_name
from vitascope.data.mixing import Mixing
from vitascope.data.preprocess import Preprocess
from vitascope.data.randaugment import RandAugment
from vitascope.data.splits import ImageSet, Splits
from vitascope.errors import UserError
from vitascope.model.classifier import Classifier, build
from vitascope.model.config import ViTConfig
from vitascope.model.sizes import ModelConfig
from vitascope.training.distributed import is_first
from vitascope.training.options import ExecutionOptions
from vitascope.training.recipes import GROUP_OF, TrainConfig
from vitascope.training.tasks.classify import Classify
from vitascope.training.tasks.distill import Distill
from vitascope.training.tasks.masked import Masked
from vitascope.training.tasks.task import Task
from vitascope.training.tasks.teachers import open_teacher
from vitascope.weights.loading import from_pretrained
from vitascope.weights.preprocess import default_preprocess, preprocess_of
from vitascope.weights.transfer import transfer

_ENGINE = tuple(field.name for field in dataclasses.fields(ExecutionOptions))
"""What may be another when a run goes on; one of them is an option of the model too."""
_PLACES = ("data", "run", "weights", "teacher")


def start_model(config: TrainConfig, model_config: ModelConfig, channels: int) -> Classifier:
    """The model before the first step, with its preprocessing.

    Args:
        config: of the run.
        model_config: of the model.
        channels: of the training images; where the model of the weights has another number, that is printed.

    Raises:
        UserError: weights that cannot be read, or do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build(model_config)
    if config.weights is None:
        model.preprocess = default_preprocess(model_config)
        return model
    weights = from_pretrained(config.weights)
    model.preprocess = preprocess_of(weights).at_size(model_config.image_hw)
    notes = transfer(weights, model, config.weights)
    if channels == 3 and model_config.in_channels == 1:
        notes = [
            *notes,
            "this model is grey: the colour images are converted to grey, so colour is not learned",
        ]
    if is_first():
        print(f"weights of {config.weights}: {'; '.join(notes)}")
    return model


def make_task(
    config: TrainConfig,
    model_config: ModelConfig,
    preprocess: Preprocess,
    splits: Splits,
    device: torch.device,
    precision: torch.dtype,
) -> Task:
    """What the run learns.

    Raises:
        UserError: a teacher that cannot be opened, or knows other classes; a body that is to be frozen and
            to learn.
    """
    if config.task == "masked":
        assert isinstance(model_config, ViTConfig)
        if config.optimization.freeze:
            raise UserError("freeze trains a head alone, and pre-training is of the body; leave it out")
        if config.optimization.label_smoothing:
            raise UserError("label_smoothing is of labels, and pre-training has none; leave it out")
        return Masked(masking=config.masking, config=model_config, preprocess=preprocess)
    smoothing = config.optimization.label_smoothing
    if config.distillation.teacher is None:
        return Classify(preprocess, smoothing)
    teacher = open_teacher(
        config.distillation.teacher, splits.train.class_names, device=device, precision=precision
    )
    return Distill(
        options=config.distillation, preprocess=preprocess, teacher=teacher, label_smoothing=smoothing
    )


def augmentation_of(config: TrainConfig) -> tuple[Augmentation, Mixing | None]:
    """What is varied in each image, and how images are mixed, if they are.

    Raises:
        UserError: images that are mixed with their labels, where there are no labels.
    """
    asked = config.augmentation
    if config.task == "masked" and (asked.mixup or asked.cutmix):
        raise UserError("mixup and cutmix mix labels too, and pre-training has none; leave them out")
    randaugment = None
    if asked.randaugment:
        randaugment = RandAugment(
            num_ops=asked.randaugment, magnitude=asked.magnitude, probability=asked.operation_probability
        )
    augmentation = Augmentation(
        flip=asked.flip,
        crop_scale=asked.crop_scale,
        shift=asked.shift,
        rotate=asked.rotate,
        color_jitter=asked.color_jitter,
        randaugment=randaugment,
        erase=asked.erase,
    )
    mixes = asked.mixup or asked.cutmix
    return augmentation, Mixing(mixup=asked.mixup, cutmix=asked.cutmix) if mixes else None


def identity(config: TrainConfig, model_config: ModelConfig, images: ImageSet) -> dict[str, Any]:
    """What a checkpoint belongs to: only a run of the same may go on from it. Plain values by name.

    Every option but the engine's is among them, and but the places of files, which may be moved.
    """
    names = [source_name(source).replace("\\", "/").rsplit("/", 1)[-1] for source in images.sources]
    content = json.dumps([names, images.labels.tolist()]).encode()
    model = model_config.to_dict()
    return {
        "training images": len(images),
        "classes": list(images.class_names),
        "names and labels of the training images, SHA-256": hashlib.sha256(content).hexdigest()[:16],
        **{f"model: {name}": value for name, value in model.items() if name not in ("class_names", *_ENGINE)},
        **{name: value for name, value in config.to_dict().items() if _decides(name)},
    }


def _decides(option: str) -> bool:
    """Whether an option is part of what a run is; those of the architecture are, as the model's own."""
    return GROUP_OF[option] not in ("architecture", "engine") and option not in _PLACES


def refuse_other(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint with other data, another model or other options.

    What the checkpoint does not know is an option that came later.

    Raises:
        UserError: naming every difference.
    """
    plain = json.loads(json.dumps(now))
    differences = [
        f"{name} was {value!r}, is {plain.get(name)!r}"
        for name, value in saved.items()
        if value != plain.get(name)
    ]
    if differences:
        raise UserError(
            f"the checkpoint is not of this run: {'; '.join(differences)}; a run goes on with the same data "
            "and options, or starts anew with another --run"
        )
