"""facebook's DeiT, distilled DeiT and DeiT-III: `.pth` files with the state under "model".

Facts: facebookresearch/deit, `models.py`, `models_v2.py`, `datasets.py`. A file is written so that its
`main.py --eval --model NAME --resume model.pth`, or the model's own

    model.load_state_dict(torch.load("model.pth")["model"])

loads it. A plain DeiT has timm's names and nothing else, so its family has to be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.families import pth
from vitascope.weights.families.timm_body import BODY, body_options, heads
from vitascope.weights.mapping import PLAIN_VIT, Source, State, Table, any_of

TABLE: Table = {"encoder.blocks.{i}.scale{n}.gamma": "blocks.{i}.gamma_{n}", **BODY}
_FIXED = {"norm_eps": 1e-6, "resample": "huggingface"}  # bicubic without antialiasing, as in its `main.py`


class Deit(pth.PthFamily):
    """facebook's DeiT, with or without a distillation token, and DeiT-III."""

    name = "deit"
    holds = (
        PLAIN_VIT
        | any_of("position_prefix", "layer_scale", "distillation_token")
        | {
            "qkv_bias": ("all", "none"),
            "head": ("linear", "zero", "none"),
        }
    )

    def settled(self, config: ViTConfig) -> ViTConfig:
        return config.replace(**_FIXED)

    def objections(self, config: ViTConfig) -> list[str]:
        reasons, scaled = [], config.block.layer_scale is not None
        if config.embedding.position_prefix == scaled:
            reasons.append(f"position_prefix {scaled} {'with' if scaled else 'without'} layer_scale")
        if scaled and config.readout.distillation_token:
            reasons.append("layer_scale with a distillation_token")
        if config.readout.head == "none" and config.readout.distillation_token:  # it then averages both
            reasons.append("head 'none' with a distillation_token")
        return reasons or pth.untold(config)

    def recognizes(self, source: Source) -> bool:
        own = source.has("dist_token") or source.has("blocks.0.gamma_1")
        return pth.has_timms_body(source) and source.has("pos_embed") and own

    def table(self, config: ViTConfig) -> Table:
        return TABLE

    def read_config(self, source: Source) -> ViTConfig:
        options = body_options(pth.with_timms_names(source))
        covers_prefix = options["layer_scale"] is None  # DeiT-III adds positions before the class token joins
        prefix = 1 + options["distillation_token"] if covers_prefix else 0
        options |= {
            "image_size": pth.square_size(source, "pos_embed", prefix, options["patch_size"]),
            "num_heads": heads(source, options["embed_dim"]),
            "position_prefix": covers_prefix,
        }
        return ViTConfig.from_dict(options | _FIXED)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The evaluation of `main.py`: a crop of 0.875, for DeiT-III (README_revenge.md) of 1."""
        is_third = config.block.layer_scale is not None
        side = int(max(config.image_hw) / (1.0 if is_third else 0.875))
        return pth.imagenet(config, resize_to=(side, side))

    def wrapped(self, state: State) -> Mapping[str, Any]:
        return {"model": state}
