"""Hugging Face's transformers: folders that `save_pretrained` writes, and the hub's.

The family is its model types, one file each. A checkpoint belongs to the one of its `model_type`; a model is
written as the first that holds it.
"""

from __future__ import annotations

import re

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import ViTConfig
from vitascope.weights.families.huggingface import elsewhere
from vitascope.weights.families.huggingface.aimv2 import Aimv2
from vitascope.weights.families.huggingface.beit import Beit
from vitascope.weights.families.huggingface.clip import Clip
from vitascope.weights.families.huggingface.deit import DeiT
from vitascope.weights.families.huggingface.dinov2 import Dinov2ViT, Dinov2WithRegisters
from vitascope.weights.families.huggingface.dinov3_vit import Dinov3ViT
from vitascope.weights.families.huggingface.ijepa import IJepa
from vitascope.weights.families.huggingface.model_type import ModelType
from vitascope.weights.families.huggingface.siglip import Siglip, Siglip2
from vitascope.weights.families.huggingface.vit import ViT, ViTMAE, ViTMSN
from vitascope.weights.families.library import Library
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import Family, Source

TYPES: tuple[ModelType, ...] = (
    *(ViT(), DeiT(), Dinov2ViT(), Dinov2WithRegisters(), Dinov3ViT()),
    *(IJepa(), Clip(), Siglip(), Aimv2(), Beit(), ViTMAE(), ViTMSN(), Siglip2()),
)
"""In the order in which they are tried for writing."""
KINDS = tuple(kind for each in TYPES for kind in each.kinds)
"""The values of `model_type` that are read."""
SHOWN_BY: dict[str, ModelType] = {
    r"rope_embed|^(model\.)?layer\.\d": Dinov3ViT(),
    r"register_tokens$": Dinov2WithRegisters(),
    r"layer_scale1\.": Dinov2ViT(),
    r"lambda_1$|relative_position_bias_table$": Beit(),
    r"distillation_token$": DeiT(),
    r"pre_layrnorm\.": Clip(),
    r"embeddings\.rms_norm\.": Aimv2(),
    r"embeddings\.position_embedding\.": Siglip(),
    r"^decoder\.decoder_embed\.": ViTMAE(),
}
"""Tensors that only one type has, or one of those that follow: the first pattern that is found counts."""


class HuggingFace(Library):
    """The models of transformers."""

    def __init__(self) -> None:
        super().__init__("huggingface", TYPES)

    def of(self, source: Source) -> Family:
        """The type of a checkpoint's `model_type`; without `config.json`, the one whose tensors it has."""
        if source.config:
            kind = source.config.get("model_type")
            return next((each for each in TYPES if kind in each.kinds), self)
        shown = (
            each for word, each in SHOWN_BY.items() if any(re.search(word, name) for name in source.tensors)
        )
        return next(shown, ViT())

    def recognizes(self, source: Source) -> bool:
        if source.config:
            return self.of(source) is not self
        return any(re.search(r"(^|\.)embeddings\.patch_embed(ding)?s?\.", key) for key in source.tensors)

    def before_reading(self, source: Source) -> Source:
        kind = self.of(source)
        return source if kind is self else kind.before_reading(source)

    def read_config(self, source: Source) -> ViTConfig:
        kind = self.of(source)
        if source.config and isinstance(kind, ModelType):
            return kind.read_config(source)
        raise CheckpointError(
            f"{source.name}: no config.json with a model_type of {', '.join(KINDS)}, and no shape shows the "
            "number of heads; give the architecture: from_pretrained(..., config=ViTConfig(...))"
        )

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        kind = self.of(source)
        return (self.holding(config) if kind is self else kind).read_preprocess(source, config)


def readable_instead(kind: str) -> str:
    """The models of transformers that are read, and why another is not."""
    return elsewhere.reason(kind) or f"vitascope reads {', '.join(KINDS)} of transformers"
