"""Hugging Face's ViT, DeiT, DINOv2 and DINOv3: folders that `save_pretrained` writes, and the hub's.

Facts: transformers 5.23.0, `models/{vit,deit,dinov2,dinov2_with_registers,dinov3_vit}`. Its files keep the
names of version 4, which every version loads; in memory version 5 has others, and those are read too.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch

from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.storage import write_json
from vitascope.weights.families import huggingface_settings as settings
from vitascope.weights.families.huggingface_settings import DINOV2_TYPES, MODEL_TYPES, model_type, rule
from vitascope.weights.files import CheckpointError, write_safetensors
from vitascope.weights.mapping import PLAIN_VIT, Family, Source, State, Table, respelled, stacked, supporting

_BLOCK, _LAYER, _QKV = "encoder.blocks.{i}.", "encoder.layer.{i}.", ("query", "key", "value")
VIT: Table = {
    "patch_embedding.*": "embeddings.patch_embeddings.projection.*",
    "class_token": "embeddings.cls_token",
    "distillation_token": "embeddings.distillation_token",
    "registers": "embeddings.register_tokens",
    "positions.weight": "embeddings.position_embeddings",
    _BLOCK + "norm1.*": _LAYER + "layernorm_before.*",
    _BLOCK + "attention.qkv.*": stacked(*(f"{_LAYER}attention.attention.{part}.*" for part in _QKV)),
    _BLOCK + "attention.proj.*": _LAYER + "attention.output.dense.*",
    _BLOCK + "norm2.*": _LAYER + "layernorm_after.*",
    _BLOCK + "mlp.fc1.*": _LAYER + "intermediate.dense.*",
    _BLOCK + "mlp.fc2.*": _LAYER + "output.dense.*",
    "norm.*": "layernorm.*",
    "head.pre_logits.*": "pooler.dense.*",
    "head.linear.*": "cls_classifier.*",
    "head.distillation.*": "distillation_classifier.*",
    "head.*": "classifier.*",
}
# A distillation token that no head reads is a register here, with a learned position.
DEIT: Table = {**VIT, "registers": "embeddings.distillation_token"}
DINOV2: Table = {
    **VIT,
    _BLOCK + "norm1.*": _LAYER + "norm1.*",
    _BLOCK + "scale{n}.gamma": _LAYER + "layer_scale{n}.lambda1",
    _BLOCK + "norm2.*": _LAYER + "norm2.*",
    _BLOCK + "mlp.fc1.*": _LAYER + "mlp.fc1.*",
    _BLOCK + "mlp.fc2.*": _LAYER + "mlp.fc2.*",
}
DINOV2_GATED: Table = {
    **DINOV2,
    _BLOCK + "mlp.fc1.*": _LAYER + "mlp.weights_in.*",
    _BLOCK + "mlp.fc2.*": _LAYER + "mlp.weights_out.*",
}
DINOV3: Table = {
    "patch_embedding.*": "embeddings.patch_embeddings.*",
    "class_token": "embeddings.cls_token",
    "registers": "embeddings.register_tokens",
    _BLOCK + "norm{n}.*": "layer.{i}.norm{n}.*",
    _BLOCK + "attention.qkv.*": stacked(*(f"layer.{{i}}.attention.{part}_proj.*" for part in "qkv")),
    _BLOCK + "attention.proj.*": "layer.{i}.attention.o_proj.*",
    _BLOCK + "scale{n}.gamma": "layer.{i}.layer_scale{n}.lambda1",
    _BLOCK + "mlp.fc1.*": "layer.{i}.mlp.up_proj.*",
    _BLOCK + "mlp.fc2.*": "layer.{i}.mlp.down_proj.*",
    "norm.*": "norm.*",
}
GATE: Table = {_BLOCK + "mlp.fc1.*": stacked("layer.{i}.mlp.gate_proj.*", "layer.{i}.mlp.up_proj.*")}
NO_KEY: Table = {
    _BLOCK + "attention.qkv.bias": stacked(*(f"layer.{{i}}.attention.{part}_proj.bias" for part in "qv"))
}
# The prefixes of classifiers, and the names of version 5 in memory.
_SPELLINGS = (
    (r"^(vit|deit|dinov2|dinov2_with_registers)\.", ""),
    (r"^model\.layer\.", "layer."),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.", "encoder.layer."),
    *((rf"^(encoder\..*\.attention)\.{it[0]}_proj\.", rf"\1.attention.{it}.") for it in _QKV),
    (r"^(encoder\..*\.attention)\.o_proj\.", r"\1.output.dense."),
    (r"^(encoder\..*\.mlp)\.down_proj\.", r"\1.weights_out."),
)


class HuggingFace(Family):
    """transformers' ViT, DeiT, DINOv2 and DINOv3."""

    name = "huggingface"
    supports = PLAIN_VIT | supporting(
        "position_prefix rotary_base norm_eps layer_scale distillation_token num_registers",
        positions=("learned", "rotary"),
        qkv_bias=("all", "none", "no_key"),
        mlp=("gelu", "gelu_tanh", "quick_gelu", "swiglu"),
        pool=("cls", "cls_mean"),
        head=("linear", "pre_logits", "none"),
        outputs=("exclusive", "independent"),
    )
    ignored = ("embeddings.mask_token",)

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        """Each of its models has its own interpolation of positions; rotary periods are exact."""
        learned = config.embedding.positions == "learned"
        own = {"resample": rule(model_type(config))} if learned else {"rotary_rounded": False}
        return config.replace(**own)

    def conflicts(self, config: ViTConfig) -> list[str]:
        kind, block, readout = model_type(config), config.block, config.readout
        dinov2, dinov3 = kind in DINOV2_TYPES, kind == "dinov3_vit"
        classifies = readout.head == "linear"
        ratio, runs = settings.whole_ratio(config), settings.runs_at_its_size(config)
        distilled, registers = readout.distillation_token, readout.num_registers
        against = {
            f"a distillation token beside {registers} registers": distilled and registers,
            "a distillation token and rotary positions": distilled and dinov3,
            "a distillation token and layer_scale": distilled and block.layer_scale is not None,
            "a distillation token and mlp 'swiglu'": distilled and block.mlp == "swiglu",
            "a distillation token and head 'none'": distilled and readout.head == "none",
            "qkv_bias 'no_key' without rotary positions": block.qkv_bias == "no_key" and not dinov3,
            f"head {readout.head!r} and rotary positions": dinov3 and readout.head != "none",
            f"head 'pre_logits' in a {kind} model": dinov2 and readout.head == "pre_logits",
            "pool 'cls_mean' without a linear head": readout.pool == "cls_mean" and not classifies,
            f"mlp_ratio {block.mlp_ratio:g} in a {kind} model": dinov2 and ratio is None,
            f"image_size {config.image_size} in a {kind} model": dinov2 and not runs,
        }
        return [reason for reason, stands in against.items() if stands]

    def recognizes(self, source: Source) -> bool:
        if source.config:
            return source.config.get("model_type") in MODEL_TYPES
        return any(re.search(r"(^|\.)embeddings\.patch_embeddings\.", key) for key in source.tensors)

    def table(self, config: ViTConfig) -> Table:
        gated = config.block.mlp == "swiglu"
        kind = model_type(config)
        if kind == "dinov3_vit":
            keyless = config.block.qkv_bias == "no_key"
            return {**(NO_KEY if keyless else {}), **DINOV3, **(GATE if gated else {})}
        if kind in DINOV2_TYPES:
            return DINOV2_GATED if gated else DINOV2
        return VIT if kind == "vit" or config.readout.distillation_token else DEIT

    def before_reading(self, source: Source) -> Source:
        """Other spellings of names, gates in two matrices, a class token with a position beside registers."""
        tensors = source.renamed(lambda name: respelled(name, _SPELLINGS)).tensors
        if "classifier.weight" in tensors or "cls_classifier.weight" in tensors:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
        _pack_gates(tensors)
        _fold_class_position(tensors)
        _drop_zeros(tensors)
        return dataclasses.replace(source, tensors=tensors)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """Add what its classes also have: positions of the prefix, scales of one, a mask token."""
        kind, D, state = model_type(config), config.embed_dim, dict(state)
        like = state["embeddings.cls_token"]
        if config.embedding.positions == "learned":
            _unfold_positions(state, config)
        if kind.startswith("dino"):
            state["embeddings.mask_token"] = like.new_zeros((1, 1, D) if kind == "dinov3_vit" else (1, D))
            layer = "layer" if kind == "dinov3_vit" else "encoder.layer"
            for index in range(config.depth):
                for branch in (1, 2):
                    state.setdefault(f"{layer}.{index}.layer_scale{branch}.lambda1", like.new_ones(D))
        if kind == "dinov3_vit":
            state.setdefault("embeddings.register_tokens", like.new_zeros(1, 0, D))
        head = state.get("classifier.weight")
        if kind in DINOV2_TYPES and head is not None and head.shape[1] == D:
            # Its classifiers also read the mean of the patches.
            state["classifier.weight"] = torch.cat([head, torch.zeros_like(head)], dim=1)
        prefix = f"{kind}." if config.readout.head == "linear" else ""
        return {name if "classifier." in name else prefix + name: tensor for name, tensor in state.items()}

    def read_config(self, source: Source) -> ViTConfig:
        options = settings.read_options(source)
        try:
            config = ViTConfig.from_dict(options)
        except UserError as error:
            raise CheckpointError(f"{source.name}: {error}") from error
        kind = model_type(config)
        if kind in DINOV2_TYPES and not settings.runs_at_its_size(config):
            height, width = config.image_hw
            raise CheckpointError(f"{source.name}: {kind} has no positions for images of {height}x{width}")
        return config

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of `preprocessor_config.json`, or of the authors' evaluation."""
        given = source.config.get("model_type")
        kind = given if given in MODEL_TYPES else model_type(config)
        if not source.preprocessor:
            return settings.published(kind, config)
        return settings.read_processor(source.name, source.preprocessor, kind, config)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        processor = settings.written_processor(preprocess)
        weights = write_safetensors(folder / "model.safetensors", state)
        described = write_json(folder / "config.json", settings.written_config(config))
        return [weights, described, write_json(folder / "preprocessor_config.json", processor)]


def _pack_gates(tensors: State) -> None:
    """DINOv2's gate and value in one matrix, the gate first, as in its files."""
    for name in list(tensors):
        match = re.fullmatch(r"(encoder\.layer\.\d+\.mlp)\.gate_proj\.(weight|bias)", name)
        other = f"{match[1]}.up_proj.{match[2]}" if match else ""
        if match and other in tensors and tensors[name].shape == tensors[other].shape:
            parts = [tensors.pop(name), tensors.pop(other)]
            tensors[f"{match[1]}.weights_in.{match[2]}"] = torch.cat(parts)


def _fold_class_position(tensors: State) -> None:
    """Beside registers, add the position of the class token to the token; drop an empty register tensor."""
    registers = tensors.get("embeddings.register_tokens")
    if registers is not None and registers.numel() == 0:
        del tensors["embeddings.register_tokens"]
    positions, token = tensors.get("embeddings.position_embeddings"), tensors.get("embeddings.cls_token")
    if registers is None or registers.numel() == 0 or positions is None or token is None:
        return
    if positions.ndim == 3 and token.shape == positions[:, :1].shape:
        # In float32, as their model adds them in float32: half precision would round the sum.
        tensors["embeddings.cls_token"] = token.float() + positions[:, :1].float()
        tensors["embeddings.position_embeddings"] = positions[:, 1:]


def _drop_zeros(tensors: State) -> None:
    """Drop zeros that `before_writing` added: positions of the prefix, half a head."""
    head, token = tensors.get("classifier.weight"), tensors.get("embeddings.cls_token")
    if head is not None and token is not None and head.shape[1] == 2 * token.shape[-1]:
        own, of_mean = head.chunk(2, dim=1)
        if not of_mean.any():
            tensors["classifier.weight"] = own
    positions = tensors.get("embeddings.position_embeddings")
    covered = 2 if "embeddings.distillation_token" in tensors else 1
    if positions is None or positions.ndim != 3 or "embeddings.register_tokens" in tensors:
        return
    if positions.any() and not positions[:, :covered].any():
        tensors["embeddings.position_embeddings"] = positions[:, covered:]


def _unfold_positions(state: State, config: ViTConfig) -> None:
    """Positions for the class token, DeiT's distillation token and the patches."""
    positions = state["embeddings.position_embeddings"]
    covered = 2 if model_type(config) == "deit" else 1
    if not config.embedding.position_prefix:
        zeros = positions.new_zeros(1, covered, config.embed_dim)
        state["embeddings.position_embeddings"] = torch.cat([zeros, positions], dim=1)
    elif config.num_prefix_tokens > covered:  # registers, which have none there
        prefix = config.num_prefix_tokens
        kept = [positions[:, :covered], positions[:, prefix:]]
        state["embeddings.position_embeddings"] = torch.cat(kept, dim=1)
        state["embeddings.register_tokens"] = (
            state["embeddings.register_tokens"] + positions[:, covered:prefix]
        )
