"""Small timm models of every module that is read, and conversion from timm to us and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.models import random_images, randomize
from tests.uninitialized import uninitialized
from vitascope.models.config import ViTConfig
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.all_families import FAMILIES
from vitascope.models.weights.families.timm import Timm
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.mapping import Source, from_family, to_family
from vitascope.models.weights.preprocess import default_preprocess

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")

TIMM, LIBRARY = Timm(), FAMILIES["timm"]
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
}
EVA_SIZES = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
EVA: dict[str, tuple[str, dict[str, Any]]] = {
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "DINOv3 with biases": ("vit_small_patch16_dinov3_qkvb", {"global_pool": "token"}),
    "DINOv3 with gates": ("vit_huge_plus_patch16_dinov3", {"num_classes": 0}),
    "LingBot": ("vit_giant_patch16_lingbot", {}),
    "EVA": ("eva_giant_patch14_224", {}),
    "EVA-CLIP": ("eva_giant_patch14_clip_224", {}),
    "EVA-02 small": ("eva02_small_patch14_336", {}),
    "EVA-02 with a norm inside": ("eva02_base_patch14_448", {}),
    "EVA-02-CLIP": ("eva02_large_patch14_clip_224", {}),
    "EVA-02-CLIP of norms after branches": ("eva02_enormous_patch14_clip_224", {}),
    "rotary with registers": ("vit_medium_patch16_rope_reg1_gap_256", {}),
    "rotary without biases": ("vit_mediumd_patch16_rope_reg1_gap_256", {}),
    "RoPE-ViT": ("vit_small_patch16_rope_224", {}),
    "RoPE-ViT with learned positions": ("vit_small_patch16_rope_ape_224", {}),
    "RoPE-ViT mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "RoPE-ViT mixed with learned positions": ("vit_small_patch16_rope_mixed_ape_224", {}),
    "PE spatial": ("vit_pe_spatial_small_patch16_512", {}),
    "PE lang": ("vit_pe_lang_large_patch14_448", {}),
    "PE lang without class token": ("vit_pe_lang_gigantic_patch14_448", {}),
    "PE core": ("vit_pe_core_small_patch16_384", {"num_heads": 3}),
    "PE core without class token": ("vit_pe_core_gigantic_patch14_448", {}),
    "Sapiens2": ("vit_base_patch16_sapiens2", {"num_kv_heads": 3}),
    "Sapiens2 of shared keys": ("vit_large_patch16_sapiens2", {"num_kv_heads": (3, 1)}),
    "EVA-02 with norms of queries and keys": ("eva02_small_patch14_224", {"qk_norm": True}),
    "arguments": (
        "vit_small_patch16_rope_mixed_224",
        {"rope_grid_indexing": "ij", "no_embed_class": False, "use_abs_pos_emb": True, "num_reg_tokens": 2},
    ),
    "more arguments": (
        "eva02_small_patch14_224",
        {"rope_rotate_half": True, "rope_grid_indexing": "xy", "rope_temperature": 30, "ref_feat_shape": 7},
    ),
    "a norm inside a plain MLP": ("eva_giant_patch14_224", {"scale_mlp": True, "num_heads": 6}),
    "EVA without positions and last norms": (
        "eva_giant_patch14_224",
        {"use_abs_pos_emb": False, "use_fc_norm": False, "use_post_transformer_norm": False},
    ),
}
BEIT: dict[str, tuple[str, dict[str, Any]]] = {
    "BEiT": ("beit_base_patch16_224", {}),
    "BEiT v2, no head": ("beitv2_large_patch16_224", {"num_classes": 0}),
    "BEiT, class token": ("beit_large_patch16_384", {"global_pool": "token"}),
    "BEiT, shared": ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    "BEiT, learned positions too": ("beit_base_patch16_224", {"use_abs_pos_emb": True, "qkv_bias": False}),
    "BEiT, learned positions alone": (
        "beit_base_patch16_224",
        {"use_abs_pos_emb": True, "use_rel_pos_bias": False},
    ),
    "BEiT, gates with a norm": ("beit_base_patch16_224", {"swiglu_mlp": True, "scale_mlp": True}),
    "BEiT, a norm in a plain MLP": ("beit_base_patch16_224", {"scale_mlp": True, "init_values": 0.0}),
    "BEiT, norm, then mean": ("beit_base_patch16_224", {"use_fc_norm": False}),
    "BEiT, a square": ("beit_base_patch16_224", {"img_size": 48}),
}


def peer_model(case: str) -> nn.Module:
    """timm's model, with every parameter random."""
    name, options = (MODELS | HYBRIDS)[case]
    return random_model(name, **options)


def random_model(name: str, **options: Any) -> nn.Module:
    with uninitialized():
        peer = timm.create_model(name, **options)
    return randomize(peer).eval()


def with_arguments(case: str, folder: Path, **more: Any) -> tuple[nn.Module, VisionTransformer]:
    """timm's model of a case of `EVA` or `BEIT`, and ours from the folder that timm writes."""
    name, options = (EVA | BEIT)[case]
    patch = 14 if "patch14" in name else 16
    args = {**EVA_SIZES, "img_size": [4 * patch, 3 * patch], **options, **more}
    peer = random_model(name, **args)
    timm.models.save_for_hf(peer, folder, safe_serialization=True, model_args=args)
    ours = from_pretrained(folder)
    assert isinstance(ours, VisionTransformer)
    return peer, ours


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
    to_family(LIBRARY, ours, default_preprocess(ours.config), folder)
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
