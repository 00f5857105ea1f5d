import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import VARIANTS, law, small_config, valid_configs
from vitascope.errors import UserError
from vitascope.models.config import OPTIONS, ViTConfig, check_tiling
from vitascope.models.options import (
    BlockOptions,
    EmbeddingOptions,
    NormOptions,
    ReadoutOptions,
    Regularization,
    RotaryOptions,
    TokenizerOptions,
)

GROUPS = {
    "embedding": EmbeddingOptions,
    "rotary": RotaryOptions,
    "tokenizer": TokenizerOptions,
    "block": BlockOptions,
    "norms": NormOptions,
    "readout": ReadoutOptions,
    "regularization": Regularization,
}


@law
@given(valid_configs())
def test_flat_options_are_those_of_the_groups(config: ViTConfig) -> None:
    flat = {name: config.option(name) for name in OPTIONS}
    for name, group in OPTIONS.items():
        assert flat[name] == getattr(getattr(config, group) if group else config, name)
    assert ViTConfig.from_dict(flat) == config
    grouped = {group: getattr(config, group) for group in GROUPS}
    top = {name: flat[name] for name, group in OPTIONS.items() if group is None}
    assert ViTConfig(**top, **grouped) == config


def choices(hint: Any) -> tuple[Any, ...]:
    """The values that an option can have, where they can be listed."""
    if hint is bool:
        return False, True
    if get_origin(hint) is Literal:
        return get_args(hint)
    if bool in get_args(hint):  # bool | None
        return None, False, True
    return ()


def test_every_value_of_every_option_is_in_a_variant() -> None:
    seen = [small_config(**options) for options in VARIANTS.values()]
    for group in GROUPS.values():
        for name, hint in get_type_hints(group).items():
            expected = choices(hint)
            values = {config.option(name) for config in seen}
            assert values >= set(expected), name
            assert len(values) > 1, f"{name} is the same in every variant"


def test_an_unknown_option_is_rejected_with_the_nearest() -> None:
    for invalid in (
        lambda: ViTConfig.from_dict({"num_head": 3}),
        lambda: ViTConfig().replace(num_head=3),
        lambda: small_config(num_head=3),
    ):
        with pytest.raises(UserError, match="unknown model option 'num_head'; nearest: num_heads"):
            invalid()
    with pytest.raises(UserError, match="unknown model option 'pol_norm'; nearest: pool_norm"):
        ViTConfig().replace(pol_norm="after")


def test_options_of_groups_are_keywords_of_the_config() -> None:
    flat = ViTConfig(depth=3, pool="mean", positions="rotary", num_registers=2)
    nested = ViTConfig(
        depth=3,
        readout=ReadoutOptions(pool="mean", num_registers=2),
        embedding=EmbeddingOptions(positions="rotary"),
    )
    assert flat == nested
    assert hash(flat) == hash(nested)
    assert ViTConfig(readout=ReadoutOptions(num_registers=2), pool="mean").readout == nested.readout
    assert flat.replace(readout=ReadoutOptions()) == ViTConfig(depth=3, positions="rotary")


def test_repr_shows_the_options_that_differ_from_the_defaults() -> None:
    assert repr(ViTConfig()) == "ViTConfig()"
    config = ViTConfig(image_size=32, patch_size=8, pool="mean", norm="post")
    assert repr(config) == "ViTConfig(image_size=(32, 32), patch_size=(8, 8), norm='post', pool='mean')"
    assert len(repr(ViTConfig(num_classes=1000, class_names=[f"class{k}" for k in range(1000)]))) < 120


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pool": "cls"}, True),
        ({"pool": "mean"}, False),
        ({"pool": "cls_mean"}, True),
        ({"pool": "map"}, False),
        ({"pool": "mean", "class_token": True}, True),
        ({"pool": "map", "class_token": True}, True),
        ({"pool": "mean", "class_token": False}, False),
    ],
)
def test_a_class_token_exists_if_pooling_reads_it_or_on_request(
    options: dict[str, Any], expected: bool
) -> None:
    assert small_config(**options).readout.has_class_token == expected


def test_sizes_are_height_then_width_or_one_number_for_both() -> None:
    config = small_config(image_size=[16, 96], patch_size=[8, 32], window=3, resnet_layers=[1, 2])
    assert (config.image_size, config.patch_hw, config.grid) == ((16, 96), (8, 32), (2, 3))
    assert (config.block.window, config.embedding.resnet_layers) == ((3, 3), (1, 2))
    assert ViTConfig(image_size=32, patch_size=8) == ViTConfig(image_size=(32, 32), patch_size=(8, 8))
    assert small_config(stem="overlap", stride=4).patch_stride == (4, 4)


def test_the_stride_is_the_patch_size_unless_patches_overlap() -> None:
    for stem in ("conv", "resnet"):
        assert small_config(stem=stem, patch_size=16).patch_stride == (16, 16)
    assert small_config(stem="tokenizer", patch_size=4).patch_stride == (4, 4)
    assert small_config(stem="overlap", patch_size=(8, 16)).patch_stride == (4, 8)
    assert small_config(stem="overlap", stride=(2, 8)).patch_stride == (2, 8)


# Errors

UNFIT: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("depth", "in_channels", "embed_dim", "num_heads", "num_classes"), (0,)),
    **dict.fromkeys(("num_registers", "token_merging"), (-1,)),
    **dict.fromkeys(("dropout", "attention_dropout", "drop_path", "patch_dropout"), (-0.1, 1.0, "0.1")),
    "image_size": (0, (32, 32, 3), 32.5),
    "patch_size": (-8, True),
    "stride": ((4, 4, 4), 0),
    "window": ("7x7", 0, (7, -7)),
    "mlp_ratio": (0.0, float("inf")),
    "norm_eps": (-1e-6, float("nan")),
    "rotary_base": (0.0, float("nan")),
    "layer_scale": (float("nan"),),
    "thresholds": (None,),
    "class_names": ("cat",),
    "resnet_layers": ((3, 4.0),),
    "tokenizer_widths": ((8, 0),),
}


def test_unfit_values_are_rejected_with_the_option_and_the_value() -> None:
    for option, values in UNFIT.items():
        beside = {"stem": "overlap"} if option == "stride" else {}
        for value in values:
            with pytest.raises(UserError, match=option) as raised:
                ViTConfig.from_dict({option: value, "attention": "window", **beside})
            assert str(value) in str(raised.value), option


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": (225, 224), "patch_size": 16}, "image 225x224 is not a multiple of patch 16"),
        ({"image_size": (32, 90), "patch_size": (8, 16)}, "image 32x90 is not a multiple of patch 8x16"),
        ({"image_size": (33, 32), "patch_size": 8, "stem": "overlap"}, "image 33x32 is not tiled by patches"),
        (
            {"image_size": (32, 32), "patch_size": (8, 6), "stem": "overlap", "stride": (3, 5)},
            "image 32x32 is not tiled by patches of 8x6 every 3x5 pixels; nearest: 32x31",
        ),
        (
            {"image_size": (32, 40), "patch_size": 16, "stem": "resnet", "resnet_width": 4},
            "image 32x40 is not a multiple of patch 16; nearest: 32x(32|48)",
        ),
        ({"image_size": 7, "patch_size": 16}, "nearest: 16x16"),
        ({"embed_dim": 192, "num_heads": 5}, "num_heads 5 does not divide embed_dim 192; nearest: (4|6)"),
        ({"mlp_ratio": 0.01, "embed_dim": 48}, "mlp_ratio 0.01 gives an MLP without a hidden layer"),
        ({"class_names": ("cat", "dog"), "num_classes": 3}, "2 class_names for num_classes 3"),
        ({"pool": "meen"}, "unknown pool 'meen'; nearest: mean; it is one of cls, mean, cls_mean, map"),
        ({"mlp": "relu"}, "unknown mlp 'relu'; .*it is one of gelu, gelu_tanh, quick_gelu, swiglu"),
        # Combinations
        ({"stride": 4}, "stride belongs to stem \"overlap\", not to 'conv'"),
        ({"stem": "overlap", "patch_size": 8, "stride": (4, 9)}, "stride 4x9 leaves gaps between patches of"),
        ({"stem": "resnet", "patch_size": 8, "image_size": 32}, "patch 8x8 is not a multiple of the stride"),
        (
            {"stem": "tokenizer", "patch_size": 16},
            "a tokenizer of 3 layers has patches of 2 or 4 or 8 pixels, not 16x16: set patch_size to one of "
            "these, or add tokenizer_widths",
        ),
        ({"tokenizer_widths": (8,) * 8}, "a tokenizer has at most 8 layers, .* not 9"),
        ({"tokenizer_pooling": (2, 1)}, r"an ascending choice of these, not \[2, 1\]"),
        ({"tokenizer_pooling": (1, 3)}, r"an ascending choice of these, not \[1, 3\]"),
        ({"stem": "resnet", "resnet_width": 48}, "48 channels are not 32 equal groups"),
        ({"positions": "rotary", "embed_dim": 36, "num_heads": 6}, "rotary positions need a head width that"),
        ({"positions": "sincos_2d", "embed_dim": 18, "num_heads": 2}, "sine-cosine positions need an embed_"),
        *(
            ({"patch_dropout": 0.5, **grid}, "patch_dropout breaks up the grid")
            for grid in ({"attention": "axial"}, {"attention": "window"}, {"positions": "relative"})
        ),
        ({"attention": "window", "image_size": (224, 240), "window": (7, 4)}, "a grid of 14x15 patches is"),
        ({"pool": "cls", "class_token": False}, "pool 'cls' reads a class token"),
        ({"pool": "cls_mean", "class_token": False}, "pool 'cls_mean' reads a class token"),
        ({"distillation_token": True, "pool": "mean"}, "not with 'mean' and 'linear'"),
        ({"distillation_token": True, "head": "mlp"}, "not with 'cls' and 'mlp'"),
        ({"distillation_token": True, "head": "pre_logits"}, "not with 'cls' and 'pre_logits'"),
        ({"distillation_token": True, "pool_norm": "after"}, 'pool_norm "after" goes with one pooled token'),
        ({"pool": "cls_mean", "pool_norm": "after"}, 'pool_norm "after" goes with one pooled token'),
        ({"pool": "map", "pool_norm": "after"}, 'pool_norm "after" goes with one pooled token'),
    ],
)
def test_invalid_options_are_rejected_with_the_numbers(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ViTConfig.from_dict(values)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_another_type_is_rejected_by_name(name: str) -> None:
    for value in (None, {}, ViTConfig()):
        with pytest.raises(UserError, match=f"{name} must be {GROUPS[name].__name__}, not "):
            ViTConfig(**{name: value})


def test_unused_options_are_not_checked() -> None:
    # Only window attention needs windows that tile the grid; only the ResNet stem needs a valid ResNet.
    unread = small_config(window=5, resnet_width=48, resnet_layers=(1,))
    assert (unread.block.window, unread.grid) == ((5, 5), small_config().grid)
    assert small_config(positions="learned", embed_dim=18, num_heads=6).head_dim == 3


@law
@given(*[st.integers(1, 300)] * 2, *[st.integers(1, 40)] * 2, *[st.floats(0.05, 1)] * 2)
def test_the_nearest_size_in_the_message_is_tiled_by_patches(
    height: int, width: int, ph: int, pw: int, down: float, across: float
) -> None:
    image, patch, step = (height, width), (ph, pw), (max(1, int(down * ph)), max(1, int(across * pw)))
    sides = list(zip(image, patch, step, strict=True))
    if all(side >= whole and (side - whole) % move == 0 for side, whole, move in sides):
        check_tiling(image, patch, step)
        return
    with pytest.raises(UserError) as raised:
        check_tiling(image, patch, step)
    nearest = [int(side) for side in re.findall(r"nearest: (\d+)x(\d+)", str(raised.value))[0]]
    for (side, whole, move), found in zip(sides, nearest, strict=True):
        tiled = [whole + count * move for count in range(max(0, side - whole) // move + 2)]
        assert found in tiled
        assert abs(found - side) == min(abs(each - side) for each in tiled)
