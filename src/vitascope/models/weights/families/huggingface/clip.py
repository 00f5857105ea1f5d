"""transformers' CLIP and MetaCLIP 2: the vision model, alone, with its projection, of a whole model, or the
classifier of the patches' mean.

Facts: transformers 5.23.0, `models/{clip,metaclip_2}`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vitascope.models.config import ViTConfig
from vitascope.models.options import CLASSES
from vitascope.models.weights.families.huggingface import model_type
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import (
    PLAIN_VIT,
    Source,
    State,
    Table,
    reshaped,
    stacked,
    supporting,
)

LAYER = "encoder.layers.{i}."
POSITIONS = "embeddings.position_embedding.weight"
VISION: Table = {
    "patch_embedding.*": "embeddings.patch_embedding.*",
    "positions.weight": reshaped(POSITIONS, lambda ours: ours[0], lambda theirs: theirs[None]),
    model_type.BLOCK + "norm{n}.*": LAYER + "layer_norm{n}.*",
    model_type.BLOCK + "attention.qkv.*": stacked(*(f"{LAYER}self_attn.{part}_proj.*" for part in "qkv")),
    model_type.BLOCK + "attention.proj.*": LAYER + "self_attn.out_proj.*",
    model_type.BLOCK + "mlp.*": LAYER + "mlp.*",
    "norm.*": "post_layernorm.*",
}
"""What CLIP and SigLIP have in common."""
CLIP: Table = {
    **VISION,
    "class_token": reshaped(
        "embeddings.class_embedding", lambda ours: ours[0, 0], lambda theirs: theirs[None, None]
    ),
    "embedding_norm.*": "pre_layrnorm.*",
    "head.*": "visual_projection.*",
}
CLASSIFIER: Table = {**CLIP, "head.*": "classifier.*"}
TEXT = ("text_model.*", "text_projection.*", "logit_scale", "logit_bias", "embeddings.position_ids")
"""The tensors of whole models that the vision model does not need."""
OF_WHOLE = ("model_type", "architectures", "id2label", "label2id", "problem_type", "outputs", "thresholds")
"""Values of `config.json` that describe a whole model, also where its parts repeat them."""


class VisionOfWhole(model_type.ModelType):
    """A vision model that whole models of images and texts contain: square images, and `vision_config`."""

    defaults: ClassVar[Mapping[str, Any]] = model_type.BASE
    spellings = ((r"^vision_model\.", ""),)
    position_table = POSITIONS
    ignored = TEXT

    def before_reading(self, source: Source) -> Source:
        """The configuration of the vision model, with what the whole model has beside it."""
        source = super().before_reading(source)
        told: dict[str, Any] = {}
        for part in ("vision_config", "vision_config_dict"):  # older files have the second, which overrules
            nested = source.config.get(part)
            if nested is None:
                continue
            told |= {**(self.defaults if told else {}), **nested}
        own = {name: value for name, value in told.items() if name not in OF_WHOLE}
        return dataclasses.replace(source, config={**source.config, **own})

    def conflicts(self, config: ViTConfig) -> list[str]:
        oblong = config.image_hw[0] != config.image_hw[1] or config.patch_hw[0] != config.patch_hw[1]
        return ["images or patches that are not square"] if oblong else []


class Clip(VisionOfWhole):
    """transformers' CLIP; with a projection its outputs are an embedding.

    Its classifier reads the mean of the patches without the last norm, which its files have all the same.
    """

    kinds = ("clip_vision_model", "clip", "metaclip_2_vision_model", "metaclip_2")
    defaults: ClassVar[Mapping[str, Any]] = {
        **model_type.BASE,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }
    body, classifier = "CLIPVisionModel", "CLIPForImageClassification"
    prefix = "vision_model."
    names = CLIP
    processor, evaluation = "CLIP", "CLIP's"
    supports = PLAIN_VIT | supporting(
        "norm_eps",
        patch_bias=(False,),
        embedding_norm=(True,),
        mlp=("gelu", "gelu_tanh", "quick_gelu"),
        head=("linear", "none"),
        pool=("cls", "mean"),
        pool_norm=("before", "none"),
        outputs=(*CLASSES, "embedding"),
        remainder=("rejected", "cut"),
    )

    def conflicts(self, config: ViTConfig) -> list[str]:
        readout, reasons = config.readout, super().conflicts(config)
        found = readout.pool, readout.pool_norm, readout.has_class_token
        if found != (("mean", "none", True) if _classifies(config) else ("cls", "before", True)):
            told = dict(zip(("pool", "pool_norm", "class_token"), found, strict=True))
            listed = ", ".join(f"{name} {value!r}" for name, value in told.items())
            reasons.append(f"{listed} {'with' if _classifies(config) else 'without'} classes")
        return reasons

    def table(self, config: ViTConfig) -> Table:
        return CLASSIFIER if _classifies(config) else CLIP

    def change(self, tensors: State) -> None:
        """The classifier does without the last norm, and the projection without a bias."""
        if "classifier.weight" in tensors:
            for name in [name for name in tensors if name.startswith("post_layernorm.")]:
                del tensors[name]
        if "visual_projection.weight" in tensors:
            weight = tensors["visual_projection.weight"]
            tensors["visual_projection.bias"] = weight.new_zeros(weight.shape[:1])

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {"patch_bias": False, "embedding_norm": True, "head": "none"}
        if source.has("visual_projection.weight"):
            width = source.shape("visual_projection.weight", 2)[0]
            return options | {"head": "linear", "num_classes": width, "outputs": "embedding"}
        if source.has("classifier.weight"):
            options |= {"pool": "mean", "pool_norm": "none", "class_token": True}
            options |= model_type.classifier_options(source)
        return options

    def before_writing(self, state: State, config: ViTConfig) -> State:
        state = dict(state)
        bias = state.pop("visual_projection.bias", None)
        if bias is not None and bias.any():
            raise CheckpointError(
                "huggingface has no CLIP whose projection has a bias; this model's is not zero"
            )
        if _classifies(config):
            width = config.embed_dim
            state |= {"post_layernorm.weight": torch.ones(width), "post_layernorm.bias": torch.zeros(width)}
        return super().before_writing(state, config)

    def class_there(self, config: ViTConfig) -> str:
        projects = config.outputs == "embedding"
        return "CLIPVisionModelWithProjection" if projects else super().class_there(config)

    def own_config(self, config: ViTConfig) -> dict[str, Any]:
        width = {"projection_dim": config.num_classes} if config.outputs == "embedding" else {}
        return {"intermediate_size": config.mlp_dim, **width}

    def written_config(self, config: ViTConfig) -> dict[str, Any]:
        values = super().written_config(config)
        return nested(values, "clip") if _classifies(config) else values


def nested(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The configuration of a vision model in that of a whole model, which classifiers have."""
    vision = {name: value for name, value in values.items() if name not in OF_WHOLE}
    whole = {name: values[name] for name in OF_WHOLE if name in values}
    return {**whole, "model_type": kind, "vision_config": vision}


def _classifies(config: ViTConfig) -> bool:
    return config.readout.head == "linear" and config.outputs != "embedding"
