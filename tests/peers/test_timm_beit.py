"""BEiT as timm saves it loads as ours, and ours written for timm load there, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.model import small_config, small_model
from tests.peers.comparison import relative_error
from tests.peers.test_timm_eva import SMALL, assert_alike, in_timm
from tests.peers.timm_models import assert_same_state, images_for, random_model
from vitascope.model.vit import VisionTransformer
from vitascope.weights.families.timm_beit import TimmBeit
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import identify
from vitascope.weights.loading import from_pretrained
from vitascope.weights.mapping import misfit

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")

BEIT: dict[str, tuple[str, dict[str, Any]]] = {
    "BEiT": ("beit_base_patch16_224", {}),
    "BEiT v2, no head": ("beitv2_large_patch16_224", {"num_classes": 0}),
    "class token": ("beit_large_patch16_384", {"global_pool": "token"}),
    "shared": ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    "learned positions too": ("beit_base_patch16_224", {"use_abs_pos_emb": True, "qkv_bias": False}),
    "learned positions alone": (
        "beit_base_patch16_224",
        {"use_abs_pos_emb": True, "use_rel_pos_bias": False},
    ),
    "gates with a norm": ("beit_base_patch16_224", {"swiglu_mlp": True, "scale_mlp": True}),
    "a norm in a plain MLP": ("beit_base_patch16_224", {"scale_mlp": True, "init_values": 0.0}),
    "norm, then mean": ("beit_base_patch16_224", {"use_fc_norm": False}),
    "a square": ("beit_base_patch16_224", {"img_size": 48}),
}


def beit(case: str, folder: Path) -> tuple[nn.Module, VisionTransformer]:
    name, options = BEIT[case]
    args = {**SMALL, "img_size": [64, 48], **options}
    peer = random_model(name, **args)
    timm.models.save_for_hf(peer, folder, safe_serialization=True, model_args=args)
    ours = from_pretrained(folder)
    assert isinstance(ours, VisionTransformer)
    return peer.double(), ours.double()


@pytest.mark.parametrize("case", BEIT)
def test_model_saved_by_timm_has_timms_outputs(case: str, tmp_path: Path) -> None:
    peer, ours = beit(case, tmp_path)
    assert identify(tmp_path)[1].name == "timm"
    assert_alike(ours, peer, images_for(ours.config).double())


@pytest.mark.parametrize("case", BEIT)
@torch.no_grad()
def test_model_written_for_timm_loads_there_strictly_and_back_here_unchanged(
    case: str, tmp_path: Path
) -> None:
    peer, ours = beit(case, tmp_path / "theirs")
    images = images_for(ours.config).double()
    again = in_timm(ours, tmp_path / "ours")
    assert relative_error(again(images), peer(images)) < 1e-10
    read = from_pretrained(tmp_path / "ours")
    assert read.config == ours.config
    assert_same_state(read.state_dict(), ours.float().state_dict())


OURS: dict[str, dict[str, Any]] = {
    "relative": {"positions": "relative", "qkv_bias": "no_key"},
    "relative by block": {"positions": "relative_by_block", "qkv_bias": "none", "absolute": "all"},
    "mean": {"positions": "relative", "qkv_bias": "no_key", "pool": "mean", "class_token": True},
    "gates": {"positions": "relative", "qkv_bias": "none", "mlp": "swiglu", "inner_norm": "mlp"},
}


@pytest.mark.parametrize("case", OURS)
@torch.no_grad()
def test_our_models_have_equal_outputs_in_timm(case: str, tmp_path: Path) -> None:
    ours = small_model(image_size=(32, 48), **OURS[case])
    peer = in_timm(ours, tmp_path)
    assert_alike(ours.double(), peer, images_for(ours.config).double())
    assert_same_state(from_pretrained(tmp_path).state_dict(), ours.float().state_dict())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"positions": "relative", "qkv_bias": "all"}, "qkv_bias 'all'"),
        ({"positions": "relative", "qkv_bias": "none", "num_registers": 2}, "num_registers 2"),
        ({"positions": "relative", "qkv_bias": "none", "pool": "mean"}, "class_token False"),
        ({"positions": "relative", "qkv_bias": "none", "absolute": "patches"}, "absolute 'patches'"),
    ],
)
def test_what_timm_has_not_is_rejected_with_the_option(options: dict[str, Any], reason: str) -> None:
    assert misfit(TimmBeit(), small_config(**options)) == f"timm has no model with {reason}"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"use_shared_rel_pos_bias": True}, "relative positions of all blocks beside those of each"),
        ({"norm_layer": "layernorm2d"}, "timm's norm_layer 'layernorm2d'"),
    ],
)
def test_what_no_model_here_has_is_rejected_with_its_reason(
    args: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    built = {**SMALL, "img_size": [64, 48]} | ({} if "norm_layer" in args else args)
    peer = random_model("beit_base_patch16_224", **built)
    timm.models.save_for_hf(peer, tmp_path, safe_serialization=True, model_args=built | args)
    with pytest.raises(CheckpointError, match=reason):
        from_pretrained(tmp_path)


def test_file_without_its_settings_is_rejected(tmp_path: Path) -> None:
    peer = random_model("beit_base_patch16_224", **SMALL, img_size=32)
    torch.save(peer.state_dict(), tmp_path / "beit_base_patch16_224.pth")
    with pytest.raises(CheckpointError, match=r"timm's beit\.py without its config\.json"):
        from_pretrained(f"timm:{tmp_path / 'beit_base_patch16_224.pth'}")


def test_a_table_of_another_grid_is_rejected(tmp_path: Path) -> None:
    beit("BEiT", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "blocks.1.attn.relative_position_bias_table"
    for shape, reason in (
        ((36, 3), r"has 33 offsets, and a grid of \(4, 3\) has 7 x 5"),
        ((4,), "is no table of relative"),
    ):
        save_file({**tensors, name: torch.zeros(shape)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=reason):
            from_pretrained(tmp_path)
