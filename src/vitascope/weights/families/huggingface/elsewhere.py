"""Models of transformers that are not read, with the reason and the way out."""

from __future__ import annotations

import re

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
