"""timm's names of architectures: which are plain ViTs, and why others are not read.

Facts: timm 1.0.31, `models/vision_transformer*.py`, `eva.py`, `beit.py`, `deit.py`.
"""

from __future__ import annotations

import re

from vitascope.errors import nearest

# The words of the names whose models are plain ViTs. A word that is not here may mean anything, with the same
# tensors: `rpn` normalizes after each branch, `pe` has rotary positions. The last line's have stood behind a
# dot since 2023.
PLAIN = re.compile(
    r"(test_vit2?|vit|deit3?|flexivit|eva_large)(_("
    r"tiny|wee|little|xsmall|small|medium|mediumd|betwixt|base|large|huge|giant|giantopt|gigantic|"
    r"so150m|so150m2|so400m|plus|36x1|patch\d+|\d+|reg\d+|gap|map|clip|quickgelu|siglip|"
    r"dinov2|tipsv2|miil|distilled|r|r26|r50|s16|s32|p8|"
    r"in21k|in21ft1k|sam|dino|laion2b))*"
)
_WHOLE = re.compile(r"patch\d|flexivit|test_vit|_r\d*_s\d|beit")
# What a word of a name stands for, in models that have a ViT's tensors or most of them.
_OTHERS = {
    "rpn": "the norm after each branch (res-post-norm)",
    r"s?relpos|beit(v2)?": "relative positions in a layout of its own",
    r"rope|pe|eva02|lingbot|sapiens2": "rotary positions in a layout of its own",
    r"dinov3": "rotary positions in timm's layout; DINOv3 is read from facebook's and transformers' files",
}
# Some that are read, for the nearest.
_EXAMPLES = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_small_patch32_224",
    "vit_base_patch8_224",
    "vit_base_patch16_224",
    "vit_base_patch16_384",
    "vit_base_patch32_224",
    "vit_large_patch16_224",
    "vit_base_patch16_clip_224",
    "vit_large_patch14_clip_224",
    "vit_base_patch16_siglip_224",
    "vit_so400m_patch14_siglip_224",
    "vit_small_patch14_dinov2",
    "vit_base_patch14_reg4_dinov2",
    "vit_medium_patch16_reg4_gap_256",
    "vit_small_r26_s32_224",
    "deit_small_patch16_224",
    "deit_base_distilled_patch16_224",
    "deit3_base_patch16_224",
    "flexivit_base",
)
_FAMILIES = "vit_*, deit_*, deit3_* and flexivit_*"


def is_whole(name: str) -> bool:
    """Whether a name tells more than the shapes do: a file called `vit_base.pth` does not."""
    return _WHOLE.search(name) is not None


def unreadable(name: str) -> str | None:
    """Why an architecture of timm's is not read although a configuration may fit its tensors; else None."""
    for word, what in _OTHERS.items():
        if re.search(rf"(^|_)({word})(_|$)", name):
            return f"timm's {name} has {what}; no model of vitascope is that{nearest(name, _EXAMPLES)}"
    return None


def unknown(name: str) -> str:
    """That an architecture is none of those that are read, and which those are."""
    similar = nearest(name, _EXAMPLES) if re.match("vit|deit|flexivit", name) else ""
    return f"{name} is no plain ViT of timm's; those that vitascope reads are {_FAMILIES}{similar}"
