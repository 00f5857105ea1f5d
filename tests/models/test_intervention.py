"""Parts of a model switched off, beside equations 1 to 4 in float64, and beside zeroed weights."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import VARIANTS, random_images, small_model
from vitascope import explain
from vitascope.errors import UserError
from vitascope.models.vit import VisionTransformer

SWITCHES: list[dict[str, Any]] = [
    {"heads": [(0, 1), (2, 0), (2, 1)]},
    {"attention": [1]},
    {"mlps": [-1]},
    {"layers": [0, 2]},
    {"patches": [0, 7, 15]},
    {"heads": [(1, 0)], "attention": [0], "mlps": [1], "layers": [2], "patches": [3]},
]
BY_HAND = ("plain", "post-norm", "norm of branches", "distillation")


def by_hand(model: VisionTransformer, image: Tensor, off: dict[str, Any]) -> Tensor:
    """The logits (K) of an image (C, H, W) in float64, without the parts that are off."""
    config, W = model.config, {name: value.double() for name, value in model.state_dict().items()}
    H, hd, P, kind = config.num_heads, config.head_dim, config.num_prefix_tokens, config.block.norm
    off = {"heads": [], "attention": [], "mlps": [], "layers": [], "patches": []} | off
    layers_off = {
        name: [layer % config.depth for layer in off[name]] for name in ("attention", "mlps", "layers")
    }

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ W[f"{name}.weight"].T + W[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + config.norms.norm_eps).sqrt()
        return centred / scale * W[f"{name}.weight"] + W[f"{name}.bias"]

    ph, pw = config.patch_hw
    tiles = image.double().unfold(1, ph, ph).unfold(2, pw, pw).flatten(1, 2)  # (C, N, ph, pw)
    filters = W["patch_embedding.weight"].flatten(1)
    z = tiles.transpose(0, 1).flatten(1) @ filters.T + W["patch_embedding.bias"]  # (N, D)
    prefix = [W[name][0] for name in ("class_token", "distillation_token", "registers") if name in W]
    z = torch.cat([*prefix, z]) + W["positions.weight"][0]
    z = z[[place for place in range(len(z)) if place - P not in off["patches"]]]
    for layer in range(config.depth):
        if layer in layers_off["layers"]:
            continue
        name = f"encoder.blocks.{layer}"
        gamma = [W.get(f"{name}.scale{part}.gamma", 1.0) for part in (1, 2)]
        qkv = linear(f"{name}.attention.qkv", norm(f"{name}.norm1", z) if kind == "pre" else z)
        q, k, v = qkv.unflatten(1, (3, H, hd)).permute(1, 2, 0, 3)  # (H, T, hd)
        heads = (q @ k.mT / hd**0.5).softmax(-1) @ v
        for switched, head in off["heads"]:
            heads[head] *= switched != layer
        branch = linear(f"{name}.attention.proj", heads.transpose(0, 1).flatten(1))
        branch = gamma[0] * (norm(f"{name}.norm1", branch) if kind == "branch" else branch)
        z = z + branch * (layer not in layers_off["attention"])
        z = norm(f"{name}.norm1", z) if kind == "post" else z
        hidden = linear(f"{name}.mlp.fc1", norm(f"{name}.norm2", z) if kind == "pre" else z)
        branch = linear(f"{name}.mlp.fc2", torch.nn.functional.gelu(hidden))
        branch = gamma[1] * (norm(f"{name}.norm2", branch) if kind == "branch" else branch)
        z = z + branch * (layer not in layers_off["mlps"])
        z = norm(f"{name}.norm2", z) if kind == "post" else z
    z = norm("norm", z) if config.final_norm == "before" else z
    if config.option("distillation_token"):
        return (linear("head.linear", z[0]) + linear("head.distillation", z[1])) / 2
    return linear("head", z[0])


@pytest.mark.parametrize("off", [{}, *SWITCHES])
@pytest.mark.parametrize("name", BY_HAND)
def test_logits_are_those_of_the_equations_in_float64(name: str, off: dict[str, Any]) -> None:
    model = small_model(**VARIANTS[name]).double()
    images = random_images(2, 3, *model.config.image_hw).double()
    with model.intervene(**off), torch.no_grad():
        logits = model(images)
        torch.testing.assert_close(model.head(model.embed(images)), logits)
        torch.testing.assert_close(model.trace(images, attention=True)["logits"], logits)
    expected = torch.stack([by_hand(model, image, off) for image in images])
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("off", SWITCHES)
@pytest.mark.parametrize("name", ["plain", "rotary with registers", "window"])
def test_heatmaps_and_the_lens_keep_their_places(name: str, off: dict[str, Any]) -> None:
    model = small_model(**VARIANTS[name])
    images = random_images(1, 3, *model.config.image_hw)
    if name == "window":
        off = {kind: parts for kind, parts in off.items() if kind != "patches"}
    with model.intervene(**off):
        for method in ("rollout", "gradient-rollout", "grad-cam", "occlusion"):
            assert explain.heatmap(model, images, method).shape == (1, 4, 4)
        gradient = explain.integrated_gradients(model, images, steps=2).flatten()
        torch.testing.assert_close(explain.lens(model, images).logits[-1], model(images))
        if name == "plain":
            rollout = explain.rollout(model, images).flatten()
            np.testing.assert_array_equal(rollout[off.get("patches", [])], 0)
    np.testing.assert_array_equal(gradient[off.get("patches", [])], 0)


def test_contexts_are_nested_and_end_with_exceptions() -> None:
    model, images = small_model(), random_images(1, 3, 32, 32)
    whole = model(images)
    with model.intervene(mlps=[0], layers=[1]):
        both = model(images)
    with model.intervene(mlps=[0]):
        first = model(images)
        with model.intervene(layers=[1]):
            assert torch.equal(model(images), both)
        with pytest.raises(UserError, match="no class 9"), model.intervene(layers=[1]):
            explain.lens(model, images, 9)
        with pytest.raises(UserError, match="no layer 99"), model.intervene(layers=[2, 99]):
            pass
        assert torch.equal(model(images), first)
    assert torch.equal(model(images), whole)
    assert len({whole.sum().item(), first.sum().item(), both.sum().item()}) == 3


@pytest.mark.parametrize("pool", ["cls", "mean", "map", "sequence", "cls_mean"])
def test_patches_of_nested_contexts_are_off_together(pool: str) -> None:
    model, images = small_model(pool=pool), random_images(1, 3, 32, 32)
    with model.intervene(patches=[1, 9]):
        both = model(images)
    with model.intervene(patches=[1]), model.intervene(patches=[9]):
        torch.testing.assert_close(model(images), both)
    first, second = model.intervene(patches=range(8)), model.intervene(patches=range(8, 16))
    with first, second, pytest.raises(UserError, match="all 16 patches are off: leave at least one"):
        model(images)


@pytest.mark.parametrize(
    ("options", "off", "message"),
    [
        ({}, {"layers": [99]}, r"no layer 99: the model has 3, 0 to 2 \(or -3 to -1\)"),
        ({}, {"mlps": [3]}, "no layer 3: the model has 3"),
        ({}, {"heads": [(0, 7)]}, "no head 7: each layer has 2, 0 to 1"),
        ({}, {"heads": [(3, 0)]}, "no layer 3"),
        ({}, {"patches": [300]}, "no patch 300: the grid of 4x4 has 16, 0 to 15"),
        ({}, {"patches": [-1]}, "no patch -1"),
        ({}, {"patches": range(16)}, "all 16 patches are off: leave at least one"),
        ({}, {"patches": ["a", 1]}, "no patch a"),
        ({}, {"patches": [True]}, "no patch True"),
        ({}, {"layers": [True]}, "no layer True"),
        ({}, {"layers": 0}, "layers must be a list of a whole number, not 0"),
        ({"attention": "axial"}, {"patches": [1]}, "patches can be off where attention is global and no"),
        ({"token_merging": 2}, {"patches": [1]}, "patches can be off where attention is global and no"),
        ({"token_merging": 2}, {"layers": [1]}, "with token_merging no layer can be off"),
    ],
)
def test_parts_that_do_not_exist_are_rejected_in_one_line(
    options: dict[str, Any], off: dict[str, Any], message: str
) -> None:
    model = small_model(**options)
    with pytest.raises(UserError, match=f"^{message}"), model.intervene(**off):
        model(random_images(1, 3, 32, 32))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_patches_are_not_off_beside_a_choice_of_visible_ones() -> None:
    model, images = small_model(), random_images(1, 3, 32, 32)
    with (
        model.intervene(patches=[0]),
        pytest.raises(UserError, match=r"^5 of 16 patches are there: none can be off beside this choice"),
    ):
        model.encode(model.prepare_tokens(images), (4, 4), visible=torch.arange(5)[None])
