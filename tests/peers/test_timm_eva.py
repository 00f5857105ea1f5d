"""Models of timm's eva.py load as ours, and ours written for timm load there, in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model import random_images, small_config, small_model
from tests.peers.comparison import relative_error
from tests.peers.timm_models import assert_same_state, images_for, random_model
from tests.uninitialized import uninitialized
from vitascope.model.vit import VisionTransformer
from vitascope.weights.families.timm_eva import TimmEva
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import TIMM, identify
from vitascope.weights.loading import from_pretrained
from vitascope.weights.mapping import misfit, to_family
from vitascope.weights.preprocess import preprocess_of

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}

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
    "norms of queries and keys": ("eva02_small_patch14_224", {"qk_norm": True}),
    "arguments": (
        "vit_small_patch16_rope_mixed_224",
        {"rope_grid_indexing": "ij", "no_embed_class": False, "use_abs_pos_emb": True, "num_reg_tokens": 2},
    ),
    "more arguments": (
        "eva02_small_patch14_224",
        {"rope_rotate_half": True, "rope_grid_indexing": "xy", "rope_temperature": 30, "ref_feat_shape": 7},
    ),
    "a norm inside a plain MLP": ("eva_giant_patch14_224", {"scale_mlp": True, "num_heads": 6}),
    "no positions, both norms off": (
        "eva_giant_patch14_224",
        {"use_abs_pos_emb": False, "use_fc_norm": False, "use_post_transformer_norm": False},
    ),
}


def eva(case: str, folder: Path, **more: Any) -> tuple[nn.Module, VisionTransformer]:
    """timm's model of a case with random parameters, and ours from the folder that timm writes."""
    name, options = EVA[case]
    patch = 14 if "patch14" in name else 16
    args = {**SMALL, "img_size": [4 * patch, 3 * patch], **options, **more}
    peer = random_model(name, **args)
    timm.models.save_for_hf(peer, folder, safe_serialization=True, model_args=args)
    ours = from_pretrained(folder)
    assert isinstance(ours, VisionTransformer)
    return peer.double(), ours.double()


def in_timm(ours: VisionTransformer, folder: Path) -> nn.Module:
    to_family(TIMM, ours.float(), preprocess_of(ours), folder)
    with uninitialized():
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval().double()


def with_rotation_of(peer: nn.Module, ours: VisionTransformer) -> nn.Module:
    """timm's DINOv3 with our float32 table of angles, which differs from its own by their last digit."""
    if type(getattr(peer, "rope", None)).__name__ != "RotaryEmbeddingDinoV3":
        return peer
    embed: Callable[..., Tensor] = peer.rope.get_embed

    def get_embed(shape: Any = None) -> Tensor:
        cos, sin = ours.positions.layout(tuple(shape or ours.config.grid), torch.device("cpu")).rotation
        table = torch.cat([sin[:, 0], cos[:, 0]], dim=1).double()
        torch.testing.assert_close(table, embed(shape).double(), rtol=0, atol=2e-6)
        return table

    peer.rope.get_embed = get_embed
    return peer


@torch.no_grad()
def assert_alike(ours: VisionTransformer, peer: nn.Module, images: Tensor) -> None:
    """Compare logits, pooled features, and every block's tokens and attention."""
    assert relative_error(ours(images), peer(images)) < 1e-10
    attention, tokens = [], []
    for block in peer.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, __, output: attention.append(output))
        block.register_forward_hook(lambda _, __, output: tokens.append(output))
    features = peer.forward_features(images)
    assert relative_error(ours.forward_features(images), features) < 1e-10
    assert relative_error(ours.embed(images), peer.forward_head(features, pre_logits=True)) < 1e-10
    trace = ours.trace(images, attention=True)
    assert trace.attention is not None
    assert len(trace.attention) == len(attention) == ours.config.depth
    for index in range(ours.config.depth):
        assert relative_error(trace.attention[index], attention[index]) < 1e-10
        assert relative_error(trace[f"block{index}"], tokens[index]) < 1e-10


@pytest.mark.parametrize("case", EVA)
def test_model_saved_by_timm_has_timms_outputs(case: str, tmp_path: Path) -> None:
    peer, ours = eva(case, tmp_path)
    assert identify(tmp_path)[1].name == "timm"
    assert_alike(ours, with_rotation_of(peer, ours), images_for(ours.config).double())


@pytest.mark.parametrize("case", EVA)
@torch.no_grad()
def test_model_written_for_timm_loads_there_strictly_and_back_here_unchanged(
    case: str, tmp_path: Path
) -> None:
    peer, ours = eva(case, tmp_path / "theirs")
    images = images_for(ours.config).double()
    again = in_timm(ours, tmp_path / "ours")
    assert (
        relative_error(again(images), peer(images)) < 1e-7
    )  # DINOv3 may compute its angles in another dtype
    assert_alike(ours.double(), with_rotation_of(again, ours), images)
    read = from_pretrained(tmp_path / "ours")
    assert read.config == ours.config
    assert_same_state(read.state_dict(), ours.float().state_dict())


OURS: dict[str, dict[str, Any]] = {
    "rotary": {"positions": "rotary", "rotary_base": 50.0, "absolute": "all"},
    "rotary by row and column": {"positions": "rotary_axial", "rotary_base": 50.0, "absolute": "patches"},
    "stretched": {"positions": "rotary_axial", "rotary_grid": (3, 5), "rotary_offset": 1.0, "norm_eps": 1e-5},
    "learned frequencies": {"positions": "rotary_mixed", "num_registers": 1, "layer_scale": 0.1},
    "no key bias": {"qkv_bias": "no_key"},
    "norm of branches": {"norm": "branch", "pool": "mean", "pool_norm": "after"},
    "norms inside": {"inner_norm": "all", "mlp": "swiglu", "mlp_ratio": 8 / 3},
    "RMS norms": {"norm_type": "rms", "layer_scale": 0.1, "qk_norm": True, "positions": "rotary"},
    "attention pooling": {"positions": "rotary", "pool": "map", "pool_prefix": True, "pool_mlp_ratio": 2.0},
    "no last norm": {"pool_norm": "none", "qkv_bias": "none", "embedding_norm": True, "patch_bias": False},
    "CLIP's epsilon": {
        "positions": "rotary",
        "norm_eps": 1e-5,
        "num_registers": 4,
        "class_names": tuple("abcde"),
    },
}


@pytest.mark.parametrize("case", OURS)
@torch.no_grad()
def test_our_models_have_equal_outputs_in_timm(case: str, tmp_path: Path) -> None:
    ours = small_model(image_size=(32, 48), **OURS[case])
    peer = in_timm(ours, tmp_path)
    ours = ours.double()
    assert_alike(ours, with_rotation_of(peer, ours), images_for(ours.config).double())
    read = from_pretrained(tmp_path)
    assert_same_state(read.state_dict(), ours.float().state_dict())
    assert read.config.class_names == ours.config.class_names


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm": "branch", "layer_scale": 0.1}, 'norm "branch" and layer_scale'),
        ({"positions": "rotary_axial", "norm_eps": 1e-5}, "no rotary_grid"),
        ({"positions": "rotary", "mlp": "gelu_tanh"}, "mlp 'gelu_tanh'"),
        ({"positions": "rotary", "pool": "map", "num_registers": 1}, 'pool "map" and pool_prefix False'),
        ({"positions": "rotary", "pool": "map", "mlp": "swiglu"}, 'pool "map" and mlp "swiglu"'),
        ({"positions": "rotary", "norm": "branch", "qk_norm": True}, 'norm "branch" and qk_norm'),
        ({"positions": "rotary", "norm_type": "rms"}, 'norm_type "rms" without layer_scale'),
    ],
)
def test_what_timm_has_not_is_rejected_with_the_option(options: dict[str, Any], reason: str) -> None:
    config = small_config(**options)
    assert reason in misfit(TimmEva(), config)
    assert misfit(TIMM, config).startswith("timm has no model with ")


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("eva02_tiny_patch14_224", {"depth": 1, "rope_type": "mrope"}, "rope_type 'mrope' is none of"),
        ("vit_small_patch16_dinov3", {"depth": 1, "rope_grid_offset": 0.5}, "rope_grid_offset 0.5"),
        (
            "eva_giant_patch14_224",
            {"depth": 1, "embed_dim": 64, "num_heads": 2, "global_pool": "max"},
            "'max' is",
        ),
        (
            "eva02_tiny_patch14_224",
            {"depth": 1, "use_fc_norm": True, "use_post_transformer_norm": True},
            "extra norm",
        ),
    ],
)
def test_what_no_model_here_has_is_rejected_with_its_reason(
    name: str, args: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    peer = random_model(name, **args)
    timm.models.save_for_hf(peer, tmp_path, safe_serialization=True, model_args=args)
    with pytest.raises(CheckpointError, match=reason):
        from_pretrained(tmp_path)


def test_file_without_its_settings_is_rejected(tmp_path: Path) -> None:
    peer = random_model("vit_small_patch16_dinov3", depth=1)
    torch.save(peer.state_dict(), tmp_path / "vit_small_patch16_dinov3.pth")
    with pytest.raises(CheckpointError, match=r"without its config\.json"):
        from_pretrained(f"timm:{tmp_path / 'vit_small_patch16_dinov3.pth'}")


def test_preprocessing_is_that_of_the_settings(tmp_path: Path) -> None:
    peer, ours = eva("DINOv3", tmp_path)
    expected = timm.data.resolve_data_config({}, model=peer)
    preprocess = preprocess_of(ours)
    assert (preprocess.mean, preprocess.std) == (expected["mean"], expected["std"])
    assert preprocess.interpolation == expected["interpolation"]


@pytest.mark.parametrize("case", ["RoPE-ViT mixed", "EVA-02 small", "DINOv3"])
@torch.no_grad()
def test_other_image_sizes_equal_timm(case: str, tmp_path: Path) -> None:
    peer, ours = eva(case, tmp_path, dynamic_img_size=True)
    patch = ours.config.patch_hw[0]
    images = random_images(2, 3, 2 * patch, 5 * patch).double()
    assert (
        relative_error(ours(images), with_rotation_of(peer, ours)(images)) < 1e-6
    )  # timm's angles are float64


def test_heads_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    peer = random_model("eva02_tiny_patch14_224", depth=1)
    timm.models.save_for_hf(peer, tmp_path, safe_serialization=True, model_args={"num_heads": 5})
    with pytest.raises(CheckpointError, match="does not fit 5 heads"):
        from_pretrained(tmp_path)
