"""transformers' DeiT.

Facts: transformers 5.23.0, `models/deit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitascope.model.config import ViTConfig
from vitascope.weights.families.huggingface.model_type import classifier_options
from vitascope.weights.families.huggingface.vit import VIT, ViT
from vitascope.weights.mapping import Source, Table, supporting

DEIT: Table = {
    "distillation_token": "embeddings.distillation_token",
    "registers": "embeddings.distillation_token",  # one that no head reads is a register here
    "head.linear.*": "cls_classifier.*",
    "head.distillation.*": "distillation_classifier.*",
    **VIT,
}


class DeiT(ViT):
    """transformers' DeiT, with the teacher's classifier or without."""

    kinds = ("deit",)
    body, classifier, prefix = "DeiTModel", "DeiTForImageClassification", "deit."
    names = DEIT
    processor, evaluation = "DeiT", "crop"
    supports = ViT.supports | supporting("distillation_token", num_registers=(0, 1))

    def conflicts(self, config: ViTConfig) -> list[str]:
        readout = config.readout
        against = {
            "neither a distillation token nor a register": not readout.distillation_token
            and not readout.num_registers,
            "a distillation token beside a register": readout.distillation_token and readout.num_registers,
            "a distillation token and head 'none'": readout.distillation_token and readout.head == "none",
            "a register without position": readout.num_registers and not config.embedding.position_prefix,
        }
        return [reason for reason, stands in against.items() if stands]

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        if source.has("cls_classifier.weight"):
            return {"distillation_token": True, **classifier_options(source, "cls_classifier.weight")}
        return {"num_registers": 1, **super().own_options(source, values)}

    def class_there(self, config: ViTConfig) -> str:
        return super().class_there(config) + "WithTeacher" * config.readout.distillation_token
