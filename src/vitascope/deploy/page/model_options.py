"""The models that a page holds: a table of their options, and what the page's program needs to know."""

from __future__ import annotations

from typing import Any

from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.vision_model import VisionModel
from vitascope.model.vit import VisionTransformer

EVERY = "every value"
INSTEAD = "`vitascope serve` shows it"

HELD: dict[str, str | tuple[Any, ...]] = {
    **dict.fromkeys(("image_size", "num_classes", "class_names", "outputs", "thresholds"), EVERY),
    **dict.fromkeys(("patch_size", "remainder", "embed_dim", "depth", "num_heads"), EVERY),
    "in_channels": (1, 3),
    # Equation 1
    "stem": ("conv", "overlap", "tokenizer"),
    **dict.fromkeys(("stride", "patch_bias", "patch_norm", "tokenizer_widths", "embedding_norm"), EVERY),
    **dict.fromkeys(("resnet_layers", "resnet_width", "resnet_dialect"), EVERY),  # of the stem that is not
    **dict.fromkeys(("positions", "position_prefix", "absolute", "resample"), EVERY),
    **dict.fromkeys(("rotary_base", "rotary_rounded", "rotary_grid", "rotary_offset"), EVERY),
    # Equations 2 and 3
    "attention": ("global",),
    "token_merging": (0,),
    **dict.fromkeys(("norm", "window", "head_dim", "qkv_bias", "linear_bias"), EVERY),
    **dict.fromkeys(("mlp", "mlp_ratio", "layer_scale"), EVERY),
    **dict.fromkeys(("norm_type", "inner_norm", "norm_eps", "qk_norm"), EVERY),
    # Equation 4
    **dict.fromkeys(("class_token", "distillation_token", "num_registers"), EVERY),
    **dict.fromkeys(("pool", "pool_heads", "pool_mlp_ratio", "pool_prefix", "pool_norm"), EVERY),
    **dict.fromkeys(("head", "projection"), EVERY),
    # Training
    **dict.fromkeys(("init", "head_init", "dropout", "attention_dropout"), EVERY),
    **dict.fromkeys(("drop_path", "patch_dropout"), EVERY),
}
"""The values of each option of a model that the page's program has."""


def check_held(model: VisionModel) -> VisionTransformer:
    """The model, if a page can hold its kind; `UserError` names the option that it cannot."""
    if not isinstance(model, VisionTransformer):
        raise UserError(f"a page holds Vision Transformers, not a ResNet: {INSTEAD}")
    for name, values in HELD.items():
        value = model.config.option(name)
        if values is not EVERY and value not in values:
            known = " or ".join(map(repr, values))
            raise UserError(f"a page holds models of {name} {known}, not of {name} {value!r}: {INSTEAD}")
    return model


def program_options(config: ViTConfig) -> dict[str, Any]:
    """What `web/vit.js` needs to know of a model, as JSON."""
    readout = config.readout
    return {
        **{
            name: config.option(name)
            for name in ("embed_dim", "depth", "num_heads", "in_channels", "outputs")
        },
        **{name: config.option(name) for name in ("stem", "patch_norm", "embedding_norm", "norm", "mlp")},
        **{name: config.option(name) for name in ("norm_type", "inner_norm", "norm_eps", "qk_norm")},
        **{name: config.option(name) for name in ("distillation_token", "pool", "pool_prefix", "head")},
        "image_hw": config.tiled_hw(config.image_hw),
        "grid": config.grid,
        "prefix": config.num_prefix_tokens,
        "patch_size": config.patch_hw,
        "patch_stride": config.patch_stride,
        "tokenizer_channels": config.tokenizer_channels,
        "tokenizer_pools": config.tokenizer_pools,
        "head_dim": config.head_dim,
        "final_norm": config.final_norm,
        "num_pooled": readout.num_pooled,
        "pool_heads": readout.pool_heads or config.embed_dim // config.head_dim,
    }
