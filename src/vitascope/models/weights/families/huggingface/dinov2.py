"""transformers' DINOv2, with registers and without; their backbones too.

Facts: transformers 5.23.0, `models/{dinov2,dinov2_with_registers}`.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vitascope.models.config import ViTConfig
from vitascope.models.options import CLASSES
from vitascope.models.weights.families.huggingface import vit
from vitascope.models.weights.families.huggingface.model_type import (
    BASE,
    BLOCK,
    ModelType,
    classifier_options,
)
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import PLAIN_VIT, Source, State, Table, supporting

DINOV2: Table = {
    **vit.VIT,
    "registers": "embeddings.register_tokens",
    BLOCK + "norm1.*": vit.LAYER + "norm1.*",
    BLOCK + "scale{n}.gamma": vit.LAYER + "layer_scale{n}.lambda1",
    BLOCK + "norm2.*": vit.LAYER + "norm2.*",
    BLOCK + "mlp.fc1.*": vit.LAYER + "mlp.fc1.*",
    BLOCK + "mlp.fc2.*": vit.LAYER + "mlp.fc2.*",
}
GATED: Table = {
    **DINOV2,
    BLOCK + "mlp.fc1.*": vit.LAYER + "mlp.weights_in.*",
    BLOCK + "mlp.fc2.*": vit.LAYER + "mlp.weights_out.*",
}


class Dinov2ViT(ModelType):
    """transformers' DINOv2; its classifiers read the class token and the mean of the patches."""

    kinds = ("dinov2",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **BASE,
        "layer_norm_eps": 1e-6,
        "layerscale_value": 1.0,
        "mlp_ratio": 4,
        "use_swiglu_ffn": False,
        "patch_size": 14,
    }
    body, classifier, prefix = "Dinov2Model", "Dinov2ForImageClassification", "dinov2."
    spellings = (*vit.SPELLINGS, (r"^(encoder\..*\.mlp)\.down_proj\.", r"\1.weights_out."))
    processor = "Bit"
    supports = PLAIN_VIT | supporting(
        "position_prefix norm_eps layer_scale",
        qkv_bias=("all", "none"),
        mlp=("gelu", "gelu_tanh", "quick_gelu", "swiglu"),
        pool=("cls", "cls_mean"),
        head=("linear", "none"),
        outputs=CLASSES,
        remainder=("rejected", "cut"),
    )
    ignored = ("embeddings.mask_token",)

    def table(self, config: ViTConfig) -> Table:
        return GATED if config.block.mlp == "swiglu" else DINOV2

    def conflicts(self, config: ViTConfig) -> list[str]:
        headless = config.readout.pool == "cls_mean" and config.readout.head != "linear"
        against = {
            "pool 'cls_mean' without a linear head": headless,
            f"mlp_ratio {config.block.mlp_ratio:g}": whole_ratio(config) is None,
            f"image_size {config.image_size}": not runs_at_its_size(config),
        }
        return [reason for reason, stands in against.items() if stands]

    def change(self, tensors: State) -> None:
        """Gates in one matrix; no zeros that `before_writing` added: half a head, positions of the prefix."""
        for name in list(tensors):
            match = re.fullmatch(r"(encoder\.layer\.\d+\.mlp)\.gate_proj\.(weight|bias)", name)
            other = f"{match[1]}.up_proj.{match[2]}" if match else ""
            if match and other in tensors and tensors[name].shape == tensors[other].shape:
                parts = [tensors.pop(name), tensors.pop(other)]
                tensors[f"{match[1]}.weights_in.{match[2]}"] = torch.cat(parts)
        head, token = tensors.get("classifier.weight"), tensors.get("embeddings.cls_token")
        if head is not None and token is not None and head.shape[1:] == (2 * token.shape[-1],):
            own, of_mean = head.chunk(2, dim=1)
            if not of_mean.any():
                tensors["classifier.weight"] = own
        vit.drop_empty_positions(tensors, 1)

    def read_config(self, source: Source) -> ViTConfig:
        config = super().read_config(source)
        if not runs_at_its_size(config):
            height, width = config.image_hw
            raise CheckpointError(
                f"{source.name}: {self.kinds[0]} has no positions for images of {height}x{width}"
            )
        return config

    def mlp(self, source: Source, values: Mapping[str, Any]) -> str:
        # Its gate is SiLU, independent of hidden_act.
        return "swiglu" if values["use_swiglu_ffn"] else super().mlp(source, values)

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        options = classifier_options(source)
        width, gated = int(values["hidden_size"]), bool(values["use_swiglu_ffn"])
        options["mlp_ratio"] = _hidden(width, values["mlp_ratio"], gated) / width
        options["layer_scale"] = values["layerscale_value"]
        if options["head"] == "linear" and source.shape("classifier.weight")[1] == 2 * width:
            options["pool"] = "cls_mean"
        return options

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """Add what its classes also have: positions of the prefix, scales of one, a mask token."""
        state, D = dict(state), config.embed_dim
        like = state["embeddings.cls_token"]
        vit.pad_positions(state, config, 1)
        state["embeddings.mask_token"] = like.new_zeros(1, D)
        for index in range(config.depth):
            for branch in (1, 2):
                state.setdefault(f"encoder.layer.{index}.layer_scale{branch}.lambda1", like.new_ones(D))
        head = state.get("classifier.weight")
        if head is not None and head.shape[1] == D:
            state["classifier.weight"] = torch.cat([head, torch.zeros_like(head)], dim=1)
        return super().before_writing(state, config)

    def own_config(self, config: ViTConfig) -> dict[str, Any]:
        scale = config.block.layer_scale
        return {
            "mlp_ratio": whole_ratio(config),
            "use_swiglu_ffn": config.block.mlp == "swiglu",
            "qkv_bias": config.block.qkv_bias == "all",
            "layerscale_value": 1.0 if scale is None else float(scale),
        }


class Dinov2WithRegisters(Dinov2ViT):
    """The same with registers, which have no position, as the class token then has none here."""

    kinds = ("dinov2_with_registers",)
    defaults: ClassVar[Mapping[str, Any]] = {**Dinov2ViT.defaults, "num_register_tokens": 4, "patch_size": 16}
    body, classifier = "Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"
    prefix = "dinov2_with_registers."
    rule = "timm"  # with registers it is antialiased
    supports = Dinov2ViT.supports | supporting("num_registers")

    def change(self, tensors: State) -> None:
        """Add the position of the class token to the token; drop an empty register tensor."""
        registers = tensors.get("embeddings.register_tokens")
        if registers is None or registers.numel() == 0:
            tensors.pop("embeddings.register_tokens", None)
            super().change(tensors)
            return
        positions, token = (
            tensors.pop("embeddings.position_embeddings", None),
            tensors.get("embeddings.cls_token"),
        )
        super().change(tensors)
        if positions is None:
            return
        if positions.ndim == 3 and token is not None and token.shape == positions[:, :1].shape:
            # In float32, as their model adds them in float32: half precision would round the sum.
            tensors["embeddings.cls_token"] = token.float() + positions[:, :1].float()
            positions = positions[:, 1:]
        tensors["embeddings.position_embeddings"] = positions

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().own_options(source, values), "num_registers": values["num_register_tokens"]}

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """The registers' positions in the registers, which have none there."""
        state, prefix = dict(state), config.num_prefix_tokens
        positions = state["embeddings.position_embeddings"]
        if config.embedding.position_prefix and prefix > 1:
            state["embeddings.position_embeddings"] = torch.cat(
                [positions[:, :1], positions[:, prefix:]], dim=1
            )
            registers = state["embeddings.register_tokens"]
            state["embeddings.register_tokens"] = registers + positions[:, 1:prefix]
        return super().before_writing(state, config)

    def own_config(self, config: ViTConfig) -> dict[str, Any]:
        return {**super().own_config(config), "num_register_tokens": config.readout.num_registers}


def runs_at_its_size(config: ViTConfig) -> bool:
    """Whether DINOv2 leaves its positions as they are; for an oblong image it assumes a square grid."""
    (height, width), (rows, columns) = config.image_hw, config.grid
    return height == width or rows == columns


def _hidden(width: int, ratio: float, gated: bool) -> int:
    """The width of DINOv2's hidden layer; a gated one has two thirds, rounded up to eights."""
    hidden = int(width * ratio)
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def whole_ratio(config: ViTConfig) -> int | None:
    """The `mlp_ratio`, a whole number, that gives DINOv2 a hidden layer as wide as ours."""
    gated = config.block.mlp == "swiglu"
    candidates = range(1, int(2 * config.block.mlp_ratio) + 2)
    fits = (ratio for ratio in candidates if _hidden(config.embed_dim, ratio, gated) == config.mlp_dim)
    return next(fits, None)
