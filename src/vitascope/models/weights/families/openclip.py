"""OpenCLIP's ViTs: `open_clip_config.json` beside `open_clip_model.safetensors` or its `.bin`.

Facts: open_clip 3, `model.py`, `transformer.py`, `transform.py`, `constants.py`. OpenCLIP computes the text
models itself (`vitascope.models.text`). Vision models of `timm_model_name` (SigLIP's) have timm's names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.huggingface.processors import sides
from vitascope.models.weights.families.timm import Timm
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import (
    Family,
    Source,
    Stored,
    Table,
    check_setting,
    checked_config,
    reshaped,
)

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_BLOCK, _LAYER = "encoder.blocks.{i}.", "visual.transformer.resblocks.{i}."


def with_first_axes(name: str, count: int) -> Stored:
    """Our tensor has axes of length one before theirs."""
    return reshaped(name, lambda ours: ours.flatten(0, count), lambda theirs: theirs[(None,) * count])


TABLE: Table = {
    "patch_embedding.*": "visual.conv1.*",
    "class_token": with_first_axes("visual.class_embedding", 2),
    "positions.weight": with_first_axes("visual.positional_embedding", 1),
    "embedding_norm.*": "visual.ln_pre.*",
    _BLOCK + "norm{n}.*": _LAYER + "ln_{n}.*",
    _BLOCK + "attention.qkv.*": _LAYER + "attn.in_proj_*",
    _BLOCK + "attention.proj.*": _LAYER + "attn.out_proj.*",
    _BLOCK + "scale{n}.gamma": _LAYER + "ls_{n}.gamma",
    _BLOCK + "mlp.fc1.*": _LAYER + "mlp.c_fc.*",
    _BLOCK + "mlp.fc2.*": _LAYER + "mlp.c_proj.*",
    "norm.*": "visual.ln_post.*",
    "pool_norm.*": "visual.ln_post.*",
    # Our linear layer is their matrix that multiplies from the right.
    "head.weight": reshaped("visual.proj", lambda ours: ours.T, lambda theirs: theirs.T),
    "head.bias": "visual.proj_bias",  # zeros: see `before_reading`
}
# The options of a ViT with their defaults; those that have to be as they are here stand in `_FIXED`.
VISION: dict[str, Any] = {
    "layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16, "image_size": 224,
    "ls_init_value": None, "patch_dropout": 0.0, "no_ln_pre": False, "final_ln_after_pool": False,
    "pool_type": "tok", "act_kwargs": None, "norm_kwargs": None, "output_tokens": False,
    "attn_pooler_queries": 256, "attn_pooler_heads": 8,
}  # fmt: skip
_FIXED = {"attentional_pool": False, "pos_embed_type": "learnable", "timm_model_name": None}
_SEVERAL = ("layers", "image_size", "patch_size", "size")  # numbers that may be lists
_OF_TIMM = {"timm_model_pretrained", "timm_drop", "timm_drop_path", "timm_pool", "timm_proj"}
_OF_TIMM |= {"timm_proj_bias", "timm_model_name", "image_size"}


class OpenClip(Family):
    """OpenCLIP's vision models, whose outputs are embeddings."""

    name = "openclip"
    supports: Mapping[str, tuple[Any, ...]] = {}  # type: ignore[misc]
    read_only = True
    ignored = (
        *("text.*", "token_embedding.*", "positional_embedding", "transformer.*", "ln_final.*"),
        *("text_projection", "text_projection.*", "logit_scale", "logit_bias", "attn_mask"),
    )

    def recognizes(self, source: Source) -> bool:
        return "model_cfg" in source.config

    def table(self, config: ViTConfig) -> Table:
        if config.readout.head == "none":  # of timm
            return {ours: with_prefix(theirs) for ours, theirs in Timm().table(config).items()}
        return TABLE

    def before_reading(self, source: Source) -> Source:
        """The projection has no bias there: zeros."""
        projection = source.tensors.get("visual.proj")
        if projection is None or projection.ndim != 2:
            return source
        tensors = source.tensors | {"visual.proj_bias": projection.new_zeros(projection.shape[1])}
        return dataclasses.replace(source, tensors=tensors)

    def read_config(self, source: Source) -> ViTConfig:
        model = section(source, "model_cfg")
        vision = section(source, "model_cfg", "vision_cfg")
        if vision.get("timm_model_name"):
            return _timm_config(source, vision)
        values = known(source, "vision_cfg", vision, VISION, _FIXED)
        if isinstance(values["layers"], list):
            raise CheckpointError(
                f"{source.name}: layers {values['layers']!r} of a ResNet: only ViTs are read"
            )
        check_setting(source, "pool_type", values["pool_type"], ("tok", "avg"))
        width = values["width"]
        options = {
            "image_size": values["image_size"],
            "patch_size": values["patch_size"],
            "embed_dim": width,
            "depth": values["layers"],
            "num_heads": width // values["head_width"],
            "mlp_ratio": int(width * values["mlp_ratio"]) / width,
            "mlp": open_clip_activation(source, model, values),
            "norm_eps": epsilon(source, values),
            "layer_scale": values["ls_init_value"],
            "patch_bias": False,
            "embedding_norm": not values["no_ln_pre"],
            "class_token": True,
            "pool": "cls" if values["pool_type"] == "tok" else "mean",
            "pool_norm": "after" if values["final_ln_after_pool"] else "before",
            "num_classes": source.shape("visual.proj", 2)[1],
            "outputs": "embedding",
        }
        return checked_config(source, options)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The transform of torchvision that its `image_transform` makes for evaluation."""
        defaults = {"size": config.image_hw, "mode": "RGB", "mean": MEAN, "std": STD, "fill_color": 0}
        defaults |= {"interpolation": "bicubic", "resize_mode": "shortest"}
        values = known(source, "preprocess_cfg", source.config.get("preprocess_cfg") or {}, defaults, {})
        size = sides(values["size"])
        modes: dict[str, dict[str, Any]] = {
            "shortest": {"resize": "crop", "resize_to": size},
            "squash": {"resize": "squash"},
        }
        if values["resize_mode"] not in modes or values["mode"] != "RGB":
            raise CheckpointError(
                f"{source.name}: resize_mode {values['resize_mode']!r} of {values['mode']} pictures; only "
                "shortest and squash of RGB are read"
            )
        if values["resize_mode"] == "shortest" and size[0] != size[1]:
            raise CheckpointError(f"{source.name}: resize_mode 'shortest' to {size}; only squares are read")
        return Preprocess(
            image_size=size,
            interpolation=values["interpolation"],
            mean=tuple(values["mean"]),
            std=tuple(values["std"]),
            **modes[values["resize_mode"]],
        )


def with_prefix(theirs: str | Stored) -> Stored:
    """The place of a tensor of timm's in `visual.trunk.`."""
    stored = theirs if isinstance(theirs, Stored) else Stored((theirs,))
    return dataclasses.replace(stored, names=tuple(f"visual.trunk.{name}" for name in stored.names))


def _timm_config(source: Source, vision: Mapping[str, Any]) -> ViTConfig:
    """The configuration of a timm model that pools by itself and has no projection, as SigLIP's."""
    unknown = sorted(vision.keys() - _OF_TIMM)
    projection, bias = vision.get("timm_proj", "linear"), vision.get("timm_proj_bias", False)
    if unknown or vision.get("timm_pool", "avg") != "map" or projection not in ("none", "") or bias:
        raise CheckpointError(
            f"{source.name}: vision_cfg {dict(vision)}: of timm's models only those with timm_pool 'map' and "
            "timm_proj 'none' are read"
        )
    prefix = "visual.trunk."
    trunk = {
        name.removeprefix(prefix): tensor
        for name, tensor in source.tensors.items()
        if name.startswith(prefix)
    }
    size = vision.get("image_size", 224)
    config = {"architecture": vision["timm_model_name"], "model_args": {"img_size": size}, "num_classes": 0}
    body = dataclasses.replace(source, tensors=trunk, config=config)
    return Timm().read_config(body).replace(outputs="embedding")


def section(source: Source, *names: str) -> Mapping[str, Any]:
    """An object in open_clip_config.json."""
    found: Any = source.config
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{source.name}: no {'.'.join(names)} in open_clip_config.json")
    return found


def known(
    source: Source,
    where: str,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
) -> dict[str, Any]:
    """The options of a section; rejects unknown ones, those that differ from `fixed`, and other types."""
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    for name, value in values.items():
        if name in fixed:
            if value != fixed[name]:
                raise CheckpointError(
                    f"{source.name}: {name} {value!r} in {where}; only {fixed[name]!r} is read"
                )
        elif name not in defaults:
            raise CheckpointError(f"{source.name}: unknown {name} {value!r} in {where}")
        elif value is not None:
            words, types = _accepted(name, defaults[name])
            if not isinstance(value, types):
                raise CheckpointError(f"{source.name}: {name} {value!r} in {where} is not {words}")
    return values


def _accepted(name: str, default: Any) -> tuple[str, tuple[type, ...]]:
    """The values that an option may have, in words, and their types."""
    if name.endswith("_kwargs"):
        return "an object", (Mapping,)
    if name in _SEVERAL:
        return "a number or a list", (int, float, list, tuple)
    kinds: dict[type, tuple[str, tuple[type, ...]]] = {
        bool: ("true or false", (bool,)),
        int: ("a number", (int, float)),
        float: ("a number", (int, float)),
        str: ("a text", (str,)),
        tuple: ("a list", (list, tuple)),
    }
    return kinds.get(type(default), ("known", (object,)))


def open_clip_activation(source: Source, model: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The option `mlp`, of `quick_gelu` and `act_kwargs`."""
    arguments = values["act_kwargs"] or {}
    if model.get("quick_gelu") and not arguments:
        return "quick_gelu"
    if arguments not in ({}, {"approximate": "tanh"}, {"approximate": "none"}) or model.get("quick_gelu"):
        raise CheckpointError(f"{source.name}: act_kwargs {arguments!r}; only approximate 'tanh' is read")
    return "gelu_tanh" if arguments.get("approximate") == "tanh" else "gelu"


def epsilon(source: Source, values: Mapping[str, Any]) -> float:
    """The option `norm_eps`, of `norm_kwargs`."""
    arguments = values["norm_kwargs"] or {}
    eps = arguments.get("eps", 1e-5)
    if arguments.keys() - {"eps"} or not isinstance(eps, int | float):
        raise CheckpointError(f"{source.name}: norm_kwargs {arguments!r}; only eps is read")
    return float(eps)
