"""Models saved by timm load as ours, and our models written for timm load in timm."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tests.contracts import family as contract
from tests.models import VARIANTS, randomize, small_config, small_model
from tests.models.weights import edit
from tests.peers.comparison import relative_error
from tests.peers.timm_models import (
    BEIT,
    EVA,
    EVA_SIZES,
    HYBRIDS,
    LIBRARY,
    MODELS,
    TIMM,
    assert_same_state,
    images_for,
    in_timm,
    loaded,
    peer_model,
    random_model,
    saved,
    with_arguments,
)
from tests.uninitialized import uninitialized
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.families.timm import Timm
from vitascope.models.weights.families.timm_beit import TimmBeit
from vitascope.models.weights.families.timm_eva import TimmEva
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import identify, open_source
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.mapping import Source, changes, from_family, misfit

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")


class TimmLibrary(contract.Library):
    family = "timm"

    def __init__(self, **args: Any) -> None:
        self.args = {"model_args": args} if args else {}  # in config.json, besides the architecture

    def save(self, peer: nn.Module, folder: Path) -> Path:
        timm.models.save_for_hf(peer, folder, safe_serialization=True, **self.args)
        return folder

    def load(self, folder: Path, ours: VisionTransformer, peer: Any) -> nn.Module:
        with uninitialized():
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        assert_same_state(loaded.state_dict(), load_file(folder / "model.safetensors"))
        if peer is not None and not self.args:  # the others' tensors may have other names
            assert_same_state(loaded.state_dict(), peer.float().state_dict())
        return loaded

    def preprocess(self, peer: nn.Module) -> dict[str, Any]:
        told = timm.data.resolve_data_config({}, model=peer)
        names = ("mean", "std", "interpolation") if peer.in_chans == 3 else ("interpolation",)
        return {name: told[name] for name in names}

    def carried(self, ours: VisionTransformer) -> Preprocess:
        """Whole pixels, as timm resizes to."""
        channels, size = ours.config.in_channels, ours.config.image_hw
        numbers = {"mean": (0.1, 0.2, 0.3, 0.4, 0.5)[:channels], "std": (0.5,) * channels}
        whole: dict[str, Any] = {"resize_to": size}
        if size[0] != size[1]:
            whole["side_rounding"] = "nearest"
        return Preprocess(image_size=size, channels=channels, **numbers, **whole)

    def answer(self, peer: nn.Module, images: Tensor, ours: VisionTransformer) -> contract.Answer:
        peer = with_rotation_of(peer.double(), ours)
        seen: dict[str, list[Tensor]] = {"": [], "attn.attn_drop": []}  # of a block, and attention weights
        hooks = []
        for block in peer.blocks:
            block.attn.fused_attn = False
            for part, results in seen.items():
                hooks.append(keep_outputs(block.get_submodule(part), results))
        features = peer.forward_features(images)
        for hook in hooks:
            hook.remove()
        distilled = ours.config.readout.distillation_token  # timm returns the mean of two tokens
        pooled = None if distilled else peer.forward_head(features, pre_logits=True)
        blocks, attention = seen.values()
        return contract.Answer(
            outputs=peer(images), features=features, pooled=pooled, blocks=blocks, attention=attention
        )


def keep_outputs(module: nn.Module, results: list[Tensor]) -> RemovableHandle:
    return module.register_forward_hook(lambda module, args, output: results.append(output))


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


SIZES = {name: [(96, 32), (128, 80)] for name in ("ViT", "DeiT distilled", "FlexiViT")}
SIZES |= {"register, mean, layer scale": [(96, 32)], "RoPE-ViT mixed": [(32, 80)]}
SIZES |= {"EVA-02 small": [(28, 70)], "DINOv3": [(32, 80)]}
"""Sizes of images of models that timm builds for any size."""


def with_mask_token(peer: nn.Module, source: Source) -> Source:
    return contract.with_tensors(open_source(source.folder), {"mask_token": torch.zeros(1, 384)})


def example(case: str) -> contract.Example:
    name, options = (MODELS | HYBRIDS | EVA | BEIT)[case]
    patch, args = 14 if "patch14" in name else 16, {}
    if case in EVA | BEIT:
        args = options = {**EVA_SIZES, "img_size": [4 * patch, 3 * patch], **options}
    any_size = {"dynamic_img_size": True} if case in SIZES else {}
    return contract.Example(
        library=TimmLibrary(**args),
        build=lambda: random_model(name, **options, **any_size),
        sizes=SIZES.get(case, ()),
        others={"a mask token": with_mask_token} if case == "DINOv2" else {},
        tolerance=1e-6 if case in EVA and any_size else 1e-10,  # timm then computes the angles in float32
        attention=1e-6 if case in EVA and any_size else 1e-10,
    )


@pytest.mark.parametrize("case", MODELS | HYBRIDS | EVA | BEIT)
def test_family(case: str, tmp_path: Path) -> None:
    contract.check_family(example(case), tmp_path)


@pytest.mark.parametrize("case", ["ViT", "DeiT distilled", "DINOv3", "BEiT"])
def test_misshapen_tensors_are_rejected(case: str, tmp_path: Path) -> None:
    given = example(case)
    contract.check_misshapen(given.library.save(given.build(), tmp_path), "timm")


@torch.no_grad()
def test_timm_training_checkpoint_determines_its_architecture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """16 heads of 48, where shapes suggest 12 of 64; written by timm's saver."""
    name, options = "vit_base_patch16_gap_224", {"depth": 2, "img_size": 32, "num_classes": 5}
    peer = random_model(name, **options)
    args = argparse.Namespace(model=name, model_kwargs={"depth": 2}, img_size=32, gp=None, lr=0.1)
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1)
    timm.utils.CheckpointSaver(peer, optimizer, args, checkpoint_dir=str(tmp_path)).save_checkpoint(0)
    ours = from_pretrained(f"timm:{tmp_path / 'last.pth.tar'}")
    images = images_for(ours.config)
    assert ours.config.num_heads == 16
    assert relative_error(ours(images), peer(images)) < 1e-5
    assert caplog.messages == []


def test_timm_model_wrapped_by_transformers_has_timms_outputs(tmp_path: Path) -> None:
    """transformers' Trainer saves a timm model in this layout."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224", num_labels=3, model_args={"depth": 2, "img_size": 32}
    )
    peer = transformers.TimmWrapperForImageClassification(config).eval()
    randomize(peer)
    peer.save_pretrained(tmp_path)
    found = from_pretrained(tmp_path)
    assert (identify(tmp_path)[1].name, found.config.class_names) == ("timm", ())
    images = images_for(found.config)
    assert relative_error(found(images), peer(images).logits.detach()) < 1e-5


MORE: dict[str, dict[str, Any]] = {
    "norm of branches alone": {"norm": "branch", "pool": "mean"},
    "norm before the encoder": {"embedding_norm": True, "patch_bias": False},
    "CLIP": {"embedding_norm": True, "patch_bias": False, "norm_eps": 1e-5, "mlp": "quick_gelu"},
    "CLIP's epsilon alone": {"norm_eps": 1e-5},
    "AIMv2": {
        "norm_type": "rms",
        "patch_norm": True,
        "mlp": "swiglu",
        "norm_eps": 1e-5,
        "linear_bias": False,
    },
    "RMS norms, no other biases": {"norm_type": "rms", "inner_norm": "all", "linear_bias": False},
    "map of every token, timm's": {"pool": "map", "pool_prefix": True, "num_registers": 1},
    "swiglu with layer scale": {"mlp": "swiglu", "layer_scale": 1e-5},
    "layer scale that starts at 0": {"layer_scale": 0.0},
    "map of tanh": {"pool": "map", "mlp": "gelu_tanh"},
    "mean with registers": {"pool": "mean", "num_registers": 2, "position_prefix": False},
    "class names": {"class_names": ("cat", "dog", "bird", "", "Ähre")},
    "no positions, no class token": {"positions": "none", "pool": "mean"},
    "root alone": {"stem": "resnet", "resnet_layers": (), "resnet_dialect": "timm", "pool": "mean"},
    "R26": {
        "stem": "resnet",
        "resnet_layers": (2, 2, 2, 2),
        "resnet_dialect": "timm",
        "image_size": 64,
        "patch_size": 32,
    },
    "EVA, rotary": {"positions": "rotary", "rotary_base": 50.0, "absolute": "all"},
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
    "relative": {"positions": "relative", "qkv_bias": "no_key"},
    "relative by block": {"positions": "relative_by_block", "qkv_bias": "none", "absolute": "all"},
    "mean": {"positions": "relative", "qkv_bias": "no_key", "pool": "mean", "class_token": True},
    "gates": {"positions": "relative", "qkv_bias": "none", "mlp": "swiglu", "inner_norm": "mlp"},
}


HELD = {name for name, options in VARIANTS.items() if not misfit(LIBRARY, small_config(**options))}


@pytest.mark.parametrize("case", sorted(HELD | MORE.keys()))
def test_our_models_have_equal_outputs_in_timm(case: str, tmp_path: Path) -> None:
    model = small_model(**{"depth": 2, **(VARIANTS | MORE)[case]})
    contract.check_written(model, contract.Example(library=TimmLibrary(), build=dict), tmp_path)


def test_our_other_models_are_rejected_by_an_option(tmp_path: Path) -> None:
    assert (len(HELD), len(VARIANTS)) == (39, 82)
    for case in VARIANTS.keys() - HELD:
        reason = misfit(LIBRARY, small_config(**VARIANTS[case]))
        assert reason.startswith("timm has no model with ")
        assert any(option in reason for option in VARIANTS[case]), (case, reason)
    contract.check_refused("timm", small_model(norm="post"), ["norm 'post'"], tmp_path)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"norm_eps": 1e-12}, "norm_eps 1e-12 becomes 1e-06"),
        ({"norm_eps": 1e-5, "norm_type": "rms"}, "norm_eps 1e-05 becomes 1e-06"),
        ({"norm_eps": 1e-5, "mlp": "swiglu"}, "norm_eps 1e-05 becomes 1e-06"),
        ({"norm_eps": 1e-5, "distillation_token": True}, "norm_eps 1e-05 becomes 1e-06"),
        ({"resample": "dinov2"}, "resample 'dinov2' becomes 'timm'"),
        (
            {"stem": "resnet", "resnet_layers": (), "norm_eps": 1e-5},
            "norm_eps 1e-05 becomes 1e-06; resnet_dialect 'jax' becomes 'timm'",
        ),
    ],
)
def test_options_fixed_by_timm_are_reported_and_applied(
    options: dict[str, Any], change: str, tmp_path: Path
) -> None:
    ours = small_model(**options)
    told = [sentence.partition(": timm has no other")[0] for sentence in changes(TIMM, ours.config)]
    assert sorted(told) == sorted(change.split("; "))
    peer = in_timm(ours, tmp_path).double()
    expected = contract.settled(ours, "timm").double()
    images = images_for(ours.config).double()
    with torch.no_grad():
        assert relative_error(peer(images), expected(images)) < 1e-12


@pytest.mark.parametrize("case", ["ViT", "norm, then mean", "SigLIP of tanh", "DINOv2 giant", "R26+ViT-S/32"])
def test_gradients_equal_timm(case: str, tmp_path: Path) -> None:
    peer = peer_model(case)
    ours = loaded(saved(peer, tmp_path))
    images = images_for(ours.config)
    gradients = []
    for model in (ours.double(), peer.double()):
        pixels = images.double().requires_grad_()
        model.train()(pixels).square().sum().backward()
        gradients.append((pixels.grad, {name: value.grad for name, value in model.named_parameters()}))
    (our_pixels, our_weights), (their_pixels, their_weights) = gradients
    assert relative_error(our_pixels, their_pixels) < 1e-10
    renamed = from_family(TIMM, Source(name="gradients", tensors=their_weights), ours.config)
    for name, gradient in our_weights.items():
        assert relative_error(gradient, renamed[name]) < 1e-10, name


@torch.no_grad()
@pytest.mark.parametrize("case", ["ViT", "DeiT distilled", "DINOv2 with registers", "class token, then norm"])
def test_intermediates_equal_timms(case: str, tmp_path: Path) -> None:
    peer = peer_model(case)
    ours = loaded(saved(peer, tmp_path))
    images, prefix = images_for(ours.config), ours.config.num_prefix_tokens
    theirs = peer.get_intermediate_layers(images, n=[0, 1], norm=True)
    for mine, other in zip(ours.forward_intermediates(images, [0, 1]), theirs, strict=True):
        assert relative_error(mine[:, prefix:], other) < 1e-5
    theirs = peer.forward_intermediates(
        images, indices=[0], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
    )
    (mine,) = ours.forward_intermediates(images, [0], norm=False)
    ((patches, others),) = theirs
    assert relative_error(mine, torch.cat([others, patches], dim=1)) < 1e-5
    for norm in (True, False):
        maps = peer.forward_intermediates(
            images, indices=[0, 1], output_fmt="NCHW", norm=norm, intermediates_only=True
        )
        for mine, other in zip(ours.feature_map(images, [0, 1], norm=norm), maps, strict=True):
            assert mine.shape == other.shape
            assert relative_error(mine, other) < 1e-5


UNBIASED = {"positions": "relative", "qkv_bias": "none"}
GIANT_EVA = {"depth": 1, "embed_dim": 64, "num_heads": 2}
BOTH_NORMS = {"use_fc_norm": True, "use_post_transformer_norm": True}


@pytest.mark.parametrize(
    ("part", "options", "reason"),
    [
        (TimmEva(), {"norm": "branch", "layer_scale": 0.1}, 'norm "branch" and layer_scale'),
        (TimmEva(), {"positions": "rotary_axial", "norm_eps": 1e-5}, "no rotary_grid"),
        (TimmEva(), {"positions": "rotary", "mlp": "gelu_tanh"}, "mlp 'gelu_tanh'"),
        (TimmEva(), {"positions": "rotary", "pool": "map", "num_registers": 1}, "and pool_prefix False"),
        (TimmEva(), {"positions": "rotary", "pool": "map", "mlp": "swiglu"}, 'pool "map" and mlp "swiglu"'),
        (TimmEva(), {"positions": "rotary", "norm": "branch", "qk_norm": True}, 'norm "branch" and qk_norm'),
        (TimmEva(), {"positions": "rotary", "norm_type": "rms"}, 'norm_type "rms" without layer_scale'),
        (TimmBeit(), {"positions": "relative", "qkv_bias": "all"}, "qkv_bias 'all'"),
        (TimmBeit(), {**UNBIASED, "num_registers": 2}, "num_registers 2"),
        (TimmBeit(), {**UNBIASED, "pool": "mean"}, "class_token False"),
        (TimmBeit(), {**UNBIASED, "absolute": "patches"}, "absolute 'patches'"),
    ],
)
def test_what_a_part_of_timm_has_not_is_rejected_with_the_option(
    part: Timm, options: dict[str, Any], reason: str
) -> None:
    config = small_config(**options)
    assert reason in misfit(part, config)
    assert misfit(LIBRARY, config).startswith("timm has no model with ")


@pytest.mark.parametrize(
    ("name", "args", "told", "reason"),
    [
        ("eva02_tiny_patch14_224", {"depth": 1, "rope_type": "mrope"}, {}, "rope_type 'mrope' is none of"),
        ("vit_small_patch16_dinov3", {"depth": 1, "rope_grid_offset": 0.5}, {}, "rope_grid_offset 0.5"),
        ("eva_giant_patch14_224", {**GIANT_EVA, "global_pool": "max"}, {}, "'max' is"),
        ("eva02_tiny_patch14_224", {"depth": 1, **BOTH_NORMS}, {}, "extra norm"),
        ("eva02_tiny_patch14_224", {"depth": 1}, {"num_heads": 5}, "does not fit 5 heads"),
        ("beit_base_patch16_224", {**EVA_SIZES, "use_shared_rel_pos_bias": True}, {}, "relative positions"),
        ("beit_base_patch16_224", EVA_SIZES, {"norm_layer": "layernorm2d"}, "timm's norm_layer 'layernorm2d"),
    ],
)
def test_what_no_model_here_has_is_rejected_with_its_reason(
    name: str, args: dict[str, Any], told: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    peer = random_model(name, **args)
    timm.models.save_for_hf(peer, tmp_path, safe_serialization=True, model_args=args | told)
    with pytest.raises(CheckpointError, match=reason):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "beit_base_patch16_224"])
def test_file_without_its_settings_is_rejected(name: str, tmp_path: Path) -> None:
    peer = random_model(name, **EVA_SIZES, img_size=32)
    torch.save(peer.state_dict(), tmp_path / f"{name}.pth")
    with pytest.raises(CheckpointError, match=r"(eva|beit)\.py without its config\.json"):
        from_pretrained(f"timm:{tmp_path / name}.pth")


def test_a_table_of_another_grid_is_rejected(tmp_path: Path) -> None:
    with_arguments("BEiT", tmp_path)
    name = "blocks.1.attn.relative_position_bias_table"
    for shape, reason in (
        ((36, 3), r"has 33 offsets, and a grid of \(4, 3\) has 7 x 5"),
        ((4,), "is no table of relative"),
    ):
        edit(tmp_path, lambda tensors, shape=shape: tensors.update({name: torch.zeros(shape)}))
        with pytest.raises(CheckpointError, match=reason):
            from_pretrained(tmp_path)
