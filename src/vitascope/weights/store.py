"""Models in and out: any checkpoint of any family, loaded whole; saved whole; taken over for a new task."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitascope.errors import UserError, check_choice
from vitascope.model.classifier import Classifier, build, kind_of
from vitascope.model.config import ViTConfig
from vitascope.model.hardware import resolve_device
from vitascope.model.resnet import ResNet
from vitascope.model.resnet_config import ResNetConfig
from vitascope.model.sizes import NAMED_SIZES, ModelConfig, named_config
from vitascope.model.vit import VisionTransformer
from vitascope.weights.deit import Deit
from vitascope.weights.dinov2 import Dinov2
from vitascope.weights.dinov3 import Dinov3
from vitascope.weights.files import CheckpointError, refusal
from vitascope.weights.huggingface import HuggingFace
from vitascope.weights.huggingface_config import readable_instead
from vitascope.weights.jax import Jax
from vitascope.weights.mapping import Family, Source, check_preprocess, from_family, refuse, to_family
from vitascope.weights.own import (
    MODEL_TYPE,
    Vitascope,
    is_resnet,
    misfits,
    read_preprocess,
    read_resnet,
    read_resnet_config,
    write_resnet,
)
from vitascope.weights.preprocess import default_preprocess, preprocess_of
from vitascope.weights.sources import exists, open_source
from vitascope.weights.timm import Timm
from vitascope.weights.torchvision import Torchvision

log = logging.getLogger(__name__)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (Vitascope(), Timm(), HuggingFace(), Torchvision(), Jax(), Dinov3(), Dinov2(), Deit())
}
"""By name, in the order in which they are asked whether a checkpoint is theirs."""
UNTOLD: dict[str, Callable[[str], Any]] = {"num_heads": int, "mlp": str, "norm_eps": float}
"""What no tensor tells, and may be named between a family and its file."""


def from_pretrained(
    ref: str | os.PathLike[str],
    revision: str | None = None,
    *,
    family: str | None = None,
    config: ViTConfig | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Classifier:
    """Load the model behind a MODEL argument, for evaluation; `model.preprocess` is its preprocessing.

    Args:
        ref: a run folder, a model folder of any family, a weights file, a hub id, or torchvision's name
            (`torchvision/vit_b_16`). `timm:FILE` and the like name the family of a file that does not tell,
            `timm:num_heads=16:FILE` also options of `UNTOLD`, which are otherwise assumed, with a warning.
        revision: branch, tag or commit of a hub id; `owner/name@revision` says the same.
        family: one of `FAMILIES`; None finds it from the keys and the configuration.
        config: the architecture, where the checkpoint cannot tell it; None reads it. A ResNet's always can.
        dtype: of the parameters; None gives float32, whatever the checkpoint has.
        device: `auto`, or a torch device; None is the CPU.

    Raises:
        CheckpointError: nothing there, a broken file, an unknown family, or missing, extra and misshapen
            keys (listed).
        UserError: a device that is not there, or a `dtype` of integers.
    """
    if not isinstance(config, ViTConfig | None):
        raise UserError(f"config is a {type(config).__name__}, not a ViTConfig; None reads the checkpoint's")
    if dtype is not None and not dtype.is_floating_point:
        raise UserError(f"dtype is {dtype}; a model's is torch.float32, torch.bfloat16 or torch.float16")
    where = None if device is None else resolve_device(str(device))
    source, kind = identify(ref, revision, family)
    return load_source(source, kind, config).to(where, dtype)


def load_source(source: Source, kind: Family, config: ModelConfig | None = None) -> Classifier:
    """The model of a checkpoint that was identified; without a `config`, of the architecture that it tells.

    Raises:
        CheckpointError: missing, extra and misshapen keys (listed); pictures far larger than the model's own.
    """
    found = read_config(source, kind) if config is None else config
    if config is None and isinstance(found, ViTConfig) and (assumed := kind.assumed(source, found)):
        log.warning(
            "%s: nothing in the file tells %s, which is assumed; if that is wrong, name it with the file "
            "(%s:num_heads=N:FILE) or give config=ViTConfig(...)", source.name, assumed, kind.name,
        )  # fmt: skip
    model: Classifier
    if isinstance(found, ResNetConfig):
        model = read_resnet(source, found)
        preprocess = read_preprocess(source)
    else:
        state = from_family(kind, source, found)
        with torch.device("meta"):
            model = VisionTransformer(found)
        model.load_state_dict(state, strict=True, assign=True)
        preprocess = kind.read_preprocess(source, found)
    model.preprocess = check_preprocess(source.name, preprocess, found.image_hw)
    return model.eval().float()


def pretrained_config(ref: str | os.PathLike[str]) -> ModelConfig:
    """The architecture behind a MODEL argument, without building it; errors as `from_pretrained`."""
    return read_config(*identify(ref))


def read_config(source: Source, family: Family) -> ModelConfig:
    """The architecture of a checkpoint of a family's."""
    if family.name == MODEL_TYPE and is_resnet(source):
        return read_resnet_config(source)
    config = family.read_config(source)
    return config.replace(**source.options) if source.options else config


def split_ref(ref: str) -> tuple[str | None, dict[str, Any], str]:
    """The family, the options and the rest of `timm:FILE` or `timm:num_heads=16,mlp=gelu_tanh:FILE`.

    Raises:
        UserError: an option that every checkpoint tells, or a value of another kind.
    """
    family, _, rest = ref.partition(":")
    if family not in FAMILIES:
        return None, {}, ref
    options: dict[str, Any] = {}
    told = re.fullmatch(r"(\w+=[^,:=]*(?:,\w+=[^,:=]*)*):(.+)", rest)
    for name, _, value in (text.partition("=") for text in told[1].split(",")) if told else ():
        check_choice("option before a file", name, UNTOLD)
        try:
            options[name] = UNTOLD[name](value)
        except ValueError as error:
            raise UserError(f"{ref}: {name} is a number, not {value!r}") from error
    return family, options, told[2] if told else rest


def identify(
    ref: str | os.PathLike[str], revision: str | None = None, family: str | None = None
) -> tuple[Source, Family]:
    """A checkpoint, and whose it is.

    Raises:
        CheckpointError: as `from_pretrained`.
    """
    options: dict[str, Any] = {}
    if family is None and not exists(ref):
        family, options, ref = split_ref(os.fspath(ref))
    if family is not None:
        check_choice("family", family, FAMILIES)  # before anything is fetched
        kind = FAMILIES[family]
        source = dataclasses.replace(open_source(ref, revision), options=options)
        return kind.arriving(source), kind
    source = open_source(ref, revision)
    for kind in FAMILIES.values():
        if kind.recognizes(source):
            return kind.arriving(source), kind
    if model_type := source.config.get("model_type"):
        raise CheckpointError(f"{ref}: its model_type is {model_type!r}; {readable_instead(str(model_type))}")
    if "blocks.0.attn.qkv.weight" in source.tensors:
        raise CheckpointError(
            f"{ref}: timm's names without timm's config.json, so its preprocessing is unknown; say whose it "
            f"is: timm:{ref} (mean and std of 0.5) or deit:{ref} (ImageNet's)"
        )
    for prefix in sorted({name.partition(".")[0] + "." for name in source.tensors}):
        part = {k.removeprefix(prefix): v for k, v in source.tensors.items() if k.startswith(prefix)}
        if has_body(dataclasses.replace(source, tensors=part)):
            other = next(name for name in sorted(source.tensors) if not name.startswith(prefix))
            raise refusal(
                ref,
                f"the names under {prefix!r} are a ViT's, but there are others, such as {other!r}; save only "
                f"those, without the prefix: {{k[{len(prefix)}:]: v for k, v in state.items() "
                f"if k.startswith({prefix!r})}}",
            )
    some = ", ".join(sorted(source.tensors)[:3])
    raise refusal(ref, f"not a ViT of a known family; its first tensors are {some}")


def has_body(source: Source) -> bool:
    """Whether there are tensors of a ViT of some family."""
    return source.has("blocks.0.attn.qkv.weight") or any(
        kind.recognizes(source) for kind in FAMILIES.values()
    )


def save_pretrained(
    model: Classifier,
    folder: str | os.PathLike[str],
    *,
    format: str = "vitascope",
) -> Path:
    """Write a model folder, in our own format or as another library itself loads it.

    What a folder held under the same names is replaced, and never mixed with the new: an interruption leaves
    the old, the new, or a folder that is refused. Parameters keep their dtype, but for bfloat16 in an `.npz`,
    which has none: float32.

    Args:
        model: the model, with its preprocessing; one without (a bare `VisionTransformer(config)`) gets a
            plain one of its size: centre crop, mean and std of 0.5.
        folder: where to.
        format: one of `FAMILIES`. The preprocessing is written as near as the other library has it, which
            `vitascope convert` measures.

    Raises:
        UserError: an unknown format; a model that the other library does not have; weights that cannot be
            written, or in whose folder others would be read instead.
    """
    check_choice("format", format, FAMILIES)
    if not isinstance(model, VisionTransformer | ResNet):
        raise UserError(f"a {type(model).__name__} is no model of vitascope: VisionTransformer or ResNet")
    write_model(model, Path(folder), FAMILIES[format])
    return Path(folder)


def write_model(model: Classifier, folder: Path, family: Family) -> list[Path]:
    """Write a model as a family's library loads it; returns the files.

    Raises:
        CheckpointError: the family has no such model, or it cannot be written.
    """
    if isinstance(model, VisionTransformer):
        return to_family(family, model, preprocess_of(model), folder)
    if family.name != MODEL_TYPE:
        raise CheckpointError(f"{family.name} has no ResNet like this one; its only format is {MODEL_TYPE}")
    return write_resnet(model, preprocess_of(model), folder)


def create_model(name: str, *, weights: str | os.PathLike[str] | None = None, **overrides: Any) -> Classifier:
    """A named model, with any of its options changed: `create_model("vit_b16", num_classes=10)`.

    Args:
        name: one of `list_models()`.
        weights: a MODEL argument to start from. What the name does not say follows the weights (the epsilon
            of norms, say); positions are interpolated to another `image_size`, and the head is taken over
            where its classes are the same, or unnamed and as many. One logged line tells what was loaded,
            left out and initialized. The model keeps the weights' preprocessing, at its own size. None
            initializes at random.
        **overrides: options of `ViTConfig`, or for a ResNet of `ResNetConfig`.

    Raises:
        UserError: an unknown name or option, naming the nearest; a checkpoint that does not fit.
    """
    if weights is None:
        model = build(named_config(name, **overrides))
        model.preprocess = default_preprocess(model.config)
        return model
    named_config(name, **overrides)  # an unknown name is refused before anything is fetched
    source = from_pretrained(weights)
    model = build(adapted(source.config, name, str(weights), overrides))
    log.warning("%s: %s", weights, "; ".join(transfer(source, model, str(weights))))
    preprocess = preprocess_of(source)
    model.preprocess = preprocess.at_size(model.config.image_hw) if "image_size" in overrides else preprocess
    return model


# What decides the shape of a body; what a name always says of it; what it leaves to the weights or the task.
_SHAPE = {"in_channels", "patch_size", "embed_dim", "depth", "num_heads", "head_dim", "mlp_ratio"}
_SAID = _SHAPE | {"stem", "positions", "distillation_token", "num_registers"}
_LEFT_OPEN = {"image_size", "head", "layer_scale", "resample", "position_prefix"}
_RESNET_SHAPE = {"in_channels", "layers", "width", "root"}


def adapted(source: ModelConfig, name: str | None, weights: str, overrides: dict[str, Any]) -> ModelConfig:
    """The configuration of trained weights for a new task: theirs, with options changed.

    A head that is no linear layer gives way to one where a number of classes is asked for (paper, section
    3.2: the whole pre-training head is removed).

    Raises:
        CheckpointError: the weights are of another shape than the name or the options say.
    """
    expected = source.replace(**overrides) if name is None else named_config(name, **overrides)
    refuse_other_kind(weights, source, str(name), expected)
    if isinstance(source, ResNetConfig):
        said = _RESNET_SHAPE
    else:
        said = _SHAPE if name is None else _SAID | NAMED_SIZES[name].options.keys() - _LEFT_OPEN
    differing = [
        f"{option} is {source.option(option)!r}, not {expected.option(option)!r}"
        for option in sorted(said)
        if source.option(option) != expected.option(option)
    ]
    refuse(differing, f"{weights} has another body" if name is None else f"{weights} is no such {name}")
    options = dict(overrides)
    if options.get("num_classes", source.num_classes) != source.num_classes:
        options.setdefault("class_names", ())
    other_head = isinstance(source, ViTConfig) and source.readout.head not in ("linear", "zero")
    if "num_classes" in options and other_head:
        options.setdefault("head", "linear")
    return source.replace(**options)


def refuse_other_kind(weights: str, source: ModelConfig, name: str, target: ModelConfig) -> None:
    """Refuse to start a ViT from a ResNet, or the other way round."""
    if type(source) is not type(target):
        raise CheckpointError(f"{weights} is {kind_of(source)}, and {name} is {kind_of(target)}")


def transfer(source: Classifier, target: Classifier, name: str) -> list[str]:
    """Start a model from a trained one; returns in words what was loaded, left out and initialized.

    Raises:
        CheckpointError: the bodies differ; every difference is listed.
    """
    refuse_other_kind(name, source.config, "the model", target.config)
    notes = []
    if isinstance(source, VisionTransformer) and source.config.grid != target.config.grid:
        (h, w), (new_h, new_w) = source.config.grid, target.config.grid
        if any(True for _ in source.positions.parameters()):
            notes.append(f"positions interpolated from {h}x{w} to {new_h}x{new_w}")
        source.resize(target.config.image_hw)
    state, wanted = source.state_dict(), target.state_dict()
    heads = [{k: v for k, v in values.items() if k.startswith("head.")} for values in (state, wanted)]
    same_shapes = {k: v.shape for k, v in heads[0].items()} == {k: v.shape for k, v in heads[1].items()}
    names = (source.config.class_names, target.config.class_names)
    body = {key: value for key, value in state.items() if not key.startswith("head.")}
    if same_shapes and not (all(names) and names[0] != names[1]):
        fit_state(target, state, name)
        return [f"all {len(state)} tensors loaded", *notes]
    fit_state(target, body | heads[1], name)
    left_out = f"left out the head for {source.config.num_classes} classes" if heads[0] else "it has no head"
    made = f"initialized one for {target.config.num_classes}" if heads[1] else "made none"
    return [f"{len(body)} tensors of the body loaded", *notes, left_out, made]


def fit_state(model: Classifier, state: dict[str, Tensor], name: str) -> None:
    """Load a state of ours whole, or refuse it with every missing, extra and misshapen key.

    Raises:
        CheckpointError: with the list.
    """
    refuse(misfits(model, state), f"{name} does not fit the model")
    model.load_state_dict(state, strict=True)
