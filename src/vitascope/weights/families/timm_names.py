"""timm's architecture names: those that are plain ViTs, their names here, and reasons to reject others.

Facts: timm 1.0.31, `models/vision_transformer*.py`, `eva.py`, `beit.py`, `deit.py`.
"""

from __future__ import annotations

import re
from typing import Any

from vitascope.errors import nearest
from vitascope.model.sizes import NAMED_SIZES

# The words of the names whose models are plain ViTs. Any other word may mean another model with the same
# tensors: `rpn` normalizes after each branch, `pe` has rotary positions. The words of the last line stand
# behind a dot since 2023.
PLAIN = re.compile(
    r"(test_vit2?|vit|deit3?|flexivit|eva_large)(_("
    r"tiny|wee|little|xsmall|small|medium|mediumd|betwixt|base|large|huge|giant|giantopt|gigantic|"
    r"so150m|so150m2|so400m|plus|36x1|patch\d+|\d+|reg\d+|gap|map|clip|quickgelu|siglip|"
    r"dinov2|tipsv2|miil|distilled|r|r26|r50|s16|s32|p8|"
    r"in21k|in21ft1k|sam|dino|laion2b))*"
)
_WHOLE = re.compile(r"patch\d|flexivit|test_vit|_r\d*_s\d|beit")
# The meaning of words in the names of models that have a ViT's tensors or most of them.
_OTHERS = {
    "rpn": "the norm after each branch (res-post-norm)",
    r"s?relpos|beit(v2)?": "relative positions in a layout of its own",
    r"rope|pe|eva02|lingbot|sapiens2": "rotary positions in a layout of its own",
    r"dinov3": "rotary positions in timm's layout; DINOv3 is read from facebook's and transformers' files",
}
# Some names that are read, to suggest the nearest.
_EXAMPLES = """
    vit_tiny_patch16_224 vit_small_patch16_224 vit_small_patch32_224 vit_base_patch8_224 vit_base_patch16_224
    vit_base_patch16_384 vit_base_patch32_224 vit_large_patch16_224 vit_base_patch16_clip_224
    vit_large_patch14_clip_224 vit_base_patch16_siglip_224 vit_so400m_patch14_siglip_224
    vit_small_patch14_dinov2 vit_base_patch14_reg4_dinov2 vit_medium_patch16_reg4_gap_256
    vit_small_r26_s32_224 deit_small_patch16_224 deit_base_distilled_patch16_224 deit3_base_patch16_224
    flexivit_base
"""
_FAMILIES = "vit_*, deit_*, deit3_* and flexivit_*"


def is_readable(name: str) -> bool:
    """Whether a name, with or without a tag, is that of a plain ViT."""
    return PLAIN.fullmatch(name.partition(".")[0]) is not None


def is_whole(name: str) -> bool:
    """Whether a name tells more than the shapes do: a file called `vit_base.pth` does not."""
    return _WHOLE.search(name) is not None


def unreadable(name: str) -> str | None:
    """The reason to reject an architecture although a configuration may fit its tensors; else None."""
    for word, what in _OTHERS.items():
        if re.search(rf"(^|_)({word})(_|$)", name):
            similar = nearest(name, _EXAMPLES.split())
            return f"timm's {name} has {what}; no model of vitascope has that{similar}"
    return None


def unknown(name: str) -> str:
    """The reason to reject a name that is not a plain ViT's."""
    similar = nearest(name, _EXAMPLES.split()) if re.match("vit|deit|flexivit", name) else ""
    return f"{name} is no plain ViT of timm's; vitascope reads {_FAMILIES}{similar}"


_WIDTHS = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant", "7b": "7b"}
_SUFFIXES = {"_reg": "_reg4", "_plus": "_plus", "_distilled": "_distilled", "": ""}


def _timm_name(ours: str) -> str:
    """timm's name of a size of ours, without the image size; empty if timm has none."""
    found = re.fullmatch(r"(vit|deit|dinov2|dinov3)_(7b|\D+)(\d+)(_reg|_plus|_distilled|)", ours)
    if found is None:
        return ""
    family, width, patch, suffix = found[1], _WIDTHS[found[2]], f"_patch{found[3]}", _SUFFIXES[found[4]]
    if family in ("vit", "deit"):
        return f"{family}_{width}{suffix}{patch}"
    after = suffix == "_reg4"
    return f"vit_{width}{'' if after else suffix}{patch}{suffix if after else ''}_{family}"


# Our names by timm's, without image size and tag.
TIMM_NAMES: dict[str, str] = {_timm_name(ours): ours for ours in NAMED_SIZES if _timm_name(ours)}
TIMM_NAMES |= {
    "vit_small_r26_s32": "vit_r26_s32",
    "vit_base_r50_s16": "vit_r50_b16",
    "vit_large_r50_s32": "vit_r50_l32",
}


def from_timm_name(name: str) -> tuple[str, dict[str, Any]] | None:
    """Our name of timm's model and the options that differ, such as its image size; None if there is none."""
    found = re.fullmatch(r"(.+?)(?:_(\d{3}))?(?:\..*)?", name)
    if found is None or found[1] not in TIMM_NAMES:
        return None
    ours = TIMM_NAMES[found[1]]
    if "dinov3" in ours:
        return ours, {"image_size": int(found[2] or 256)}  # timm's size of DINOv3
    options: dict[str, Any] = {"image_size": int(found[2])} if found[2] else {}
    if NAMED_SIZES[ours].options.get("stem") == "resnet":
        options["resnet_dialect"] = "timm"
    return ours, options | {"norm_eps": 1e-6, "resample": "timm"}
