"""The named models: the shapes of the papers. No torch, for a fast command line."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vitascope.errors import UserError, check_choice, suggestion
from vitascope.models.config import ViTConfig
from vitascope.models.configuration import traits
from vitascope.models.options import Role
from vitascope.models.resnet_config import ResNetConfig

ModelConfig = ViTConfig | ResNetConfig
_KINDS: dict[str, type[ModelConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}


def architecture_record(config: ModelConfig) -> dict[str, Any]:
    """The options as plain values for JSON; "architecture" is "resnet", or left out for a ViT."""
    kind = {"architecture": "resnet"} if isinstance(config, ResNetConfig) else {}
    return {**kind, **config.to_dict()}


def config_of(record: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `record_of`; UserError as the constructors."""
    options = dict(record)
    kind = options.pop("architecture", "vit")
    check_choice("architecture", kind, _KINDS)
    return _KINDS[kind].from_dict(options)


class NamedSize(NamedTuple):
    """A published shape: the options that differ from its configuration's defaults, and its publication."""

    options: dict[str, Any]
    source: str
    kind: type[ModelConfig] = ViTConfig


_TI = {"embed_dim": 192, "depth": 12, "num_heads": 3}
_S = {"embed_dim": 384, "depth": 12, "num_heads": 6}
_B = {"embed_dim": 768, "depth": 12, "num_heads": 12}
_L = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
_H = {"embed_dim": 1280, "depth": 32, "num_heads": 16}

_VIT = "Dosovitskiy et al. 2021, table 1"
_AUGREG = "Steiner et al. 2022"
_DEIT = "Touvron et al. 2021, table 1"
_DINOV2 = "Oquab et al. 2024"
_REGISTERS = "Darcet et al. 2024"
_DINOV3 = "Siméoni et al. 2025"
_RESNET = "He et al. 2016, table 1"
_CIFAR = "after He et al. 2016, section 4.2"
_RESNEXT = "Xie et al. 2017, section 5.3"
_IDENTITY = "He et al. 2016, Identity Mappings"
_CCT = "after Hassani et al. 2021"

_MINI = {"embed_dim": 128, "depth": 4, "num_heads": 4, "mlp_ratio": 2.0, "image_size": 32, "patch_size": 4}
_TOKENIZER = {"stem": "tokenizer", "tokenizer_widths": (96, 160)}
_TOKENIZER_6 = {
    "stem": "tokenizer",
    "tokenizer_widths": (24, 64, 64, 160, 160),
    "tokenizer_pooling": (1, 3, 5),
    "tokenizer_activation": "gelu",
}
_DISTILLED = {"distillation_token": True}
_R26 = {"stem": "resnet", "resnet_layers": (2, 2, 2, 2), "patch_size": 32}
_R50 = {"stem": "resnet", "resnet_layers": (3, 4, 6, 3), "patch_size": 32}
# The last stage's units are in the third: stride 16 instead of 32 (Dosovitskiy et al. 2021, section 4.1).
_R50_S16 = {"stem": "resnet", "resnet_layers": (3, 4, 9), "patch_size": 16}
_DINO = {"layer_scale": 1e-5, "head": "none"}
_DINOV2_OPTIONS = {**_DINO, "image_size": 518, "patch_size": 14, "resample": "dinov2"}
_REG = {"num_registers": 4, "position_prefix": False, "resample": "timm"}
_DINOV2_G = {"embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp": "swiglu", "mlp_ratio": 8 / 3}
_DINOV3_OPTIONS = {**_DINO, "positions": "rotary", "num_registers": 4, "norm_eps": 1e-5, "qkv_bias": "no_key"}
_7B = {"embed_dim": 4096, "depth": 40, "num_heads": 32, "mlp": "swiglu", "mlp_ratio": 2.0, "qkv_bias": "none"}

_SMALL = {"image_size": 32, "root": "cifar"}
_DEEP = {"layers": (18, 18, 18), "width": 16}

NAMED_SIZES: dict[str, NamedSize] = {
    "vit_ti16": NamedSize({**_TI, "patch_size": 16}, _AUGREG),
    "vit_s16": NamedSize({**_S, "patch_size": 16}, _AUGREG),
    "vit_s32": NamedSize({**_S, "patch_size": 32}, _AUGREG),
    "vit_b8": NamedSize({**_B, "patch_size": 8}, _AUGREG),
    "vit_b16": NamedSize({**_B, "patch_size": 16}, _VIT),
    "vit_b32": NamedSize({**_B, "patch_size": 32}, _VIT),
    "vit_l16": NamedSize({**_L, "patch_size": 16}, _VIT),
    "vit_l32": NamedSize({**_L, "patch_size": 32}, _VIT),
    "vit_h14": NamedSize({**_H, "patch_size": 14}, _VIT),
    "vit_r26_s32": NamedSize({**_S, **_R26}, _AUGREG),
    "vit_r50_b16": NamedSize({**_B, **_R50_S16}, _VIT),
    "vit_r50_l32": NamedSize({**_L, **_R50}, _AUGREG),
    "cct_mini": NamedSize({**_MINI, **_TOKENIZER, "pool": "mean"}, _CCT),
    "cct_1_3x6": NamedSize({**_MINI, **_TOKENIZER_6, "depth": 1, "pool": "mean"}, _CCT),
    "cct_2_3x6": NamedSize({**_MINI, **_TOKENIZER_6, "depth": 2, "pool": "mean"}, _CCT),
    "deit_ti16": NamedSize(_TI, _DEIT),
    "deit_s16": NamedSize(_S, _DEIT),
    "deit_b16": NamedSize(_B, _DEIT),
    "deit_ti16_distilled": NamedSize({**_TI, **_DISTILLED}, _DEIT),
    "deit_s16_distilled": NamedSize({**_S, **_DISTILLED}, _DEIT),
    "deit_b16_distilled": NamedSize({**_B, **_DISTILLED}, _DEIT),
    "dinov2_s14": NamedSize({**_S, **_DINOV2_OPTIONS}, _DINOV2),
    "dinov2_b14": NamedSize({**_B, **_DINOV2_OPTIONS}, _DINOV2),
    "dinov2_l14": NamedSize({**_L, **_DINOV2_OPTIONS}, _DINOV2),
    "dinov2_g14": NamedSize({**_DINOV2_G, **_DINOV2_OPTIONS}, _DINOV2),
    "dinov2_s14_reg": NamedSize({**_S, **_DINOV2_OPTIONS, **_REG}, _REGISTERS),
    "dinov2_b14_reg": NamedSize({**_B, **_DINOV2_OPTIONS, **_REG}, _REGISTERS),
    "dinov2_l14_reg": NamedSize({**_L, **_DINOV2_OPTIONS, **_REG}, _REGISTERS),
    "dinov2_g14_reg": NamedSize({**_DINOV2_G, **_DINOV2_OPTIONS, **_REG}, _REGISTERS),
    "dinov3_s16": NamedSize({**_S, **_DINOV3_OPTIONS}, _DINOV3),
    "dinov3_s16_plus": NamedSize({**_S, **_DINOV3_OPTIONS, "mlp": "swiglu"}, _DINOV3),
    "dinov3_b16": NamedSize({**_B, **_DINOV3_OPTIONS}, _DINOV3),
    "dinov3_l16": NamedSize({**_L, **_DINOV3_OPTIONS}, _DINOV3),
    "dinov3_h16_plus": NamedSize({**_H, **_DINOV3_OPTIONS, "num_heads": 20, "mlp": "swiglu"}, _DINOV3),
    "dinov3_7b16": NamedSize({**_DINOV3_OPTIONS, **_7B}, _DINOV3),
    "resnet26": NamedSize({"layers": (2, 2, 2, 2)}, _AUGREG, ResNetConfig),
    "resnet50": NamedSize({"layers": (3, 4, 6, 3)}, _RESNET, ResNetConfig),
    "resnet101": NamedSize({"layers": (3, 4, 23, 3)}, _RESNET, ResNetConfig),
    "resnet56_w16_cifar": NamedSize({**_SMALL, "layers": (6, 6, 6), "width": 16}, _CIFAR, ResNetConfig),
    "resnet29_w16_cifar": NamedSize({**_SMALL, "layers": (3, 3, 3), "width": 16}, _CIFAR, ResNetConfig),
    "resnet29_w32_cifar": NamedSize({**_SMALL, "layers": (3, 3, 3), "width": 32}, _CIFAR, ResNetConfig),
    "resnet164_w16_cifar": NamedSize({**_SMALL, **_DEEP}, _IDENTITY, ResNetConfig),
    "resnet29_w64_cifar": NamedSize({**_SMALL, "layers": (3, 3, 3), "width": 64}, _RESNEXT, ResNetConfig),
}
"""By name. Networks for CIFAR are named by depth, width and root; papers give the depth alone."""


def list_models() -> list[str]:
    """The names that `create_model` accepts, by family and width."""
    return list(NAMED_SIZES)


def left_open(name: str) -> set[str]:
    """The options that a named size leaves to the weights, the task or the training."""
    size = NAMED_SIZES[name]
    free = {option for option, role in traits(size.kind, Role).items() if role is Role.FREE}
    return free | ({"layer_scale"} & size.options.keys())  # its initial value


def architecture_of(config: ModelConfig) -> str:
    """The first named size that a configuration has, or its summary."""
    options = config.to_dict()
    for name, size in NAMED_SIZES.items():
        free = left_open(name)
        named = named_config(name).to_dict() if isinstance(config, size.kind) else {}
        if named and all(value == named[option] for option, value in options.items() if option not in free):
            return name
    return config.summary


def named_config(name: str, **overrides: Any) -> ModelConfig:
    """The configuration of a named size with other options; `num_classes` adds a linear head to features."""
    if name not in NAMED_SIZES:
        raise UserError(
            f"unknown model {name!r}{suggestion(name, NAMED_SIZES)}; `vitascope models` lists all names"
        )
    size = NAMED_SIZES[name]
    if "num_classes" in overrides and size.options.get("head") == "none":
        overrides = {"head": "linear", **overrides}
    return size.kind.from_dict({**size.options, **overrides})
