"""facebook's DeiT, distilled DeiT and DeiT-III: `.pth` files with the state under "model".

Facts: facebookresearch/deit, `models.py`, `models_v2.py`, `datasets.py`. A file is written so that its
`main.py --eval --model NAME --resume model.pth`, or the model's own

    model.load_state_dict(torch.load("model.pth")["model"])

loads it. A plain DeiT has timm's names and nothing else: only who loads it knows that it is one.
"""

from __future__ import annotations

from pathlib import Path

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.families.pth import (
    has_timms_body,
    imagenet,
    is_named,
    square_side,
    untold,
    with_timms_names,
    write_pth,
)
from vitascope.weights.families.timm_body import BODY, assumed_heads, body_options, heads
from vitascope.weights.mapping import Family, Source, State, Table

TABLE: Table = {
    **BODY,
    "encoder.blocks.{i}.scale1.gamma": "blocks.{i}.gamma_1",
    "encoder.blocks.{i}.scale2.gamma": "blocks.{i}.gamma_2",
}
_RESAMPLE = "huggingface"  # bicubic without antialiasing, as in DeiT's `main.py`


class Deit(Family):
    """facebook's DeiT, with or without a distillation token, and DeiT-III."""

    name = "deit"
    holds = {  # noqa: RUF012 - a constant
        "stem": ("conv", "linear"),
        "position_prefix": (),
        "qkv_bias": ("all", "none"),
        "mlp_ratio": (),
        "layer_scale": (),
        "class_token": (None, True),
        "distillation_token": (),
        "head": ("linear", "zero", "none"),
    }

    def settled(self, config: ViTConfig) -> ViTConfig:
        """Its models have an epsilon of 1e-6, and one rule of interpolation."""
        return config.replace(norm_eps=1e-6, resample=_RESAMPLE)

    def objections(self, config: ViTConfig) -> list[str]:
        """What its two model files tie together."""
        reasons, scaled = [], config.block.layer_scale is not None
        if config.embedding.position_prefix == scaled:
            reasons.append(f"position_prefix {scaled} {'with' if scaled else 'without'} layer_scale")
        if scaled and config.readout.distillation_token:
            reasons.append("layer_scale with a distillation_token")
        if config.readout.head == "none" and config.readout.distillation_token:  # it then averages both
            reasons.append("head 'none' with a distillation_token")
        return reasons or untold(config)

    def recognizes(self, source: Source) -> bool:
        """A distillation token, or layer scale by its own name; a plain DeiT could be timm's."""
        own = source.has("dist_token") or source.has("blocks.0.gamma_1")
        return has_timms_body(source) and source.has("pos_embed") and own

    def table(self, config: ViTConfig) -> Table:
        """timm's names, but for the layer scale."""
        return TABLE

    def read_config(self, source: Source) -> ViTConfig:
        """From the shapes; the image is a square."""
        options = body_options(with_timms_names(source))
        covers_prefix = options["layer_scale"] is None  # DeiT-III adds positions before the class token joins
        prefix = 1 + options["distillation_token"] if covers_prefix else 0
        side, (ph, pw) = square_side(source, "pos_embed", prefix), options["patch_size"]
        options |= {
            "image_size": (side * ph, side * pw),
            "num_heads": heads(source, options["embed_dim"]),
            "norm_eps": 1e-6,
            "position_prefix": covers_prefix,
            "resample": _RESAMPLE,
        }
        return ViTConfig.from_dict(options)

    def assumed(self, source: Source, config: ViTConfig) -> str:
        """Heads, in a file that has none of its names."""
        return "" if is_named(source, "deit") else assumed_heads(source, config)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """As its `main.py` evaluates: bicubic, a crop of 0.875 at every size.

        DeiT-III's commands (README_revenge.md) all say `--eval-crop-ratio 1.0`.
        """
        is_third = config.block.layer_scale is not None
        side = int(max(config.image_hw) / (1.0 if is_third else 0.875))
        return imagenet(config, resize_to=(side, side))

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        """`model.pth`, the state under "model"."""
        return [write_pth(folder / "model.pth", {"model": state})]
