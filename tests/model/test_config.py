import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.model import law, small_config
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig, check_multiple, list_models, named_config
from vitascope.model.vit import VisionTransformer

# Millions of parameters at 224 px with 1000 classes, as published and as timm and torchvision count them.
PUBLISHED_MILLIONS = {
    "vit_ti16": 5.72,
    "vit_s16": 22.05,
    "vit_s32": 22.88,
    "vit_b8": 86.58,
    "vit_b16": 86.57,
    "vit_b32": 88.22,
    "vit_l16": 304.33,
    "vit_l32": 306.54,
    "vit_h14": 632.05,
}


def on_meta(config: ViTConfig) -> VisionTransformer:
    with torch.device("meta"):
        return VisionTransformer(config)


def count_parameters(config: ViTConfig) -> int:
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


@st.composite
def valid_configs(draw: st.DrawFn) -> ViTConfig:
    def small(most: int) -> int:
        return draw(st.integers(1, most))

    patch, grid, heads = (small(6), small(6)), (small(4), small(4)), small(4)
    num_classes = small(7)
    names = st.lists(st.text(max_size=3), min_size=num_classes, max_size=num_classes)
    return ViTConfig(
        image_size=(patch[0] * grid[0], patch[1] * grid[1]),
        patch_size=patch,
        in_channels=small(5),
        num_classes=num_classes,
        embed_dim=heads * small(6),
        depth=small(3),
        num_heads=heads,
        mlp_ratio=draw(st.sampled_from([1.0, 1.5, 8 / 3, 4.0])),
        patchify=draw(st.sampled_from(["conv", "linear"])),
        pool=draw(st.sampled_from(["cls", "mean"])),
        head=draw(st.sampled_from(["linear", "mlp", "none"])),
        norm_eps=draw(st.sampled_from([1e-12, 1e-6, 1e-5])),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        attention_dropout=draw(st.sampled_from([0.0, 0.1])),
        drop_path=draw(st.sampled_from([0.0, 0.1])),
        init=draw(st.sampled_from(["paper", "timm"])),
        class_names=tuple(draw(st.one_of(st.just([]), names))),
    )


@law
@given(valid_configs())
def test_num_parameters_is_the_count_of_the_built_model(config: ViTConfig) -> None:
    assert config.num_parameters == count_parameters(config)


@law
@given(valid_configs())
def test_flops_are_those_of_the_matrix_products_that_run(config: ViTConfig) -> None:
    model = on_meta(config)
    # The trace computes attention by its equations; what the counter knows of fused kernels varies.
    with FlopCounterMode(display=False) as counter:
        model.trace(torch.empty(1, config.in_channels, *config.image_hw, device="meta"), attention=True)
    assert counter.get_total_flops() == config.flops


@law
@given(valid_configs())
def test_num_tokens_is_the_length_of_the_sequence(config: ViTConfig) -> None:
    images = torch.empty(2, config.in_channels, *config.image_hw, device="meta")
    assert on_meta(config).forward_features(images).shape == (2, config.num_tokens, config.embed_dim)


@law
@given(valid_configs())
def test_a_config_survives_json(config: ViTConfig) -> None:
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", list_models())
def test_named_sizes_have_the_published_number_of_parameters(name: str) -> None:
    config = named_config(name)
    assert (config.image_hw, config.num_classes) == ((224, 224), 1000)
    assert round(count_parameters(config) / 1e6, 2) == PUBLISHED_MILLIONS[name]
    assert config.num_parameters == count_parameters(config)


@pytest.mark.parametrize("name", list_models())
def test_heads_of_named_sizes_are_64_wide_and_those_of_huge_80(name: str) -> None:
    config = named_config(name)
    assert config.embed_dim / config.num_heads == (80 if name == "vit_h14" else 64)


def test_named_config_takes_any_field_as_override() -> None:
    config = named_config("vit_s16", image_size=(64, 96), num_classes=3, depth=2)
    assert (config.grid, config.num_classes, config.depth, config.embed_dim) == ((4, 6), 3, 2, 384)


def test_one_number_is_a_square() -> None:
    assert ViTConfig(image_size=32, patch_size=8) == ViTConfig(image_size=(32, 32), patch_size=(8, 8))


def test_sizes_are_height_then_width() -> None:
    config = small_config(image_size=(16, 96), patch_size=(8, 32))
    assert (config.image_hw, config.patch_hw, config.grid) == ((16, 96), (8, 32), (2, 3))


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().depth = 3  # type: ignore[misc]


def test_the_config_is_known_without_importing_torch() -> None:
    code = "import sys, vitascope.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"image_size": (225, 224), "patch_size": 16},
            "image 225x224 is not a multiple of patch 16; nearest: 224x224",
        ),
        (
            {"image_size": (32, 90), "patch_size": (8, 16)},
            "image 32x90 is not a multiple of patch 8x16; nearest: 32x96",
        ),
        ({"image_size": 7, "patch_size": 16}, "nearest: 16x16"),
        ({"image_size": 0}, "image 0x0"),
        ({"patch_size": -8}, "patch -8x-8"),
        ({"image_size": (32, 32, 3)}, r"\(32, 32, 3\)"),
        ({"embed_dim": 192, "num_heads": 5}, "num_heads 5 does not divide embed_dim 192; nearest: (4|6)"),
        ({"embed_dim": 6, "num_heads": 12}, "num_heads 12 does not divide embed_dim 6; nearest: 6"),
        ({"depth": 0}, "depth must be a whole number, at least 1, not 0"),
        ({"num_classes": -1}, "num_classes must be a whole number, at least 1, not -1"),
        ({"in_channels": 0}, "in_channels must be a whole number, at least 1, not 0"),
        ({"embed_dim": 0}, "embed_dim must be a whole number, at least 1, not 0"),
        ({"num_heads": 0}, "num_heads must be a whole number, at least 1, not 0"),
        ({"mlp_ratio": 0.0}, "mlp_ratio 0.0 gives an MLP without a hidden layer"),
        ({"mlp_ratio": -4.0}, "mlp_ratio -4.0 gives an MLP without a hidden layer"),
        ({"dropout": 1.0}, r"dropout is a probability in \[0, 1\), not 1.0"),
        ({"dropout": -0.1}, r"dropout is a probability in \[0, 1\), not -0.1"),
        ({"attention_dropout": 1.5}, "attention_dropout is a probability .* not 1.5"),
        ({"attention_dropout": float("nan")}, "attention_dropout is a probability .* not nan"),
        ({"drop_path": 1.0}, "drop_path is a probability .* not 1.0"),
        ({"class_names": ("cat", "dog"), "num_classes": 3}, "2 class_names for num_classes 3"),
        ({"pool": "meen"}, "unknown pool 'meen'; nearest: mean; it is one of cls, mean"),
        ({"head": "linaer"}, "unknown head 'linaer'; nearest: linear"),
        ({"patchify": "convolution"}, "unknown patchify 'convolution'; .*one of conv, linear"),
        ({"init": "jax"}, "unknown init 'jax'; .*one of paper, timm"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ViTConfig(**values)


def test_an_unknown_model_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown model 'vit_b61'; nearest: vit_b16"):
        named_config("vit_b61")


def test_an_unknown_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown model option 'num_head'; nearest: num_heads"):
        ViTConfig.from_dict({"num_head": 3})
    with pytest.raises(UserError, match="unknown model option 'embed_dims'; nearest: embed_dim"):
        named_config("vit_b16", embed_dims=3)


@law
@given(*[st.integers(1, 300)] * 2, *[st.integers(1, 40)] * 2)
def test_the_nearest_size_is_the_nearest_that_patches_tile(height: int, width: int, ph: int, pw: int) -> None:
    if height % ph == 0 and width % pw == 0:
        check_multiple((height, width), (ph, pw))
        return
    with pytest.raises(UserError) as refusal:
        check_multiple((height, width), (ph, pw))
    nearest = [int(side) for side in re.findall(r"nearest: (\d+)x(\d+)", str(refusal.value))[0]]
    for side, step, found in zip((height, width), (ph, pw), nearest, strict=True):
        tiled = [count * step for count in range(1, side // step + 2)]
        assert found in tiled
        assert abs(found - side) == min(abs(each - side) for each in tiled)
