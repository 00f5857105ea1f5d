"""transformers' DINOv3, its ViTs; their backbones too.

Facts: transformers 5.23.0, `models/dinov3_vit`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from vitascope.models.config import ViTConfig
from vitascope.models.weights.families.huggingface.model_type import BASE, BLOCK, ModelType, activation
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import PLAIN_VIT, Source, State, Table, stacked, supporting

LAYER = "layer.{i}."
DINOV3: Table = {
    "patch_embedding.*": "embeddings.patch_embeddings.*",
    "class_token": "embeddings.cls_token",
    "registers": "embeddings.register_tokens",
    BLOCK + "norm{n}.*": LAYER + "norm{n}.*",
    BLOCK + "attention.qkv.*": stacked(*(f"{LAYER}attention.{part}_proj.*" for part in "qkv")),
    BLOCK + "attention.proj.*": LAYER + "attention.o_proj.*",
    BLOCK + "scale{n}.gamma": LAYER + "layer_scale{n}.lambda1",
    BLOCK + "mlp.fc1.*": LAYER + "mlp.up_proj.*",
    BLOCK + "mlp.fc2.*": LAYER + "mlp.down_proj.*",
    "norm.*": "norm.*",
}
GATE: Table = {BLOCK + "mlp.fc1.*": stacked(f"{LAYER}mlp.gate_proj.*", f"{LAYER}mlp.up_proj.*")}
NO_KEY: Table = {
    BLOCK + "attention.qkv.bias": stacked(*(f"{LAYER}attention.{part}_proj.bias" for part in "qv"))
}
_BIASES = {"query_bias": True, "key_bias": False, "value_bias": True}
_QKV_BIAS = {(True, True, True): "all", (True, False, True): "no_key", (False, False, False): "none"}


class Dinov3ViT(ModelType):
    """transformers' DINOv3: rotary positions, no head."""

    kinds = ("dinov3_vit",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **{**BASE, **_BIASES, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
        **{"num_register_tokens": 0, "layer_norm_eps": 1e-5, "layerscale_value": 1.0},
        **{"rope_theta": 100.0, "use_gated_mlp": False},
    }
    body = "DINOv3ViTModel"
    spellings = ((r"^model\.layer\.", "layer."),)
    rule = "timm"
    processor, evaluation = "DINOv3ViT", "squash"
    supports = PLAIN_VIT | supporting(
        "rotary_base norm_eps layer_scale num_registers",
        positions=("rotary",),
        qkv_bias=("all", "none", "no_key"),
        mlp=("gelu", "gelu_tanh", "quick_gelu", "swiglu"),
        head=("none",),
        remainder=("rejected", "cut"),
    )
    ignored = ("embeddings.mask_token",)

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        """Rotary periods are exact."""
        return config.replace(rotary_rounded=False)

    def table(self, config: ViTConfig) -> Table:
        keyless, gated = config.block.qkv_bias == "no_key", config.block.mlp == "swiglu"
        return {**(NO_KEY if keyless else {}), **DINOV3, **(GATE if gated else {})}

    def change(self, tensors: State) -> None:
        """Drop an empty register tensor."""
        registers = tensors.get("embeddings.register_tokens")
        if registers is not None and registers.numel() == 0:
            del tensors["embeddings.register_tokens"]

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        given = (bool(values["query_bias"]), bool(values["key_bias"]), bool(values["value_bias"]))
        if given not in _QKV_BIAS:
            raise CheckpointError(
                f"{source.name}: query_bias, key_bias and value_bias {given}; vitascope has all, none or "
                "no_key"
            )
        return {
            "head": "none",
            "positions": "rotary",
            "rotary_base": values["rope_theta"],
            "num_registers": values["num_register_tokens"],
            "layer_scale": values["layerscale_value"],
            "qkv_bias": _QKV_BIAS[given],
        }

    def mlp(self, source: Source, values: Mapping[str, Any]) -> str:
        if not values["use_gated_mlp"]:
            return super().mlp(source, values)
        return activation(source, values["hidden_act"], {"silu": "swiglu", "swish": "swiglu"}, "a gated MLP")

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """Add what its class also has: scales of one, a mask token, an empty register tensor."""
        state, D = dict(state), config.embed_dim
        like = state["embeddings.cls_token"]
        state["embeddings.mask_token"] = like.new_zeros(1, 1, D)
        state.setdefault("embeddings.register_tokens", like.new_zeros(1, 0, D))
        for index in range(config.depth):
            for branch in (1, 2):
                state.setdefault(f"layer.{index}.layer_scale{branch}.lambda1", like.new_ones(D))
        return state

    def own_config(self, config: ViTConfig) -> dict[str, Any]:
        scale, biases = config.block.layer_scale, {ours: theirs for theirs, ours in _QKV_BIAS.items()}
        return {
            **dict(zip(_BIASES, biases[config.block.qkv_bias], strict=True)),
            "intermediate_size": config.mlp_dim,
            "rope_theta": float(config.rotary.rotary_base),
            "use_gated_mlp": config.block.mlp == "swiglu",
            "layerscale_value": 1.0 if scale is None else float(scale),
            "num_register_tokens": config.readout.num_registers,
        }
