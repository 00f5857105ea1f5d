"""Every family: models are written completely or rejected, and keep their preprocessing."""

from pathlib import Path

import pytest
import torch

from tests.contracts.family import check_refused
from tests.models import VARIANTS, random_images, small_config, small_model, with_preprocess
from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.all_families import FAMILIES
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.mapping import changes, misfit
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.models.weights.transfer import create_model

# Of each family whose files have no settings: a model that it holds, which variants change.
HELD: dict[str, dict[str, object]] = {
    "torchvision": {},
    "jax": {"mlp": "gelu_tanh"},
    "deit": {},
    "dinov2": {"head": "none"},
    "dinov3": {"head": "none", "positions": "rotary", "qkv_bias": "no_key", "norm_eps": 1e-5},
}
MORE: dict[str, dict[str, object]] = {
    "exact GELU": {"mlp": "gelu"},
    "oblong": {"image_size": (32, 64)},
    "oblong patches": {"patch_size": (8, 16)},
    "one channel": {"in_channels": 1},
    "another number of heads": {"num_heads": 4},
    "a gate that is no multiple of 8": {"mlp": "swiglu", "mlp_ratio": 2.05},
    "another rotary base": {"positions": "rotary", "rotary_base": 50.0},
    "layer scale without positions of the prefix": {"layer_scale": 0.1, "position_prefix": False},
    "class token, mean": {"class_token": True, "pool": "mean"},
    "class token, map": {"class_token": True, "pool": "map"},
    "resnet as published": {"stem": "resnet", "resnet_layers": (1,), "resnet_width": 32},
    "distilled DeiT-III": {"layer_scale": 0.1, "position_prefix": False, "distillation_token": True},
}


@pytest.mark.parametrize("family", HELD)
@torch.no_grad()
def test_any_model_is_written_completely_or_rejected_by_an_option(tmp_path: Path, family: str) -> None:
    """What a file does not show is what reading assumes, so a model that was wrongly written would differ."""
    for variant, changed in (VARIANTS | MORE).items():
        options = {"embed_dim": 64, "num_heads": 1, "depth": 2, **HELD[family], **changed}
        if "token_merging" in options:
            options["positions"] = "learned"
        if reason := misfit(FAMILIES[family], small_config(**options)):
            assert variant not in ("plain", "dropout")
            assert reason.startswith(f"{family} has no model with ")
            assert any(name in reason for name in (*options, "4x6", "grid")), reason
            continue
        model = small_model(**options)
        save_pretrained(model, tmp_path / variant, format=family)
        images = random_images(2, model.config.in_channels, *model.config.image_hw)
        again = from_pretrained(tmp_path / variant, family=family)
        torch.testing.assert_close(again(images), model(images), rtol=1e-5, atol=1e-5, msg=variant)
    check_refused(family, small_model(norm="post"), ["norm 'post'"], tmp_path)


RULES = {"torchvision": "torchvision", "jax": "jax", "deit": "huggingface", "dinov2": "dinov2", "dinov3": ""}


@pytest.mark.parametrize(("family", "rule"), RULES.items())
def test_other_epsilons_and_resampling_rules_are_replaced_and_reported(family: str, rule: str) -> None:
    epsilon = "1e-05" if family == "dinov3" else "1e-06"
    old = "jax" if family == "torchvision" else "torchvision"
    config, kind = small_config(norm_eps=1e-3, resample=old), FAMILIES[family]
    expected = [f"resample '{old}' becomes '{rule}'"] if rule else []
    expected.append(f"norm_eps 0.001 becomes {epsilon}")
    assert sorted(changes(kind, config)) == sorted(f"{it}: {family} has no other" for it in expected)
    assert not changes(kind, kind.fixed_there(config))


RESNET: dict[str, object] = {"stem": "resnet", "resnet_layers": (1,), "mlp": "gelu_tanh"}
DISTILLED = {"distillation_token": True}


@pytest.mark.parametrize(
    ("family", "reason", "options"),
    [
        ("deit", "layer_scale with", {**DISTILLED, "layer_scale": 1, "position_prefix": False}),
        ("deit", "head 'none' with", {**DISTILLED, "head": "none"}),
        ("jax", "resnet_width 4", {**RESNET, "resnet_width": 4}),
        ("jax", "stem 'resnet' with", {**RESNET, "resnet_width": 32, "pool": "map"}),
    ],
)
def test_what_only_this_reader_would_understand_is_rejected(
    family: str, reason: str, options: dict[str, object]
) -> None:
    assert misfit(FAMILIES[family], small_config(**options)).startswith(
        f"{family} has no model with {reason}"
    )


# A checkpoint of each family: the model, and a preprocessing that the family can save completely.
OWN_RULE = {"resize": "squash", "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "exif_orientation": False}
WHOLE_PIXELS = {"resize_to": (37, 37), "mean": (0.1, 0.2, 0.3), "interpolation": "bilinear"}
TANH, REGISTERS = {"mlp": "gelu_tanh"}, {"num_registers": 4, "position_prefix": False}
SCALED: dict[str, object] = {"layer_scale": 1e-5, "head": "none"}
ROTARY: dict[str, object] = {"positions": "rotary", "num_registers": 4, "norm_eps": 1e-5}
CARRIED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "vitascope": ({}, OWN_RULE),
    "timm": ({}, WHOLE_PIXELS),
    "huggingface": ({}, {**WHOLE_PIXELS, "crop_rounding": "down"}),
    "torchvision": ({}, {}),
    "jax": (TANH, {}),
    "deit": ({"layer_scale": 1e-5, "position_prefix": False}, {}),
    "dinov2": ({**SCALED, **REGISTERS}, {}),
    "dinov3": ({**SCALED, **ROTARY, "qkv_bias": "no_key"}, {}),
}


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.read_only])
def test_loading_and_saving_again_keeps_the_preprocessing(tmp_path: Path, family: str) -> None:
    architecture, options = CARRIED[family]
    model = small_model(embed_dim=128, num_heads=2, depth=2, **architecture)
    preprocess = Preprocess(image_size=(32, 32), **options)
    save_pretrained(with_preprocess(model, preprocess), tmp_path / "theirs", format=family)
    source = from_pretrained(tmp_path / "theirs", family=family)
    if options:
        assert source.preprocess == preprocess
    else:  # a file without a place for it: the preprocessing of the family's own code
        assert source.preprocess != default_preprocess(source.config)
    for format in ("vitascope", family):
        again = from_pretrained(save_pretrained(source, tmp_path / format, format=format), family=format)
        assert again.preprocess == source.preprocess, format
    weights = f"{family}:{tmp_path / 'theirs'}"
    started = create_model("vit_ti16", weights=weights, **shape_options(source.config))
    assert started.preprocess == source.preprocess
    bigger = create_model("vit_ti16", weights=weights, **shape_options(source.config), image_size=48)
    resized = source.preprocess.at_size((48, 48))
    assert bigger.preprocess == resized
    source.resize(48)
    assert source.preprocess == resized


def shape_options(config: ViTConfig) -> dict[str, object]:
    """The options that turn any named size into the size of these weights."""
    names = ("embed_dim", "depth", "num_heads", "patch_size", "mlp_ratio", "positions", "distillation_token")
    return {name: config.option(name) for name in (*names, "num_registers", "mlp")}


def test_a_bare_model_has_no_preprocessing_and_a_named_one_has_the_default() -> None:
    assert VisionTransformer(small_config()).preprocess is None
    assert create_model("vit_ti16", depth=1).preprocess == Preprocess(image_size=(224, 224))
