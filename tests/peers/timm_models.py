"""Small timm models, and conversion from timm to us and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.model import random_images, randomize
from tests.uninitialized import uninitialized
from vitascope.model.config import ViTConfig
from vitascope.model.vit import VisionTransformer
from vitascope.weights.families.timm import Timm
from vitascope.weights.mapping import Source, from_family, to_family
from vitascope.weights.preprocess import default_preprocess

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")

TIMM = Timm()
TINY = {"depth": 2, "img_size": 64, "num_classes": 5}
SMALL = {**TINY, "embed_dim": 64, "num_heads": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_tiny_patch16_224", TINY),
    "augreg's patch 32": ("vit_small_patch32_224", TINY),
    "timm's own test model": ("test_vit", {**TINY, "depth": 3}),
    "image not square": ("vit_tiny_patch16_224", {**TINY, "img_size": (32, 80)}),
    "patch not square": ("vit_tiny_patch16_224", {**TINY, "img_size": (32, 80), "patch_size": (8, 20)}),
    "one channel": ("vit_tiny_patch16_224", {**TINY, "in_chans": 1}),
    "four channels": ("vit_tiny_patch16_224", {**TINY, "in_chans": 4}),
    "no head": ("vit_tiny_patch16_224", {**TINY, "num_classes": 0}),
    "an odd MLP": ("vit_tiny_patch16_224", {**TINY, "mlp_ratio": 2.3}),
    "no positions": ("vit_tiny_patch16_224", {**TINY, "pos_embed": "none"}),
    "no qkv bias": ("vit_base_patch16_224_miil", SMALL),
    "mean, then norm": ("vit_tiny_patch16_224", {**TINY, "global_pool": "avg"}),
    "norm, then mean": ("vit_tiny_patch16_224", {**TINY, "global_pool": "avg", "fc_norm": False}),
    "class token, then norm": ("vit_tiny_patch16_224", {**TINY, "fc_norm": True}),
    "mean without class token": ("vit_base_patch16_gap_224", {**TINY, "embed_dim": 64, "num_heads": 16}),
    "register that has a place": ("vit_tiny_patch16_224", {**TINY, "reg_tokens": 3}),
    "register, mean, layer scale": ("vit_wee_patch16_reg1_gap_256", SMALL),
    "SigLIP": ("vit_base_patch16_siglip_224", SMALL),
    "SigLIP of tanh": ("vit_so400m_patch16_siglip_256", SMALL),
    "SigLIP of tanh, mean": ("vit_base_patch32_siglip_gap_256", SMALL),
    "attention pooling beside other tokens": (
        "vit_tiny_patch16_224",
        {**TINY, "global_pool": "map", "reg_tokens": 2},
    ),
    "SigLIP, cut": ("vit_base_patch16_siglip_224", {**SMALL, "img_size": (70, 90)}),
    "CLIP": ("vit_base_patch16_clip_224", SMALL),
    "CLIP of quick GELU": ("vit_base_patch16_clip_quickgelu_224", SMALL),
    "norm before the encoder, not CLIP's": ("vit_tiny_patch16_224", {**TINY, "pre_norm": True}),
    "DeiT": ("deit_tiny_patch16_224", TINY),
    "DeiT distilled": ("deit_tiny_distilled_patch16_224", TINY),
    "DeiT-III": ("deit3_small_patch16_224", TINY),
    "FlexiViT": ("flexivit_small", TINY),
    "DINOv2": ("vit_small_patch14_dinov2", {**TINY, "img_size": 56}),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", {**TINY, "img_size": 56}),
    "DINOv2 giant": (
        "vit_giant_patch14_dinov2",
        {"depth": 2, "img_size": 56, "embed_dim": 96, "num_heads": 4},
    ),
    "norm of branches": ("vit_base_patch16_rpn_224", SMALL),
    "AIMv2": ("aimv2_large_patch14_224", {**SMALL, "img_size": 56}),
    "RMS norms": ("test_vit4", {**TINY, "depth": 3}),
    "attention pooling of every token": ("test_vit3", {**TINY, "depth": 3}),
    "norms of queries and keys": ("vit_tiny_patch16_224", {**TINY, "qk_norm": True, "proj_bias": False}),
    "norm of patches": (
        "vit_tiny_patch16_224",
        {**TINY, "embed_norm_layer": "rmsnorm", "norm_layer": "rmsnorm"},
    ),
    "BEiT-3": ("beit3_base_patch16_224", SMALL),
    "InternViT": ("vit_intern300m_patch14_448", {**SMALL, "img_size": 56}),
    "any size of image": ("vit_tiny_patch16_224", {**TINY, "dynamic_img_size": True}),
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "R+ViT-Ti/16": ("vit_tiny_r_s16_p8_224", {**SMALL, "in_chans": 1}),
    "R26+ViT-S/32": ("vit_small_r26_s32_224", {**SMALL, "img_size": (64, 96)}),
    "R50+ViT-B/32 on R50/16": ("vit_base_r50_s16_224", {**SMALL, "patch_size": 2, "global_pool": "avg"}),
    "R50+ViT-L/32": ("vit_large_r50_s32_224", SMALL),
}


def peer_model(case: str) -> nn.Module:
    """timm's model, with every parameter random."""
    name, options = (MODELS | HYBRIDS)[case]
    return random_model(name, **options)


def random_model(name: str, **options: Any) -> nn.Module:
    with uninitialized():
        peer = timm.create_model(name, **options)
    return randomize(peer).eval()


def saved(peer: nn.Module, folder: Path, **options: Any) -> Source:
    """Save a model with timm and open its folder."""
    timm.models.save_for_hf(peer, folder, safe_serialization=True, **options)
    return opened(folder)


def opened(folder: Path) -> Source:
    source = Source(
        name=str(folder),
        tensors=load_file(folder / "model.safetensors"),
        config=json.loads((folder / "config.json").read_text()),
    )
    assert TIMM.recognizes(source)
    return TIMM.before_reading(source)


def loaded(source: Source) -> VisionTransformer:
    config = TIMM.read_config(source)
    with torch.device("meta"):
        ours = VisionTransformer(config)
    ours.load_state_dict(from_family(TIMM, source, config), strict=True, assign=True)
    return ours.eval()


def in_timm(ours: VisionTransformer, folder: Path) -> nn.Module:
    """timm's model, loaded strictly from a folder that we write."""
    to_family(TIMM, ours, default_preprocess(ours.config), folder)
    with uninitialized():
        peer = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert_same_state(peer.state_dict(), load_file(folder / "model.safetensors"))
    return peer


def images_for(config: ViTConfig) -> Tensor:
    return random_images(2, config.in_channels, *config.image_hw)


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name
