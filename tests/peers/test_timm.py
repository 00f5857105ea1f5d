"""Models saved by timm load as ours, and our models written for timm load in timm."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model import VARIANTS, random_images, randomize, small_config, small_model
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
from tests.weights import edit
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.sizes import named_config
from vitascope.model.vit import VisionTransformer
from vitascope.weights.families.timm import Timm
from vitascope.weights.families.timm_beit import TimmBeit
from vitascope.weights.families.timm_eva import TimmEva
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import identify
from vitascope.weights.loading import from_pretrained
from vitascope.weights.mapping import Source, changes, from_family, misfit, to_family
from vitascope.weights.preprocess import default_preprocess, preprocess_of

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")


def watch(peer: nn.Module, part: str) -> list[Tensor]:
    """Record the outputs of a part of each block in every later forward pass; timm's "attn.attn_drop" are the
    attention weights, unless attention is fused."""
    seen: list[Tensor] = []
    for block in peer.blocks:
        block.attn.fused_attn = False
        block.get_submodule(part).register_forward_hook(lambda module, args, output: seen.append(output))
    return seen


@torch.no_grad()
def assert_alike(ours: VisionTransformer, peer: nn.Module, images: Tensor, tolerance: float) -> None:
    """Compare logits, pooled features, and every block's tokens and attention."""
    assert relative_error(ours(images), peer(images)) < tolerance
    attention, tokens = watch(peer, "attn.attn_drop"), watch(peer, "")
    features = peer.forward_features(images)
    assert relative_error(ours.forward_features(images), features) < tolerance
    if not ours.config.readout.distillation_token:  # timm returns the mean of two tokens
        pooled = peer.forward_head(features, pre_logits=True)
        assert relative_error(ours.embed(images), pooled) < tolerance
    trace = ours.trace(images, attention=True)
    assert len(trace.attention) == len(attention) == len(tokens) == ours.config.depth
    for index in range(ours.config.depth):
        assert relative_error(trace.attention[index], attention[index]) < tolerance
        assert relative_error(trace[f"block{index}"], tokens[index]) < tolerance


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


@pytest.mark.parametrize("case", MODELS | HYBRIDS | EVA | BEIT)
@torch.no_grad()
def test_a_folder_has_timms_outputs_both_ways(case: str, tmp_path: Path) -> None:
    """Saved by timm, loaded here, written for timm, loaded there strictly, and read again."""
    theirs, written = tmp_path / "theirs", tmp_path / "ours"
    if case in EVA | BEIT:
        peer, ours = with_arguments(case, theirs)
    else:
        peer = peer_model(case)
        ours = loaded(saved(peer, theirs))
    assert identify(theirs)[1].name == "timm"
    assert changes(LIBRARY, ours.config) == []
    again, images = in_timm(ours, written), images_for(ours.config).double()
    if case in MODELS | HYBRIDS:  # the others' tensors may have other names with the same function
        assert_same_state(again.state_dict(), peer.state_dict())
    read = from_pretrained(written)
    assert read.config == ours.config
    assert_same_state(read.state_dict(), ours.state_dict())
    ours, peer, again = ours.double(), peer.double(), again.double()
    # DINOv3 may compute its angles in another dtype.
    assert relative_error(again(images), peer(images)) < (1e-7 if case in EVA else 1e-10)
    for model in (peer, again):
        assert_alike(ours, with_rotation_of(model, ours), images, tolerance=1e-10)


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


@torch.no_grad()
def test_each_distilled_token_has_its_own_head(tmp_path: Path) -> None:
    peer = peer_model("DeiT distilled")
    ours = loaded(saved(peer, tmp_path))
    images = images_for(ours.config)
    peer.set_distilled_training(True)
    peer.train()  # only then it returns both; there is no dropout and no drop path
    for mine, theirs in zip(ours.head.both(ours.embed(images)), peer(images), strict=True):
        assert relative_error(mine, theirs) < 1e-5


REFUSED = {
    "overlapping patches": "stem 'overlap'",
    "overlapping patches, stride 8x4": "stem 'overlap', stride (8, 4)",
    "resnet": "resnet_layers (1, 2), resnet_width 4",
    "resnet as timm has it": "resnet_layers (1,), resnet_width 2",
    "tokenizer": "stem 'tokenizer'",
    "tokenizer that pools in two of three layers": "stem 'tokenizer', tokenizer_widths (6, 4)",
    "tokenizer that pools in its last layers": "stem 'tokenizer', tokenizer_widths (6, 4)",
    "tokenizer with GELU": "stem 'tokenizer', tokenizer_widths (4, 6)",
    "norm of overlapping patches, RMS": "stem 'overlap'",
    "RMS norms": "patch_bias and embedding_norm",
    "norm of queries and keys, RMS, rotary": "positions 'rotary'",
    "no other biases, map": 'pool "map" and linear_bias False',
    "map of every token": "pool_heads 4, pool_mlp_ratio 1.5",
    "sequence": "pool 'sequence'",
    "sequence beside a class token, then norm": "pool 'sequence'",
    "cosine head": "head 'cosine'",
    "cosine head of a projection": "head 'cosine', projection 7",
    "no patch bias": "patch_bias and embedding_norm",
    "rows and columns": "positions 'learned_2d'",
    "sincos 1d": "positions 'sincos_1d'",
    "sincos 2d": "positions 'sincos_2d'",
    "sincos 2d of big_vision, map": "positions 'sincos_2d_big_vision'",
    "relative": "positions 'relative'",
    "relative without prefix": "positions 'relative'",
    "relative by block": "positions 'relative_by_block', absolute 'all'",
    "relative by block without prefix, window": "positions 'relative_by_block', attention 'window'",
    "rotary by row and column": "positions 'rotary_axial', absolute 'all', rotary_base 50.0",
    "rotary, stretched": "positions 'rotary_axial', rotary_grid (3, 5), rotary_offset 1.0",
    "rotary with learned frequencies": "positions 'rotary_mixed', absolute 'patches'",
    "norm of branches": 'norm "branch" and layer_scale',
    "patch dropout, learned frequencies": "positions 'rotary_mixed'",
    "rotary": "positions 'rotary', rotary_base 50.0",
    "rotary with registers": "positions 'rotary'",
    "fewer heads of the same width": "head_dim 4",
    "fewer heads, map, no key bias": "head_dim 8",
    "token merging": "token_merging 3",
    "token merging, mean, registers": "token_merging 5",
    "embedding norm": "patch_bias and embedding_norm",
    "post-norm": "norm 'post'",
    "post-norm, mean": "norm 'post'",
    "axial": "attention 'axial'",
    "axial, relative, mean": "positions 'relative', attention 'axial'",
    "window": "attention 'window', window (2, 2)",
    "window, rotary, registers": "positions 'rotary', attention 'window', window (1, 2)",
    "window, relative": "positions 'relative', attention 'window', window (2, 1)",
    "no key bias": "qkv_bias 'no_key'",
    "class token and mean": "pool 'cls_mean'",
    "map, swiglu, registers, mlp head": 'head \'mlp\', pool "map" and mlp "swiglu"',
    "distillation without head": 'num_registers and distillation_token, head "none" and distillation_token',
    "mlp head": "head 'mlp'",
    "pre_logits": "head 'pre_logits'",
    "patch dropout, rotary": "positions 'rotary'",
}
"""What timm has no model for, of the variants of our tests, and the options that are named."""
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


@pytest.mark.parametrize("case", [name for name in VARIANTS if name not in REFUSED] + list(MORE))
@torch.no_grad()
def test_our_models_have_equal_outputs_in_timm(case: str, tmp_path: Path) -> None:
    ours = small_model(**(VARIANTS | MORE)[case])
    config = LIBRARY.fixed_there(ours.config)
    peer = in_timm(ours, tmp_path)
    again = from_pretrained(tmp_path)
    assert_same_state(again.state_dict(), ours.state_dict())
    assert what_runs(again.config) == what_runs(config)
    assert again.config.class_names == ours.config.class_names
    ours, peer, images = ours.double(), peer.double(), images_for(config).double()
    assert relative_error(with_rotation_of(peer, ours)(images), ours(images)) < 1e-12


def what_runs(config: ViTConfig) -> dict[str, Any]:
    """The options that, besides the weights, determine the output of a trained model."""
    options = {name: config.option(name) for name, group in OPTIONS.items() if group != "regularization"}
    spellings = {
        "layer_scale": options["layer_scale"] is not None,
        "class_token": config.readout.has_class_token,
        "position_prefix": config.num_prefix_tokens == 0 or options["position_prefix"],
        "num_classes": 0 if options["head"] == "none" else options["num_classes"],
        "mlp_ratio": config.mlp_dim,
    }
    return options | spellings


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_timm_cannot_run_is_rejected_naming_its_options(case: str, tmp_path: Path) -> None:
    model = small_model(**VARIANTS[case])
    with pytest.raises(CheckpointError) as error:
        to_family(TIMM, model, default_preprocess(model.config), tmp_path / "new")
    assert f"timm has no model with {REFUSED[case]}" in str(error.value)
    assert not (tmp_path / "new").exists()


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
    settled = VisionTransformer(TIMM.fixed_there(ours.config)).eval()
    settled.load_state_dict(ours.state_dict())
    images = images_for(ours.config).double()
    with torch.no_grad():
        assert relative_error(peer(images), settled.double()(images)) < 1e-12


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"distillation_token": True, "mlp": "swiglu"}, 'mlp "swiglu" and distillation_token'),
        ({"distillation_token": True, "positions": "none"}, 'positions "none" and distillation_token'),
        (
            {"distillation_token": True, "position_prefix": False},
            "position_prefix False and distillation_token",
        ),
        (
            {"stem": "resnet", "resnet_layers": (), "resnet_dialect": "timm", "mlp": "swiglu"},
            'stem "resnet" and mlp "swiglu"',
        ),
    ],
)
def test_combination_that_timm_lacks_is_rejected(options: dict[str, Any], reason: str) -> None:
    assert misfit(TIMM, small_config(**options)).startswith(f"timm has no model with {reason}")


# Other sizes, gradients, initialization


@pytest.mark.parametrize("case", ["ViT", "DeiT distilled", "FlexiViT", "register, mean, layer scale"])
@pytest.mark.parametrize("size", [(96, 32), (64, 64), (128, 80)])
@torch.no_grad()
def test_other_image_sizes_equal_timm(case: str, size: tuple[int, int], tmp_path: Path) -> None:
    name, options = MODELS[case]
    peer = random_model(name, **options, dynamic_img_size=True)
    assert_alike(loaded(saved(peer, tmp_path)), peer, random_images(2, 3, *size), tolerance=1e-5)


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


def test_initialization_has_the_spread_of_timm() -> None:
    torch.manual_seed(0)
    ours = VisionTransformer(named_config("vit_ti16", init="timm"))
    peer = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    source = Source(name="initial", tensors=peer.state_dict())
    for name, expected in from_family(TIMM, source, ours.config).items():
        actual = ours.state_dict()[name]
        if expected.min() == expected.max():  # a constant: biases, norms
            assert torch.equal(actual, expected), name
        else:  # at least 192 numbers, which determine a standard deviation to 5%
            assert actual.std().item() == pytest.approx(expected.std().item(), rel=0.2), name
            assert actual.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.4), name


# Faults


def test_mask_token_is_ignored(tmp_path: Path) -> None:
    source = saved(peer_model("DINOv2"), tmp_path)
    masked = dataclasses.replace(source, tensors={**source.tensors, "mask_token": torch.zeros(1, 384)})
    config = TIMM.read_config(masked)
    assert_same_state(from_family(TIMM, masked, config), from_family(TIMM, source, config))


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


# eva.py and beit.py


@pytest.mark.parametrize(
    ("part", "options", "reason"),
    [
        (TimmEva(), {"norm": "branch", "layer_scale": 0.1}, 'norm "branch" and layer_scale'),
        (TimmEva(), {"positions": "rotary_axial", "norm_eps": 1e-5}, "no rotary_grid"),
        (TimmEva(), {"positions": "rotary", "mlp": "gelu_tanh"}, "mlp 'gelu_tanh'"),
        (
            TimmEva(),
            {"positions": "rotary", "pool": "map", "num_registers": 1},
            'pool "map" and pool_prefix False',
        ),
        (TimmEva(), {"positions": "rotary", "pool": "map", "mlp": "swiglu"}, 'pool "map" and mlp "swiglu"'),
        (TimmEva(), {"positions": "rotary", "norm": "branch", "qk_norm": True}, 'norm "branch" and qk_norm'),
        (TimmEva(), {"positions": "rotary", "norm_type": "rms"}, 'norm_type "rms" without layer_scale'),
        (TimmBeit(), {"positions": "relative", "qkv_bias": "all"}, "qkv_bias 'all'"),
        (TimmBeit(), {"positions": "relative", "qkv_bias": "none", "num_registers": 2}, "num_registers 2"),
        (TimmBeit(), {"positions": "relative", "qkv_bias": "none", "pool": "mean"}, "class_token False"),
        (
            TimmBeit(),
            {"positions": "relative", "qkv_bias": "none", "absolute": "patches"},
            "absolute 'patches'",
        ),
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
        (
            "eva_giant_patch14_224",
            {"depth": 1, "embed_dim": 64, "num_heads": 2, "global_pool": "max"},
            {},
            "'max' is",
        ),
        (
            "eva02_tiny_patch14_224",
            {"depth": 1, "use_fc_norm": True, "use_post_transformer_norm": True},
            {},
            "extra norm",
        ),
        ("eva02_tiny_patch14_224", {"depth": 1}, {"num_heads": 5}, "does not fit 5 heads"),
        (
            "beit_base_patch16_224",
            {**EVA_SIZES, "use_shared_rel_pos_bias": True},
            {},
            "relative positions of all blocks beside those of each",
        ),
        (
            "beit_base_patch16_224",
            EVA_SIZES,
            {"norm_layer": "layernorm2d"},
            "timm's norm_layer 'layernorm2d'",
        ),
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


def test_preprocessing_of_dinov3_is_that_of_the_settings(tmp_path: Path) -> None:
    peer, ours = with_arguments("DINOv3", tmp_path)
    expected = timm.data.resolve_data_config({}, model=peer)
    preprocess = preprocess_of(ours)
    assert (preprocess.mean, preprocess.std) == (expected["mean"], expected["std"])
    assert preprocess.interpolation == expected["interpolation"]


@pytest.mark.parametrize("case", ["RoPE-ViT mixed", "EVA-02 small", "DINOv3"])
@torch.no_grad()
def test_other_image_sizes_of_rotary_models_equal_timm(case: str, tmp_path: Path) -> None:
    peer, ours = with_arguments(case, tmp_path, dynamic_img_size=True)
    peer, ours, patch = peer.double(), ours.double(), ours.config.patch_hw[0]
    images = random_images(2, 3, 2 * patch, 5 * patch).double()
    # timm's angles are float64
    assert relative_error(ours(images), with_rotation_of(peer, ours)(images)) < 1e-6


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
