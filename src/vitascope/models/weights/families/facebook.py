"""facebook's families, whose `.pth` files have timm's names or nearly so: DeiT, DINOv2 and DINOv3.

Facts: facebookresearch/deit, `models.py`, `models_v2.py`, `datasets.py`; facebookresearch/dinov2 and dinov3,
`models/vision_transformer.py`, `layers/`, `hub/backbones.py`, `data/transforms.py`.

A DeiT is written so that its `main.py --eval --model NAME --resume model.pth`, or the model's own
`load_state_dict(torch.load("model.pth")["model"])`, loads it. A plain DeiT has timm's names and nothing else,
so its family has to be named.

The others are written so that the model of their `hub/backbones.py`,

    model = torch.hub.load("facebookresearch/dinov2", "dinov2_vits14_reg", pretrained=False)
    model.load_state_dict(torch.load("model.pth"))

loads it; one of another size than the hub's is `DinoVisionTransformer(..., block_chunks=0)` for DINOv2, and
`DinoVisionTransformer(norm_layer="layernormbf16", ...)` for DINOv3.
"""

import dataclasses
import logging
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families import pth
from vitascope.models.weights.families.timm_body import BODY, body_options, place_options
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import (
    PLAIN_VIT,
    Source,
    State,
    Stored,
    Table,
    checked_config,
    stacked,
    supporting,
)

log = logging.getLogger(__name__)

DEIT: Table = {"encoder.blocks.{i}.scale{n}.gamma": "blocks.{i}.gamma_{n}", **BODY}
DINOV2: Table = {**BODY, "registers": "register_tokens"}
DINOV2_GATED: Table = {
    **DINOV2,
    "encoder.blocks.{i}.mlp.fc1.*": "blocks.{i}.mlp.w12.*",  # the gate first, as ours
    "encoder.blocks.{i}.mlp.fc2.*": "blocks.{i}.mlp.w3.*",
}
DINOV3: Table = {**BODY, "registers": "storage_tokens"}
DINOV3_GATED: Table = {
    **DINOV3,
    "encoder.blocks.{i}.mlp.fc1.*": stacked("blocks.{i}.mlp.w1.*", "blocks.{i}.mlp.w2.*"),
    "encoder.blocks.{i}.mlp.fc2.*": "blocks.{i}.mlp.w3.*",
}
_MASK = "blocks.{i}.attn.qkv.bias_mask"
_BASE = 100.0
_BFLOAT16 = 2**-8  # between one number of bfloat16 and the next, at most, over the number
_SATELLITE = {"mean": (0.430, 0.411, 0.296), "std": (0.213, 0.156, 0.143)}


class Deit(pth.PthFamily):
    """facebook's DeiT, with or without a distillation token, and DeiT-III."""

    name = "deit"
    wrapper = "model"
    supports = PLAIN_VIT | supporting(
        "position_prefix layer_scale distillation_token",
        qkv_bias=("all", "none"),
        head=("linear", "none"),
    )

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        """Its `main.py` interpolates positions without antialiasing."""
        return config.replace(norm_eps=1e-6, resample="huggingface")

    def conflicts(self, config: ViTConfig) -> list[str]:
        reasons, scaled = [], config.block.layer_scale is not None
        if config.embedding.position_prefix == scaled:
            reasons.append(f"position_prefix {scaled} {'with' if scaled else 'without'} layer_scale")
        if scaled and config.readout.distillation_token:
            reasons.append("layer_scale with a distillation_token")
        if config.readout.head == "none" and config.readout.distillation_token:  # it then averages both
            reasons.append("head 'none' with a distillation_token")
        return reasons or pth.hidden_options(config)

    def recognizes(self, source: Source) -> bool:
        own = source.has("dist_token") or source.has("blocks.0.gamma_1")
        return pth.has_timms_body(source) and source.has("pos_embed") and own

    def table(self, config: ViTConfig) -> Table:
        return DEIT

    def read_config(self, source: Source) -> ViTConfig:
        options = body_options(pth.with_timms_names(source))
        covers_prefix = options["layer_scale"] is None  # DeiT-III adds positions before the class token joins
        prefix = 1 + options["distillation_token"] if covers_prefix else 0
        return self.fixed_there(checked_config(source, options | pth.grid_options(source, options, prefix)))

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The evaluation of `main.py`: a crop of 0.875, for DeiT-III (README_revenge.md) of 1."""
        is_third = config.block.layer_scale is not None
        side = int(max(config.image_hw) / (1.0 if is_third else 0.875))
        return pth.imagenet(config, resize_to=(side, side))


class Dinov2(pth.PthFamily):
    """facebook's DINOv2: features, without a head; the files of its hub, and those of its training."""

    name = "dinov2"
    supports = PLAIN_VIT | supporting(
        "position_prefix layer_scale num_registers",
        qkv_bias=("all", "none"),
        mlp=("gelu", "swiglu"),
        head=("none",),
    )
    ignored = ("mask_token",)

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        """Its models with registers, which are the later ones, interpolate positions without an offset."""
        rule = "timm" if config.readout.num_registers else "dinov2"
        return config.replace(norm_eps=1e-6, resample=rule)

    def conflicts(self, config: ViTConfig) -> list[str]:
        reasons = pth.not_square(config, "image_size", "patch_size") + pth.unbuildable_gate(config)
        if config.readout.num_registers and config.embedding.position_prefix:
            reasons.append(f"num_registers {config.readout.num_registers} with position_prefix True")
        return reasons or pth.hidden_options(config)

    def recognizes(self, source: Source) -> bool:
        own = ("register_tokens", "mask_token", "blocks.0.mlp.w12.weight", "blocks.0.0.norm1.weight")
        return pth.has_timms_body(source) and source.has("pos_embed") and any(map(source.has, own))

    def before_reading(self, source: Source) -> Source:
        """Blocks without the chunks of training; beside registers, positions of the patches alone."""
        # Blocks are numbered through all chunks: blocks.{chunk}.{i}.
        source = source.renamed(lambda name: re.sub(r"\Ablocks\.\d+\.(\d+\.)", r"blocks.\1", name))
        if not source.has("register_tokens"):
            return source
        token, places = source.shape("cls_token", 3), source.shape("pos_embed", 3)
        if token != (1, 1, places[2]):
            raise CheckpointError(
                f"{source.name}: cls_token {token} and pos_embed {places} do not fit each other"
            )
        place, patches = source.tensors["pos_embed"][:, :1], source.tensors["pos_embed"][:, 1:]
        # The class token's position joins it, in float32 as in its model: half precision would round the sum.
        folded = {"cls_token": source.tensors["cls_token"].float() + place.float(), "pos_embed": patches}
        return dataclasses.replace(source, tensors={**source.tensors, **folded})

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """Add a position of zeros for the class token, and the mask token that its model has."""
        zeros = torch.zeros_like(state["cls_token"])
        if not config.embedding.position_prefix:
            state = {**state, "pos_embed": torch.cat([zeros, state["pos_embed"]], dim=1)}
        return {**state, "mask_token": zeros[0]}

    def table(self, config: ViTConfig) -> Table:
        return DINOV2_GATED if config.block.mlp == "swiglu" else DINOV2

    def read_config(self, source: Source) -> ViTConfig:
        options = body_options(pth.with_timms_names(source))
        prefix = 0 if options["num_registers"] else 1  # see `before_reading`
        return self.fixed_there(checked_config(source, options | pth.grid_options(source, options, prefix)))

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of its evaluation, at 224 pixels; the positions are those of 518 pixels."""
        return pth.dino_evaluation(config)


class Dinov3(pth.PthFamily):
    """facebook's DINOv3: features, without a head.

    The published files keep the periods of the rotary embedding as bfloat16 rounded them, and its code runs
    with those (`rotary_rounded`); Hugging Face and timm run with exact ones.
    """

    name = "dinov3"
    supports = PLAIN_VIT | supporting(
        "rotary_rounded layer_scale num_registers",
        positions=("rotary",),
        norm_eps=(1e-5,),
        qkv_bias=("no_key", "none", "all"),
        mlp=("gelu", "swiglu"),
        head=("none",),
    )
    # The norm of local crops is used in training only, according to its code.
    ignored = ("mask_token", "local_cls_norm.*", "rope_embed.periods")

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        return config.replace(norm_eps=1e-5)

    def conflicts(self, config: ViTConfig) -> list[str]:
        return pth.not_square(config, "patch_size") + pth.unbuildable_gate(config)

    def recognizes(self, source: Source) -> bool:
        own = source.has("storage_tokens") or source.has("rope_embed.periods")
        return pth.has_timms_body(source) and not source.has("pos_embed") and own

    def before_reading(self, source: Source) -> Source:
        """Unchanged; rejects other rotary periods, and masks that bar more than the bias of the keys."""
        if source.has("rope_embed.periods"):
            found = source.tensors["rope_embed.periods"].float().flatten()
            for index, exact in enumerate(_exact_periods(len(found)).tolist()):
                if not abs(float(found[index]) / exact - 1) <= _BFLOAT16:  # so that NaN fails too
                    raise CheckpointError(
                        f"{source.name}: rope_embed.periods[{index}] is {found[index]:.4g}, but {exact:.4g} "
                        f"with the rotary base of {_BASE:g}, the only one that DINOv3 was published with"
                    )
        if not source.has("storage_tokens"):
            log.warning(
                "%s: no storage_tokens; every published DINOv3 has 4, see whether some are lost", source.name
            )
        for name, mask in source.tensors.items():
            if name.endswith(".attn.qkv.bias_mask") and not _bars_keys(mask):
                raise CheckpointError(
                    f"{source.name}: {name} does not bar the bias of the keys and nothing else"
                )
        return source

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """Add the periods, the mask token, and in the 7B model the norm of local crops."""
        periods = _exact_periods(config.head_dim // 4)
        rounded = config.rotary.rotary_rounded
        state = {**state, "rope_embed.periods": periods.bfloat16().float() if rounded else periods}
        state["mask_token"] = torch.zeros_like(state["cls_token"][0])
        if config.embed_dim == 4096:
            state |= {f"local_cls_norm.{part}": state[f"norm.{part}"] for part in ("weight", "bias")}
        return state

    def table(self, config: ViTConfig) -> Table:
        table = DINOV3_GATED if config.block.mlp == "swiglu" else DINOV3
        return {**DINOV3_KEYLESS, **table} if config.block.qkv_bias == "no_key" else table

    def read_config(self, source: Source) -> ViTConfig:
        options = body_options(pth.with_timms_names(source))
        D, count = options["embed_dim"], source.shape("rope_embed.periods", 1)[0]
        if D % (4 * count):  # there is one period for every four channels of a head
            raise CheckpointError(
                f"{source.name}: {count} rope_embed.periods are for heads of width {4 * count}, "
                f"which do not make up a token of {D}"
            )
        periods = source.tensors["rope_embed.periods"].float()
        rounded = torch.equal(periods, periods.bfloat16().float())  # one or two exact ones also are
        options |= {
            "num_heads": D // (4 * count),
            "positions": "rotary",
            "rotary_base": _BASE,
            "rotary_rounded": rounded and not torch.equal(periods, _exact_periods(count)),
            "norm_eps": 1e-5,
        }
        if source.has(_MASK.format(i=0)):
            options["qkv_bias"] = "no_key"
        if source.has("blocks.0.mlp.w1.weight"):
            options["mlp"] = "swiglu"
        return checked_config(source, options | place_options(source, options, None))

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The paper's, for classification; its README squashes the picture for features, bilinearly."""
        satellite = "sat493m" in f"{source.name} {source.file}".lower() and config.in_channels == 3
        return pth.dino_evaluation(config, **(_SATELLITE if satellite else {}))

    def guessed(self, source: Source, config: ViTConfig) -> str:
        return ""  # the periods show the heads


def _exact_periods(count: int) -> Tensor:
    """base^(k / count)."""
    return _BASE ** (torch.arange(count, dtype=torch.float32) / count)


def _bars_keys(mask: Tensor) -> bool:
    """Whether a mask (3D,) of the bias lets queries and values pass, and no keys."""
    if mask.numel() == 0 or mask.numel() % 3:
        return False
    q, k, v = mask.reshape(3, -1)
    return bool((q == 1).all() and (v == 1).all() and ((k == 0) | k.isnan()).all())


def _with_key(bias: Tensor) -> list[Tensor]:
    """Biases of queries and values (2D,) as a bias of all three (3D,), and the mask that bars the keys'."""
    q, v = bias.chunk(2)
    one, zero = torch.ones_like(q), torch.zeros_like(q)
    return [torch.cat([q, zero, v]), torch.cat([one, zero, one])]


def _without_key(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `_with_key`."""
    q, _, v = parts[0].chunk(3)
    return torch.cat([q, v])


DINOV3_KEYLESS: Table = {
    "encoder.blocks.{i}.attention.qkv.bias": Stored(
        ("blocks.{i}.attn.qkv.bias", _MASK), _without_key, _with_key
    )
}
