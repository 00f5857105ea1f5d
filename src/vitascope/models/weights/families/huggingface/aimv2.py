"""transformers' AIMv2: the vision model without its pooling head.

Facts: transformers 5.23.0, `models/aimv2`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from vitascope.models.config import ViTConfig
from vitascope.models.weights.families.huggingface.clip import LAYER, POSITIONS, VISION
from vitascope.models.weights.families.huggingface.model_type import BASE, BLOCK, ModelType, activation
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import PLAIN_VIT, Source, Table, stacked, supporting

AIMV2: Table = {
    "patch_embedding.norm.*": "embeddings.rms_norm.*",
    "patch_embedding.*": "embeddings.patch_embed.*",
    "positions.weight": VISION["positions.weight"],
    BLOCK + "norm{n}.*": LAYER + "rms_norm{n}.*",
    BLOCK + "attention.qkv.*": stacked(*(f"{LAYER}attention.{part}_proj.*" for part in "qkv")),
    BLOCK + "attention.proj.*": LAYER + "attention.out_proj.*",
    BLOCK + "mlp.fc1.*": stacked(*(f"{LAYER}ffn.{part}_proj.*" for part in ("gate", "up"))),
    BLOCK + "mlp.fc2.*": LAYER + "ffn.down_proj.*",
    "norm.*": "rms_norm.*",
}


class Aimv2(ModelType):
    """transformers' AIMv2, also of native resolution, whose positions are sines and cosines."""

    kinds = ("aimv2_vision_model",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **BASE,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "patch_size": 14,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "qkv_bias": False,
        "mlp_bias": False,
        "use_head": True,
        "is_native": False,
    }
    body = "Aimv2VisionModel"
    names = AIMV2
    position_table = POSITIONS
    epsilon = "rms_norm_eps"
    processor, evaluation = "CLIP", "CLIP's"
    supports = PLAIN_VIT | supporting(
        "norm_eps position_prefix linear_bias",
        patch_norm=(True,),
        positions=("learned", "sincos_2d"),
        norm_type=("rms",),
        mlp=("swiglu",),
        qkv_bias=("all", "none"),
        pool=("mean",),
        class_token=(None, False),
        head=("none",),
        remainder=("rejected", "cut"),
    )
    ignored = ("embeddings.position_ids",)

    def conflicts(self, config: ViTConfig) -> list[str]:
        oblong = config.image_hw[0] != config.image_hw[1] or config.patch_hw[0] != config.patch_hw[1]
        biased = config.block.qkv_bias == "all"
        reasons = {
            "images or patches that are not square": oblong,
            "qkv_bias and linear_bias that differ": biased != config.block.linear_bias,
        }
        return [reason for reason, stands in reasons.items() if stands]

    def mlp(self, source: Source, values: Mapping[str, Any]) -> str:
        return activation(source, values["hidden_act"], {"silu": "swiglu", "swish": "swiglu"}, of="a SwiGLU")

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        if values["use_head"]:
            raise CheckpointError(
                f"{source.name}: its pooling has no MLP; vitascope has no such pooling. Without it the model "
                "loads: Aimv2VisionModel.from_pretrained(MODEL, use_head=False).save_pretrained(FOLDER)"
            )
        if bool(values["qkv_bias"]) != bool(values["mlp_bias"]):
            raise CheckpointError(
                f"{source.name}: qkv_bias {values['qkv_bias']} and mlp_bias {values['mlp_bias']}: there are "
                "models with both or with none"
            )
        return {
            "patch_norm": True,
            "norm_type": "rms",
            "linear_bias": bool(values["mlp_bias"]),
            "positions": "sincos_2d" if values["is_native"] else "learned",
            "pool": "mean",
            "head": "none",
        }

    def own_config(self, config: ViTConfig) -> dict[str, Any]:
        return {
            **super().own_config(config),
            "mlp_bias": config.block.linear_bias,
            "use_head": False,
            "is_native": config.embedding.positions == "sincos_2d",
        }
