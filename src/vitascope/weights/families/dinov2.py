"""facebook's DINOv2, with and without registers: the `.pth` files of its hub, and those of its training.

Facts: facebookresearch/dinov2, `models/vision_transformer.py`, `layers/`, `hub/backbones.py`,
`data/transforms.py`. A file is written so that the model of its `hub/backbones.py`,

    model = torch.hub.load("facebookresearch/dinov2", "dinov2_vits14_reg", pretrained=False)
    model.load_state_dict(torch.load("model.pth"))

loads it; one of another size than the hub's is its `DinoVisionTransformer(..., block_chunks=0)`.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.families import pth
from vitascope.weights.families.timm_body import BODY, body_options, heads
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import PLAIN_VIT, Source, State, Table, any_of

TABLE: Table = {**BODY, "registers": "register_tokens"}
GATED: Table = {
    **TABLE,
    "encoder.blocks.{i}.mlp.fc1.*": "blocks.{i}.mlp.w12.*",  # the gate first, as ours
    "encoder.blocks.{i}.mlp.fc2.*": "blocks.{i}.mlp.w3.*",
}
_CHUNKED = re.compile(r"blocks\.\d+\.(\d+\..*)")


class Dinov2(pth.PthFamily):
    """facebook's DINOv2: features, without a head."""

    name = "dinov2"
    holds = (
        PLAIN_VIT
        | any_of("position_prefix", "layer_scale", "num_registers")
        | {
            "qkv_bias": ("all", "none"),
            "mlp": ("gelu", "swiglu"),
            "head": ("none",),
        }
    )
    ignored = ("mask_token",)

    def settled(self, config: ViTConfig) -> ViTConfig:
        return config.replace(norm_eps=1e-6, resample=_rule(config.readout.num_registers))

    def objections(self, config: ViTConfig) -> list[str]:
        reasons = pth.not_square(config, "image_size", "patch_size") + pth.unbuildable_gate(config)
        if config.readout.num_registers and config.embedding.position_prefix:
            reasons.append(f"num_registers {config.readout.num_registers} with position_prefix True")
        return reasons or pth.untold(config)

    def recognizes(self, source: Source) -> bool:
        own = ("register_tokens", "mask_token", "blocks.0.mlp.w12.weight", "blocks.0.0.norm1.weight")
        return pth.has_timms_body(source) and source.has("pos_embed") and any(map(source.has, own))

    def arriving(self, source: Source) -> Source:
        """Blocks without the chunks of training; with registers, positions of the patches alone."""
        source = dataclasses.replace(source, tensors=_unchunked(source))
        return _folded(source) if source.has("register_tokens") else source

    def leaving(self, state: State, config: ViTConfig) -> State:
        """Add a position of zeros for the class token, and the mask token that its model has."""
        zeros = torch.zeros_like(state["cls_token"])
        if not config.embedding.position_prefix:
            state = {**state, "pos_embed": torch.cat([zeros, state["pos_embed"]], dim=1)}
        return {**state, "mask_token": zeros[0]}

    def table(self, config: ViTConfig) -> Table:
        return GATED if config.block.mlp == "swiglu" else TABLE

    def read_config(self, source: Source) -> ViTConfig:
        options = body_options(pth.with_timms_names(source))
        prefix = 0 if options["num_registers"] else 1  # see `arriving`
        options |= {
            "image_size": pth.square_size(source, "pos_embed", prefix, options["patch_size"]),
            "num_heads": heads(source, options["embed_dim"]),
            "position_prefix": bool(prefix),
            "resample": _rule(options["num_registers"]),
            "norm_eps": 1e-6,
        }
        return ViTConfig.from_dict(options)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of its evaluation, at 224 pixels; the positions are those of 518 pixels."""
        return pth.dino_evaluation(config)


def _unchunked(source: Source) -> State:
    """`blocks.{chunk}.{i}` as `blocks.{i}`: blocks are numbered through all chunks."""
    tensors: State = {}
    for name, tensor in source.tensors.items():
        chunked = _CHUNKED.fullmatch(name)
        name = f"blocks.{chunked[1]}" if chunked else name
        if name in tensors:
            raise CheckpointError(f"{source.name}: {name} is in two chunks of blocks")
        tensors[name] = tensor
    return tensors


def _folded(source: Source) -> Source:
    """The class token with its position added: the registers, which come after it, have none."""
    token, places = source.shape("cls_token", 3), source.shape("pos_embed", 3)
    if token != (1, 1, places[2]):
        raise CheckpointError(
            f"{source.name}: cls_token {token} and pos_embed {places} do not fit each other"
        )
    place, patches = source.tensors["pos_embed"][:, :1], source.tensors["pos_embed"][:, 1:]
    # In float32, as its model adds them in float32: half precision would round the sum.
    folded = {"cls_token": source.tensors["cls_token"].float() + place.float(), "pos_embed": patches}
    return dataclasses.replace(source, tensors={**source.tensors, **folded})


def _rule(num_registers: int) -> str:
    """The interpolation of positions: the later models, with registers, have no offset."""
    return "timm" if num_registers else "dinov2"
