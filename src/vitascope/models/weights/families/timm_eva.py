"""timm's models of `eva.py`: EVA, EVA-02, DINOv3, RoPE-ViT, LingBot, Perception Encoder and Sapiens2.

Facts: timm 1.0.31, `models/eva.py`, `layers/pos_embed_sincos.py`, `layers/mlp.py`.

The functions of timm have options that no tensor shows (heads, rotary positions, epsilon). They are read from
the architecture's name here, and `model_args` come before them.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitascope.models.config import ViTConfig
from vitascope.models.options import CLASSES
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families import timm, timm_settings
from vitascope.models.weights.families.timm_body import (
    BODY,
    check_published,
    heads,
    join,
    join_gates,
    place_options,
    split_gates,
)
from vitascope.models.weights.families.timm_settings import POOLS_THERE
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import (
    PLAIN_VIT,
    Source,
    State,
    Table,
    check_setting,
    checked_config,
    stacked,
    supporting,
)

_BLOCK, _THEIRS = "encoder.blocks.{i}.", "blocks.{i}."
EVA: Table = {
    _BLOCK + "scale{n}.gamma": _THEIRS + "gamma_{n}",
    "positions.frequencies": "rope.freqs",
    **timm.ATTENTION_POOL,
    **BODY,
}
NO_KEY: Table = {_BLOCK + "attention.qkv.bias": stacked(_THEIRS + "attn.q_bias", _THEIRS + "attn.v_bias")}

# The arguments of its functions that no tensor shows, by the architecture's name: the first that matches.
_ANY: dict[str, Any] = {"use_rot_pos_emb": False, "rope_type": "cat", "rope_grid_offset": 0.0}
_ANY |= {"rope_grid_indexing": "ij", "rope_temperature": 10000.0, "rope_rotate_half": False}
_ANY |= {"ref_feat_shape": None, "use_post_norm": False, "global_pool": "avg"}
_ANY |= {"attn_pool_num_heads": None, "attn_pool_mlp_ratio": None}
_ROTARY = {"use_rot_pos_emb": True}
_EVA02 = {**_ROTARY, "ref_feat_shape": (16, 16)}
_NAVER = {**_ROTARY, "rope_grid_indexing": "xy", "rope_temperature": 100.0, "global_pool": "token"}
_PE = {**_ROTARY, "rope_grid_indexing": "xy", "ref_feat_shape": (32, 32)}
_PE_CORE = {**_PE, "global_pool": "map", "attn_pool_num_heads": 8, "attn_pool_mlp_ratio": 4.0}
_DINOV3 = {**_ROTARY, "rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True}
FUNCTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"eva_giant_patch14_\d+", {}),
    (r"eva_giant_patch14_clip_\d+", {"global_pool": "token"}),
    (r"eva02_(tiny|small|base|large)_patch14_\d+", _EVA02),
    (r"eva02_(base|large)_patch\d+_clip_\d+", {**_EVA02, "global_pool": "token"}),
    (r"eva02_enormous_patch14_clip_\d+", {"use_post_norm": True, "global_pool": "token"}),
    (r"vit_(medium|mediumd|betwixt|base)_patch16_rope_reg\d_gap_\d+", _EVA02),
    (r"vit_(small|base|large)_patch16_rope(_ape)?_\d+", _NAVER),
    (
        r"vit_(small|base|large)_patch16_rope_mixed(_ape)?_\d+",
        {**_NAVER, "rope_type": "mixed", "rope_temperature": 10.0},
    ),
    (r"vit_pe_(lang|spatial)_gigantic_patch14_\d+", _PE),
    (r"vit_pe_(lang|spatial)_(tiny|small|base|large)_patch\d+_\d+", {**_PE, "rope_grid_offset": 1.0}),
    (r"vit_pe_core_gigantic_patch14_\d+", _PE_CORE),
    (
        r"vit_pe_core_base_patch16_\d+",
        {**_PE_CORE, "rope_grid_offset": 1.0, "ref_feat_shape": (14, 14)},
    ),
    (
        r"vit_pe_core_(tiny|small|large)_patch\d+_\d+",
        {**_PE_CORE, "rope_grid_offset": 1.0, "ref_feat_shape": (24, 24)},
    ),
    (r"vit_(tiny|small|small_plus|base|large|huge_plus|7b)_patch16_dinov3(_qkvb)?", _DINOV3),
    (r"vit_(base|large|huge|giant|5b)_patch16_sapiens2", {**_DINOV3, "global_pool": "token"}),
    (r"vit_(small|base|large|giant)_patch16_lingbot", {**_DINOV3, "global_pool": "token"}),
)
_COARSE = re.compile(r"vit_pe_|.*_(dinov3|lingbot)")  # an epsilon of 1e-5
_HEADS = {"eva02_enormous": 16, "eva_giant": 16, "7b": 32, "5b": 32, "pe_lang_gigantic": 16}
_HEADS |= {"pe_spatial_gigantic": 16, "pe_core_gigantic": 16}
# Arguments that are read here, or that tensors show, or that change no output in evaluation.
_ARGUMENTS = re.compile(
    "img_size|patch_size|in_chans|num_classes|embed_dim|depth|num_heads|qkv_bias|qkv_fused|mlp_ratio|swiglu_mlp|"
    "swiglu_align_to|scale_mlp|scale_attn_inner|attn_type|init_values|class_token|num_reg_tokens|no_embed_class|"
    "use_abs_pos_emb|use_pre_transformer_norm|use_post_transformer_norm|use_fc_norm|dynamic_img_size|"
    "head_init_scale|qk_norm|num_kv_heads|attn_only_layer_scale|rope_(shift|jitter|rescale)_coords|.*_rate|"
    + "|".join(_ANY)
)
_POSITIONS = {"cat": "rotary_axial", "mixed": "rotary_mixed", "dinov3": "rotary"}


class TimmEva(timm.TimmModule):
    """timm's Eva."""

    module = "eva.py"
    supports = PLAIN_VIT | supporting(
        "patch_bias position_prefix absolute rotary_base rotary_grid rotary_offset embedding_norm inner_norm "
        "qk_norm layer_scale class_token num_registers pool_heads pool_mlp_ratio pool_norm",
        positions=("learned", "none", "rotary", "rotary_axial", "rotary_mixed"),
        norm=("pre", "branch"),
        norm_type=("layer", "rms"),
        norm_eps=(1e-6, 1e-5),
        qkv_bias=("all", "no_key", "none"),
        mlp=("gelu", "swiglu"),
        pool=("cls", "mean", "map"),
        pool_prefix=(False, True),
        head=("linear", "none"),
        outputs=(*CLASSES, "embedding"),
    )

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        """Norms have an epsilon of 1e-6 or 1e-5; rotary periods are exact."""
        fixed: dict[str, Any] = {}
        if config.norms.norm_eps not in (1e-6, 1e-5) or config.norms.norm_type == "rms":
            fixed["norm_eps"] = 1e-6
        if config.embedding.positions == "rotary":
            fixed["rotary_rounded"] = False
        if config.embedding.learned != "none":
            fixed["resample"] = "timm"
        return config.replace(**fixed)

    def conflicts(self, config: ViTConfig) -> list[str]:
        embedding, block, readout = config.embedding, config.block, config.readout
        special = [
            name
            for name, found in {
                "qk_norm": config.norms.qk_norm,
                "rms": config.norms.norm_type == "rms",
            }.items()
            if found
        ]
        own_grid = embedding.positions == "rotary_axial" and config.rotary.rotary_grid is None
        reasons = {
            "patch_bias and embedding_norm both on or both off": embedding.patch_bias
            == embedding.embedding_norm,
            'norm "branch" and layer_scale': block.norm == "branch" and block.layer_scale is not None,
            'norm "branch" and ' + " and ".join(special): block.norm == "branch" and bool(special),
            'norm_type "rms" without layer_scale': config.norms.norm_type == "rms"
            and block.layer_scale is None,
            'pool "map" and mlp "swiglu"': readout.pool == "map" and block.mlp == "swiglu",
            'pool "map" and pool_prefix False': readout.pool == "map"
            and not readout.pool_prefix
            and config.num_prefix_tokens > 0,
            'norm_eps 1e-05, positions "rotary_axial" and no rotary_grid': config.norms.norm_eps == 1e-5
            and own_grid,
        }
        return [what for what, found in reasons.items() if found]

    def function(self, source: Source) -> str:
        return _name(source)

    def before_reading(self, source: Source) -> Source:
        """One matrix for queries, keys and values, and one for gate and values; pairs of channels that are
        rotated together half a head apart; keys and values for each head, and a scale for each branch."""
        source = super().before_reading(source)
        tensors = dict(source.tensors)
        for index in range(source.count("blocks.{i}.norm1.weight")):
            repeat_shared(tensors, f"blocks.{index}.")
            join(tensors, f"blocks.{index}.attn.qkv.weight", f"blocks.{index}.attn.{{}}_proj.weight", "qkv")
            join(tensors, f"blocks.{index}.attn.qkv.bias", f"blocks.{index}.attn.{{}}_proj.bias", "qkv")
            for part in "qv":
                join(tensors, f"blocks.{index}.attn.{part}_bias", f"blocks.{index}.attn.{{}}_proj.bias", part)
        join_gates(tensors)
        source = dataclasses.replace(source, tensors=tensors)
        args = _arguments(source)
        if not args["use_rot_pos_emb"]:
            return source
        if args["rope_grid_indexing"] == "ij" and "rope.freqs" in tensors:
            tensors["rope.freqs"] = tensors["rope.freqs"].flip(0)
        exchanged = args["rope_grid_indexing"] == "xy" and args["rope_type"] != "mixed"
        if not args["rope_rotate_half"] or exchanged:
            D = source.shape("patch_embed.proj.weight", 4)[0]
            count = _heads(source, args, D)
            order = channels(D // max(1, count), bool(args["rope_rotate_half"]), exchanged)
            reorder(tensors, count, order)
        return source

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """Pairs of channels as timm rotates them, side by side but in DINOv3; two matrices beside a norm."""
        state = dict(state)
        if config.block.mlp == "swiglu" and config.norms.inner_norm != "none":
            split_gates(state)
        if config.embedding.positions in ("rotary_axial", "rotary_mixed"):
            reorder(
                state, config.num_heads, channels(config.head_dim, halves=False, exchanged=False).argsort()
            )
        return state

    def table(self, config: ViTConfig) -> Table:
        return {**NO_KEY, **EVA} if config.block.qkv_bias == "no_key" else EVA

    def read_config(self, source: Source) -> ViTConfig:
        args, name = _arguments(source), _name(source)
        options = self.options(source)
        options |= {
            "num_heads": _heads(source, args, options["embed_dim"]),
            "norm": "branch" if args["use_post_norm"] else "pre",
            "norm_eps": 1e-5 if _COARSE.match(name) else 1e-6,
            "pool": timm.read_pool(source, args["global_pool"]),
        }
        if options["pool"] == "map":
            options |= {
                "pool_heads": args["attn_pool_num_heads"],
                "pool_mlp_ratio": args["attn_pool_mlp_ratio"],
                "pool_prefix": True,
            }
        check_published(source, name, options, timm.given_arguments(source, _ARGUMENTS))
        if "outputs" not in options and timm.is_projection(source, name, options):
            options["outputs"] = "embedding"
        options |= place_options(source, options, args.get("img_size") or timm.input_hw(source))
        if args["use_rot_pos_emb"]:
            options |= _rotary_options(source, args, options)
        return checked_config(source, options)

    def settings(self, config: ViTConfig, preprocess: Preprocess) -> dict[str, Any]:
        function = "eva_giant_patch14_224"
        if config.norms.norm_type == "rms":
            function = "vit_base_patch16_sapiens2"
        elif config.norms.norm_eps == 1e-5:
            function = "vit_pe_spatial_tiny_patch16_512"
        return timm_settings.config_json(config, preprocess, function, _written_arguments(config))


def repeat_shared(tensors: State, block: str) -> None:
    """Give each head its own copy of keys and values that several share, and the MLP's branch a scale of one.

    The function stays the same. Grouped-query attention (Ainslie et al. 2023) is Sapiens2's, as is a scale of
    attention alone.
    """
    gamma = tensors.get(block + "gamma_1")
    if gamma is not None:
        tensors.setdefault(block + "gamma_2", torch.ones_like(gamma))
    queries, width = tensors.get(block + "attn.q_proj.weight"), tensors.get(block + "attn.q_norm.weight")
    if queries is None or width is None:
        return
    for name in (f"{block}attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")):
        shared = tensors.get(name)
        if shared is not None and len(shared) < len(queries) and len(shared) % len(width) == 0:
            heads_of_each = len(queries) // len(shared)
            tensors[name] = (
                shared.unflatten(0, (-1, len(width))).repeat_interleave(heads_of_each, 0).flatten(0, 1)
            )


def channels(head_dim: int, halves: bool, exchanged: bool) -> Tensor:
    """The number that each channel of a head of ours has in theirs, (hd,).

    Ours rotate channels half a head apart, first by the row, then by the column. Theirs are side by side
    (unless in `halves`), and by the column first if `exchanged`.
    """
    count = head_dim // 2
    angle = torch.arange(count)
    if exchanged:
        angle = (angle + count // 2) % count
    return torch.cat([angle, angle + count] if halves else [2 * angle, 2 * angle + 1])


def reorder(tensors: State, num_heads: int, order: Tensor) -> None:
    """Put the channels of each head's queries and keys into another order: its scores stay the same."""
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blocks\.\d+\.attn\.(qkv\.weight|qkv\.bias|q_bias|[qk]_norm\.\w+)", name)
        if not match:
            continue
        parts, count = 3, num_heads
        if not match[1].startswith("qkv"):
            parts, count = 1, 1 if "norm" in match[1] else num_heads  # heads share a norm
        if tensor.shape[0] != parts * count * len(order):
            raise CheckpointError(
                f"{name} {tuple(tensor.shape)} does not fit {num_heads} heads of {len(order)} channels"
            )
        split = tensor.unflatten(0, (parts, count, len(order)))
        tensors[name] = torch.cat([split[:2, :, order], split[2:]]).flatten(0, 2)


def _name(source: Source) -> str:
    """The architecture's name, if it is one of `FUNCTIONS`; else it is empty."""
    return next((name for name in timm.names(source) if _function(name) is not None), "")


def _function(name: str) -> dict[str, Any] | None:
    """The arguments of a function of timm's; None if it is none of `FUNCTIONS`."""
    found = (args for pattern, args in FUNCTIONS if re.fullmatch(pattern, name))
    return next(({**_ANY, **args} for args in found), None)


def _arguments(source: Source) -> dict[str, Any]:
    """The arguments of timm's constructor: those of the function, and over them `model_args`."""
    given = timm.given_arguments(source, _ARGUMENTS)
    found = _function(_name(source))
    assert found is not None, "recognized"
    args = {**found, **{key: value for key, value in given.items() if value is not None}}
    if "global_pool" in source.config and "global_pool" not in given:
        args["global_pool"] = source.config["global_pool"]
    known = {"rope_type": tuple(_POSITIONS), "rope_grid_indexing": ("ij", "xy")}
    for key, values in known.items():
        check_setting(source, key, args[key], values)
    return args


def _heads(source: Source, args: Mapping[str, Any], embed_dim: int) -> int:
    if given := args.get("num_heads"):
        return int(given)
    name = _name(source)
    named = next((count for part, count in _HEADS.items() if part in name), None)
    return named or heads(source, embed_dim)


def _rotary_options(source: Source, args: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    kind = _POSITIONS[args["rope_type"]]
    learned = source.has("pos_embed")
    found: dict[str, Any] = {"positions": kind, "rotary_base": float(args["rope_temperature"])}
    found["absolute"] = ("all" if options["position_prefix"] else "patches") if learned else "none"
    found["position_prefix"] = True
    if kind == "rotary_axial":
        found |= {"rotary_grid": args["ref_feat_shape"], "rotary_offset": float(args["rope_grid_offset"])}
    elif kind == "rotary" and args["rope_grid_offset"]:
        raise CheckpointError(
            f"{source.name}: vitascope has no model with timm's rope_type 'dinov3' and rope_grid_offset "
            f"{args['rope_grid_offset']!r}"
        )
    return found


def _written_arguments(config: ViTConfig) -> dict[str, Any]:
    """`model_args`: the arguments with which the function builds this model."""
    embedding, block, readout = config.embedding, config.block, config.readout
    D, scale, grid = config.embed_dim, block.layer_scale, config.rotary.rotary_grid
    args: dict[str, Any] = {
        "img_size": list(config.image_hw),
        "patch_size": list(config.patch_hw),
        "in_chans": config.in_channels,
        "embed_dim": D,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "qkv_bias": block.qkv_bias != "none",
        "qk_norm": config.norms.qk_norm,
        "attn_type": "rope" if block.qkv_bias == "all" else "eva",
        "mlp_ratio": timm_settings.written_ratio(config.mlp_dim, D),
        "swiglu_mlp": block.mlp == "swiglu",
        "scale_mlp": config.norms.inner_norm != "none",
        "scale_attn_inner": config.norms.inner_norm == "all",
        "class_token": readout.has_class_token,
        "num_reg_tokens": readout.num_registers,
        "no_embed_class": embedding.learned == "patches",
        "use_abs_pos_emb": embedding.learned != "none",
        "use_rot_pos_emb": embedding.rotary,
        "use_post_norm": block.norm == "branch",
        "use_pre_transformer_norm": embedding.embedding_norm,
        "use_post_transformer_norm": readout.pool_norm == "before",
        "use_fc_norm": readout.pool_norm == "after",
        "global_pool": POOLS_THERE[readout.pool],
    }
    if scale is not None:
        args["init_values"] = float(scale)
    if config.norms.norm_type == "rms":  # the function's own choices for these are Sapiens2's
        args |= {"qkv_fused": True, "num_kv_heads": config.num_heads, "attn_only_layer_scale": False}
    if readout.pool == "map":
        args |= {
            "attn_pool_num_heads": readout.pool_heads,
            "attn_pool_mlp_ratio": readout.pool_mlp_ratio,
        }
    if embedding.rotary:
        args |= {
            "rope_type": {ours: theirs for theirs, ours in _POSITIONS.items()}[embedding.positions],
            "rope_temperature": float(config.rotary.rotary_base),
            "rope_grid_indexing": "xy" if embedding.positions == "rotary_mixed" else "ij",
            "rope_grid_offset": float(config.rotary.rotary_offset)
            if embedding.positions == "rotary_axial"
            else 0.0,
            "rope_rotate_half": embedding.positions == "rotary",
        }
    if grid is not None and embedding.positions == "rotary_axial":
        args["ref_feat_shape"] = [grid, grid] if isinstance(grid, int) else list(grid)
    return args
