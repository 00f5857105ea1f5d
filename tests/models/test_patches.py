from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law, random_images, randomize, small_config
from vitascope.models.patches import patch_embedding, patchify, unpatchify
from vitascope.models.resnet import ResNetFeatures
from vitascope.models.resnet_config import ResNetConfig

SMALL = st.integers(1, 5)


@law
@given(B=SMALL, C=SMALL, gh=SMALL, gw=SMALL, ph=SMALL, pw=SMALL)
def test_unpatchify_undoes_patchify(B: int, C: int, gh: int, gw: int, ph: int, pw: int) -> None:
    images = random_images(B, C, gh * ph, gw * pw)
    patches = patchify(images, (ph, pw))
    assert patches.shape == (B, gh * gw, C * ph * pw)
    assert torch.equal(unpatchify(patches, (gh, gw), (ph, pw)), images)


def test_patches_go_row_by_row_and_keep_their_pixels() -> None:
    images = random_images(2, 3, 4, 9)
    patches = patchify(images, (2, 3))
    for row in range(2):
        for column in range(3):
            tile = images[:, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
            assert torch.equal(patches[:, 3 * row + column], tile.flatten(1))


@law
@given(C=SMALL, gh=SMALL, gw=SMALL, ph=SMALL, pw=SMALL, seed=st.integers(0, 9))
def test_the_convolution_is_a_linear_projection_of_flat_patches(
    C: int, gh: int, gw: int, ph: int, pw: int, seed: int
) -> None:
    sizes = {"image_size": (gh * ph, gw * pw), "patch_size": (ph, pw), "in_channels": C}
    conv = patch_embedding(small_config(**sizes, stem="conv"))
    torch.nn.init.normal_(conv.bias)
    images = random_images(2, C, gh * ph, gw * pw, seed=seed)
    assert conv(images).shape == (2, gh * gw, 16)
    linear = patchify(images, (ph, pw)) @ conv.weight.flatten(1).T + conv.bias
    torch.testing.assert_close(linear, conv(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stem", ["conv", "overlap", "resnet"])
def test_patch_bias_switches_the_bias(stem: str) -> None:
    def biases(patch_bias: bool) -> int:
        config = small_config(stem=stem, patch_size=16, resnet_width=4, patch_bias=patch_bias)
        embedding = patch_embedding(config)
        embedding = embedding.projection if stem == "resnet" else embedding
        return 0 if embedding.bias is None else embedding.bias.numel()

    assert (biases(True), biases(False)) == (16, 0)


@st.composite
def overlaps(draw: st.DrawFn) -> dict[str, tuple[int, int]]:
    """Image, patch and stride of patches that tile, with a stride up to the patch itself."""
    patch = (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    stride = (draw(st.integers(1, patch[0])), draw(st.integers(1, patch[1])))
    image = tuple(whole + draw(st.integers(0, 4)) * step for whole, step in zip(patch, stride, strict=True))
    return {"image_size": image, "patch_size": patch, "stride": stride}


@law
@given(sizes=overlaps(), channels=SMALL)
def test_overlapping_patches_are_cut_out_and_embedded_by_one_linear_layer(
    sizes: dict[str, tuple[int, int]], channels: int
) -> None:
    config = small_config(**sizes, in_channels=channels, stem="overlap")
    embed = randomize(patch_embedding(config))
    images = random_images(2, channels, *sizes["image_size"])
    pixels = F.unfold(images, sizes["patch_size"], stride=sizes["stride"]).mT  # (B, N, C*ph*pw)
    expected = F.linear(pixels, embed.weight.flatten(1), embed.bias)
    torch.testing.assert_close(embed(images), expected, rtol=1e-5, atol=1e-5)


@law
@given(sizes=overlaps())
def test_the_grid_of_overlapping_patches_counts_every_kernel_position(
    sizes: dict[str, tuple[int, int]],
) -> None:
    grid = small_config(**sizes, stem="overlap").grid
    for side, patch, step, count in zip(*sizes.values(), grid, strict=True):
        assert count == sum(top + patch <= side for top in range(0, side, step))


HYBRID = {"stem": "resnet", "resnet_layers": (1, 1), "resnet_width": 4}  # of stride 8


@pytest.mark.parametrize("dialect", ["jax", "timm"])
@pytest.mark.parametrize("patch", [(8, 8), (16, 8)])
def test_hybrid_patches_are_projected_features_of_the_resnet(dialect: str, patch: tuple[int, int]) -> None:
    config = small_config(image_size=(48, 32), patch_size=patch, resnet_dialect=dialect, **HYBRID)
    embed = randomize(patch_embedding(config))
    images = random_images(2, 3, 48, 32)
    resnet = ResNetFeatures(ResNetConfig(layers=(1, 1), width=4), dialect)
    resnet.load_state_dict(embed.resnet.state_dict())
    features = resnet(images)  # (B, 32, 6, 4)
    pixels = patchify(features, (patch[0] // 8, patch[1] // 8))
    expected = F.linear(pixels, embed.projection.weight.flatten(1), embed.projection.bias)
    torch.testing.assert_close(embed(images), expected, rtol=1e-5, atol=1e-5)
    assert embed(images).shape == (2, config.grid[0] * config.grid[1], 16)


TOKENIZER = {"stem": "tokenizer", "tokenizer_widths": (6, 4)}


@pytest.mark.parametrize(
    ("options", "pools"),
    [
        *(({"patch_size": 2**n, "patch_bias": bias}, range(n)) for n in (1, 2, 3) for bias in (False, True)),
        *(
            ({"tokenizer_widths": (6, 4, 8), "tokenizer_pooling": layers, "patch_size": patch}, pools)
            for layers, patch, pools in (
                ((0, 2), 2, (0,)),
                ((0, 2), 4, (0, 2)),
                ((1, 3), 4, (1, 3)),
                ((1, 2, 3), 8, (1, 2, 3)),
            )
        ),
        ({"tokenizer_activation": "gelu"}, range(3)),
    ],
)
def test_a_tokenizer_is_convolution_pooling_and_activation_until_a_place_is_a_patch(
    options: dict[str, Any], pools: Sequence[int]
) -> None:
    config = small_config(**TOKENIZER | options)
    tokenizer, maps = randomize(patch_embedding(config)), random_images(2, 3, 32, 24)
    tokens, state = tokenizer(maps), tokenizer.state_dict()
    layers = len(config.option("tokenizer_widths")) + 1
    assert len(state) == layers * (1 + config.embedding.patch_bias)
    for layer in range(layers):
        maps = F.conv2d(maps, state[f"{layer}.conv.weight"], state.get(f"{layer}.conv.bias"), padding=1)
        if layer in pools:
            maps = F.max_pool2d(maps, kernel_size=3, stride=2, padding=1)
        maps = F.gelu(maps) if "tokenizer_activation" in options else F.relu(maps)
    torch.testing.assert_close(tokens, maps.flatten(2).mT, rtol=1e-4, atol=1e-5)


def test_tokens_of_a_tokenizer_stay_bf16_under_autocast() -> None:
    tokenizer = patch_embedding(small_config(**TOKENIZER))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tokenizer(random_images(2, 3, 32, 32)).dtype == torch.bfloat16
