"""timm's models of `beit.py`: BEiT and BEiT v2.

Facts: timm 1.0.31, `models/beit.py`.
"""

import dataclasses
import re
from typing import Any

from vitascope.models.config import ViTConfig
from vitascope.models.options import CLASSES
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families import timm, timm_eva, timm_settings
from vitascope.models.weights.families.relative_tables import (
    TABLE,
    join_tables,
    relative_names,
    relative_options,
    split_tables,
)
from vitascope.models.weights.families.timm_body import heads, join_gates, place_options, split_gates
from vitascope.models.weights.families.timm_settings import POOLS_THERE
from vitascope.models.weights.mapping import PLAIN_VIT, Source, State, Table, checked_config, supporting

NAME = re.compile(r"beit(v2)?_(base|large)_patch\d+_\d+")
_BLOCK, _SHARED = "blocks.{}.attn.", "rel_pos_bias."
_ARGUMENTS = re.compile(
    "img_size|patch_size|in_chans|num_classes|global_pool|embed_dim|depth|num_heads|qkv_bias|mlp_ratio|swiglu_mlp|"
    "scale_mlp|init_values|use_abs_pos_emb|use_rel_pos_bias|use_shared_rel_pos_bias|head_init_scale|use_fc_norm|"
    ".*_rate"
)


class TimmBeit(timm.TimmModule):
    """timm's Beit."""

    module = "beit.py"
    supports = PLAIN_VIT | supporting(
        "layer_scale",
        positions=("relative", "relative_by_block", "learned", "none"),
        absolute=("none", "all"),
        inner_norm=("none", "mlp"),
        qkv_bias=("no_key", "none"),
        mlp=("gelu", "swiglu"),
        pool=("cls", "mean"),
        pool_norm=("before", "after"),
        head=("linear", "none"),
        outputs=(*CLASSES, "embedding"),
    )
    ignored = ("mask_token", "*relative_position_index")

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        return config.replace(norm_eps=1e-6, resample="timm")

    def conflicts(self, config: ViTConfig) -> list[str]:
        return [] if config.readout.has_class_token else ["class_token False"]

    def function(self, source: Source) -> str:
        return next((name for name in timm.names(source) if NAME.fullmatch(name)), "")

    def before_reading(self, source: Source) -> Source:
        """One matrix for gate and values, and each table of relative positions in two parts."""
        source = super().before_reading(source)
        tensors = dict(source.tensors)
        join_gates(tensors)
        split_tables(tensors, _grid(source), source.name)
        return dataclasses.replace(source, tensors=tensors)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        state = dict(state)
        join_tables(state)
        if config.block.mlp == "swiglu":
            split_gates(state)
        return state

    def table(self, config: ViTConfig) -> Table:
        by_block = config.embedding.positions == "relative_by_block"
        keyless = timm_eva.NO_KEY if config.block.qkv_bias == "no_key" else {}
        return {**relative_names(by_block, config.depth, _BLOCK, _SHARED), **keyless, **timm_eva.EVA}

    def read_config(self, source: Source) -> ViTConfig:
        args, options = timm.given_arguments(source, _ARGUMENTS), self.options(source)
        options |= {
            "num_heads": args.get("num_heads") or heads(source, options["embed_dim"]),
            "pool": timm.read_pool(source, args.get("global_pool", source.config.get("global_pool", "avg"))),
        }
        options |= place_options(source, options, args.get("img_size") or timm.input_hw(source))
        if relative := relative_options(source, _BLOCK, _SHARED, learned=source.has("pos_embed")):
            options |= relative | {"position_prefix": True}
        return checked_config(source, options)

    def settings(self, config: ViTConfig, preprocess: Preprocess) -> dict[str, Any]:
        embedding, block, scale = config.embedding, config.block, config.block.layer_scale
        args: dict[str, Any] = {
            "img_size": list(config.image_hw),
            "patch_size": list(config.patch_hw),
            "in_chans": config.in_channels,
            "embed_dim": config.embed_dim,
            "depth": config.depth,
            "num_heads": config.num_heads,
            "qkv_bias": block.qkv_bias == "no_key",
            "mlp_ratio": timm_settings.written_ratio(config.mlp_dim, config.embed_dim),
            "swiglu_mlp": block.mlp == "swiglu",
            "scale_mlp": config.norms.inner_norm == "mlp",
            "init_values": 0.0 if scale is None else float(scale) or 1e-5,  # 0 is none there
            "use_abs_pos_emb": embedding.learned == "all",
            "use_rel_pos_bias": embedding.positions == "relative_by_block",
            "use_shared_rel_pos_bias": embedding.positions == "relative",
            "use_fc_norm": config.readout.pool_norm == "after",
            "global_pool": POOLS_THERE[config.readout.pool],
        }
        content = timm_settings.config_json(config, preprocess, "beit_base_patch16_224", args)
        content["model_args"].pop("dynamic_img_size", None)  # it has none: its size is that of the table
        return content


def _grid(source: Source) -> tuple[int, int] | None:
    """The grid of patches that the settings give."""
    size = timm.given_arguments(source, _ARGUMENTS).get("img_size") or timm.input_hw(source)
    height, width = (size, size) if isinstance(size, int) else tuple(size or (0, 0))
    ph, pw = source.shape("patch_embed.proj.weight", 4)[2:]
    grid = (int(height) // ph, int(width) // pw)
    counts = {tensor.shape[0] - 3 for name, tensor in source.tensors.items() if name.endswith(TABLE)}
    return grid if (2 * grid[0] - 1) * (2 * grid[1] - 1) in counts else None
