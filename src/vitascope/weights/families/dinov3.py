"""facebook's DINOv3: the `.pth` files of its hub.

Facts: facebookresearch/dinov3, `models/vision_transformer.py`, `layers/`, `hub/backbones.py`,
`data/transforms.py`. A file is written so that the model of its `hub/backbones.py`,

    model = torch.hub.load("facebookresearch/dinov3", "dinov3_vits16", pretrained=False)
    model.load_state_dict(torch.load("model.pth"))

loads it; one of another size than the hub's is its `DinoVisionTransformer(norm_layer="layernormbf16", ...)`.

The published files keep the periods of the rotary embedding as bfloat16 rounded them, and its code runs with
those, which `rotary_rounded` says; Hugging Face and timm run with exact ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.families import pth
from vitascope.weights.families.timm_body import BODY, body_options, place_options
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import PLAIN_VIT, Source, State, Stored, Table, any_of, stacked

_BASE = 100.0
_BFLOAT16 = 2**-8  # between one number of bfloat16 and the next, at most, over the number
_SATELLITE = {"mean": (0.430, 0.411, 0.296), "std": (0.213, 0.156, 0.143)}
_MASK = "blocks.{i}.attn.qkv.bias_mask"


def _with_key(bias: Tensor) -> list[Tensor]:
    """Biases of queries and values (2D,) as a bias of all three (3D,), and the mask that bars the keys'."""
    q, v = bias.chunk(2)
    one, zero = torch.ones_like(q), torch.zeros_like(q)
    return [torch.cat([q, zero, v]), torch.cat([one, zero, one])]


def _without_key(bias: Tensor) -> Tensor:
    q, _, v = bias.chunk(3)
    return torch.cat([q, v])


TABLE: Table = {**BODY, "registers": "storage_tokens"}
KEYLESS: Table = {
    "encoder.blocks.{i}.attention.qkv.bias": Stored(
        ("blocks.{i}.attn.qkv.bias", _MASK), lambda parts: _without_key(parts[0]), _with_key
    )
}
GATED: Table = {
    "encoder.blocks.{i}.mlp.fc1.*": stacked("blocks.{i}.mlp.w1.*", "blocks.{i}.mlp.w2.*"),
    "encoder.blocks.{i}.mlp.fc2.*": "blocks.{i}.mlp.w3.*",
}


class Dinov3(pth.PthFamily):
    """facebook's DINOv3: features, without a head."""

    name = "dinov3"
    holds = (
        PLAIN_VIT
        | any_of("rotary_rounded", "layer_scale", "num_registers")
        | {
            "positions": ("rotary",),
            "norm_eps": (1e-5,),
            "qkv_bias": ("no_key", "none", "all"),
            "mlp": ("gelu", "swiglu"),
            "head": ("none",),
        }
    )
    # The norm of local crops is of training only, as its code says.
    ignored = ("mask_token", "local_cls_norm.*", "rope_embed.periods")

    def settled(self, config: ViTConfig) -> ViTConfig:
        return config.replace(norm_eps=1e-5)

    def objections(self, config: ViTConfig) -> list[str]:
        return pth.not_square(config, "patch_size") + pth.unbuildable_gate(config)

    def recognizes(self, source: Source) -> bool:
        own = source.has("storage_tokens") or source.has("rope_embed.periods")
        return pth.has_timms_body(source) and not source.has("pos_embed") and own

    def arriving(self, source: Source) -> Source:
        """Unchanged; rejects other rotary periods, and masks that bar more than the bias of the keys."""
        if source.has("rope_embed.periods"):
            _check_periods(source)
        for name, mask in source.tensors.items():
            if name.endswith(".attn.qkv.bias_mask") and not _bars_keys(mask):
                raise CheckpointError(
                    f"{source.name}: {name} does not bar the bias of the keys and nothing else"
                )
        return source

    def leaving(self, state: State, config: ViTConfig) -> State:
        """Add the periods, the mask token, and in the 7B model the norm of local crops."""
        state = {**state, "rope_embed.periods": _periods(config)}
        state["mask_token"] = torch.zeros_like(state["cls_token"][0])
        if config.embed_dim == 4096:
            state |= {f"local_cls_norm.{part}": state[f"norm.{part}"] for part in ("weight", "bias")}
        return state

    def table(self, config: ViTConfig) -> Table:
        table = {**TABLE, **GATED} if config.block.mlp == "swiglu" else TABLE
        return {**KEYLESS, **table} if config.block.qkv_bias == "no_key" else table

    def read_config(self, source: Source) -> ViTConfig:
        options = body_options(pth.with_timms_names(source))
        options |= {
            "num_heads": _heads(source, options["embed_dim"]),
            "positions": "rotary",
            "rotary_base": _BASE,
            "rotary_rounded": _is_rounded(source.tensors["rope_embed.periods"]),
            "norm_eps": 1e-5,
        }
        if source.has(_MASK.format(i=0)):
            options["qkv_bias"] = "no_key"
        if source.has("blocks.0.mlp.w1.weight"):
            options["mlp"] = "swiglu"
        return ViTConfig.from_dict(options | place_options(source, options, None))

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of the paper's classification; satellite models have statistics of their own.

        Its README and Hugging Face squash the picture for features, with a bilinear filter.
        """
        satellite = "sat493m" in f"{source.name} {source.file}".lower() and config.in_channels == 3
        return pth.dino_evaluation(config, **(_SATELLITE if satellite else {}))

    def assumed(self, source: Source, config: ViTConfig) -> str:
        return ""  # the periods show the heads


def _heads(source: Source, embed_dim: int) -> int:
    """Attention heads: there is one period for every four channels of a head."""
    count = source.shape("rope_embed.periods", 1)[0]
    if count == 0 or embed_dim % (4 * count):
        raise CheckpointError(
            f"{source.name}: {count} rope_embed.periods are for heads of width {4 * count}, "
            f"which do not make up a token of {embed_dim}"
        )
    return embed_dim // (4 * count)


def _bars_keys(mask: Tensor) -> bool:
    """Whether a mask (3D,) of the bias lets queries and values pass, and no keys."""
    if mask.numel() == 0 or mask.numel() % 3:
        return False
    q, k, v = mask.reshape(3, -1)
    return bool((q == 1).all() and (v == 1).all() and ((k == 0) | k.isnan()).all())


def _exact_periods(count: int) -> Tensor:
    """base^(k / count)."""
    return _BASE ** (torch.arange(count, dtype=torch.float32) / count)


def _periods(config: ViTConfig) -> Tensor:
    """The periods in a file."""
    exact = _exact_periods(config.head_dim // 4)
    return exact.bfloat16().float() if config.embedding.rotary_rounded else exact


def _is_rounded(periods: Tensor) -> bool:
    """Whether bfloat16 has rounded the periods; one or two it holds exactly."""
    found = periods.float()
    return bool((found == found.bfloat16()).all()) and not torch.equal(found, _exact_periods(len(found)))


def _check_periods(source: Source) -> None:
    """Reject periods that are not those of base 100, up to their rounding to bfloat16."""
    found = source.tensors["rope_embed.periods"].float().flatten()
    expected = _exact_periods(len(found))
    for index, (theirs, ours) in enumerate(zip(found.tolist(), expected.tolist(), strict=True)):
        if not abs(theirs / ours - 1) <= _BFLOAT16:  # so that NaN fails too
            raise CheckpointError(
                f"{source.name}: rope_embed.periods[{index}] is {theirs:.4g}, but {ours:.4g} with the rotary "
                f"base of {_BASE:g}, the only one that DINOv3 was published with"
            )
