"""transformers' ViT, and the models with its tensors: DeiT, I-JEPA, the encoder of ViT-MAE, and ViT-MSN.

Facts: transformers 5.23.0, `models/{vit,deit,ijepa,vit_mae,vit_msn}`. Files keep the names of version 4,
which every version loads; in memory version 5 has others, and those are read too.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vitascope.models.config import ViTConfig
from vitascope.models.options import CLASSES
from vitascope.models.weights.families.huggingface.model_type import (
    BASE,
    BLOCK,
    QKV,
    ModelType,
    classifier_options,
)
from vitascope.models.weights.families.huggingface.processors import Evaluation
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import PLAIN_VIT, Source, State, Table, stacked, supporting

LAYER = "encoder.layer.{i}."
VIT: Table = {
    "patch_embedding.*": "embeddings.patch_embeddings.projection.*",
    "class_token": "embeddings.cls_token",
    "positions.weight": "embeddings.position_embeddings",
    BLOCK + "norm1.*": LAYER + "layernorm_before.*",
    BLOCK + "attention.qkv.*": stacked(*(f"{LAYER}attention.attention.{part}.*" for part in QKV)),
    BLOCK + "attention.proj.*": LAYER + "attention.output.dense.*",
    BLOCK + "norm2.*": LAYER + "layernorm_after.*",
    BLOCK + "mlp.fc1.*": LAYER + "intermediate.dense.*",
    BLOCK + "mlp.fc2.*": LAYER + "output.dense.*",
    "norm.*": "layernorm.*",
    "head.pre_logits.*": "pooler.dense.*",
    "head.*": "classifier.*",
}
# The prefixes of classifiers, and the names of version 5 in memory.
SPELLINGS = (
    (r"^(vit|deit|dinov2|dinov2_with_registers|ijepa)\.", ""),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.", "encoder.layer."),
    *((rf"^(encoder\..*\.attention)\.{it[0]}_proj\.", rf"\1.attention.{it}.") for it in QKV),
    (r"^(encoder\..*\.attention)\.o_proj\.", r"\1.output.dense."),
)


class ViT(ModelType):
    """transformers' ViT; of `ViTForMaskedImageModeling` the body."""

    kinds = ("vit",)
    defaults: ClassVar[Mapping[str, Any]] = BASE
    body, classifier, prefix = "ViTModel", "ViTForImageClassification", "vit."
    spellings = SPELLINGS
    names = VIT
    evaluation: ClassVar[Evaluation] = "squash to [-1, 1]"
    supports = PLAIN_VIT | supporting(
        "position_prefix norm_eps",
        qkv_bias=("all", "none"),
        mlp=("gelu", "gelu_tanh", "quick_gelu"),
        head=("linear", "pre_logits", "none"),
        outputs=CLASSES,
        remainder=("rejected", "cut"),
    )
    ignored: ClassVar[tuple[str, ...]] = ("embeddings.mask_token",)

    def change(self, tensors: State) -> None:
        """Drop a pooler beside a classifier, the decoder of masked images, and positions that are padding."""
        classifies = "classifier.weight" in tensors or "cls_classifier.weight" in tensors
        unread = ["pooler."] * classifies + ["decoder."] * ("embeddings.mask_token" in tensors)
        for name in [name for name in tensors if name.startswith(tuple(unread))]:
            del tensors[name]
        drop_empty_positions(tensors, 2 if "embeddings.distillation_token" in tensors else 1)

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        return pooler_options(source, values) or classifier_options(source)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        state = dict(state)
        pad_positions(state, config, 2 if "embeddings.distillation_token" in state else 1)
        return super().before_writing(state, config)


class ViTMSN(ViT):
    """transformers' ViT-MSN; our models are written as its ViT."""

    kinds = ("vit_msn",)
    defaults: ClassVar[Mapping[str, Any]] = {**BASE, "layer_norm_eps": 1e-6}
    body, classifier = "ViTMSNModel", "ViTMSNForImageClassification"
    evaluation = "crop"


class ViTMAE(ViT):
    """The encoder of transformers' ViT-MAE; our models are written as its ViT."""

    kinds = ("vit_mae",)
    body, classifier = "ViTMAEModel", ""
    evaluation = "crop"
    ignored = (*ViT.ignored, "decoder.*")


def pooler_options(source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a pooler: a hidden tanh layer without a classifier after it. Empty without a pooler."""
    if not source.has("pooler.dense.weight"):
        return {}
    width, size = source.shape("pooler.dense.weight", 2)[0], values.get("pooler_output_size")
    if size is not None and size != width:
        raise CheckpointError(f"{source.name}: pooler_output_size {size!r}, and its pooler has {width}")
    act = values.get("pooler_act", "tanh")
    if act != "tanh" or width != values["hidden_size"]:
        raise CheckpointError(
            f"{source.name}: a pooler of {width} outputs with pooler_act {act!r}; vitascope has only tanh "
            f"and as many outputs as the width, {values['hidden_size']}. Without the pooler the model loads: "
            "AutoModel.from_pretrained(MODEL, add_pooling_layer=False).save_pretrained(FOLDER)"
        )
    return {"head": "pre_logits"}


def drop_empty_positions(tensors: State, covered: int) -> None:
    """Drop the positions of the prefix if all are zeros: `pad_positions` added them."""
    positions = tensors.get("embeddings.position_embeddings")
    if positions is not None and positions.ndim == 3 and positions.any() and not positions[:, :covered].any():
        tensors["embeddings.position_embeddings"] = positions[:, covered:]


def pad_positions(state: State, config: ViTConfig, covered: int) -> None:
    """Positions of zero for a prefix of `covered` tokens that has none."""
    if not config.embedding.position_prefix:
        positions = state["embeddings.position_embeddings"]
        zeros = positions.new_zeros(1, covered, config.embed_dim)
        state["embeddings.position_embeddings"] = torch.cat([zeros, positions], dim=1)


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
