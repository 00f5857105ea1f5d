"""Hugging Face's `preprocessor_config.json` and `config.json`, read and written.

Facts: transformers 5.23.0, `image_processing_pil_{vit,deit,bit}.py`, `image_processing_dinov3_vit.py`, and
`models/{vit,deit,dinov2,dinov2_with_registers,dinov3_vit}/configuration_*.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.families.pth import IMAGENET_MEAN, IMAGENET_STD, imagenet, shorter_side
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import PROBLEMS, Source, class_names, outputs_options
from vitascope.weights.preprocess import default_preprocess

_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_SWITCHES = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
_STEPS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_SQUASH = {**_STEPS, "size": 224, "resample": 2, "image_mean": _HALF, "image_std": _HALF}
_CROP = {**_SQUASH, "resample": 3, "do_center_crop": True, "crop_size": 224}
# The defaults of its classes.
_PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": _SQUASH,
    "DeiT": {**_CROP, "size": 256},
    "Bit": {**_CROP, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "size": {"shortest_edge": 224}},
    "DINOv3ViT": {**_SQUASH, "image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD},
    "Siglip": {**_SQUASH, "resample": 3},
    "Beit": {**_SQUASH, "resample": 3},
}
_OF_MODEL = {"vit": "ViT", "deit": "DeiT", "dinov2": "Bit", "dinov2_with_registers": "Bit"}
_OF_MODEL |= {"dinov3_vit": "DINOv3ViT", "beit": "Beit"}
_Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
_RESAMPLE: dict[int, _Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def published(model_type: str, config: ViTConfig) -> Preprocess:
    """The preprocessing of a model's authors, for folders without a processor."""
    processor = _OF_MODEL[model_type]
    options: dict[str, Any] = {"resize": "squash", "interpolation": "bilinear"}
    if processor in ("DeiT", "Bit"):
        options = {"resize_to": shorter_side(config.image_hw, 0.875), "crop_rounding": "down"}
    if processor == "ViT":
        return dataclasses.replace(default_preprocess(config), **options)
    return imagenet(config, **options)


def read_processor(name: str, content: Mapping[str, Any], model_type: str, config: ViTConfig) -> Preprocess:
    """The preprocessing of a `preprocessor_config.json`; `name` is the checkpoint's, for messages."""
    # A step that is null is left out, as if it were false; any other null means the default.
    given = {key: value for key, value in content.items() if value is not None or key in _SWITCHES}
    kind = given.get("image_processor_type") or given.get("feature_extractor_type") or _OF_MODEL[model_type]
    kind = re.sub("(ImageProcessor|FeatureExtractor).*", "", str(kind))
    if kind not in _PROCESSORS:
        raise CheckpointError(f"{name}: {kind}ImageProcessor is none of {', '.join(_PROCESSORS)}")
    values = {**_PROCESSORS[kind], **given}
    if values.get("do_pad") and values.get("pad_size"):
        raise CheckpointError(
            f"{name}: pad_size {values['pad_size']!r}: vitascope has no padding after the crop"
        )
    if values["resample"] not in list(_RESAMPLE):
        raise CheckpointError(f"{name}: resample {values['resample']!r} is none of {_RESAMPLE}")
    # For pixels in [0, 1]; theirs are for pixels in [0, 255] times a factor.
    factor = values["rescale_factor"] if values["do_rescale"] else 1.0
    if not (isinstance(factor, int | float) and factor > 0):
        raise CheckpointError(f"{name}: rescale_factor {factor!r} of a processor")
    scale = 255 * factor
    if not values["do_normalize"]:
        values |= {"image_mean": (0.0,), "image_std": (1.0,)}
    mean, std = (_per_channel(name, values[key], config) for key in ("image_mean", "image_std"))
    if kind in ("Bit", "Siglip") and isinstance(values["size"], int):
        values["size"] = {"shortest_edge": values["size"]}
    return Preprocess(
        **_geometry(name, values, config),
        channels=config.in_channels,
        interpolation=_RESAMPLE[values["resample"]],
        mean=tuple(value / scale for value in mean),
        std=tuple(value / scale for value in std),
    )


def _geometry(name: str, values: Mapping[str, Any], config: ViTConfig) -> dict[str, Any]:
    """The resize and the crop of their `PilBackend`, as options of `Preprocess`."""
    crop = sides(values.get("crop_size"), name) if values.get("do_center_crop") else None
    if not values["do_resize"]:
        if crop is not None:
            raise CheckpointError(f"{name}: a processor that crops but does not resize")
        # A picture of the right size stays as it is.
        return {"image_size": config.image_hw, "resize": "squash"}
    size = values["size"]
    keeps_proportions = isinstance(size, Mapping) and "shortest_edge" in size
    if keeps_proportions:
        if size.get("longest_edge"):
            raise CheckpointError(
                f"{name}: size {dict(size)} bounds both edges; vitascope has no such resize"
            )
        size = size["shortest_edge"]
    whole = sides(size, name)
    if crop is None and not keeps_proportions:
        return {"image_size": whole, "resize": "squash"}
    return {
        # Without a crop their picture may be oblong; the model gets the square in its centre.
        "image_size": crop or whole,
        "resize": "crop" if keeps_proportions else "squash",
        "resize_to": whole,
        "crop_rounding": "down",
    }


def sides(value: Any, name: str) -> tuple[int, int]:
    """A size of theirs (one side, two, or named ones) as (height, width)."""
    if isinstance(value, Mapping):
        value = (value.get("height"), value.get("width"))
    both = (value, value) if isinstance(value, int) else value
    whole = isinstance(both, list | tuple) and all(isinstance(side, int) and side > 0 for side in both)
    if not (whole and len(both) == 2):
        raise CheckpointError(f"{name}: {value!r} is not a size")
    return both[0], both[1]


def _per_channel(name: str, values: Any, config: ViTConfig) -> tuple[float, ...]:
    """Mean or std by channel; equal numbers fit any number of channels."""
    numbers = tuple(values) if isinstance(values, list | tuple) else (values,)
    if not all(isinstance(number, int | float) for number in numbers):
        raise CheckpointError(f"{name}: mean or std {values!r} are not numbers")
    if len(set(numbers)) == 1:
        return (numbers[0],) * config.in_channels
    if len(numbers) != config.in_channels:
        raise CheckpointError(
            f"{name}: mean or std {list(numbers)} does not fit a model of {config.in_channels} channels; "
            "correct preprocessor_config.json"
        )
    return numbers


def written_processor(preprocess: Preprocess) -> dict[str, Any]:
    """The `preprocessor_config.json` of the nearest of ViT's, DeiT's and BiT's processors."""
    (height, width), channels = preprocess.image_size, preprocess.channels
    values: dict[str, Any] = {
        **_STEPS,
        "resample": {ours: theirs for theirs, ours in _RESAMPLE.items()}[preprocess.interpolation],
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "do_convert_rgb": channels == 3,
    }
    share, size = preprocess.crop_pct, {"height": height, "width": width}
    resized = preprocess.resize_to or (round(height / share), round(width / share))
    crop = {"do_center_crop": True, "crop_size": size}
    if preprocess.resize == "squash":
        if share == 1 and preprocess.resize_to is None:
            return {"image_processor_type": "ViTImageProcessor", "size": size, **values}
        whole = dict(zip(("height", "width"), resized, strict=True))
        return {"image_processor_type": "DeiTImageProcessor", "size": whole, **crop, **values}
    if preprocess.resize == "border":
        raise CheckpointError(
            f"huggingface has no preprocessing that adds a border up to {height}x{width}; "
            'only a crop, or the whole picture: Preprocess(resize="squash")'
        )
    if resized[0] != resized[1]:
        raise CheckpointError(
            f"huggingface has no preprocessing that covers {resized[0]}x{resized[1]} and crops "
            f'{height}x{width}; only a square, or the whole picture: Preprocess(resize="squash")'
        )
    edge = {"shortest_edge": resized[0]}
    return {"image_processor_type": "BitImageProcessor", "size": edge, **crop, **values}


# The defaults of configurations.
_SIZE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_INPUT = {"image_size": 224, "patch_size": 16, "num_channels": 3}
_VIT = {**_SIZE, **_INPUT, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "qkv_bias": True}
_DINOV2 = {**_VIT, "layer_norm_eps": 1e-6, "layerscale_value": 1.0, "mlp_ratio": 4, "use_swiglu_ffn": False}
_SMALL = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_register_tokens": 0}
_BIASES = {"query_bias": True, "key_bias": False, "value_bias": True}
_DINOV3 = {**_VIT, **_SMALL, **_BIASES, "layer_norm_eps": 1e-5, "layerscale_value": 1.0, "rope_theta": 100.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": {**_DINOV2, "patch_size": 14},
    "dinov2_with_registers": {**_DINOV2, "num_register_tokens": 4},
    "dinov3_vit": {**_DINOV3, "use_gated_mlp": False},
}
MODEL_TYPES = tuple(_DEFAULTS)
DINOV2_TYPES = ("dinov2", "dinov2_with_registers")
# Models whose layout in transformers is not read, and the same in timm's layout.
_ELSEWHERE = {
    r"clip(_vision_model)?": "timm/vit_base_patch16_clip_224.openai",
    r"siglip(_vision_model)?": "timm/vit_base_patch16_siglip_224.webli",
    r"siglip2(_vision_model)?": "timm/vit_base_patch16_siglip_224.v2_webli",
    r"vit_mae": "timm/vit_base_patch16_224.mae",
    r"vit[-_]hybrid": "timm/vit_base_r50_s16_384.orig_in21k_ft_in1k",
}
_CLASSES = dict(zip(MODEL_TYPES, ("ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT"), strict=True))

_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate")
_ACTIVATIONS = {"gelu": "gelu", "gelu_python": "gelu", "quick_gelu": "quick_gelu"}
_ACTIVATIONS |= dict.fromkeys(_TANH, "gelu_tanh")  # one function, in five ways to compute it
_QKV_BIAS = {(True, True, True): "all", (True, False, True): "no_key", (False, False, False): "none"}


def readable_instead(kind: str) -> str:
    """The models of transformers that are read, and a readable form of another's weights."""
    known = f"vitascope reads {', '.join(MODEL_TYPES)} of transformers"
    found = next((model for pattern, model in _ELSEWHERE.items() if re.fullmatch(pattern, kind)), None)
    return f"{known}, and this one as timm publishes it, such as {found}" if found else known


def model_type(config: ViTConfig) -> str:
    """The model of transformers for a configuration."""
    readout = config.readout
    if config.embedding.positions == "rotary":
        return "dinov3_vit"
    if readout.distillation_token:
        return "deit"
    scaled = config.block.layer_scale is not None or config.block.mlp == "swiglu"
    dinov2 = scaled or readout.pool == "cls_mean"
    if readout.num_registers == 1 and config.embedding.position_prefix and not dinov2:
        return "deit"  # its distillation token, where no head reads it
    if readout.num_registers:
        return "dinov2_with_registers"
    return "dinov2" if dinov2 else "vit"


def rule(kind: str) -> str:
    """A model's interpolation of positions; with registers it is antialiased, as timm's."""
    return "timm" if kind in ("dinov2_with_registers", "dinov3_vit") else "huggingface"


def runs_at_its_size(config: ViTConfig) -> bool:
    """Whether DINOv2 leaves its positions as they are; for an oblong image it assumes a square grid."""
    (height, width), (rows, columns) = config.image_hw, config.grid
    return height == width or rows == columns


def read_options(source: Source) -> dict[str, Any]:
    """Our options, from `config.json` and from the head that is there."""
    kind = source.config.get("model_type")
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"{source.name}: no config.json with a model_type of {', '.join(MODEL_TYPES)}, and no shape "
            "shows the number of heads; give the architecture: from_pretrained(..., config=ViTConfig(...))"
        )
    values = {**_DEFAULTS[kind], **source.config}
    embed_dim = int(number(source, values, "hidden_size", least=1))
    if "mlp_ratio" in _DEFAULTS[kind]:
        hidden = _hidden(embed_dim, number(source, values, "mlp_ratio"), values["use_swiglu_ffn"])
    else:
        hidden = int(number(source, values, "intermediate_size"))
    options: dict[str, Any] = {
        "image_size": sides(values["image_size"], source.name),
        "patch_size": sides(values["patch_size"], source.name),
        "in_channels": values["num_channels"],
        "embed_dim": embed_dim,
        "depth": values["num_hidden_layers"],
        "num_heads": values["num_attention_heads"],
        "norm_eps": number(source, values, "layer_norm_eps"),
        "qkv_bias": _qkv_bias(source, values),
        "mlp": activation(source, values),
        "mlp_ratio": hidden / embed_dim,
        "layer_scale": number(source, values, "layerscale_value") if "layerscale_value" in values else None,
        "num_registers": values.get("num_register_tokens", 0),
        "resample": rule(kind),
    }
    if kind == "dinov3_vit":
        options |= {"positions": "rotary", "rotary_base": number(source, values, "rope_theta")}
    elif source.has("embeddings.position_embeddings"):  # without the prefix, see `HuggingFace.before_reading`
        (height, width), (ph, pw) = options["image_size"], options["patch_size"]
        length = source.shape("embeddings.position_embeddings")[1]
        options["position_prefix"] = length != (height // ph) * (width // pw)
    return options | _readout(source, values, kind)


def _readout(source: Source, values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_registers": 1} if kind == "deit" else {}
    if source.has("cls_classifier.weight"):
        options = {"distillation_token": True}
    head = "cls_classifier.weight" if options.get("distillation_token") else "classifier.weight"
    if source.has(head):
        count = source.shape(head)[0]
        names = class_names(source.config.get("id2label"), count)
        options |= {"head": "linear", "num_classes": count, "class_names": names, **outputs_options(source)}
        both = source.shape(head)[1] == 2 * number(source, values, "hidden_size")
        return options | ({"pool": "cls_mean"} if both else {})
    if not source.has("pooler.dense.weight"):
        return options | {"head": "none"}
    if values.get("pooler_act", "tanh") != "tanh":
        raise CheckpointError(f"{source.name}: pooler_act {values['pooler_act']!r}; vitascope has only tanh")
    return options | {"head": "pre_logits"}


def _hidden(width: int, ratio: float, gated: bool) -> int:
    """The width of DINOv2's hidden layer; a gated one has two thirds, rounded up to eights."""
    hidden = int(width * ratio)
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def whole_ratio(config: ViTConfig) -> int | None:
    """The `mlp_ratio`, a whole number, that gives DINOv2 a hidden layer as wide as ours."""
    gated = config.block.mlp == "swiglu"
    candidates = range(1, int(2 * config.block.mlp_ratio) + 2)
    fits = (ratio for ratio in candidates if _hidden(config.embed_dim, ratio, gated) == config.mlp_dim)
    return next(fits, None)


def number(source: Source, values: Mapping[str, Any], name: str, least: float = 0) -> float:
    """A number of `config.json`."""
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise CheckpointError(f"{source.name}: {name} {value!r} in config.json is not a number >= {least:g}")
    return value


def _qkv_bias(source: Source, values: Mapping[str, Any]) -> str:
    if "query_bias" not in values:
        return "all" if values["qkv_bias"] else "none"
    given = (bool(values["query_bias"]), bool(values["key_bias"]), bool(values["value_bias"]))
    if given not in _QKV_BIAS:
        raise CheckpointError(
            f"{source.name}: query_bias, key_bias and value_bias {given}; vitascope has all, none or no_key"
        )
    return _QKV_BIAS[given]


def activation(source: Source, values: Mapping[str, Any]) -> str:
    """The option `mlp`."""
    if values.get("use_swiglu_ffn"):  # DINOv2's gate is SiLU, independent of hidden_act
        return "swiglu"
    given, gated = str(values["hidden_act"]), values.get("use_gated_mlp")
    known = {"silu": "swiglu", "swish": "swiglu"} if gated else _ACTIVATIONS
    if given not in known:
        mlp = "a gated MLP" if gated else "an MLP"
        raise CheckpointError(f"{source.name}: hidden_act {given!r} of {mlp} is none of {', '.join(known)}")
    return known[given]


def written_config(config: ViTConfig) -> dict[str, Any]:
    """The `config.json` of a model."""
    kind, block, swiglu = model_type(config), config.block, config.block.mlp == "swiglu"
    classifies = config.readout.head == "linear"
    suffix = "ForImageClassification" if classifies else "Model"
    suffix += "WithTeacher" if classifies and config.readout.distillation_token else ""
    # Without a head there are no classes, and their classifier returns features.
    names = config.class_names or tuple(f"LABEL_{index}" for index in range(config.num_classes))
    names = names if classifies else ()
    values: dict[str, Any] = {
        "architectures": [_CLASSES[kind] + suffix],
        "model_type": kind,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "hidden_act": {"swiglu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}.get(block.mlp, block.mlp),
        "layer_norm_eps": float(block.norm_eps),
        "image_size": one_or_two(config.image_hw),
        "patch_size": one_or_two(config.patch_hw),
        "num_channels": config.in_channels,
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }
    if classifies and config.outputs == "independent":
        values["problem_type"] = PROBLEMS[config.outputs]
        if config.thresholds:
            values["thresholds"] = list(config.thresholds)  # for us: transformers has none
    if kind in DINOV2_TYPES:
        values |= {"mlp_ratio": whole_ratio(config), "use_swiglu_ffn": swiglu}
    else:
        values["intermediate_size"] = config.mlp_dim
    if kind == "dinov3_vit":
        biases = {ours: theirs for theirs, ours in _QKV_BIAS.items()}[block.qkv_bias]
        values |= dict(zip(_BIASES, biases, strict=True))
        values |= {"rope_theta": float(config.rotary.rotary_base), "use_gated_mlp": swiglu}
    else:
        values["qkv_bias"] = block.qkv_bias == "all"
    if kind not in ("vit", "deit"):
        values["layerscale_value"] = 1.0 if block.layer_scale is None else float(block.layer_scale)
    if kind in ("dinov2_with_registers", "dinov3_vit"):
        values["num_register_tokens"] = config.readout.num_registers
    return values


def one_or_two(size: tuple[int, int]) -> int | list[int]:
    """The side of a square: their ViT divides by it."""
    return size[0] if size[0] == size[1] else list(size)
