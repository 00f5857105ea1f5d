"""transformers' I-JEPA: no class token, and a classifier of the patches' mean.

Facts: transformers 5.23.0, `models/ijepa`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vitascope.weights.families.huggingface.model_type import BASE, ModelType, classifier_options
from vitascope.weights.families.huggingface.vit import SPELLINGS, VIT, ViT
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import Source, supporting


class IJepa(ModelType):
    """transformers' I-JEPA."""

    kinds = ("ijepa",)
    defaults: ClassVar[Mapping[str, Any]] = BASE
    body, classifier, prefix = "IJepaModel", "IJepaForImageClassification", "ijepa."
    spellings = SPELLINGS
    names = VIT
    supports = ViT.supports | supporting(
        "position_prefix", pool=("mean",), class_token=(None, False), head=("linear", "none")
    )
    ignored = ("embeddings.mask_token",)

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        if source.has("pooler.dense.weight"):
            raise CheckpointError(
                f"{source.name}: its pooler reads the first patch; vitascope has no such pooling. Without "
                "the pooler the model loads: AutoModel.from_pretrained(MODEL).save_pretrained(FOLDER)"
            )
        return {"pool": "mean", **classifier_options(source)}
