"""timm's `config.json`: the architecture and the arguments with which timm builds a model of ours."""

from __future__ import annotations

import math
from typing import Any, Literal

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.model.resnet_config import ResNetConfig

POOLS = {"token": "cls", "avg": "mean", "map": "map"}  # our names of timm's `global_pool`
ARCHITECTURES = {
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (): "vit_tiny_r_s16_p8_224",
}
"""The hybrids by the layers of their ResNet."""

_Resize = Literal["crop", "squash", "border"]
# Our names of timm's `crop_mode`.
CROP_MODES: dict[str, _Resize] = {"center": "crop", "squash": "squash", "border": "border"}


def read_rule(image_size: tuple[int, int], crop_pct: float, crop_mode: str) -> dict[str, Any]:
    """The resize and the crop of timm's `transforms_imagenet_eval`, as options of `Preprocess`."""
    height, width = (math.floor(side / crop_pct) for side in image_size)
    resize = CROP_MODES[crop_mode]
    if resize == "squash" and (height, width) == image_size:
        return {"resize": resize}
    # A square is torchvision's to resize, anything else timm's own `ResizeKeepRatio`.
    is_own = resize == "border" or height != width
    return {
        "resize": resize,
        "resize_to": (height, width),
        "side_rounding": "nearest" if is_own else "down",
        "crop_rounding": "even",
    }


def written_crop_pct(preprocess: Preprocess) -> float:
    """The shortest `crop_pct` from which timm computes our `resize_to`, or the nearest to it."""
    if preprocess.resize_to is None:
        return preprocess.crop_pct
    sides = list(zip(preprocess.image_size, preprocess.resize_to, strict=True))
    shares = (
        round(sides[0][0] / (sides[0][1] + extra), digits) for digits in range(1, 8) for extra in (0, 0.5)
    )
    fitting = (
        share
        for share in shares
        if share > 0 and all(math.floor(side / share) == resized for side, resized in sides)
    )
    return next(fitting, sides[0][0] / sides[0][1])


def only_one_of(config: ViTConfig) -> list[str]:
    """Options that exclude each other: timm has each in a constructor of its own, with an epsilon of 1e-6."""
    special = {
        'stem "resnet"': config.embedding.stem == "resnet",
        'mlp "swiglu"': config.block.mlp == "swiglu",
        "distillation_token": config.readout.distillation_token,
    }
    return [name for name, found in special.items() if found]


def settings(config: ViTConfig, preprocess: Preprocess) -> dict[str, Any]:
    """The content of `config.json`."""
    args, pretrained = _arguments(config), _pretrained(config, preprocess)
    if not pretrained["fixed_input_size"]:
        args["dynamic_img_size"] = True
    values = {
        "architecture": _architecture(config),
        "num_classes": pretrained["num_classes"],
        "num_features": config.embed_dim,
        "global_pool": args["global_pool"],
        "model_args": args,
        "pretrained_cfg": pretrained,
    }
    return values | ({"label_names": list(config.class_names)} if config.class_names else {})


def _architecture(config: ViTConfig) -> str:
    """The function of timm whose fixed choices (norm, class of the MLP, stem, heads) are this model's."""
    if config.readout.distillation_token:
        return "deit_base_distilled_patch16_224"
    if config.embedding.stem == "resnet":
        return ARCHITECTURES[config.embedding.resnet_layers]
    if config.block.mlp == "swiglu":
        return "vit_giant_patch14_dinov2"
    return "vit_base_patch16_clip_224" if config.block.norm_eps == 1e-5 else "vit_base_patch16_224"


def _arguments(config: ViTConfig) -> dict[str, Any]:
    """`model_args`: the arguments with which that function builds this model."""
    (ph, pw), layers, scale = config.patch_hw, config.embedding.resnet_layers, config.block.layer_scale
    step = ResNetConfig(layers=layers).stride if config.embedding.stem == "resnet" else 1
    D, hidden = (
        config.embed_dim,
        config.mlp_dim * (2 if config.block.mlp == "swiglu" else 1),
    )  # gate and value
    args: dict[str, Any] = {
        "img_size": list(config.image_hw),
        "patch_size": [ph // step, pw // step],  # on a ResNet's feature map
        "in_chans": config.in_channels,
        "embed_dim": D,
        "depth": config.depth,
        "num_heads": config.num_heads,
        # timm cuts where we round.
        "mlp_ratio": hidden / D if int(D * (hidden / D)) == hidden else (hidden + 0.5) / D,
        "qkv_bias": config.block.qkv_bias == "all",
        # Not None, which timm takes for its function's own choice; 0 is none, so a start at 0 needs another.
        "init_values": 0.0 if scale is None else scale or 1e-5,
        "global_pool": {ours: theirs for theirs, ours in POOLS.items()}[config.readout.pool],
        "fc_norm": config.readout.pool_norm == "after",
        "class_token": config.readout.has_class_token,
        "no_embed_class": not config.embedding.position_prefix,
        "reg_tokens": config.readout.num_registers,
        "pre_norm": config.embedding.embedding_norm,
        "pos_embed": "learn" if config.embedding.positions == "learned" else "none",
    }
    return args | ({} if config.block.mlp == "swiglu" else {"act_layer": config.block.mlp})


def _pretrained(config: ViTConfig, preprocess: Preprocess) -> dict[str, Any]:
    """`pretrained_cfg`: the names and the preprocessing that timm loads."""
    stem = {True: "backbone.stem.conv", False: "backbone.conv"}[bool(config.embedding.resnet_layers)]
    return {
        "input_size": [config.in_channels, *preprocess.image_size],
        # At another size than the model's own, positions are interpolated in each forward pass.
        "fixed_input_size": preprocess.image_size == config.image_hw,
        "interpolation": preprocess.interpolation,
        "crop_pct": written_crop_pct(preprocess),
        "crop_mode": {ours: theirs for theirs, ours in CROP_MODES.items()}[preprocess.resize],
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "num_classes": config.num_classes if config.readout.head != "none" else 0,
        "first_conv": "patch_embed." + (stem if config.embedding.stem == "resnet" else "proj"),
        "classifier": ["head", "head_dist"] if config.readout.distillation_token else "head",
    }
