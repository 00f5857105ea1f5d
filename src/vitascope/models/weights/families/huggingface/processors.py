"""Hugging Face's `preprocessor_config.json`, read and written.

Facts: transformers 5.23.0, `image_processing_pil_{vit,deit,bit,clip,siglip,siglip2,beit}.py` and
`image_processing_dinov3_vit.py`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.pth import IMAGENET_MEAN, IMAGENET_STD, imagenet, shorter_side
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.preprocess import default_preprocess

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
_PROCESSORS["CLIP"] = _PROCESSORS["Bit"]
# Of any proportions there; here the square of the model's positions.
_PROCESSORS["Siglip2"] = {name: value for name, value in _SQUASH.items() if name != "size"}
Evaluation = Literal["squash to [-1, 1]", "squash", "crop", "CLIP's"]
"""A resize of the whole picture, or a crop after the shorter side's, with ImageNet's statistics or others."""
_Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
_RESAMPLE: dict[int, _Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def published(evaluation: Evaluation, config: ViTConfig) -> Preprocess:
    """The preprocessing of a model's authors, for folders without a processor."""
    squash: dict[str, Any] = {"resize": "squash", "interpolation": "bilinear"}
    if evaluation == "squash to [-1, 1]":
        return dataclasses.replace(default_preprocess(config), **squash)
    if evaluation == "squash":
        return imagenet(config, **squash)
    share = 1.0 if evaluation == "CLIP's" else 0.875
    crop = {"resize_to": shorter_side(config.image_hw, share), "crop_rounding": "down"}
    if evaluation == "CLIP's" and config.in_channels == 3:
        crop |= {"mean": _CLIP_MEAN, "std": _CLIP_STD}
    return imagenet(config, **crop)


def read_processor(name: str, content: Mapping[str, Any], default: str, config: ViTConfig) -> Preprocess:
    """The preprocessing of a `preprocessor_config.json`, by default of `default`; `name` is for messages."""
    # A step that is null is left out, as if it were false; any other null means the default.
    given = {key: value for key, value in content.items() if value is not None or key in _SWITCHES}
    kind = given.get("image_processor_type") or given.get("feature_extractor_type") or default
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
    scale = 255 * (values["rescale_factor"] if values["do_rescale"] else 1.0)
    if not values["do_normalize"]:
        values |= {"image_mean": (0.0,), "image_std": (1.0,)}
    mean, std = (_per_channel(name, values[key], config) for key in ("image_mean", "image_std"))
    if kind in ("Bit", "CLIP", "Siglip") and isinstance(values["size"], int):
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
    crop = sides(values["crop_size"]) if values.get("do_center_crop") else None
    if not values["do_resize"]:
        if crop is not None:
            raise CheckpointError(f"{name}: a processor that crops but does not resize")
        # A picture of the right size stays as it is.
        return {"image_size": config.image_hw, "resize": "squash"}
    size = values.get("size", config.image_hw)
    keeps_proportions = isinstance(size, Mapping) and "shortest_edge" in size
    if keeps_proportions:
        if size.get("longest_edge"):
            raise CheckpointError(
                f"{name}: size {dict(size)} bounds both edges; vitascope has no such resize"
            )
        size = size["shortest_edge"]
    whole = sides(size)
    if crop is None and not keeps_proportions:
        return {"image_size": whole, "resize": "squash"}
    return {
        # Without a crop their picture may be oblong; the model gets the square in its centre.
        "image_size": crop or whole,
        "resize": "crop" if keeps_proportions else "squash",
        "resize_to": whole,
        "crop_rounding": "down",
    }


def sides(value: Any) -> tuple[int, int]:
    """A size of theirs (one side, two, or named ones) as (height, width)."""
    if isinstance(value, Mapping):
        return value["height"], value["width"]
    height, width = (value, value) if isinstance(value, int) else value
    return height, width


def _per_channel(name: str, values: Any, config: ViTConfig) -> tuple[float, ...]:
    """Mean or std by channel; equal numbers fit any number of channels."""
    numbers = tuple(values) if isinstance(values, list | tuple) else (values,)
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
