"""The vision models in Hugging Face's CLIP and SigLIP folders, with the projection into the space of texts.

Facts: transformers 5.23.0, `models/{clip,siglip}`. The text models are read by `vitascope.text`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.weights.families.huggingface_settings import read_processor, sides
from vitascope.weights.families.openclip import ACTIVATIONS, check_sizes, settings_of
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import Family, Source, State, Table, reshaped, stacked

VISION, _LAYER = "vision_model.", "vision_model.encoder.layers.{i}."
_BLOCK = "encoder.blocks.{i}."
TABLE: Table = {
    "patch_embedding.*": VISION + "embeddings.patch_embedding.*",
    "class_token": reshaped(
        VISION + "embeddings.class_embedding", lambda ours: ours[0, 0], lambda theirs: theirs[None, None]
    ),
    "positions.weight": reshaped(
        VISION + "embeddings.position_embedding.weight", lambda ours: ours[0], lambda theirs: theirs[None]
    ),
    "embedding_norm.*": VISION + "pre_layrnorm.*",
    _BLOCK + "norm{n}.*": _LAYER + "layer_norm{n}.*",
    _BLOCK + "attention.qkv.*": stacked(*(f"{_LAYER}self_attn.{part}_proj.*" for part in "qkv")),
    _BLOCK + "attention.proj.*": _LAYER + "self_attn.out_proj.*",
    _BLOCK + "mlp.*": _LAYER + "mlp.*",
    "norm.*": VISION + "post_layernorm.*",
    "pool.query": VISION + "head.probe",
    "pool.proj.*": VISION + "head.attention.out_proj.*",
    "pool.norm.*": VISION + "head.layernorm.*",
    "pool.*": VISION + "head.*",
    "head.*": "visual_projection.*",
}
_SIZE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_SIZE |= {"num_channels": 3, "image_size": 224}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip": {**_SIZE, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip": {**_SIZE, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}


class HuggingFaceClip(Family):
    """transformers' CLIPModel and SiglipModel: their vision models, whose outputs are embeddings."""

    name = "clip"
    supports: Mapping[str, tuple[Any, ...]] = {}  # type: ignore[misc]
    read_only = True
    ignored = ("text_model.*", "text_projection.*", "logit_*", VISION + "embeddings.position_ids")

    def recognizes(self, source: Source) -> bool:
        return source.config.get("model_type") in _DEFAULTS

    def table(self, config: ViTConfig) -> Table:
        return TABLE

    def before_reading(self, source: Source) -> Source:
        """SigLIP's pooling with the query's matrix by itself; CLIP's projection with a bias of zero."""
        tensors = dict(source.tensors)
        for kind in ("weight", "bias"):
            whole = tensors.pop(f"{VISION}head.attention.in_proj_{kind}", None)
            if whole is not None and len(whole) % 3 == 0:
                q, *kv = whole.chunk(3)
                tensors[f"{VISION}head.q.{kind}"], tensors[f"{VISION}head.kv.{kind}"] = q, torch.cat(kv)
        projection = tensors.get("visual_projection.weight")
        if projection is not None:
            tensors["visual_projection.bias"] = projection.new_zeros(len(projection))
        return dataclasses.replace(source, tensors=tensors)

    def read_config(self, source: Source) -> ViTConfig:
        kind = str(source.config.get("model_type"))
        if kind not in _DEFAULTS:
            raise CheckpointError(f"{source.name}: model_type {kind!r} is none of {', '.join(_DEFAULTS)}")
        values = {**_DEFAULTS[kind], **settings_of(source, "vision_config")}
        check_sizes(source, values, "hidden_size", "intermediate_size", "num_hidden_layers")
        siglip, act = kind == "siglip", values["hidden_act"]
        if act not in ACTIVATIONS:
            raise CheckpointError(f"{source.name}: hidden_act {act!r} is none of {', '.join(ACTIVATIONS)}")
        if siglip and not values.get("vision_use_head", True):
            raise CheckpointError(f"{source.name}: vision_use_head false: images have no embedding")
        options: dict[str, Any] = {
            "image_size": sides(values["image_size"], source.name),
            "patch_size": sides(values["patch_size"], source.name),
            "in_channels": values["num_channels"],
            "embed_dim": values["hidden_size"],
            "depth": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "norm_eps": values["layer_norm_eps"],
            "mlp": ACTIVATIONS[act],
            "mlp_ratio": values["intermediate_size"] / values["hidden_size"],
            "resample": "huggingface",
            "outputs": "embedding",
        }
        if siglip:
            options |= {"pool": "map", "head": "none"}
        else:
            width = source.shape("visual_projection.weight", 2)[0]
            options |= {"patch_bias": False, "embedding_norm": True, "num_classes": width}
        try:
            return ViTConfig.from_dict(options)
        except UserError as error:
            raise CheckpointError(f"{source.name}: {error}") from error

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        kind = source.config["model_type"]
        # The defaults of CLIP's processor are those of BiT's.
        processor = {"clip": "BitImageProcessor", "siglip": "SiglipImageProcessor"}[kind]
        side = config.image_hw[0]
        content: dict[str, Any] = {"size": {"height": side, "width": side}}
        if kind == "clip":
            content = {"size": {"shortest_edge": side}, "crop_size": side}
        content = dict(source.preprocessor) or content
        named = str(content.get("image_processor_type", content.get("feature_extractor_type", "CLIP")))
        if kind == "siglip" or named.startswith("CLIP"):
            content["image_processor_type"] = processor
        return read_processor(source.name, content, "dinov2", config)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        raise NotImplementedError  # `read_only`
