"""transformers' SigLIP and SigLIP 2: the vision model, alone or of a whole model, or the classifier.

Facts: transformers 5.23.0, `models/{siglip,siglip2}`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vitascope.models.config import ViTConfig
from vitascope.models.options import CLASSES
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.huggingface.clip import VISION, VisionOfWhole, nested
from vitascope.models.weights.families.huggingface.model_type import BASE, classifier_options
from vitascope.models.weights.mapping import PLAIN_VIT, Source, State, Table, supporting

_POOL = "head.attention.in_proj"
_LINEAR = "embeddings.patch_embedding.weight"
SIGLIP: Table = {
    **VISION,
    "pool.query": "head.probe",
    "pool.q.*": _POOL + ".q.*",
    "pool.kv.*": _POOL + ".kv.*",
    "pool.proj.*": "head.attention.out_proj.*",
    "pool.norm.*": "head.layernorm.*",
    "pool.mlp.*": "head.mlp.*",
    "head.*": "classifier.*",
}


class Siglip(VisionOfWhole):
    """transformers' SigLIP: a pool of attention, or a classifier of the patches' mean."""

    kinds = ("siglip_vision_model", "siglip")
    defaults: ClassVar[Mapping[str, Any]] = {
        **BASE,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": True,
    }
    body, classifier = "SiglipVisionModel", "SiglipForImageClassification"
    prefix = "vision_model."
    names = SIGLIP
    processor, evaluation = "Siglip", "squash to [-1, 1]"
    supports = PLAIN_VIT | supporting(
        "norm_eps position_prefix",
        mlp=("gelu", "gelu_tanh", "quick_gelu"),
        class_token=(None, False),
        pool=("map", "mean"),
        head=("linear", "none"),
        outputs=CLASSES,
        remainder=("rejected", "cut"),
    )

    def conflicts(self, config: ViTConfig) -> list[str]:
        both = config.readout.pool == "map" and config.readout.head == "linear"
        return super().conflicts(config) + ["pool 'map' and head 'linear'"] * both

    def change(self, tensors: State) -> None:
        """The pool's query apart from its keys and values; no pool beside a classifier, which has another."""
        for part in ("weight", "bias"):
            joined = tensors.pop(f"{_POOL}_{part}", None)
            if joined is not None:
                width = joined.shape[0] // 3
                tensors[f"{_POOL}.q.{part}"], tensors[f"{_POOL}.kv.{part}"] = joined[:width], joined[width:]
        if "classifier.weight" in tensors:
            for name in [name for name in tensors if name.startswith("head.")]:
                del tensors[name]

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        options = classifier_options(source)
        pooled = values["vision_use_head"] and options["head"] == "none"
        return {**options, "pool": "map" if pooled else "mean"}

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        found = super().read_preprocess(source, config)
        return found if source.preprocessor else dataclasses.replace(found, interpolation="bicubic")

    def before_writing(self, state: State, config: ViTConfig) -> State:
        state = dict(state)
        for part in ("weight", "bias"):
            if f"{_POOL}.q.{part}" in state:
                parts = [state.pop(f"{_POOL}.{it}.{part}") for it in ("q", "kv")]
                state[f"{_POOL}_{part}"] = torch.cat(parts)
        return super().before_writing(state, config)

    def written_config(self, config: ViTConfig) -> dict[str, Any]:
        """Flat, or nested in the configuration of a whole model, which their classifier has."""
        values = super().written_config(config)
        return nested(values, "siglip") if config.readout.head == "linear" else values

    def own_config(self, config: ViTConfig) -> dict[str, Any]:
        return {"intermediate_size": config.mlp_dim, "vision_use_head": config.readout.pool == "map"}


class Siglip2(Siglip):
    """transformers' SigLIP 2 of any proportions (NaFlex), at the square of its positions: a SigLIP.

    Its class takes images that are cut into patches, which a linear layer embeds. SigLIP 2 of a fixed
    resolution is `siglip`; our models are written as that.
    """

    kinds = ("siglip2_vision_model", "siglip2")
    body, classifier = "Siglip2VisionModel", "Siglip2ForImageClassification"
    processor = "Siglip2"
    defaults: ClassVar[Mapping[str, Any]] = {
        **{name: value for name, value in Siglip.defaults.items() if name != "image_size"},
        "num_patches": 256,
    }

    def before_reading(self, source: Source) -> Source:
        """The linear layer as a convolution, and the size of the square."""
        source = super().before_reading(source)
        values = {**self.defaults, **source.config}
        patch, channels = (int(values[it]) for it in ("patch_size", "num_channels"))
        side = math.isqrt(int(values["num_patches"]))
        tensors = dict(source.tensors)
        linear = tensors.get(_LINEAR)
        if linear is not None and linear.shape[1:] == (patch * patch * channels,):
            tensors[_LINEAR] = linear.reshape(-1, patch, patch, channels).permute(0, 3, 1, 2).contiguous()
        config = {**source.config, "image_size": side * patch}
        return dataclasses.replace(source, tensors=tensors, config=config)
