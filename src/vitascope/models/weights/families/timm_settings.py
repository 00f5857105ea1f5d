"""timm's architecture names, and the `config.json` with which timm builds a model of ours.

Facts: timm 1.0.31, `models/vision_transformer*.py`, `eva.py`, `beit.py`, `deit.py`.
"""

import math
import re
from typing import Any, Literal

from vitascope.errors import suggestion
from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import NAMED_SIZES

# The words of the names whose models are plain ViTs. Any other word may mean another model with the same
# tensors: `rpn` normalizes after each branch, `pe` has rotary positions. The words of the last line stand
# behind a dot since 2023.
PLAIN = re.compile(
    r"(test_vit[234]?|vit|deit3?|flexivit|eva_large|beit3|aimv2)(_("
    r"tiny|wee|little|xsmall|small|medium|mediumd|betwixt|base|large|huge|giant|giantopt|gigantic|"
    r"so150m|so150m2|so400m|plus|36x1|patch\d+|\d+|reg\d+|gap|map|clip|quickgelu|siglip|"
    r"dinov2|tipsv2|miil|rpn|intern300m|radio_v\d|distilled|r|r26|r50|s16|s32|p8|"
    r"1b|3b|in21k|in21ft1k|sam|dino|laion2b))*"
)
_WHOLE = re.compile(r"patch\d|flexivit|test_vit|_r\d*_s\d|beit")
# The meaning of words in the names of models that have a ViT's tensors or most of them.
_OTHERS = {
    r"s?relpos": "relative positions in a layout of its own",
    r"xp|\d+x2|d?pwee": "branches in parallel",
    r"d(little|wee)": "differential attention",
    r"cait": "heads that are mixed before and after the softmax (talking heads)",
    r"naflexvit": "patches of any number in a batch, under names of its own",
    r"mci": "a convolutional stem of its own",
    r"\w+26d|\w+50d": "a ResNet-D as its stem",
}
# Some names that are read, to suggest the nearest.
_EXAMPLES = """
    vit_tiny_patch16_224 vit_small_patch16_224 vit_small_patch32_224 vit_base_patch8_224 vit_base_patch16_224
    vit_base_patch16_384 vit_base_patch32_224 vit_large_patch16_224 vit_base_patch16_clip_224
    vit_large_patch14_clip_224 vit_base_patch16_siglip_224 vit_so400m_patch14_siglip_224
    vit_small_patch14_dinov2 vit_base_patch14_reg4_dinov2 vit_medium_patch16_reg4_gap_256
    vit_small_r26_s32_224 deit_small_patch16_224 deit_base_distilled_patch16_224 deit3_base_patch16_224
    flexivit_base
"""
_FAMILIES = "vit_*, deit_*, deit3_*, flexivit_*, eva_*, eva02_*, beit_* and beitv2_*"


def is_whole(name: str) -> bool:
    """Whether a name specifies more than the shapes do: a file called `vit_base.pth` does not."""
    return _WHOLE.search(name) is not None


def unreadable(name: str) -> str | None:
    """The reason to reject an architecture although a configuration may fit its tensors; else None."""
    for word, what in _OTHERS.items():
        if re.search(rf"(^|_)({word})(_|$)", name):
            similar = suggestion(name, _EXAMPLES.split())
            return f"timm's {name} has {what}; no model of vitascope has that{similar}"
    return None


def unknown(name: str) -> str:
    """The reason to reject a name that is not a plain ViT's."""
    if reason := unreadable(name):
        return f"{name} is not a plain ViT: {reason}"
    similar = suggestion(name, _EXAMPLES.split()) if re.match("vit|deit|flexivit", name) else ""
    return f"{name} is not a plain ViT of timm's; vitascope reads {_FAMILIES}{similar}"


_WIDTHS = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant", "7b": "7b"}
_SUFFIXES = {"_reg": "_reg4", "_plus": "_plus", "_distilled": "_distilled", "": ""}


def _timm_name(ours: str) -> str:
    """timm's name of a size of ours, without the image size; empty if timm has none."""
    match = re.fullmatch(r"(vit|deit|dinov2|dinov3)_(7b|\D+)(\d+)(_reg|_plus|_distilled|)", ours)
    if match is None:
        return ""
    family, width, patch, suffix = match[1], _WIDTHS[match[2]], f"_patch{match[3]}", _SUFFIXES[match[4]]
    if family in ("vit", "deit"):
        return f"{family}_{width}{suffix}{patch}"
    after = suffix == "_reg4"
    return f"vit_{width}{'' if after else suffix}{patch}{suffix if after else ''}_{family}"


# Our names by timm's, without image size and tag.
TIMM_NAMES: dict[str, str] = {_timm_name(ours): ours for ours in NAMED_SIZES if _timm_name(ours)}
TIMM_NAMES |= {
    "vit_small_r26_s32": "vit_r26_s32",
    "vit_base_r50_s16": "vit_r50_b16",
    "vit_large_r50_s32": "vit_r50_l32",
}


def from_timm_name(name: str) -> tuple[str, dict[str, Any]] | None:
    """Our name of timm's model and the options that differ, such as its image size; None if there is none."""
    match = re.fullmatch(r"(.+?)(?:_(\d{3}))?(?:\..*)?", name)
    if match is None or match[1] not in TIMM_NAMES:
        return None
    ours = TIMM_NAMES[match[1]]
    if "dinov3" in ours:
        return ours, {"image_size": int(match[2] or 256)}  # timm's size of DINOv3
    options: dict[str, Any] = {"image_size": int(match[2])} if match[2] else {}
    if NAMED_SIZES[ours].options.get("stem") == "resnet":
        options["resnet_dialect"] = "timm"
    return ours, options | {"norm_eps": 1e-6, "resample": "timm"}


POOLS = {"token": "cls", "avg": "mean", "map": "map"}  # our names of timm's `global_pool`
POOLS_THERE = {ours: theirs for theirs, ours in POOLS.items()}
NORMS = {"layer": "layernorm", "rms": "rmsnorm"}
"""timm's names of our norms."""
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
        'norm "branch"': config.block.norm == "branch",
    }
    return [name for name, found in special.items() if found]


def is_aimv2(config: ViTConfig) -> bool:
    """Whether a model is of AIMv2's kind, whose function splits SwiGLU and has an epsilon of 1e-5."""
    kind = (config.norms.norm_type, config.norms.norm_eps, config.block.mlp, config.embedding.patch_norm)
    return kind == ("rms", 1e-5, "swiglu", True)


def settings(config: ViTConfig, preprocess: Preprocess) -> dict[str, Any]:
    """The content of `config.json` for a model of `vision_transformer.py`."""
    return config_json(config, preprocess, _architecture(config), _arguments(config))


def config_json(
    config: ViTConfig, preprocess: Preprocess, architecture: str, args: dict[str, Any]
) -> dict[str, Any]:
    """The content of `config.json`: a function of timm, and the arguments with which it builds the model."""
    pretrained = _pretrained(config, preprocess)
    if not pretrained["fixed_input_size"]:
        args = {**args, "dynamic_img_size": True}
    values = {
        "architecture": architecture,
        "num_classes": pretrained["num_classes"],
        "num_features": config.embed_dim,
        "global_pool": args["global_pool"],
        "outputs": config.outputs,  # for us, as `thresholds`: timm does not know what its outputs are
        "thresholds": list(config.thresholds),
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
    if is_aimv2(config):
        return "aimv2_1b_patch14_224"
    if config.block.mlp == "swiglu":
        return "vit_giant_patch14_dinov2"
    if config.block.norm == "branch":
        return "vit_base_patch16_rpn_224"
    return "vit_base_patch16_clip_224" if config.norms.norm_eps == 1e-5 else "vit_base_patch16_224"


def written_ratio(hidden: int, embed_dim: int) -> float:
    """The `mlp_ratio` of a hidden layer; timm cuts where we round."""
    exact = hidden / embed_dim
    return exact if int(embed_dim * exact) == hidden else (hidden + 0.5) / embed_dim


def _arguments(config: ViTConfig) -> dict[str, Any]:
    """`model_args`: the arguments with which that function builds this model."""
    (ph, pw), layers, scale = config.patch_hw, config.embedding.resnet_layers, config.block.layer_scale
    step = ResNetConfig(layers=layers).stride if config.embedding.stem == "resnet" else 1
    packed = config.block.mlp == "swiglu" and not is_aimv2(config)  # gate and value in one matrix
    D, hidden = config.embed_dim, config.mlp_dim * (2 if packed else 1)
    args: dict[str, Any] = {
        "img_size": list(config.image_hw),
        "patch_size": [ph // step, pw // step],  # on a ResNet's feature map
        "in_chans": config.in_channels,
        "embed_dim": D,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": written_ratio(hidden, D),
        "qkv_bias": config.block.qkv_bias == "all",
        "qk_norm": config.norms.qk_norm,
        "proj_bias": config.block.linear_bias,
        # Not None, which timm takes for its function's own choice; 0 is none, so a start at 0 needs another.
        "init_values": 0.0 if scale is None else scale or 1e-5,
        "global_pool": POOLS_THERE[config.readout.pool],
        "pool_include_prefix": config.readout.pool_prefix,
        "scale_attn_norm": config.norms.inner_norm == "all",
        "scale_mlp_norm": config.norms.inner_norm != "none",
        "final_norm": config.readout.pool_norm != "none",
        "fc_norm": config.readout.pool_norm == "after",
        "class_token": config.readout.has_class_token,
        "no_embed_class": not config.embedding.position_prefix,
        "reg_tokens": config.readout.num_registers,
        "pre_norm": config.embedding.embedding_norm,
        "pos_embed": "learn" if config.embedding.positions == "learned" else "none",
    }
    if config.norms.norm_type == "rms" and not is_aimv2(config):
        args["norm_layer"] = NORMS["rms"]
    if config.embedding.patch_norm and not is_aimv2(config):
        args["embed_norm_layer"] = NORMS[config.norms.norm_type]
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
