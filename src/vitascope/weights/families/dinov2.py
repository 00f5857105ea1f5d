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
from pathlib import Path

import torch

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.families.pth import (
    has_timms_body,
    imagenet,
    is_named,
    not_square,
    shorter_side,
    size_for_evaluation,
    square_side,
    unbuildable_gate,
    untold,
    with_timms_names,
    write_pth,
)
from vitascope.weights.families.timm_body import BODY, assumed_heads, body_options, heads
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import Family, Source, State, Table

TABLE: Table = {**BODY, "registers": "register_tokens"}
GATED: Table = {
    **TABLE,
    "encoder.blocks.{i}.mlp.fc1.*": "blocks.{i}.mlp.w12.*",  # the gate first, as ours
    "encoder.blocks.{i}.mlp.fc2.*": "blocks.{i}.mlp.w3.*",
}
_CHUNKED = re.compile(r"blocks\.\d+\.(\d+\..*)")


class Dinov2(Family):
    """facebook's DINOv2: features, without a head."""

    name = "dinov2"
    holds = {  # noqa: RUF012 - a constant
        "stem": ("conv", "linear"),
        "position_prefix": (),
        "qkv_bias": ("all", "none"),
        "mlp": ("gelu", "swiglu"),
        "mlp_ratio": (),
        "layer_scale": (),
        "class_token": (None, True),
        "num_registers": (),
        "head": ("none",),
    }
    ignored = ("mask_token",)

    def settled(self, config: ViTConfig) -> ViTConfig:
        """Its models have an epsilon of 1e-6, and one rule of interpolation."""
        return config.replace(norm_eps=1e-6, resample=_rule(config.readout.num_registers))

    def objections(self, config: ViTConfig) -> list[str]:
        """What its constructor cannot build."""
        reasons = not_square(config, "image_size", "patch_size") + unbuildable_gate(config)
        if config.readout.num_registers and config.embedding.position_prefix:
            reasons.append(f"num_registers {config.readout.num_registers} with position_prefix True")
        return reasons or untold(config)

    def recognizes(self, source: Source) -> bool:
        """timm's names, positions, and one of the things that only DINOv2 has."""
        own = ("register_tokens", "mask_token", "blocks.0.mlp.w12.weight", "blocks.0.0.norm1.weight")
        return has_timms_body(source) and source.has("pos_embed") and any(map(source.has, own))

    def arriving(self, source: Source) -> Source:
        """Blocks out of the chunks that training keeps them in; with registers, positions of patches only.

        Raises:
            CheckpointError: two chunks with a block of one number; positions of another width.
        """
        source = dataclasses.replace(source, tensors=_unchunked(source))
        return _folded(source) if source.has("register_tokens") else source

    def leaving(self, state: State, config: ViTConfig) -> State:
        """A place for the class token that adds nothing, and the mask token that its model has."""
        nothing = torch.zeros_like(state["cls_token"])
        if not config.embedding.position_prefix:
            state = {**state, "pos_embed": torch.cat([nothing, state["pos_embed"]], dim=1)}
        return {**state, "mask_token": nothing[0]}

    def table(self, config: ViTConfig) -> Table:
        """timm's names, but for registers and SwiGLU."""
        return GATED if config.block.mlp == "swiglu" else TABLE

    def read_config(self, source: Source) -> ViTConfig:
        """From the shapes; the image is a square."""
        options = body_options(with_timms_names(source))
        registers = options["num_registers"] > 0
        side = square_side(source, "pos_embed", prefix=0 if registers else 1)
        ph, pw = options["patch_size"]
        options |= {
            "image_size": (side * ph, side * pw),
            "num_heads": heads(source, options["embed_dim"]),
            "position_prefix": not registers,
            "resample": _rule(options["num_registers"]),
            "norm_eps": 1e-6,
        }
        return ViTConfig.from_dict(options)

    def assumed(self, source: Source, config: ViTConfig) -> str:
        """Heads, in a file that has none of its names."""
        return "" if is_named(source, "dinov2") else assumed_heads(source, config)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """As its `make_classification_eval_transform`: bicubic, 224 of 256 pixels.

        The positions were made for 518 pixels, in the last phase of training; evaluated it was at 224.
        """
        size = size_for_evaluation(config)
        return imagenet(config, image_size=size, resize_to=shorter_side(size, 224 / 256))

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        """`model.pth`: the state itself, in the names of the hub."""
        return [write_pth(folder / "model.pth", state)]


def _unchunked(source: Source) -> State:
    """`blocks.{chunk}.{i}` as `blocks.{i}`: blocks are counted through all chunks."""
    tensors: State = {}
    for name, tensor in source.tensors.items():
        chunked = _CHUNKED.fullmatch(name)
        name = f"blocks.{chunked[1]}" if chunked else name
        if name in tensors:
            raise CheckpointError(f"{source.name}: {name} is in two chunks of blocks")
        tensors[name] = tensor
    return tensors


def _folded(source: Source) -> Source:
    """The class token with its position added: there is none for the registers, which come after it."""
    token, places = source.shape("cls_token", 3), source.shape("pos_embed", 3)
    if token != (1, 1, places[2]):
        raise CheckpointError(
            f"{source.name}: cls_token {token} and pos_embed {places} do not fit each other"
        )
    place, patches = source.tensors["pos_embed"][:, :1], source.tensors["pos_embed"][:, 1:]
    # In float32, as its model adds them when it is run so: half precision would round the sum.
    folded = {"cls_token": source.tensors["cls_token"].float() + place.float(), "pos_embed": patches}
    return dataclasses.replace(source, tensors={**source.tensors, **folded})


def _rule(num_registers: int) -> str:
    """How its hub's models interpolate: those with registers came later, without the offset of the first."""
    return "timm" if num_registers else "dinov2"
