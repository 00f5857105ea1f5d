"""Hugging Face's transformers: folders that `save_pretrained` writes, and the hub's.

The family is its model types, one file each. A checkpoint belongs to the one of its `model_type`; a model is
written as the first that holds it.
"""

import re

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.huggingface.aimv2 import Aimv2
from vitascope.models.weights.families.huggingface.beit import Beit
from vitascope.models.weights.families.huggingface.clip import Clip
from vitascope.models.weights.families.huggingface.dinov2 import Dinov2ViT, Dinov2WithRegisters
from vitascope.models.weights.families.huggingface.dinov3_vit import Dinov3ViT
from vitascope.models.weights.families.huggingface.model_type import ModelType
from vitascope.models.weights.families.huggingface.siglip import Siglip, Siglip2
from vitascope.models.weights.families.huggingface.vit import DeiT, IJepa, ViT, ViTMAE, ViTMSN
from vitascope.models.weights.families.library import Library
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import Family, Source

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
        if not isinstance(kind, ModelType):
            raise CheckpointError(f"{source.name}: its model_type is none of {', '.join(KINDS)}")
        return kind.read_config(source)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        kind = self.of(source)
        return (self.holding(config) if kind is self else kind).read_preprocess(source, config)


def readable_instead(kind: str) -> str:
    """The models of transformers that are read, and why another is not."""
    return reason(kind) or f"vitascope reads {', '.join(KINDS)} of transformers"


_PYRAMID = "its feature maps become smaller from stage to stage"
_REASONS = {
    r"swin|swinv2|donut-swin|maskformer-swin": f"{_PYRAMID}, and its windows shift",
    r"hiera|pvt|pvt_v2|cvt|focalnet|poolformer|swiftformer|segformer|dinat": _PYRAMID,
    r"levit|mobilevit|mobilevitv2": f"{_PYRAMID}, and it has convolutions and batch norms between its blocks",
    r"convnext|convnextv2|dinov3_convnext|resnet|regnet|bit|efficientnet|mobilenet_v[12]|vit[-_]hybrid": (
        "it is a convolutional network, or begins with one in a layout of its own"
    ),
    r"aimv2": "its pooling has no MLP; its vision model loads without the pooling (use_head=False)",
    r"mlcd(_vision_model)?": "the queries and keys of its class token are rotated by learned angles",
    r"vitdet|sam(2|_hq)?(_vision_model)?": "some of its blocks attend within windows, others to all patches",
}
# The same models in timm's layout, which is read.
_IN_TIMM = {
    r"vit[-_]hybrid": "timm/vit_base_r50_s16_384.orig_in21k_ft_in1k",
}
_CLASSIFIERS = re.compile(
    r"swin|swinv2|hiera|pvt|pvt_v2|cvt|focalnet|poolformer|swiftformer|segformer|dinat|levit|mobilevit|mobilevitv2|"
    r"convnext|convnextv2|resnet|regnet|bit|efficientnet|mobilenet_v[12]"
)
"""Those that `AutoModelForImageClassification` opens."""


def reason(kind: str) -> str:
    """Why a `model_type` is not read, and the way out; empty for one that is unknown here."""
    why = next((why for pattern, why in _REASONS.items() if re.fullmatch(pattern, kind)), "")
    if not why:
        return ""
    ways = []
    if timm := next((model for pattern, model in _IN_TIMM.items() if re.fullmatch(pattern, kind)), None):
        ways.append(f"timm publishes a readable form, such as {timm}")
    if _CLASSIFIERS.fullmatch(kind):
        ways.append("its classifiers can teach a model, --teacher transformers:MODEL")
    return f"vitascope has no such model: {'; '.join([why, *ways])}"
